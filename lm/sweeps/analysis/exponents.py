"""How the test loss of each variant falls with the size: the answers of a sweep with sizes and without comparisons."""

import dataclasses
import math

import numpy as np

from lm.sweeps.analysis.multipliers import incomparable
from lm.sweeps.analysis.scope import describe_scope_of_sizes
from lm.sweeps.design.axes import at_size, size_of
from lm.sweeps.design.spec import MIN_SIZES_OF_FIT
from lm.sweeps.statistics.inference import LEVEL
from lm.sweeps.statistics.power_laws import Bounded, PowerLaw, fit
from lm.text_tables import plural

ALL, INNER = "parameters", "parameters without embeddings"
FLOPS, INNER_FLOPS = "training FLOPs", "training FLOPs without embeddings"
NO_LAW = "the losses determine no exponent: they do not fall, or their fall does not slow down at larger sizes"


@dataclasses.dataclass(frozen=True)
class Fall:
    """How the loss of a variant falls with the size.

    Attributes:
        variant: its name, without the size.
        sizes: the names of the sizes.
        x: by measure of the size (`ALL` and so on), its value at each size (S,).
        losses_SN: test losses: at the estimated optima where all sizes have one, else at the best rates.
        at_optimum: whether `losses_SN` are those at the estimated optima.
        laws: by measure, the fit; None if the losses determine none.
        true_floor: the loss of the best possible model on this test text in windows of this length; None if unknown.
        missing: the reason if there are no fits, else "".
    """

    variant: str
    sizes: list[str]
    x: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    losses_SN: np.ndarray | None = None
    at_optimum: bool = False
    laws: dict[str, PowerLaw | None] = dataclasses.field(default_factory=dict)
    true_floor: float | None = None
    missing: str = ""

    @property
    def is_drawable(self) -> bool:
        return any(self.laws.values())


def falls(record: dict, variants: dict) -> list[Fall]:
    """Return the fits of each variant; empty if the sweep has no sizes, or has comparisons.

    Args:
        record: sweep.json.
        variants: by name, the VariantResults of the variants whose runs are complete.
    """
    sizes = record.get("sizes")
    if not sizes or record["comparisons"]:
        return []
    names = {name.removesuffix(at_size("", size_of(name, sizes))): None for name in record["variants"]}
    return [_fall(name, sizes, record, variants) for name in names]


def _fall(variant: str, sizes: list[str], record: dict, variants: dict) -> Fall:
    names, found = [at_size(variant, size) for size in sizes], Fall(variant, sizes)
    if missing := incomparable(names, record, variants):
        return dataclasses.replace(found, missing=missing)
    results, entries = [variants[name] for name in names], [record["variants"][name] for name in names]
    inner = [entry["without_embeddings"] for entry in entries]
    x = {
        ALL: [v.n_params for v in results],
        INNER: [e["n_params"] for e in inner],
        FLOPS: [v.flops * v.tokens for v in results],
        INNER_FLOPS: [e["flops_per_token"] * v.tokens for e, v in zip(inner, results, strict=True)],
    }
    for measure, values in x.items():
        if min(values) <= 0:
            return dataclasses.replace(found, missing=f"the {measure} are 0 at a size")
        if (n := len(set(values))) < MIN_SIZES_OF_FIT:
            missing = f"the {measure} have only {plural(n, 'different value')}, and a fit needs {MIN_SIZES_OF_FIT}"
            return dataclasses.replace(found, missing=missing)
    at_optimum = not any(v.optimum.missing for v in results)
    losses_SN = np.array([v.optimum.losses if at_optimum else v.losses for v in results], float)
    floors = {entry["data"].get("best_test_loss") for entry in entries}
    return dataclasses.replace(
        found,
        x={measure: np.array(values, float) for measure, values in x.items()},
        losses_SN=losses_SN,
        at_optimum=at_optimum,
        laws={measure: fit(values, losses_SN) for measure, values in x.items()},
        true_floor=floors.pop() if len(floors) == 1 else None,
    )


def answer(f: Fall, record: dict) -> str:
    """Return the answer that the numbers support, and its limits: sizes, text and tuning."""
    if (budget := record["budget"]) != "full":
        return f"No conclusion about {f.variant}: budget {budget} only checks that the sweep runs."
    if f.missing:
        return f"{f.variant}: no exponent, because {f.missing}."
    if f.laws[ALL] is None:
        return f"{f.variant}: no exponent over the parameters, because {NO_LAW}."
    exponents = ", ".join(f"{exponent(law)} over {measure}" for measure, law in f.laws.items() if law)
    where = "the estimated optima of the learning rate" if f.at_optimum else "the best learning rates of the grids"
    parts = [
        f"The test loss of {f.variant} falls as E + A x^-a, with the exponent a = {exponents} ({len(f.sizes)} sizes, "
        f"{f.losses_SN.shape[1]} seeds each, 95 % CI, at {where}).",
        f"{describe_floor(f)}.",
        *describe_misfit(f),
        describe_scope_of_sizes({size: (record["variants"][at_size(f.variant, size)],) * 2 for size in f.sizes}),
    ]
    return " ".join(parts)


def describe_floor(f: Fall) -> str:
    """Return the irreducible loss, fitted over all parameters, beside the true one if it is known."""
    law, true = f.laws[ALL], "" if f.true_floor is None else f"; true {f.true_floor:.4f}"
    if math.isinf(law.floor.low):
        return f"Irreducible loss: at most {law.floor.high:.4f}, and these sizes show no lower limit{true}"
    return f"Irreducible loss: fitted {floor(law)}{true}"


def describe_misfit(f: Fall) -> list[str]:
    """Return a warning if the losses are not on a power law of the parameters."""
    p = f.laws[ALL].p_misfit
    if not p < 1 - LEVEL:
        return []
    return [
        f"But the losses are not on such a curve (p = {p:.2g}): E and a depend on which sizes are fitted, and the "
        "intervals, which are over seeds alone, are too narrow."
    ]


def exponent(law: PowerLaw) -> str:
    """Format the exponent of a fit with its interval.

    >>> exponent(PowerLaw(Bounded(1.9, 1.8, 2.0), Bounded(0.51, 0.4, math.inf), 3.0, 0.5))
    '0.510 [0.400, ∞]'
    """
    return _with_interval(law.exponent, 3)


def floor(law: PowerLaw) -> str:
    """Format the irreducible loss of a fit with its interval.

    >>> floor(PowerLaw(Bounded(1.9, -math.inf, 2.0), Bounded(0.51, 0.4, math.inf), 3.0, 0.5))
    '1.9000 [−∞, 2.0000]'
    """
    return _with_interval(law.floor, 4)


def _with_interval(b: Bounded, digits: int) -> str:
    shown = [("−∞" if x < 0 else "∞") if math.isinf(x) else f"{x:.{digits}f}" for x in b]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"
