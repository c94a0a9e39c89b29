"""Which seeds a sweep uses, and after how many of them it looks at the results. This module does not import jax.

The seeds follow from the sweep's name, so that two sweeps share none and their results are independent.
"""

import hashlib

from lm.config.values import short

MAX_SEEDS = 1000  # of a sweep: for the final runs, and for tuning
FIRST_TUNING_SEED = 10**9  # final runs use smaller seeds
PLACEBO = "placebo"  # the name of the variant that `Sweep.placebo` describes


def fresh_seeds(name: str, n: int) -> tuple[int, ...]:
    """Return the seeds of a sweep's final runs. Two names have the same ones with probability 1e-6.

    >>> fresh_seeds("norms", 3)
    (168696000, 168696001, 168696002)
    """
    first = int(hashlib.sha256(name.encode()).hexdigest(), 16) % (FIRST_TUNING_SEED // MAX_SEEDS) * MAX_SEEDS
    return tuple(range(first, first + n))


def tuning_seeds(name: str, n: int) -> tuple[int, ...]:
    """Return the seeds with which a sweep tunes its learning rates; no final run uses them."""
    return tuple(FIRST_TUNING_SEED + seed for seed in fresh_seeds(name, n))


def wrong_types(budget):
    """Yield the numbers of seeds of a budget that are missing, given twice, or of another type."""
    looks = budget.looks
    if looks is not None and budget.seeds is not None:
        yield "seeds and looks are both given: seeds is a fixed number, looks are the numbers of a design that grows"
    if looks is not None and not (isinstance(looks, tuple | list) and all(type(n) is int for n in looks)):
        yield f"looks is {short(looks)}: it must be a tuple of integers, such as (5, 8, 12, 20)"
    for field in ("tuning_seeds", "seeds"):
        value = getattr(budget, field)
        if type(value) is not int and not (field == "seeds" and looks is not None):
            found = f"{field} is missing" if value is None else f"{field} is {value!r}"
            yield f"{found}: it must be an integer"


def wrong_numbers(budget, least: int):
    """Yield the numbers of seeds of a budget that are out of range; `least` is the lowest for final runs."""
    looks = () if budget.looks is None else tuple(budget.looks)
    if budget.looks is not None and (len(looks) < 2 or list(looks) != sorted(set(looks))):
        yield f"looks is {short(looks)}; it must be at least two numbers in ascending order"
    fields = [("looks", n, least) for n in looks] or [("seeds", budget.seeds, least)]
    for field, value, low in (*fields, ("tuning_seeds", budget.tuning_seeds, 1)):
        if not low <= value <= MAX_SEEDS:
            yield f"{field} is {short(value)}; it must be at least {low} and at most {MAX_SEEDS}"


def wrong_placebo(sweep):
    """Yield the mistakes in a sweep's placebo, apart from those in the config of its variant."""
    if not sweep.placebo:
        return
    if PLACEBO in sweep.variants:
        yield f"variants: {PLACEBO!r} is the name of the variant that placebo describes; choose another name"
    if any(PLACEBO in pair for pair in sweep.comparisons):
        yield f"comparisons: {PLACEBO!r} is compared with the baseline in any case; remove it"
    if "optimizer.learning_rate" in sweep.placebo:
        yield "placebo: it has the learning rates of the baseline; remove optimizer.learning_rate"
