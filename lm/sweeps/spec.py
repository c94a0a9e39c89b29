"""What a sweep file says: the question, the base config, the variants, the seeds, the budgets and the comparisons.

A file in configs/sweeps/ has a function `get_sweep()` that returns a Sweep. This module imports no jax.
"""

import ast
import dataclasses
import difflib
import itertools
from numbers import Real
from pathlib import Path
from typing import Any

from lm.config import Config
from lm.config.loading import load_values, run_file
from lm.errors import UserError

LEARNING_RATE = "optimizer.learning_rate"
BUDGETS = ("quick", "full")
MIN_SEEDS = 5  # of a budget that may make a claim

Values = dict[str, Any]  # dotted config keys and their values
Variants = dict[str, Values]


@dataclasses.dataclass(frozen=True)
class Match:
    """The value of model.d_ff for which a variant has as many parameters ("params") or FLOPs a token as another."""

    what: str
    variant: str


def match_params(variant: str) -> Match:
    """In place of model.d_ff: the width whose number of parameters is nearest to that of `variant`."""
    return Match("params", variant)


def match_flops(variant: str) -> Match:
    """In place of model.d_ff: the width whose FLOPs a token are nearest to those of `variant`."""
    return Match("flops", variant)


def each(key: str, *values) -> Variants:
    """One variant for each value of a key, named by the value; raises ValueError if there is none, or one twice."""
    if not values:
        raise ValueError(f"each({key!r}): an axis without values")
    variants = {str(value): {key: value} for value in values}
    if len(variants) < len(values):
        raise ValueError(f"each({key!r}): a value twice in {values}")
    return variants


def product(*axes: Variants) -> Variants:
    """Every combination of one variant from each axis, "a, b".

    Raises ValueError for an axis without variants, and for a key that two of them set.
    """
    if not all(axes):
        raise ValueError("product: an axis without variants")
    return {", ".join(names): _merged(axes, names) for names in itertools.product(*axes)}


def zipped(*axes: Variants) -> Variants:
    """The first variants of all axes together, the second, and so on.

    Raises ValueError for unequal or no lengths, and for a key that two of them set.
    """
    if not all(axes):
        raise ValueError("zipped: an axis without variants")
    return {", ".join(names): _merged(axes, names) for names in zip(*axes, strict=True)}


def _merged(axes, names) -> Values:
    merged = {}
    for axis, name in zip(axes, names, strict=True):
        if both := merged.keys() & axis[name].keys():
            raise ValueError(f"{', '.join(names)}: two axes set {min(both)}")
        merged |= axis[name]
    return merged


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much is spent: seeds to tune the learning rate with, fresh seeds for the result, and overrides (steps)."""

    tuning_seeds: int
    seeds: int
    values: Values = dataclasses.field(default_factory=dict)
    learning_rates: tuple[float, ...] | None = None  # in place of the sweep's


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One ablation.

    base: a config file, with `values` changed for all variants. variants: by name what each changes; the value of
    optimizer.learning_rate may be a grid of the variant's own. comparisons: (variant, against) pairs, the
    claims that the sweep is made for: the report corrects for their number.
    """

    question: str
    base: str
    variants: Variants
    baseline: str
    comparisons: tuple[tuple[str, str], ...]
    learning_rates: tuple[float, ...]
    budgets: dict[str, Budget]
    values: Values = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep under one budget: each variant's grid of learning rates, and its config at the first of them.

    `matches` holds the widths that are still to be computed; the configs have the base's in their place.
    """

    name: str
    background: str  # what the file says of itself
    budget_name: str
    sweep: Sweep
    budget: Budget
    configs: dict[str, Config]
    grids: dict[str, tuple[float, ...]]
    matches: dict[str, Match]

    @property
    def tuning_seeds(self) -> range:
        return range(1_000_000, 1_000_000 + self.budget.tuning_seeds)

    @property
    def seeds(self) -> range:
        return range(self.budget.seeds)


def load(path: str, budget_name: str) -> Plan:
    """The plan of a sweep file under a budget; raises UserError with everything that is wrong with it."""
    sweep = run_file(path, "get_sweep", "configs/sweeps")
    if not isinstance(sweep, Sweep):
        raise UserError(f"{path}: get_sweep() returned {type(sweep).__name__}; it must return a Sweep")
    if problems := list(_problems(sweep)):
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    budget, problems, configs, grids, matches = sweep.budgets[budget_name], {}, {}, {}, {}
    for name, changes in sweep.variants.items():
        values = sweep.values | budget.values | changes
        of_budget = sweep.learning_rates if budget.learning_rates is None else budget.learning_rates
        own = values.pop(LEARNING_RATE, None)
        grid = tuple(float(rate) for rate in _grid(of_budget if own is None else own))  # NumPy's numbers too
        if isinstance(values.get("model.d_ff"), Match):
            matches[name] = values.pop("model.d_ff")
        for rate in reversed(grid):
            try:
                configs[name] = load_values(sweep.base, values | {LEARNING_RATE: rate})
            except UserError as error:
                problems |= {f"{path}: variant {name!r}: {problem}": None for problem in error.problems}
        grids[name] = grid
    for a, b in sweep.comparisons:
        if len(grids[a]) != len(grids[b]):
            problems[
                f"{path}: comparisons: {a!r} has {len(grids[a])} learning rates to choose from and {b!r} "
                f"{len(grids[b])}; give both as many"
            ] = None
    if problems:
        raise UserError(*problems)
    background = ast.get_docstring(ast.parse(Path(path).read_text(encoding="utf-8"))) or ""
    return Plan(Path(path).stem, background, budget_name, sweep, budget, configs, grids, matches)


def _grid(rates) -> tuple:
    """Learning rates in any list, or a single one, as a tuple."""
    return tuple(rates) if isinstance(rates, tuple | list) else (rates,)


def _misshapen(s: Sweep):
    """What is not of its type: everything else may rely on it."""
    comparisons = isinstance(s.comparisons, tuple | list) and all(_is_pair(pair) for pair in s.comparisons)
    variants = _has_keys(s.variants) and all(_has_keys(changes) for changes in s.variants.values())
    for field, right, wanted in (
        ("question", isinstance(s.question, str), "a question"),
        ("base", isinstance(s.base, str), "the path of a config file"),
        ("values", _has_keys(s.values), "a dictionary of config keys and values"),
        ("variants", variants, "a dictionary, by name, of dictionaries of config keys and values"),
        ("baseline", isinstance(s.baseline, str), "the name of a variant"),
        ("comparisons", comparisons, "pairs (variant, against) of names"),
        (
            "budgets",
            _has_keys(s.budgets) and all(map(_is_budget, s.budgets.values())),
            "a dictionary of Budgets by name",
        ),
    ):
        if not right:
            yield f"{field}: {getattr(s, field)!r} is not {wanted}"


def _has_keys(found) -> bool:
    return isinstance(found, dict) and all(isinstance(key, str) for key in found)


def _is_pair(found) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(name, str) for name in found)


def _is_budget(found) -> bool:
    """Its learning rates are judged with all others."""
    return (
        isinstance(found, Budget) and type(found.tuning_seeds) is type(found.seeds) is int and _has_keys(found.values)
    )


def _problems(sweep: Sweep):
    """What is wrong with a sweep apart from its configs."""
    if problems := list(_misshapen(sweep)):
        yield from problems
        return
    names = list(sweep.variants)
    if len(names) < 2:
        yield f"variants: there {'is' if names else 'are'} {len(names)}, and a comparison needs at least 2"
    where = [("baseline", sweep.baseline)]
    where += [("comparisons", name) for pair in sweep.comparisons for name in pair]
    for variant, changes in sweep.variants.items():
        where += [(f"variant {variant!r}", v.variant) for v in changes.values() if isinstance(v, Match)]
        targets = [sweep.variants.get(v.variant, {}) for v in changes.values() if isinstance(v, Match)]
        if any(isinstance(value, Match) for target in targets for value in target.values()):
            yield f"variant {variant!r}: it is matched to a variant that is itself matched; match both to a third"
        if any(isinstance(v, Match) and key != "model.d_ff" for key, v in changes.items()):
            yield f"variant {variant!r}: only model.d_ff can be matched"
    for place, name in where:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            yield f"{place}: there is no variant {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if not sweep.comparisons:
        yield "comparisons: there are none; name the pairs (variant, against) whose difference is the question"
    yield from (f"comparisons: {a!r} is compared with itself" for a, b in sweep.comparisons if a == b)
    pairs = [frozenset(pair) for pair in sweep.comparisons]
    twice = (pair for i, pair in enumerate(sweep.comparisons) if pairs[i] in pairs[:i])
    yield from (f"comparisons: {a!r} and {b!r} are compared twice" for a, b in twice)
    places = {"values": sweep.values} | {f"budget {name!r}: values": b.values for name, b in sweep.budgets.items()}
    for place, values in places.items():
        if any(isinstance(v, Match) for v in values.values()) or LEARNING_RATE in values:
            yield f"{place}: learning rates and matched widths belong to learning_rates and to variants"
    places |= {f"variant {name!r}": changes for name, changes in sweep.variants.items()}
    yield from (f"{place}: train.seed is the sweep's to set" for place, v in places.items() if "train.seed" in v)
    for variant, changes in sweep.variants.items():
        measured = [key for key in changes if key.startswith("eval.")]
        yield from (f"variant {variant!r}: {key} must be alike for all, in values" for key in measured)
    yield from _wrong_grids(sweep)
    yield from _wrong_budgets(sweep.budgets)


def _wrong_grids(sweep: Sweep):
    grids = {f"budget {name!r}: learning_rates": b.learning_rates for name, b in sweep.budgets.items()}
    grids |= {f"variant {name!r}: {LEARNING_RATE}": v.get(LEARNING_RATE) for name, v in sweep.variants.items()}
    grids = {"learning_rates": sweep.learning_rates} | {k: grid for k, grid in grids.items() if grid is not None}
    for place, given in grids.items():
        grid = _grid(given)
        numbers = all(isinstance(rate, Real) and not isinstance(rate, bool) for rate in grid)
        if not (grid and numbers and list(grid) == sorted(set(grid))):
            yield f"{place}: {given} must be numbers in ascending order, at least one and none twice"


def _wrong_budgets(budgets: dict[str, Budget]):
    for name in BUDGETS:
        if name not in budgets:
            yield f"budgets: there is no {name!r}; a sweep has {' and '.join(BUDGETS)}"
    for name, budget in budgets.items():
        if name not in BUDGETS:
            yield f"budgets: unknown {name!r}; there are {' and '.join(BUDGETS)}"
        least = MIN_SEEDS if name == "full" else 2
        if budget.seeds < least:
            yield f"budget {name!r}: {budget.seeds} seeds; it needs at least {least}"
        if budget.tuning_seeds < 1:
            yield f"budget {name!r}: tuning_seeds is {budget.tuning_seeds}; it needs at least 1"
