"""Means over the tokens of a text, with standard errors from the blocks of the text.

The losses of neighboring tokens are correlated: a difficult passage raises many of them. The
standard error of independent tokens would be too small. The method of batch means (Schmeiser 1982,
Operations Research 30(3), 556-568) cuts the text into about 30 consecutive blocks, much longer than
the correlation, and takes their means as independent. Schmeiser found little benefit in more blocks
than 30. Blocks consist of whole windows, because the loss varies within a window in the same way in
all of them.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

MAX_BLOCKS = 30
MIN_BLOCKS = 8  # with fewer blocks, no standard error is reported


class Estimate(NamedTuple):
    """A value and its standard error, None if there are fewer than MIN_BLOCKS blocks.

    >>> print(Estimate(1.58460, 0.01234), Estimate(53.2, None))
    1.585 ± 0.012 53.200
    """

    value: float
    error: float | None

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate of factor * value."""
        return Estimate(factor * self.value, None if self.error is None else factor * self.error)

    def __str__(self) -> str:
        if self.error is None or not 0 < self.error < math.inf:
            return f"{self.value:.{min(4, _digits(self.value, 4))}f}"
        digits = _digits(self.error, 1)
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


def _digits(x: float, following: int) -> int:
    """Return the number of decimals, 0 to 6, that show `following` digits after the first."""
    if x == 0 or not math.isfinite(x):
        return following
    return min(6, max(0, following - math.floor(math.log10(abs(x)))))


class ContextBin(NamedTuple):
    """The predictions with first to last tokens of context."""

    first: int
    last: int
    tokens: int
    loss: Estimate
    accuracy: Estimate


@dataclasses.dataclass(frozen=True)
class TextMeans:
    """Sums over the predictions of a text, by block and by length of the context."""

    # float64 (blocks, bins, 3): the number of predictions, the sum of their losses in nats, and the
    # number of predictions whose likeliest token is right.
    sums: np.ndarray
    seq_len: int  # the longest context
    stride: int  # distance between two windows
    bytes_per_token: float | None = None  # UTF-8 bytes of the text per token; None if unknown

    @property
    def blocks(self) -> int:
        return len(self.sums)

    @property
    def tokens(self) -> int:
        return int(self.sums[..., 0].sum())

    @functools.cached_property
    def loss(self) -> Estimate:
        """Return the mean loss in nats per token."""
        return ratio(self.sums[..., 1].sum(1), self.sums[..., 0].sum(1))

    @property
    def block_losses(self) -> np.ndarray:
        """Return the mean loss of each block, to compare two models; NaN without targets."""
        with np.errstate(invalid="ignore"):
            return self.sums[..., 1].sum(1) / self.sums[..., 0].sum(1)

    @property
    def perplexity(self) -> Estimate:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> Estimate | None:
        return bits_per_byte(self.loss, self.bytes_per_token)

    @functools.cached_property
    def accuracy(self) -> Estimate:
        """Return the fraction of tokens that the model predicts as the likeliest one."""
        return ratio(self.sums[..., 2].sum(1), self.sums[..., 0].sum(1))

    @functools.cached_property
    def by_context(self) -> list[ContextBin]:
        """Return loss and accuracy by length of context, in the non-empty bins of `bin_edges`."""
        bins = []
        edges = [0, *bin_edges(self.seq_len)]
        for i, (before, last) in enumerate(itertools.pairwise(edges)):
            counts, losses, hits = self.sums[:, i].T
            if n := int(counts.sum()):
                loss = ratio(losses, counts)
                bins.append(ContextBin(before + 1, last, n, loss, ratio(hits, counts)))
        return bins


def perplexity(loss: Estimate) -> Estimate:
    """Return exp(loss), with a standard error to first order (delta method)."""
    value = math.exp(min(loss.value, 700.0))
    return Estimate(value, None if loss.error is None else value * loss.error)


def bits_per_byte(loss: Estimate, bytes_per_token: float | None) -> Estimate | None:
    """Return loss / (ln 2 * bytes per token); None if the bytes are unknown.

    >>> print(bits_per_byte(Estimate(math.log(2), None), bytes_per_token=4.0))
    0.2500
    """
    return loss.scaled(1 / (math.log(2) * bytes_per_token)) if bytes_per_token else None


def bin_edges(seq_len: int) -> list[int]:
    """Return the longest context of each bin: the powers of two below seq_len, and seq_len.

    >>> bin_edges(12)
    [1, 2, 4, 8, 12]
    """
    return [2**i for i in range((seq_len - 1).bit_length())] + [seq_len]


def ratio(sums_B, counts_B) -> Estimate:
    """Return sum(sums) / sum(counts) over the blocks with a count, with its standard error.

    This is the linearized error of a ratio (Cochran 1977, Sampling Techniques, chapter 6, eq. 6.4):
    for n blocks of counts c_i and sums s_i, taken as independent, error^2 = n / (n - 1) * sum((s_i
    - r c_i)^2) / sum(c)^2. For equal counts its square is the sample variance of the means of the
    blocks, divided by n.

    >>> ratio(np.array([4.0, 6.0, 8.0, 2.0] * 2), np.full(8, 2.0))  # means 2, 3, 4, 1
    Estimate(value=2.5, error=0.4225771273642583)
    """
    counted = np.asarray(counts_B) > 0
    s = np.asarray(sums_B, float)[counted]
    c = np.asarray(counts_B, float)[counted]
    value = float(s.sum()) / float(c.sum())
    n = len(c)
    if n < MIN_BLOCKS:
        return Estimate(value, None)
    with np.errstate(invalid="ignore"):  # infinite losses of a diverged model
        residuals = s - s.sum() / c.sum() * c
        return Estimate(value, float(math.sqrt(n / (n - 1) * np.sum(residuals**2)) / c.sum()))
