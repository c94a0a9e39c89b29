"""Whether a difference depends on the text: for each declared pair of variants, the difference of two differences.

On text 2 a variant differs from another by d2, on text 1 by d1; the interaction is d2 - d1. For one seed it equals
x_variant - x_against with x = loss on text 2 - loss on text 1, so it is tested like any other paired difference. All
texts share the seeds. Runs of one seed on two texts start from the same values of the parameters that the texts have in
common, and the paired test holds for any correlation that this causes.
"""

import dataclasses
import math

import numpy as np

from lm.sweeps.analysis.looks import PairTest, correct, is_significant, was_tuned
from lm.sweeps.analysis.multipliers import without_losses
from lm.sweeps.design.axes import at_size
from lm.sweeps.statistics import inference
from lm.sweeps.statistics.inference import Difference
from lm.sweeps.statistics.moderation import NO_PRIOR, ROUNDING, Prior, fit_prior


@dataclasses.dataclass(frozen=True)
class Interaction:
    """(variant - against) on a text, minus the same on the first text of the sweep; test losses, paired by seed.

    Attributes:
        variant, against: the names of the two variants, without the text.
        text, first: the names of the two texts.
        difference: at the best learning rates of the grids; None if there is none: see `missing`.
        at_optimum: at the estimated optima; None if a variant has no estimate on one of the texts.
        p_adjusted, p_at_optimum: their p-values after Holm's correction for all interactions.
        p_beyond, p_equivalent: p-values of the tests in `lm.sweeps.statistics.margins` after the same correction; see
            `PairTest`, also for leaves_out_tuning.
        verdict: "beyond the margin", "different", "equivalent" or "undecided", else why it was not tested.
        sampling_error: standard error over blocks of both test texts.
        missing: the reason if there is no interaction, else "".
        answer: the result in one sentence.
    """

    variant: str
    against: str
    text: str
    first: str
    difference: Difference | None = None
    at_optimum: Difference | None = None
    p_adjusted: float = math.nan
    p_at_optimum: float = math.nan
    p_beyond: float = math.nan
    p_equivalent: float = math.nan
    leaves_out_tuning: bool = False
    verdict: str = ""
    sampling_error: float = math.nan
    missing: str = ""
    answer: str = ""

    @property
    def is_significant(self) -> bool:
        return is_significant(self)


def interactions(record: dict, comparisons: list, variants: dict) -> list[Interaction]:
    """Return the interactions of each declared pair with each text but the first; empty if the sweep has no texts.

    Args:
        record: sweep.json.
        comparisons: the Comparisons, each pair on all texts, one after the other.
        variants: by name, the VariantResults of the variants whose runs are complete.
    """
    texts = record.get("texts")  # sweeps of older versions have none
    if not texts:
        return []
    n, found = len(texts), []
    n_tests = len(comparisons) // n * (n - 1)
    for i in range(0, len(comparisons), n):
        of_first, *others = comparisons[i : i + n]
        names = [name.removesuffix(at_size("", texts[0])) for name in (of_first.variant, of_first.against)]
        for text, other in zip(texts[1:], others, strict=True):
            error = math.hypot(of_first.sampling_error, other.sampling_error)
            interaction = Interaction(*names, text, texts[0], sampling_error=error)
            found.append(_tested(interaction, record, variants, n_tests))
    tests = [
        PairTest(
            1,
            x.difference.n if x.difference else 0,
            x.difference,
            x.at_optimum,
            leaves_out_tuning=x.leaves_out_tuning,
        )
        for x in found
    ]
    names, is_full = ("p_adjusted", "p_at_optimum", "p_beyond", "p_equivalent"), record["budget"] == "full"
    return [
        dataclasses.replace(
            x,
            verdict=test.verdict if is_full else "no conclusion",
            **{name: getattr(test, name) for name in names},
        )
        for x, test in zip(found, correct(tests, record["margin"]), strict=True)
    ]


def _tested(x: Interaction, record: dict, variants: dict, n_tests: int) -> Interaction:
    """Return an interaction with its two estimates, or with the reason why there are none."""
    names = [_on_both(name, x) for name in (x.variant, x.against)]
    if missing := without_losses([name for on_both in names for name in on_both], variants):
        return dataclasses.replace(x, missing=missing)
    if _fingerprints(record, x.variant, x) != _fingerprints(record, x.against, x):
        return dataclasses.replace(x, missing="losses on different data or tokens cannot be compared")
    contrasts = [_contrasts(*(variants[name] for name in on_both)) for on_both in names]
    if np.abs(contrasts[0][0] - contrasts[1][0]).max() <= ROUNDING:
        return dataclasses.replace(x, missing="the differences on the two texts are equal but for rounding")
    found = [
        None if a is None or b is None else inference.paired_difference(a, b, n_tests, prior)
        for a, b, prior in zip(*contrasts, _priors(x, record, variants), strict=True)
    ]
    tuned = was_tuned(record, *names[0], *names[1])
    return dataclasses.replace(
        x, difference=found[0], at_optimum=found[1], leaves_out_tuning=tuned and found[1] is None
    )


def _on_both(name: str, x: Interaction) -> list[str]:
    """Return the names of a variant on the two texts of an interaction."""
    return [at_size(name, x.text), at_size(name, x.first)]


def _fingerprints(record: dict, name: str, x: Interaction) -> list[str]:
    return [record["variants"][on_text]["data"]["fingerprint"] for on_text in _on_both(name, x)]


def _contrasts(on_text, on_first) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the loss on a text minus that on the first one, per seed: at the best rate, and at the optimum."""
    at_optimum = None
    if not (on_text.optimum.missing or on_first.optimum.missing):
        at_optimum = np.subtract(on_text.optimum.losses, on_first.optimum.losses)
    return np.subtract(on_text.losses, on_first.losses), at_optimum


def _priors(x: Interaction, record: dict, variants: dict) -> list[Prior]:
    """Return the priors of the variances, at the best rates and at the optima, from all variants on the same texts."""
    texts = _fingerprints(record, x.variant, x)
    names = [name.removesuffix(at_size("", x.text)) for name in variants if name.endswith(at_size("", x.text))]
    names = [name for name in names if not without_losses(_on_both(name, x), variants)]
    names = [name for name in names if _fingerprints(record, name, x) == texts]
    found = [_contrasts(*(variants[on_text] for on_text in _on_both(name, x))) for name in names]
    columns = [[losses for losses in column if losses is not None] for column in zip(*found, strict=True)]
    return [fit_prior(losses) if losses else NO_PRIOR for losses in columns]
