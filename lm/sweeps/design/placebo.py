"""The placebo of a sweep: a variant that differs from the baseline, and whose true difference from it is 0.

In a sweep with sizes or texts there is one placebo, at the first size with tuning runs or on the first text. This
module does not import jax.
"""

from lm.sweeps.design.axes import LEARNING_RATE, Match, Variants, at_size, axis_of, expand, size_of

PLACEBO = "placebo"  # the name of the variant that `Sweep.placebo` describes, without the size or text


def placebo_name(sweep) -> str:
    """Return the name of the placebo, with the size or text at which it is trained: the first that has tuning runs."""
    tuned = [name for name, values in axis_of(sweep).items() if not isinstance(values.get(LEARNING_RATE), Match)]
    return at_size(PLACEBO, tuned[0])


def expanded(sweep) -> Variants:
    """Return every variant at every size or on every text, but the placebo at one of them only."""
    axis = axis_of(sweep)
    others = {at_size(PLACEBO, name) for name in axis} - {placebo_name(sweep)} if sweep.placebo else ()
    return {name: changes for name, changes in expand(sweep.variants, axis).items() if name not in others}


def placebo_pair(record: dict) -> tuple[str, str]:
    """Return the placebo of a sweep and the baseline at the same size or on the same text.

    Args:
        record: sweep.json of a sweep with a placebo.

    >>> placebo_pair({"placebo": "placebo, 32", "baseline": "SiLU, 64", "sizes": ["32", "64"]})
    ('placebo, 32', 'SiLU, 32')
    """
    names = record.get("sizes") or record.get("texts") or [""]
    baseline = record["baseline"].removesuffix(at_size("", names[-1]))
    return record["placebo"], at_size(baseline, size_of(record["placebo"], names))


def wrong_placebo(sweep):
    """Yield the mistakes in a sweep's placebo, apart from those in the config of its variant."""
    if not sweep.placebo:
        return
    if PLACEBO in sweep.variants:
        yield f"variants: {PLACEBO!r} is the name of the variant that placebo describes; choose another name"
    if any(PLACEBO in pair for pair in sweep.comparisons):
        yield f"comparisons: {PLACEBO!r} is always compared with the baseline; remove it"
    if sweep.sizes and not sweep.comparisons:
        yield "placebo: it checks comparisons, and this sweep has none; remove it"
    if LEARNING_RATE in sweep.placebo:
        yield f"placebo: it uses the learning rates of the baseline; remove {LEARNING_RATE}"
