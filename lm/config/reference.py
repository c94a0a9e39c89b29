"""Write docs/configuration.md from the schema.

python -m lm.config.reference > docs/configuration.md
"""

from lm.config.schema import Config, schema, sections
from lm.config.values import allowed, show

INTRODUCTION = """\
# Configuration

For users who train a model or write a config file. This page is generated from `lm/config/schema.py` by
`python -m lm.config.reference > docs/configuration.md`; `python -m lm.train --help` prints the same list.

A config file is Python: its `get_config()` starts from `default_config()`, changes what differs, and returns it
(`configs/shakespeare.py` is an example). `--config.SECTION.KEY=VALUE` on the command line overrides the file, and the
last override of a key wins. A value is written as in Python or as plain text: `none`, `true`, `2e-3`, `(128, 0)`.

All mistakes of a config are reported at once, before JAX is imported, each with the key and a value that would be
right; the exit code is 2. What depends on the text and on the devices is checked next, before anything is compiled.

For a short run give `--config.train.steps=20` alone: a warm-up or decay of the file that no longer fits is scaled down
in proportion, with a note. A schedule that fits, or a number given on the command line, is never changed.

The tables leave out the section of each key. Among the values, the default is in `code font`. Some meanings begin with
the setting that the key needs: "moe:", "not sgd:", or the name of a key that must be set ("qk_norm:") or not ("not
mixture:"). Without it, the key is refused on the command line; in a file, which may serve several runs, it causes a
warning.

A run is resumed with `--resume` by the config that started it. Only keys with a star may differ then: they change how
a run is carried out, not what it computes (beyond rounding), except `train.on_spike` and `train.on_nonfinite`, which
reject updates, and `eval.patience`, which ends a run. `train.steps` may grow if no learning rate of a step already
trained changes: with `optimizer.schedule = constant`, with a number in `optimizer.decay_steps`, or before the decay of
`wsd` begins. It may not if a weight in the loss changes in training, as those of `model.multi_token_prediction` do.
"""
GROUPS = {  # the first key of each, in the order of the schema
    "model.d_model": "Sizes", "model.norm": "Norms", "model.ffn": "Feed-forward layers and experts",
    "model.ffn_bias": "Biases", "model.positions": "Positions", "model.qk_norm": "Variants of attention",
    "model.residual": "Variants of the residual stream and the loss", "model.window_pattern": "Windows, scales, caps",
    "model.dropout": "Dropout, initial values and muP", "model.param_dtype": "Precision and execution",
}  # fmt: skip
HEAD = "\n| key | values | meaning |\n| --- | --- | --- |\n"


def page() -> str:
    """Return docs/configuration.md: an introduction, and a table of the keys of each section."""
    parts = [INTRODUCTION]
    for section, cls in {"": Config, **sections()}.items():
        parts.append(f"\n## {section or 'Top level'}\n\n{cls.__doc__}\n")
        keys = {name: leaf for name, leaf in schema().items() if name.rpartition(".")[0] == section}
        for i, (name, (type_, field)) in enumerate(keys.items()):
            if i == 0:
                parts.append(HEAD)
            if name in GROUPS:
                parts.append(f"| **{GROUPS[name]}** | | |\n")
            parts.append(_row(name.rpartition(".")[2], type_, field))
    return "".join(parts)


def _row(name: str, type_, field) -> str:
    default = show(field.default)
    values = allowed(type_, field).split(" | ")
    shown = [f"`{value}`" if value == default else value for value in values]
    if default not in values:
        shown[0] += f" (`{default}`)" if default else " (empty)"
    cells = (
        f"`{name}`" + "\\*" * field.metadata["execution"],
        " | ".join(shown),
        field.metadata["doc"],
    )
    return (
        "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |\n"
    )


if __name__ == "__main__":
    print(page(), end="")
