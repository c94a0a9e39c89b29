"""The results of an analysis: each variant, each comparison, and everything else that a report shows."""

import dataclasses
import math

import numpy as np

from lm.sweeps.analysis import exponents
from lm.sweeps.analysis.exponents import Fall
from lm.sweeps.analysis.interactions import Interaction
from lm.sweeps.analysis.looks import is_significant
from lm.sweeps.analysis.multipliers import Saving, answer
from lm.sweeps.analysis.optimum import Optimum
from lm.sweeps.statistics.inference import CrossedInterval, Difference, Interval
from lm.sweeps.storage.results import Results


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """One variant at its best learning rate. Losses are on the test split, in nats per token.

    Attributes:
        name: the variant's name.
        grid: the learning rates it could choose from.
        rate: the best one; at_edge: whether it is the first or last of the grid.
        runs: the runs at that rate, one per fresh seed; losses: their test losses, None if diverged.
        n_params, flops: parameters, and training FLOPs per token.
        steps, tokens_per_step: the length of one run.
        loss: mean and interval over seeds; None if a run diverged.
        median: the median loss, where a diverged run counts as infinite.
        sampling_error: standard error of the loss over blocks of text, averaged over the runs; nan if all diverged.
        tokens_per_second: median throughput; nan if not measured, which needs all runs of the sweep to finish.
        quartiles: the quartiles of the throughput.
        n_stuck: how many runs ended above STUCK times the unigram baseline.
        bits_per_byte: of the mean loss; nan if a run diverged or the bytes of the test text are not known.
        optimum: the estimated minimum over learning rates, between those of the grid.
        rate_from: the variant whose best rate this one uses, scaled; None: it was tuned itself.
    """

    name: str
    grid: tuple[float, ...]
    rate: float
    at_edge: bool
    runs: list[dict]
    losses: list[float | None]
    n_params: int
    flops: float
    steps: int
    tokens_per_step: int
    loss: Interval | None
    median: float
    sampling_error: float
    tokens_per_second: float
    quartiles: tuple[float, float]
    n_stuck: int
    bits_per_byte: float
    optimum: Optimum
    rate_from: str | None = None

    @property
    def tuned_rates(self) -> tuple[float, ...]:
        """Return the learning rates of the tuning runs."""
        return self.grid if len(self.grid) > 1 and not self.rate_from else ()

    @property
    def n_diverged(self) -> int:
        return self.losses.count(None)

    @property
    def did_not_train(self) -> bool:
        """Return whether all runs got stuck, apart from those that diverged."""
        return self.n_stuck > 0 and self.n_stuck + self.n_diverged == len(self.losses)

    @property
    def tokens(self) -> int:
        """Return the training tokens of one run."""
        return self.steps * self.tokens_per_step

    @property
    def label(self) -> str:
        """Return the legend entry of the curve that `center` computes."""
        return self.name + " (median)" * (self.n_stuck > 0)

    def center(self, losses: np.ndarray) -> np.ndarray:
        """Return the mean over runs of losses (runs, points), or the median if a run is stuck."""
        return (np.median if self.n_stuck else np.mean)(losses, axis=0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """variant - against on the test split, paired by seed.

    Attributes:
        variant, against: the names of the two variants.
        difference: None if runs of either diverged or failed, or if all got stuck; see `missing`.
        p_adjusted: the p-value after Holm's correction.
        sampling_error: standard error of the difference over the same blocks of text.
        answer: the result in one sentence, and its limits: size, text and tuning.
        missing: "runs diverged", "runs failed" or "did not train" if there is no difference, else "".
        same_tokens: whether both variants trained on the same number of tokens.
        at_optimum: the difference of the estimated minima over learning rates; None if a variant has no estimate.
        p_at_optimum: its p-value after Holm's correction.
        p_beyond, p_equivalent: p-values of the tests in `lm.sweeps.statistics.margins` after Holm's correction; with an
            estimate at the optimum, the larger one of both estimates, because an answer needs both.
        leaves_out_tuning: see `PairTest`.
        pairing: the variance of the difference, divided by that without pairing.
        verdict: "beyond the margin", "different", "equivalent" or "undecided", else why it was not tested.
        over_text: the difference with its interval over other seeds and other text; None as for `difference`, or if
            the two were tested on different tokens.
        n_seeds, look: the number of seeds at the look at which the comparison stopped, and that look, counted from 1.
    """

    variant: str
    against: str
    difference: Difference | None
    p_adjusted: float
    sampling_error: float
    answer: str
    missing: str = ""
    same_tokens: bool = True
    at_optimum: Difference | None = None
    p_at_optimum: float = math.nan
    p_beyond: float = math.nan
    p_equivalent: float = math.nan
    leaves_out_tuning: bool = False
    pairing: float = math.nan
    verdict: str = ""
    over_text: CrossedInterval | None = None
    n_seeds: int = 0
    look: int = 1

    @property
    def is_significant(self) -> bool:
        return is_significant(self)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Everything a report shows.

    Attributes:
        record: sweep.json.
        results: the runs.
        variants: the variants whose runs are complete.
        failed: by name, the error of each variant that is left out because runs of it failed.
        comparisons: the declared comparisons.
        warnings: what a reader should know before trusting the numbers.
        savings: the training compute that variants save; the claims of a sweep with sizes.
        falls: how the loss of each variant falls with the size, if the sweep has sizes and no comparisons.
        interactions: how the differences depend on the text, if the sweep has texts.
        placebo: the placebo against the baseline, at the first look and without correction; None if there is none.
    """

    record: dict
    results: Results
    variants: dict[str, VariantResult]
    failed: dict[str, str]
    comparisons: list[Comparison]
    warnings: list[str]
    savings: list[Saving] = ()
    falls: list[Fall] = ()
    interactions: list[Interaction] = ()
    placebo: Comparison | None = None

    @property
    def answers(self) -> list[str]:
        """Return one answer per claim, and those of the interactions and of the placebo.

        The claims are the comparisons. With sizes, they are the pairs of variants; with sizes and without comparisons,
        the variants.
        """
        claims = [answer(s, self.record) for s in self.savings] or [c.answer for c in self.comparisons]
        claims += [exponents.answer(f, self.record) for f in self.falls]
        claims += [x.answer for x in self.interactions]
        return [*claims, self.placebo.answer] if self.placebo else claims

    @property
    def is_full(self) -> bool:
        """Return whether the budget supports conclusions."""
        return self.record["budget"] == "full"


def curve(runs: list[dict]) -> tuple[list[int], np.ndarray]:
    """Return the evaluated steps and the validation losses (runs, steps), nan after a run diverged."""
    steps = sorted({step for run in runs for step, _ in run["validation"]})
    losses = np.full((len(runs), len(steps)), np.nan)
    for i, run in enumerate(runs):
        for step, loss in run["validation"]:
            losses[i, steps.index(step)] = loss
    return steps, losses
