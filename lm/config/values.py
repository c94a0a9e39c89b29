"""One value of a config key: parse it, check its type and range, and describe both. Imports no jax."""

import argparse
import ast
import dataclasses
import difflib
import math
import operator
import os
import re
import types
import typing
from typing import Any

from lm.system.files import expanded

BOUNDS = {
    "low": (">=", operator.ge), "above": (">", operator.gt), "high": ("<=", operator.le), "below": ("<", operator.lt)
}  # fmt: skip
# steps, ids and sizes are 32-bit on the device; a key's own `high` may allow more
MAX_INT = 2**31 - 1


def parse(text: str, type_: Any) -> Any:
    """Read a value from the command line as the key's type suggests; text that does not fit is
    returned as it is.

    >>> parse("none", int | None), parse("2e-3", float), parse("true", bool), parse("128,0", tuple[int, ...])
    (None, 0.002, True, (128, 0))
    """
    kind, optional = _split_optional(type_)
    if optional and text.lower() == "none":
        return None
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind is str:
        return text.replace("\\n", "\n")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        parts = [part.strip() for part in text.strip("()").split(",")]
        value = tuple(part for part in parts if part) if typing.get_origin(kind) is tuple else text
    return (
        (value,)
        if typing.get_origin(kind) is tuple and isinstance(value, int | float | str)
        else value
    )


def show(value: Any) -> str:
    r"""Write a value as `parse` reads it.

    >>> show(None), show(True), show((128, 0)), show(("test", "train")), show("\n")
    ('none', 'true', '(128, 0)', '(test, train)', '\\n')
    """
    if isinstance(value, tuple):
        if isinstance(value[0], tuple):  # commas and quotes of the inner ones matter
            return repr(value)
        inner = ", ".join(show(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("\n", "\\n")


def allowed(type_: Any, field: dataclasses.Field) -> str:
    """Describe the values that a key takes, for --help and docs/configuration.md."""
    kind, optional = _split_optional(type_)
    limits = field.metadata
    plural = typing.get_origin(kind) is tuple
    if plural:
        kind, *more = typing.get_args(kind)
        if more != [...]:
            return f"({', '.join(allowed(part, field) for part in (kind, *more))})"
        if typing.get_origin(kind) is tuple:
            return f"list of {allowed(kind, field)}" + (" | none" if optional else "")
    if limits["choices"] or limits["forms"]:
        text = " | ".join(limits["choices"] or limits["forms"])
    elif kind is bool:
        text = "true | false"
    else:
        given = [name for name in BOUNDS if limits[name] is not None]
        bounds = [f" {BOUNDS[name][0]} {limits[name]}" for name in given]
        text = ("text" if kind is str else kind.__name__) + " and".join(bounds)
    text = f"list of {text}" if plural else text
    return f"{text} | none" if optional else text


def checked(value: Any, type_: Any, field: dataclasses.Field) -> Any:
    """Return the value as the key's type: an int may be given for a float, a list for a tuple.

    Args:
        value: the value, as a config file or the command line gives it.
        type_: the annotation of the key in the schema.
        field: the key, whose metadata has its choices and limits.

    Raises:
        ValueError: with what is wrong and what would be right.
    """
    kind, optional = _split_optional(type_)
    if value is None and optional:
        return None
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{short(value)} is not a tuple; write it as ({short(value)},)")
        if not value:
            raise ValueError("() is empty; give at least one value")
        kinds = typing.get_args(kind)
        if typing.get_origin(kinds[0]) is tuple and not all(
            isinstance(item, list | tuple) for item in value
        ):
            raise ValueError(
                f"{short(value)} is not a tuple of tuples; write one as ((...),), with the last "
                "comma"
            )
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(value)
        if len(value) != len(kinds):
            raise ValueError(f"{short(value)} is not {allowed(kind, field)}")
        return tuple(checked(item, kind, field) for item, kind in zip(value, kinds, strict=True))
    value = _as_kind(value, kind, optional)
    limits = dict(field.metadata)
    if (choices := limits["choices"]) and value not in choices:
        raise ValueError(
            f"{short(value)} is not one of {', '.join(choices)}{close_match(value, list(choices))}"
        )
    if (forms := limits["forms"]) and not any(_has_form(value, form) for form in forms):
        raise ValueError(
            f"{short(value)} is not one of {', '.join(forms)}{_form_hint(value, forms)}"
        )
    if limits["path"]:
        form, colon, path = value.rpartition(":")
        value = f"{form}{colon}{expanded(path)}"
    if kind is int and limits["high"] is None:
        limits["high"] = MAX_INT
    for name, (sign, fits) in BOUNDS.items():
        if limits[name] is not None and not fits(value, limits[name]):
            raise ValueError(f"{short(value)} is out of range; it must be {sign} {limits[name]}")
    return value


def path_argument(text: str) -> str:
    """Return the path that an argument names; raises ArgumentTypeError if it is not UTF-8.

    A shell replaces "~" in `--workdir ~/run`, but not in `--workdir=~/run`.
    """
    if not is_text(text):
        raise argparse.ArgumentTypeError(f"{text!r} has a byte that is not UTF-8")
    return expanded(text)


def close_match(
    word: str, candidates: list[str], template: str = "; did you mean {}?", cutoff: float = 0.6
) -> str:
    """Return the template with the candidate most similar to the word, "" if none is similar.

    >>> close_match("rsm", ["rms", "layer"])
    '; did you mean rms?'
    """
    near = difflib.get_close_matches(word[:100], candidates, n=1, cutoff=cutoff)
    return template.format(near[0]) if near else ""


def divisors(n: int) -> list[int]:
    """Return the divisors of a positive integer in ascending order, in O(sqrt(n)).

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _split_optional(type_: Any) -> tuple[Any, bool]:
    """Split `T | None` into (T, True), and any other type T into (T, False)."""
    if not isinstance(type_, types.UnionType):
        return type_, False
    return typing.get_args(type_)[0], types.NoneType in typing.get_args(type_)


def _as_kind(value: Any, kind: type, optional: bool) -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and is_int:
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{short(value)} is too large for a float") from None
    if not isinstance(value, kind) or (kind is int and not is_int):
        article = "an" if kind.__name__[0] in "aeiou" else "a"
        raise ValueError(
            f"{short(value)} is not {article} {kind.__name__}{' or none' if optional else ''}"
        )
    if isinstance(value, str) and ("\0" in value or not is_text(value)):
        raise ValueError(
            f"{short(value)} has a character that is not text: U+0000, or a byte that is not UTF-8"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    if isinstance(value, float) and 0 < abs(value) < 2**-126:
        raise ValueError(f"{value!r} is 0 in float32; use at least 1.2e-38")
    return value


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT.

    >>> is_address("node1:1234"), is_address("[::1]:1234"), is_address("node1"), is_address("node1:70000")
    (True, True, False, False)
    """
    host, _, port = text.rpartition(":")
    return bool(host) and re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 2**16


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode a str: Python decodes invalid bytes to surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _has_form(value: str, form: str) -> bool:
    """Return whether value is the form's name, with a colon and an argument if it has these."""
    name, colon, argument = form.partition(":")
    given_name, given_colon, given = value.partition(":")
    if argument == "SIZE" and not re.fullmatch("[0-9]{1,7}", given):
        return False
    return (given_name, given_colon, bool(given)) == (name, colon, bool(colon))


def _form_hint(value: str, forms: tuple[str, ...]) -> str:
    """Return advice for a value of no known form: a path needs its kind."""
    name, colon, _ = value.partition(":")
    starts = {form.partition(":")[0]: form for form in forms}
    ending = os.path.splitext(value)[1]
    near = starts.get(close_match(name, list(starts), "{}"), "")
    if "text:PATH" in forms:
        kinds = {".json": "jsonl", ".tsv": "csv"} | {
            f".{name}": name for name in ("jsonl", "csv", "parquet", "arrow")
        }
        if not colon and ending in kinds:
            near = f"{kinds[ending]}:{value}"
        elif ending in (".bin", ".npy"):
            near = f"tokens:{os.path.dirname(value) or '.'}"
        elif not colon and ("/" in value or ending or os.path.exists(value)):
            near = f"text:{value}"
    near = near if len(near) <= 200 else near[:200] + "..."
    return f"; did you mean {near}?" if near else ""


def short(value: Any) -> str:
    """Return the repr of a value in one line, shortened for an error message."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return "a number of thousands of digits"
    except Exception:  # an object of the user's own type
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:40]}... ({len(text)} characters)"
