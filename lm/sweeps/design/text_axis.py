"""The texts of a sweep: the mistakes in `Sweep.texts`. This module does not import jax."""

from lm.sweeps.design.axes import at_size


def wrong_texts(sweep):
    """Yield the mistakes in the texts, without which the variants cannot be listed."""
    texts = sweep.texts
    if not texts:
        return
    if len(texts) == 1:
        yield "texts: there is 1, and the dependence on the text needs at least 2"
    if "" in texts:
        yield "texts: a text must have a name"
    names = [at_size(variant, text) for text in texts for variant in sweep.variants]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        yield f"texts: {twice[0]!r} would be the name of two variants; rename a text"
    if sweep.sizes:
        yield "texts and sizes are both given; remove one of them"
    for name, budget in sweep.budgets.items():
        if budget.looks is not None:
            yield f"budget {name!r}: looks: a sweep with texts needs a fixed number of seeds; give seeds instead"
    for name, values in texts.items():
        for key in values:
            if not key.startswith("data."):
                yield f"text {name!r}: {key}: a text may set keys of data only; set others in values or in variants"
