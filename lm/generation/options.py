"""The options of text generation, their types and ranges. Imports no jax."""

import argparse
import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from lm.config.schema import MAX_SAMPLE, key
from lm.config.values import checked, short
from lm.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of text generation, declared like the keys of the config."""

    n_tokens: int = key(500, "maximum number of new tokens for each prompt", low=1, high=MAX_SAMPLE)
    n_samples: int = key(1, "number of texts for each prompt", low=1, high=MAX_SAMPLE)
    temperature: float = key(0.8, "0: always the likeliest token", low=0.0)
    top_k: int | None = key(None, "draw from the N likeliest tokens", low=1)
    top_p: float | None = key(
        None, "draw from the likeliest tokens with total probability X", above=0.0, high=1.0
    )
    min_p: float | None = key(
        None, "draw from tokens at least X times as likely as the likeliest", above=0.0, high=1.0
    )
    seed: int = key(0, "random seed", low=0, high=2**32 - 1)
    batch_size: int = key(16, "number of texts generated in one batch", low=1, high=MAX_SAMPLE)


def flag(name: str) -> str:
    """Return the argument of lm.generate for an option.

    >>> flag("n_tokens"), flag("top_k")
    ('--tokens', '--top-k')
    """
    return "--" + name.removeprefix("n_").replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, names: tuple[str, ...] = ()) -> None:
    """Add an argument for each option to a command, or for these."""
    for name, hint in typing.get_type_hints(Options).items():
        if names and name not in names:
            continue
        field = Options.__dataclass_fields__[name]
        kind = (typing.get_args(hint) or (hint,))[0]  # of "int | None": int
        default = "all" if field.default is None else field.default
        parser.add_argument(
            flag(name),
            dest=name,
            type=kind,
            default=field.default,
            metavar="N" if kind is int else "X",
            help=f"{field.metadata['doc']} (default: {default})",
        )


def check_options(values: dict[str, Any], label: Callable[[str], str] = str) -> None:
    """Raise UserError with every problem of options: values of another type or out of range.

    `prompts` and `stop` are sequences of texts. `label` returns what an option is called in a
    message.

    >>> check_options({"top_p": 1.5, "seed": 3})
    Traceback (most recent call last):
    lm.system.errors.UserError: top_p: 1.5 is out of range; it must be <= 1.0
    """
    problems = []
    for name, value in values.items():
        try:
            _check(name, value)
        except ValueError as error:
            problems.append(f"{label(name)}: {error}")
    if problems:
        raise UserError(*problems)


def _check(name: str, value: Any) -> None:
    if name not in ("prompts", "stop"):
        field = Options.__dataclass_fields__[name]
        if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:  # a NumPy scalar
            value = value.item()
        checked(value, typing.get_type_hints(Options)[name], field)
        return
    used_up = iter(value) is value  # an iterator has no texts after this check
    if isinstance(value, str) or used_up or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{short(value)} is not a list of texts")
    if name == "stop" and "" in value:
        raise ValueError("a stop string is empty")
