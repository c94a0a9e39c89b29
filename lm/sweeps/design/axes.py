"""The axes of a sweep: combinations of variants, sizes, and values that are computed from another variant or size.

This module does not import jax.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

LEARNING_RATE = "optimizer.learning_rate"

Values = dict[str, Any]  # dotted config keys and their values
Variants = dict[str, Values]


@dataclasses.dataclass(frozen=True)
class Match:
    """A config value that is computed from another variant or size.

    Attributes:
        what: "params" or "flops", for model.d_ff; "tokens", for train.steps; "rate", for the learning rates.
        of: the variant that is matched, or the size whose best learning rate is taken; None for "tokens".
        ratio: tokens per parameter, or the factor of the learning rate.
    """

    what: str
    of: str | None
    ratio: float = 1.0

    def __str__(self) -> str:
        if self.what == "tokens":
            return f"{self.ratio:g} tokens per parameter"
        if self.what == "rate":
            return f"the best of {self.of!r} times {self.ratio:.3g}"
        return f"{self.what} of {self.of!r}"


MATCHED_KEYS = {"params": "model.d_ff", "flops": "model.d_ff", "tokens": "train.steps", "rate": LEARNING_RATE}


def match_params(variant: str) -> Match:
    """Set model.d_ff to the width whose number of parameters is nearest to that of `variant`."""
    return Match("params", variant)


def match_flops(variant: str) -> Match:
    """Set model.d_ff to the width whose FLOPs per token are nearest to those of `variant`."""
    return Match("flops", variant)


def match_tokens(per_parameter: float) -> Match:
    """Set train.steps to this many tokens per parameter of the baseline, of the same size if there are sizes.

    All variants of a size then train equally long. The warm-up, the decay and the steps between evaluations change in
    proportion to train.steps.

    Raises:
        ValueError: the number is not positive, or infinite.
    """
    if not 0 < per_parameter < math.inf:
        raise ValueError(f"match_tokens({per_parameter!r}): the number must be positive and finite")
    return Match("tokens", None, per_parameter)


def match_rate(size: str, times: float = 1.0) -> Match:
    """Set the learning rate of a size to the best one of another size, times a factor, without tuning runs.

    Each variant takes its own best rate of the other size. The grid is that of the other size times the factor.

    Raises:
        ValueError: the factor is not positive, or infinite.
    """
    if not 0 < times < math.inf:
        raise ValueError(f"match_rate({size!r}, {times!r}): the factor must be positive and finite")
    return Match("rate", size, times)


def axis_of(sweep) -> Variants:
    """Return the sizes or the texts of a sweep; {"": {}} without them."""
    return sweep.sizes or sweep.texts or {"": {}}


def at_size(variant: str, size: str) -> str:
    """Return the name of a variant at a size; "" is the size of a sweep without sizes.

    >>> at_size("SwiGLU", "64"), at_size("SwiGLU", "")
    ('SwiGLU, 64', 'SwiGLU')
    """
    return f"{variant}, {size}" if size else variant


def size_of(name: str, sizes: Iterable[str]) -> str:
    """Return the size in the name of a variant; "" in a sweep without sizes.

    >>> size_of("SwiGLU, 64", ["32", "64"]), size_of("SwiGLU", [])
    ('64', '')
    """
    return max((size for size in sizes if name.endswith(at_size("", size))), key=len, default="")


def expand(variants: Variants, sizes: Variants) -> Variants:
    """Return every variant at every size. Where both set a key, the variant's value is used.

    >>> list(expand({"SiLU": {}, "SwiGLU": {}}, {"32": {"model.d_model": 32}, "64": {"model.d_model": 64}}))
    ['SiLU, 32', 'SwiGLU, 32', 'SiLU, 64', 'SwiGLU, 64']
    """

    def of(value, variant: str, size: str):
        if not isinstance(value, Match) or value.what == "tokens":
            return value
        return dataclasses.replace(
            value, of=at_size(variant, value.of) if value.what == "rate" else at_size(value.of, size)
        )

    return {
        at_size(variant, size): {key: of(value, variant, size) for key, value in (of_size | changes).items()}
        for size, of_size in sizes.items()
        for variant, changes in variants.items()
    }


def each(key: str, *values) -> Variants:
    """Return one variant per value of a config key, named by the value.

    Raises:
        ValueError: there is no value, or one appears twice.

    >>> each("model.norm", "rms", "layer")
    {'rms': {'model.norm': 'rms'}, 'layer': {'model.norm': 'layer'}}
    """
    if not values:
        raise ValueError(f"each({key!r}): no values")
    variants = {str(value): {key: value} for value in values}
    if len(variants) < len(values):
        raise ValueError(f"each({key!r}): {values} has duplicates")
    return variants


def product(*axes: Variants) -> Variants:
    """Combine every variant of each axis with every variant of the others; names are joined by ", ".

    Raises:
        ValueError: an axis has no variants, or two axes set the same key.

    >>> list(product(each("model.norm", "rms", "layer"), each("model.d_ff", 64, 128)))
    ['rms, 64', 'rms, 128', 'layer, 64', 'layer, 128']
    """
    if not all(axes):
        raise ValueError("product: an axis has no variants")
    return {", ".join(names): _merged(axes, names) for names in itertools.product(*axes)}


def zipped(*axes: Variants) -> Variants:
    """Combine the first variants of all axes, then the second ones, and so on; names are joined by ", ".

    Raises:
        ValueError: axes have unequal lengths or no variants, or two axes set the same key.

    >>> list(zipped(each("model.norm", "rms", "layer"), each("model.d_ff", 64, 128)))
    ['rms, 64', 'layer, 128']
    """
    if not all(axes):
        raise ValueError("zipped: an axis has no variants")
    return {", ".join(names): _merged(axes, names) for names in zip(*axes, strict=True)}


def _merged(axes, names) -> Values:
    merged = {}
    for axis, name in zip(axes, names, strict=True):
        if both := merged.keys() & axis[name].keys():
            raise ValueError(f"{', '.join(names)}: two axes set {min(both)}")
        merged |= axis[name]
    return merged
