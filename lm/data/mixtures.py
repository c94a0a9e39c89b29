"""Mixtures: the source and the window of draw k, a pure function of (seed, k).

With weights 0.7 and 0.3, the first k draws have floor(0.7 k + phase) windows of the first source:
never one more or less than its share, unlike independent draws, whose counts deviate by about
sqrt(k). The draws of the others are numbered anew and divided in the same way. The number of
earlier draws of a source is its place in the source's own order, in which each epoch visits every
window once.
"""

import bisect
import functools
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lm.config import Config, DataConfig
from lm.data.permutation import hash_counters, permute

MAX_DRAWS = 2**40
LARGEST_DENOMINATOR = 2**22  # of a share: its product with a number of draws fits into 63 bits


class Part(NamedTuple):
    """The tokens of one source within a split, one source after the other."""

    name: str  # of the source; "" if the split has one source only
    start: int  # index of its first token in the split
    n_tokens: int
    weight: float  # in the mean loss of an evaluation; the weights add up to 1
    bytes_per_token: float | None  # UTF-8 bytes of its text per token; None if unknown


class Stretch(NamedTuple):
    """Consecutive draws with the same weights."""

    first: int  # number of its first draw
    before: tuple[int, ...]  # for each source, how many draws before the stretch were of it
    # For each source, (numerator, denominator, phase) of its share of the draws that are not of a
    # source before it.
    shares: tuple[tuple[int, int, int], ...]

    def counts(self, n) -> list:
        """Return how many of the first n draws (a number or an array) are of each source."""
        counts = []
        for numerator, denominator, phase in self.shares:
            counts.append((n * numerator + phase) // denominator)
            n = n - counts[-1]
        return counts

    def draws_until(self, count: int, source: int, at_most: int) -> int:
        """Return after how many draws there are `count` of a source; at_most if it takes more."""
        return bisect.bisect_left(range(at_most), count, key=lambda n: self.counts(n)[source])

    def choose(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each draw, and how many draws before it were of this source."""
        counts = np.stack(self.counts(draws - self.first))
        after = np.stack(self.counts(draws - self.first + 1))
        source = (after > counts).argmax(0)
        of_source = np.take_along_axis(counts, source[None], 0)[0]
        return source, np.array(self.before)[source] + of_source


def weights(config: DataConfig) -> list[float]:
    """Return the weights of the sources of a mixture, with the temperature, as shares of 1.

    >>> weights(DataConfig(mixture=(("a", "text:a", 3.0), ("b", "text:b", 1.0))))
    [0.75, 0.25]
    """
    return _tempered([weight for *_, weight in config.mixture or ()], config.mixture_temperature)


def _tempered(given: list[float], temperature: float) -> list[float]:
    tempered = [(weight / max(given)) ** (1 / temperature) for weight in given]
    return [weight / sum(tempered) for weight in tempered]


def starts(parts: tuple[Part, ...], config: Config, steps) -> np.ndarray:
    """Return each window's first token in a mixture of sources, as `batches.window_starts` does.

    Raises ValueError if a step is beyond the last one for which the sources have windows.
    """
    t = config.train
    stride = config.data.stride or t.seq_len
    n_windows = windows_of(parts, config)
    stretches, end = plan(n_windows, config.data, t.batch_size, t.seed)
    draws = np.asarray(steps, np.int64)[..., None] * t.batch_size + np.arange(t.batch_size)
    if draws.max() >= end:
        raise ValueError(
            f"the mixture has {end:,} windows in all epochs, fewer than the draw {draws.max():,}"
        )
    first_tokens = np.empty(draws.shape, np.int64)
    number = np.searchsorted([stretch.first for stretch in stretches], draws, side="right") - 1
    for k in np.unique(number):
        source, rank = stretches[k].choose(draws)
        for i, n in enumerate(n_windows):
            own = (number == k) & (source == i)
            if not own.any():
                continue
            epoch, position = np.divmod(rank[own], n)
            if config.data.shuffle:
                position = permute(position, n, hash_counters(t.seed, 2, i, epoch))
            first_tokens[own] = parts[i].start + position * stride
    return first_tokens


def windows_of(parts: tuple[Part, ...], config: Config) -> tuple[int, ...]:
    """Return how many windows an epoch of each source has."""
    T = config.train.seq_len
    stride = config.data.stride or T
    return tuple(max(0, (part.n_tokens - T - 1) // stride + 1) for part in parts)


@functools.lru_cache(maxsize=64)
def plan(
    n_windows: tuple[int, ...], config: DataConfig, batch_size: int, seed: int
) -> tuple[list[Stretch], int]:
    """Divide the draws of a run into stretches with constant weights.

    A stretch ends where a stage of data.mixture_stages begins, or where a source has reached its
    data.max_epochs. From there on, the other sources divide its draws by their weights. An epoch of
    source i has n_windows[i] windows, and a step draws batch_size of them.

    Returns:
        The stretches, and the number of draws at which no source with a weight has windows left (or
        MAX_DRAWS).
    """
    stages = [weights(config)]
    ends = []
    for step, *later in config.mixture_stages or ():
        stages.append(_tempered(later, config.mixture_temperature))
        ends.append(int(step) * batch_size)
    ends.append(MAX_DRAWS)
    epochs = config.max_epochs or (MAX_DRAWS,)
    if len(epochs) == 1:
        epochs *= len(n_windows)
    limits = [min(MAX_DRAWS, int(e * n)) for e, n in zip(epochs, n_windows, strict=True)]
    stretches: list[Stretch] = []
    before = (0,) * len(n_windows)
    first = 0
    for of_stage, end in zip(stages, ends, strict=True):
        while first < end:
            given = [
                weight * (n < limit)
                for weight, n, limit in zip(of_stage, before, limits, strict=True)
            ]
            if not any(given):
                return stretches, first
            stretch = Stretch(first, before, _shares(given, seed, len(stretches)))
            n = end - first
            for i, limit in enumerate(limits):
                # Shorten the stretch to the draws after which the source has no window left.
                if before[i] < limit:
                    n = min(n, stretch.draws_until(limit - before[i], i, n))
            stretches.append(stretch)
            before = tuple(a + b for a, b in zip(before, stretch.counts(n), strict=True))
            first += n
    return stretches, first


def _shares(given: list[float], seed: int, number: int) -> tuple[tuple[int, int, int], ...]:
    """Return the share of each source among itself and those after it, with a phase of the seed."""
    exact = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in given]
    shares = []
    for i, weight in enumerate(exact):
        rest = sum(exact[i:])
        share = (weight / rest if rest else Fraction(0)).limit_denominator(LARGEST_DENOMINATOR)
        phase = int(hash_counters(seed, 3, number, i)) % share.denominator
        shares.append((share.numerator, share.denominator, phase))
    return tuple(shares)


def describe(parts: tuple[Part, ...], config: Config) -> list[str]:
    """Return a line for each stretch: its first step, each source's share and epochs so far."""
    if not parts:
        return []
    t = config.train
    n_windows = windows_of(parts, config)
    stretches, end = plan(n_windows, config.data, t.batch_size, t.seed)
    ends = [*(stretch.first for stretch in stretches[1:]), end]
    lines = []
    for stretch, after in zip(stretches, ends, strict=True):
        n = min(after, t.steps * t.batch_size) - stretch.first
        if n <= 0:
            continue
        of_sources = zip(parts, stretch.counts(n), stretch.before, n_windows, strict=True)
        shares = [
            f"{part.name} {count / n:.1%} (up to epoch {(before + count) / windows:.2f})"
            for part, count, before, windows in of_sources
        ]
        lines.append(f"mixture from step {stretch.first / t.batch_size:,.0f}: {', '.join(shares)}")
    return lines
