"""What a sweep file says: `Sweep` and `Budget`, the axes of its variants, and values matched to
another variant.

This module does not import jax.
"""

import dataclasses
import itertools
from typing import Any

from lm.sweeps.tuning import LEARNING_RATE

PLACEBO = "placebo"  # the name of the first placebo of the baseline
# tests/sweeps/test_placebo.py has the proof
PLACEBO_KEYS = (
    "model.rope_pairing",
    "model.sinusoidal_order",
)

INIT_DRAW = "model.init_draw"

Values = dict[str, Any]  # dotted config keys and their values
Variants = dict[str, Values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The size of a sweep: seeds, and values of this budget.

    Attributes:
        tuning_seeds: seeds per point of the tuned lists.
        seeds: fresh seeds for the result.
        placebos: how many placebos the baseline has. A placebo is the same model with another draw
            of initial values, tuned by itself. With any, a variant that is compared with the
            baseline is compared with the mean of the baseline and its placebos.
        values: config values for all runs of this budget (`train.steps`, for example); they replace
            those of a size or text, and may not be those of lengths.
    """

    tuning_seeds: int
    seeds: int
    placebos: int = 0
    values: Values = dataclasses.field(default_factory=dict)


QUICK = Budget(tuning_seeds=1, seeds=2, values={"train.steps": 60, "eval.every": 20})
FULL = Budget(tuning_seeds=2, seeds=15, placebos=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """One ablation.

    Attributes:
        question: what the sweep should answer, in one sentence.
        base: the path of the config file that all variants start from.
        variants: by name, the config values that each variant changes. The value of a tuned key is
            the variant's own list, and that of `model.d_ff` may be `match_params`.
        baseline: the variant that the placebo changes.
        comparisons: pairs (variant, against). p-values are corrected for their number. Only with
            sizes, texts or lengths there may be none.
        learning_rates: the list from which each variant takes its best learning rate, in ascending
            order.
        tune: lists of other keys of the optimizer, by config key. First the rate is tuned with the
            middle value of such a list, then the list at the chosen rate (lm/sweeps/tuning.py). It
            may have the list of the learning rates too, instead of `learning_rates`.
        budgets: "quick", "full" or both; by default QUICK and FULL.
        values: config values for all variants.
        sizes: by name, from small to large, the config values of each size. Every variant is tuned,
            trained and compared at every size. The value of a tuned key is the size's own list.
        texts: by name, the config values of each text: {"data.source": "python_docs"}, for example.
            Every variant is tuned, trained and compared on every text; with sizes, at every size on
            it.
        lengths: by name, from short to long, the config values of each length of training:
            {"train.steps": 1440}, for example. Every variant is tuned, trained and compared at every
            length, and the claims are how the differences change from the first length to the last.
            Not with sizes or texts.
        margin: the smallest difference in loss that matters, in nats per token.
        placebo: config values that change the baseline's program but not the distribution of its
            results, such as {"model.rope_pairing": "halves"}: those of the first placebo, in every
            budget.
        placebos: by name, how many placebos other variants have that are compared with, in budgets
            with placebos: {"AdamW": 2}, for example.
    """

    question: str
    base: str
    variants: Variants
    baseline: str
    comparisons: tuple[tuple[str, str], ...]
    learning_rates: tuple[float, ...] | None = None
    tune: dict[str, tuple] = dataclasses.field(default_factory=dict)
    budgets: dict[str, Budget] = dataclasses.field(
        default_factory=lambda: {"quick": QUICK, "full": FULL}
    )
    values: Values = dataclasses.field(default_factory=dict)
    sizes: Variants = dataclasses.field(default_factory=dict)
    texts: Variants = dataclasses.field(default_factory=dict)
    lengths: Variants = dataclasses.field(default_factory=dict)
    margin: float = 0.005
    placebo: Values = dataclasses.field(default_factory=dict)
    placebos: dict[str, int] = dataclasses.field(default_factory=dict)

    def placebos_of(self, budget: Budget) -> dict[str, tuple[str, Values]]:
        """Return by name of a placebo the variant that it is like, and what it changes of it."""
        placebos: dict[str, tuple[str, Values]] = {}
        if self.placebo:
            placebos[PLACEBO] = self.baseline, self.placebo
        counts = {self.baseline: budget.placebos}
        if budget.placebos:
            counts |= self.placebos
        for variant, n in counts.items():
            for draw in range(1, n + 1):
                name = placebo_name("" if variant == self.baseline else variant, draw)
                placebos.setdefault(name, (variant, {INIT_DRAW: draw}))
        return placebos

    @property
    def lists(self) -> dict[str, Any]:
        """Return the lists by config key, the learning rate first."""
        rates = {} if self.learning_rates is None else {LEARNING_RATE: self.learning_rates}
        return dict(
            sorted({**rates, **self.tune}.items(), key=lambda item: item[0] != LEARNING_RATE)
        )

    @property
    def cells(self) -> Variants:
        """Return the lengths, the sizes, the texts, or each size on each text; {"": {}} without
        them. Raises as `product` does.
        """
        axes = [axis for axis in (self.texts, self.sizes, self.lengths) if axis]
        return product(*axes) if axes else {"": {}}


@dataclasses.dataclass(frozen=True)
class Match:
    """The value of model.d_ff at which the number of parameters is nearest to that of the variant
    `of`.
    """

    of: str

    def __str__(self) -> str:
        return f"params of {self.of!r}"


def match_params(variant: str) -> Match:
    """Set model.d_ff to the width whose number of parameters is nearest to that of `variant`."""
    return Match(variant)


def in_cell(arm: str, cell: str) -> str:
    """Return the name of a variant at a size or on a text; "" is the cell of a sweep without them.

    >>> in_cell("SwiGLU", "64"), in_cell("SwiGLU", "")
    ('SwiGLU, 64', 'SwiGLU')
    """
    return f"{arm}, {cell}" if cell else arm


def placebo_name(variant: str, number: int) -> str:
    """Return the name of a placebo of a variant; "" is the baseline.

    >>> placebo_name("", 1), placebo_name("", 2), placebo_name("AdamW", 1)
    ('placebo', 'placebo 2', 'placebo of AdamW')
    """
    numbered = PLACEBO if number == 1 else f"{PLACEBO} {number}"
    return f"{numbered} of {variant}" if variant else numbered


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
    """Combine every variant of each axis with every variant of the others; names are joined by ",
    ".

    Raises ValueError if an axis has no variants, or if two axes set the same key.

    >>> list(product(each("model.norm", "rms", "layer"), each("model.d_ff", 64, 128)))
    ['rms, 64', 'rms, 128', 'layer, 64', 'layer, 128']
    """
    if not all(axes):
        raise ValueError("product: an axis has no variants")
    combined: Variants = {}
    for names in itertools.product(*axes):
        merged: Values = {}
        for axis, name in zip(axes, names, strict=True):
            if both := merged.keys() & axis[name].keys():
                raise ValueError(f"{', '.join(names)}: two axes set {min(both)}")
            merged |= axis[name]
        combined[", ".join(names)] = merged
    return combined
