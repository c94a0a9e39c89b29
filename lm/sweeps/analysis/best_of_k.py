"""Best of k trials: the loss to expect from a search with fewer trials (Dodge et al. 2019, arXiv:1909.03004)."""

import numpy as np

from lm.sweeps.storage.results import Results


def expected_best(losses, k: int) -> float:
    """Return the expected lowest loss of k trials, drawn from these losses with replacement.

    Equations 3 to 5 of Dodge et al. 2019 (arXiv:1909.03004) for a minimum: with B losses, the lowest of k draws is at
    least the i-th lowest loss with probability ((B - i + 1) / B)^k.

    Args:
        losses: the loss of each trial.
        k: the number of trials, at least 1.

    >>> expected_best([3.0, 1.0], 1), expected_best([3.0, 1.0], 2)
    (2.0, 1.5)
    """
    losses = np.sort(np.asarray(losses, float))
    at_least = (np.arange(len(losses), -1, -1) / len(losses)) ** k  # P(lowest >= i-th), then 0
    return float(losses @ (at_least[:-1] - at_least[1:]))


def trial_losses(results: Results, record: dict, variant: str) -> list[float]:
    """Return the validation loss of each trial of a variant, the mean over the tuning seeds.

    The loss of a run counts as that of the unigram baseline if it is larger, or if the run diverged.

    Args:
        results: the runs of a sweep with a search; tuning must be complete.
        record: its sweep.json.
        variant: the name of the variant.

    Returns:
        The losses in the order of the trials.
    """
    described = record["variants"][variant]
    ceiling = described["data"]["unigram"]["validation"]
    losses = [
        [results.runs["tuning", variant, rate, seed]["val_loss"] for seed in record["tuning_seeds"]]
        for rate in described["grid"]
    ]
    return [float(np.mean([ceiling if loss is None else min(loss, ceiling) for loss in row])) for row in losses]


def numbers_of_trials(n: int) -> list[int]:
    """Return the powers of two below n, and n.

    >>> numbers_of_trials(20), numbers_of_trials(2)
    ([1, 2, 4, 8, 16, 20], [1, 2])
    """
    return [2**i for i in range((n - 1).bit_length())] + [n]
