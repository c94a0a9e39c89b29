"""Configs as dicts: the ConfigDict that a file edits, nested plain dicts, and flat dicts of dotted
names.
"""

import dataclasses
from typing import Any

import ml_collections

from lm.config.schema import Config, schema, sections
from lm.config.values import checked, close_match
from lm.system.errors import UserError
from lm.system.text_tables import without_secrets


class _Sections(ml_collections.ConfigDict):
    """A ConfigDict that accepts assignments to a misspelled section, so that they are reported with
    all else.
    """

    def __getattr__(self, name):
        if name not in self and not name.startswith("_"):
            self[name] = ml_collections.ConfigDict(type_safe=False)
        return super().__getattr__(name)


def default_config() -> ml_collections.ConfigDict:
    """Return the defaults, for a config file to change. Its keys are checked later, all at once.

    >>> default_config().model.n_layers
    4
    """
    return _Sections(to_dict(Config()), type_safe=False)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested plain dicts, for records: without passwords and queries in URLs."""
    return without_secrets(dataclasses.asdict(config))


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to one dict with dotted names; an empty nested dict is a value.

    >>> flatten({"name": "run", "train": {"steps": 20}})
    {'name': 'run', 'train.steps': 20}
    """
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict | ml_collections.ConfigDict):
            flat |= flatten(dict(value), f"{prefix}{name}.") or {f"{prefix}{name}": {}}
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def from_dict(nested: dict[str, Any]) -> Config:
    """Return the Config of a saved `to_dict`; raises UserError with every mistake."""
    config, problems = from_flat(flatten(nested))
    if problems:
        raise UserError(*problems.values())
    return config


def from_flat(flat: dict[str, Any]) -> tuple[Config, dict[str, str]]:
    """Return the Config of values by dotted name, and what is wrong by name; a wrong value becomes
    its default.
    """
    problems: dict[str, str] = {}
    given: dict[str, dict[str, Any]] = {}
    leaves = schema()
    for name, value in flat.items():
        if name not in leaves:
            problems[name] = f"config.{name}: unknown {suggestion(name)}"
            continue
        section, _, leaf = name.rpartition(".")
        try:
            given.setdefault(section, {})[leaf] = checked(value, *leaves[name])
        except ValueError as error:
            problems[name] = f"config.{name}: {error}"
    top = given.pop("", {})
    return Config(
        **top, **{name: sections()[name](**values) for name, values in given.items()}
    ), problems


def suggestion(name: str) -> str:
    """Complete the message "config.NAME: unknown ..." for a dotted name that is not in the schema.

    >>> suggestion("model.n_head")
    'key; did you mean n_heads?'
    """
    leaves = schema()
    section, _, leaf = name.rpartition(".")
    names = sorted(sections())
    if name in names:
        return f"key; {name} is a section, set its keys one by one"
    if section and section not in names:
        near = close_match(section, names, "did you mean {}?", cutoff=0.5)
        return f"section {section[:80]!r}; " + (near or f"there are {', '.join(names)}")
    if elsewhere := [n for n in leaves if n.rpartition(".")[2] == leaf]:
        return f"key; did you mean {elsewhere[0]}?"
    siblings = [n.rpartition(".")[2] for n in leaves if n.rpartition(".")[0] == section]
    if near := close_match(leaf, siblings, "key; did you mean {}?"):
        return near
    if section:
        return f"key; {section} has {', '.join(siblings)}"
    return "key; " + (
        close_match(leaf, names, "did you mean {}?") or f"there are {', '.join(siblings + names)}"
    )
