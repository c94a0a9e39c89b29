"""The seeds of a sweep, and the numbers of seeds at which it tests its comparisons. This module does not import jax.

The seeds follow from the sweep's name, so that two sweeps share none and their results are independent. In a sweep with
sizes they follow from the name and the size, for the same reason: variants are paired at each size, and the sizes are
independent.
"""

import hashlib
from collections.abc import Callable, Iterable

from lm.config.values import short
from lm.sweeps.design.axes import at_size, size_of

MAX_SEEDS = 1000  # of a sweep: for the final runs, and for tuning
FIRST_TUNING_SEED = 10**9  # final runs use smaller seeds

# The seeds of all variants, or of each size. Before sizes had seeds of their own, all sizes shared them.
Seeds = tuple[int, ...] | dict[str, tuple[int, ...]]


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


def by_size(draw: Callable[[str, int], tuple[int, ...]], name: str, sizes: Iterable[str], n: int) -> Seeds:
    """Return n seeds of a sweep, or n for each of its sizes.

    Args:
        draw: `fresh_seeds` or `tuning_seeds`.
        name: the sweep's name.
        sizes: the names of its sizes, if any.
        n: how many seeds.

    >>> by_size(fresh_seeds, "norms", [], 2)
    (168696000, 168696001)
    >>> by_size(fresh_seeds, "norms", ["32", "64"], 2)
    {'32': (437897000, 437897001), '64': (69182000, 69182001)}
    """
    return {size: draw(at_size(name, size), n) for size in sizes} or draw(name, n)


def seeds_of(seeds: Seeds, variant: str) -> tuple[int, ...]:
    """Return the seeds of a variant.

    >>> seeds_of((7, 8), "SwiGLU"), seeds_of({"32": (7, 8), "64": (3, 4)}, "SwiGLU, 64")
    ((7, 8), (3, 4))
    """
    return seeds[size_of(variant, seeds)] if isinstance(seeds, dict) else seeds


def first_seeds(seeds: Seeds, n: int) -> Seeds:
    """Return the first n seeds, of each size if there are sizes.

    >>> first_seeds((7, 8, 9), 2), first_seeds({"32": (7, 8, 9), "64": (3, 4, 5)}, 1)
    ((7, 8), {'32': (7,), '64': (3,)})
    """
    return {size: own[:n] for size, own in seeds.items()} if isinstance(seeds, dict) else seeds[:n]


def count(seeds: Seeds) -> int:
    """Return the number of seeds of each variant.

    >>> count((7, 8, 9)), count({"32": (7, 8), "64": (3, 4)})
    (3, 2)
    """
    return len(next(iter(seeds.values()))) if isinstance(seeds, dict) else len(seeds)


def seeds_to_json(seeds: Seeds) -> list[int] | dict[str, list[int]]:
    """Convert seeds to lists, for sweep.json."""
    return {size: list(own) for size, own in seeds.items()} if isinstance(seeds, dict) else list(seeds)


def seeds_from_json(seeds: list[int] | dict[str, list[int]]) -> Seeds:
    """Convert the seeds of sweep.json to tuples."""
    return {size: tuple(own) for size, own in seeds.items()} if isinstance(seeds, dict) else tuple(seeds)


def wrong_types(budget):
    """Yield the numbers of seeds of a budget that are missing, given twice, or of another type."""
    looks = budget.looks
    if looks is not None and budget.seeds is not None:
        yield "seeds and looks are both given: seeds is one number, looks are growing numbers; remove one of them"
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
