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

The config is checked before JAX is imported: every key and value first, then what several keys say together. All
mistakes are reported at once, each with the key and a value that would be right, and the exit code is 2. What depends
on the text and on the devices is checked next, still before anything is compiled.

For a short run give `--config.train.steps=20` alone: a warm-up or decay of the file that no longer fits is scaled down
in proportion, with a warning. A schedule that fits, or a number given on the command line, is never changed.

A run is resumed with `--resume` by the config that started it. The last column says which keys may differ then: they
change how a run is carried out, not what it computes (beyond rounding). `train.steps` may grow if no learning rate of
a step already trained changes: with `optimizer.schedule = constant`, or with a number in `optimizer.decay_steps`.
"""


def page() -> str:
    """Return docs/configuration.md: an introduction, and a table of keys per section."""
    parts = [INTRODUCTION]
    for section, cls in {"": Config, **sections()}.items():
        keys = {name: leaf for name, leaf in schema().items() if name.rpartition(".")[0] == section}
        rows = [_row(name, type_, field) for name, (type_, field) in keys.items()]
        heading = f"## {section or 'Top level'}\n\n{cls.__doc__}\n"
        table = "| key | default | values | meaning | may change on resume |\n| --- | --- | --- | --- | --- |\n"
        parts.append(f"{heading}\n{table}{''.join(rows)}")
    return "\n".join(parts)


def _row(name: str, type_, field) -> str:
    default, values, meaning = (
        text.replace("|", "\\|") for text in (show(field.default), allowed(type_, field), field.metadata["doc"])
    )
    changes = {"train.steps": "may grow"}.get(name, "yes" if field.metadata["execution"] else "no")
    shown = f"`{default}`" if default else "empty"
    return f"| `{name}` | {shown} | {values} | {meaning.replace('<', '&lt;')} | {changes} |\n"


if __name__ == "__main__":
    print(page(), end="")
