"""Load a sweep file under a budget, and report its mistakes, as many as can be found at once.

A file in configs/sweeps/ defines `get_sweep()`, which returns a Sweep. This module does not import
jax.
"""

import ast
import dataclasses
import hashlib
import inspect
import itertools
import math
import types
import typing
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

from lm.command_line.loading import load_values, print_note, run_file
from lm.command_line.sweeping import BUDGETS
from lm.config import Config, flatten, to_dict
from lm.config.schema import schema
from lm.config.values import checked, close_match, short
from lm.sweeps.declare import PLACEBO, PLACEBO_KEYS, Budget, Match, Sweep, Values, in_cell
from lm.sweeps.tuning import LEARNING_RATE
from lm.system.errors import UserError
from lm.system.files import MAX_NAME, expanded, is_name

MIN_SEEDS = 5  # of the full budget
MAX_SEEDS = 1000  # fresh ones, and for tuning
# rounding errors may exceed a smaller margin, and no difference exceeds a larger one
MARGINS = (
    0.0001,
    1,
)
FIRST_TUNING_SEED = 10**9  # final runs use smaller seeds
# Keys of lm.train that runs of a sweep ignore (lm/sweeps/stacked.py).
UNUSED = (
    "eval.patience", "eval.harness_every", "eval.harness_tasks", "log.detail_every", "log.wandb",
    "train.on_nonfinite", "train.profile", "train.debug",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlannedVariant:
    """A variant at a size or on a text, before its data is opened."""

    arm: str  # its name in the file
    cell: str  # the size or text; "" without them
    changes: Values  # the values that the file gives it
    lists: dict[str, tuple]  # by tuned key, the values to choose from
    # fresh ones, of the final runs; variants of a cell are paired by them, and cells are
    # independent
    seeds: range
    tuning_seeds: range  # of the tuning runs; no final run has them
    config: Config  # with the first value of each list, before its width is matched
    match: str | None  # the full name of the variant whose number of parameters is matched

    @property
    def n_points(self) -> int:
        """Return the number of points that are tuned before any extension; 0 if nothing is tuned."""
        n = math.prod(map(len, self.lists.values()))
        return n if n > 1 else 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep under one budget."""

    name: str  # the file's, without ".py"
    background: str  # the file's docstring
    sweep: Sweep  # what the file returned
    budget_name: str
    budget: Budget
    # by full name, every variant in every cell, and the placebo
    variants: dict[str, PlannedVariant]
    # pairs of full names; each pair in all cells before the next pair
    comparisons: tuple[tuple[str, str], ...]

    @property
    def placebos(self) -> tuple[tuple[str, str], ...]:
        """Return the placebo and the baseline of each cell."""
        baseline = self.sweep.baseline
        return tuple(
            (n, in_cell(baseline, v.cell)) for n, v in self.variants.items() if v.arm == PLACEBO
        )

    @property
    def cells(self) -> list[str]:
        """Return the sizes or texts, or both; [""] without them."""
        return list(dict.fromkeys(v.cell for v in self.variants.values()))


def draw_seeds(name: str, n: int, above: int = 0) -> range:
    """Return n seeds above a number that follow from a name. Two names share them with probability
    1e-6.

    >>> draw_seeds("norms", 3)
    range(168696000, 168696003)
    """
    first = (
        int(hashlib.sha256(name.encode()).hexdigest(), 16)
        % (FIRST_TUNING_SEED // MAX_SEEDS)
        * MAX_SEEDS
    )
    return range(above + first, above + first + n)


def load_sweep(path: str, budget_name: str) -> Plan:
    """Load a sweep file under a budget, "quick" or "full"; raises UserError with all mistakes of
    the file.
    """
    return plan_sweep(path, read_sweep(path), budget_name)


def read_sweep(path: str) -> Sweep:
    """Return the Sweep of a file; raises UserError if it has none, or one with values of wrong
    types.
    """
    sweep = run_file(path, "get_sweep", "configs/sweeps")
    if not isinstance(sweep, Sweep):
        raise UserError(
            f"{path}: get_sweep() returned {type(sweep).__name__}; it must return a Sweep"
        )
    if problems := list(_wrong_types(sweep)):  # everything else relies on the types of the fields
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    return sweep


def plan_sweep(path: str, sweep: Sweep, budget_name: str) -> Plan:
    """Plan a sweep of a file under a budget; raises UserError with all mistakes."""
    try:
        cells = sweep.cells
    except ValueError as error:
        raise UserError(f"{path}: sizes and texts: {error}") from None
    budget = sweep.budgets.get(budget_name, Budget(tuning_seeds=1, seeds=2))
    problems = [
        *_wrong_names(sweep),
        *_wrong_values(sweep),
        *_wrong_lists(sweep),
        *_wrong_budgets(sweep, budget_name),
    ]
    notes: list[str] = []
    variants, of_configs = _plan_variants(Path(path).stem, sweep, budget, notes)
    problems += [
        *of_configs,
        *_wrong_matches(sweep, variants),
        *_unequal_lists(sweep, budget, variants),
    ]
    problems += _unused_keys(variants)
    if problems:
        raise UserError(*(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    for note in dict.fromkeys(notes):  # once for all variants
        print_note(note)
    background = ast.get_docstring(ast.parse(Path(expanded(path)).read_bytes())) or ""
    pairs = tuple(
        (in_cell(a, cell), in_cell(b, cell)) for a, b in sweep.comparisons for cell in cells
    )
    return Plan(Path(path).stem, background, sweep, budget_name, budget, variants, pairs)


def _plan_variants(
    name: str, sweep: Sweep, budget: Budget, notes: list[str]
) -> tuple[dict[str, PlannedVariant], list[str]]:
    """Return every variant in every cell of the sweep of this name, and the mistakes in the
    configs; add notes.
    """
    placebo = sweep.variants.get(sweep.baseline, {}) | sweep.placebo
    arms = sweep.variants | ({PLACEBO: placebo} if sweep.placebo else {})
    planned: dict[str, PlannedVariant] = {}
    problems: list[str] = []
    for (cell, of_cell), (arm, of_arm) in itertools.product(sweep.cells.items(), arms.items()):
        full_name = in_cell(arm, cell)
        changes = {
            key: value for key, value in of_cell.items() if key not in budget.values
        } | of_arm
        lists = {key: as_list(key, changes.get(key, values)) for key, values in sweep.lists.items()}
        values = {
            k: v for k, v in (sweep.values | budget.values | changes).items() if k not in lists
        }
        is_matched = isinstance(values.get("model.d_ff"), Match)
        match = in_cell(values.pop("model.d_ff").of, cell) if is_matched else None
        if "train.seed" in values:
            problems.append(f"variant {full_name!r}: train.seed is set by the sweep; remove it")
        first = {key: found[0] for key, found in lists.items() if found}
        points = [
            first,
            *({**first, key: value} for key, found in lists.items() for value in found[1:]),
        ]
        configs = []
        for point in points:
            try:
                configs.append(load_values(sweep.base, values | point, notes.append))
            except UserError as error:
                problems += [f"variant {full_name!r}: {problem}" for problem in error.problems]
        seeds = draw_seeds(in_cell(name, cell), budget.seeds)
        tuning_seeds = draw_seeds(in_cell(name, cell), budget.tuning_seeds, FIRST_TUNING_SEED)
        if full_name in planned:
            problems.append(
                f"{full_name!r} would be the name of two variants; rename a variant, size or text"
            )
        if configs and arm == PLACEBO and configs[0].init_from:
            problems.append(
                "placebo: it may change the loss of weights that init_from loads; remove one of "
                "them"
            )
        if configs:
            planned[full_name] = PlannedVariant(
                arm, cell, changes, lists, seeds, tuning_seeds, configs[0], match
            )
    return planned, problems


def as_list(key: str, given: Any) -> tuple:
    """Return the values of a tuned key, given in any list or as one value, as a tuple; numbers
    become Python's.

    >>> as_list("optimizer.learning_rate", [1, 2e-3]), as_list("optimizer.weight_decay", 0)
    ((1.0, 0.002), (0.0,))
    """
    values = tuple(given) if isinstance(given, tuple | list) else (given,)
    return tuple(
        _as_kind(key, value.item() if hasattr(value, "item") else value) for value in values
    )


def _as_kind(key: str, value: Any) -> Any:
    """Return a value as the type of its key; a wrong one as it is, because the config reports it."""
    try:
        return checked(value, *schema()[key])
    except (KeyError, ValueError):
        return value


def _wrong_types(declared: Sweep | Budget, place: str = "") -> Iterator[str]:
    """Yield the fields of another type than their annotation."""
    for name, hint in typing.get_type_hints(type(declared)).items():
        if not _fits(value := getattr(declared, name), hint):
            yield f"{place}{name}: {short(value)} must be {inspect.formatannotation(hint)}"
        elif name == "budgets":
            for budget_name, budget in value.items():
                yield from _wrong_types(budget, f"budget {budget_name!r}: ")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type; a list may stand for a tuple."""
    kind = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if kind is Any:
        return True
    if kind is types.UnionType:
        return any(_fits(value, argument) for argument in arguments)
    if kind is dict:
        key, item = arguments
        return isinstance(value, dict) and all(
            _fits(k, key) and _fits(v, item) for k, v in value.items()
        )
    if kind is tuple:
        if not isinstance(value, tuple | list):
            return False
        each = arguments if ... not in arguments else arguments[:1] * len(value)
        return not arguments or (len(value) == len(each) and all(map(_fits, value, each)))
    return isinstance(value, Real if kind is float else kind) and not isinstance(value, bool)


def _wrong_names(sweep: Sweep) -> Iterator[str]:
    """Yield the names of variants that do not exist, and the mistakes in the comparisons."""
    names = list(sweep.variants)
    pairs = [frozenset(pair) for pair in sweep.comparisons]
    for name in (*sweep.variants, *sweep.sizes, *sweep.texts):
        if not is_name(name):
            yield (
                f"the name {short(name)} must be one line of printable text, of 1 to {MAX_NAME} "
                "bytes"
            )
    if PLACEBO in names:
        yield (
            f"variants: {PLACEBO!r} is the name of the variant that placebo describes; choose "
            "another name"
        )
    if not pairs and len(sweep.cells) == 1:
        yield (
            "comparisons: there are none; name the pairs (variant, against) whose difference is "
            "the question"
        )
    for key in sweep.placebo.keys() - PLACEBO_KEYS:
        yield (
            f"placebo: {key} may change the loss; only {' and '.join(PLACEBO_KEYS)} are known "
            "not to"
        )
    if sweep.placebo and not pairs:
        yield "placebo: it checks comparisons, and this sweep has none; remove it"
    where = [
        ("baseline", sweep.baseline),
        *(("comparisons", name) for pair in sweep.comparisons for name in pair),
    ]
    for place, name in where:
        if name == PLACEBO:
            yield f"{place}: {PLACEBO!r} is always compared with the baseline; remove it"
        elif name not in names:
            yield f"{place}: there is no variant {name!r}" + close_match(
                name, names, "; did you mean {!r}?"
            )
    yield from (
        f"comparisons: {a!r} is compared with itself" for a, b in sweep.comparisons if a == b
    )
    for i, (a, b) in enumerate(sweep.comparisons):
        if pairs[i] in pairs[:i]:
            yield f"comparisons: {a!r} and {b!r} are compared twice"


def _wrong_values(sweep: Sweep) -> Iterator[str]:
    """Yield the config keys that are set in a place where they are not allowed, and a margin out of
    range.
    """
    low, high = MARGINS
    if not low <= sweep.margin <= high:
        yield f"margin: {short(sweep.margin)} must be between {low:g} and {high:g} nats per token"
    shared = {"values": sweep.values, "placebo": sweep.placebo}
    shared |= {f"budget {name!r}: values": budget.values for name, budget in sweep.budgets.items()}
    for place, values in shared.items():
        for key in {LEARNING_RATE, *sweep.tune} & values.keys():
            yield f"{place}: {key} is tuned; set it in learning_rates or tune, or in a variant"
    for variant, changes in sweep.variants.items():
        for key in changes:
            if key.startswith("eval."):
                yield (
                    f"variant {variant!r}: {key} must be the same for all variants; set it in "
                    "values"
                )


def _wrong_lists(sweep: Sweep) -> Iterator[str]:
    """Yield the tuned keys that cannot be tuned, and the lists that are empty, unordered or have
    duplicates.
    """
    if LEARNING_RATE not in sweep.lists:
        yield "learning_rates is missing: give a tuple of numbers, in ascending order"
    if sweep.learning_rates is not None and LEARNING_RATE in sweep.tune:
        yield f"learning_rates and tune both have {LEARNING_RATE}; remove one of them"
    for key in sweep.tune:
        if not key.startswith("optimizer."):
            yield f"tune: {key}: only keys of the optimizer are tuned; declare variants instead"
    given = {("", key): values for key, values in sweep.lists.items()}
    for kind, tables in (("size", sweep.sizes), ("text", sweep.texts), ("variant", sweep.variants)):
        given |= {
            (f"{kind} {n!r}: ", key): v[key]
            for n, v in tables.items()
            for key in sweep.lists.keys() & v.keys()
        }
    for (place, key), found in given.items():
        values = as_list(key, found)
        numbers = all(_fits(value, float) for value in values)
        if (
            not values
            or len(set(map(repr, values))) < len(values)
            or (numbers and list(values) != sorted(values))
        ):
            yield (
                f"{place}{key}: {short(found)} must be values in ascending order, at least one, "
                "without duplicates"
            )


def _wrong_matches(sweep: Sweep, variants: dict[str, PlannedVariant]) -> Iterator[str]:
    """Yield the widths that cannot be computed from another variant."""
    names = [in_cell(arm, cell) for arm in sweep.variants for cell in sweep.cells]
    for name, planned in variants.items():
        target = variants.get(planned.match or "")
        if planned.match and planned.match not in names:
            yield f"variant {name!r}: there is no variant {planned.match!r}" + close_match(
                planned.match, names
            )
        elif target and target.match:
            yield (
                f"variant {name!r}: it is matched to a variant that is itself matched; match "
                "both to a third"
            )


def _unequal_lists(
    sweep: Sweep, budget: Budget, variants: dict[str, PlannedVariant]
) -> Iterator[str]:
    """Yield the pairs that are tuned over different numbers of points, and a budget with too few
    tuning seeds.
    """
    for (a, b), cell in itertools.product(sweep.comparisons, sweep.cells):
        both = [
            variants[name].n_points for arm in (a, b) if (name := in_cell(arm, cell)) in variants
        ]
        if len(both) == 2 and both[0] != both[1]:
            yield (
                f"comparisons: {in_cell(a, cell)!r} is tuned over {both[0]} points and "
                f"{in_cell(b, cell)!r} over {both[1]}; give both the same number"
            )
    if any(v.n_points for v in variants.values()) and budget.seeds > 10 and budget.tuning_seeds < 3:
        yield (
            f"budget: {budget.seeds} seeds need 3 tuning seeds, or the error of the tuned values "
            "shows in the difference; set tuning_seeds=3, or seeds=10"
        )


def _unused_keys(variants: dict[str, PlannedVariant]) -> Iterator[str]:
    """Yield the keys that the base, the values or a variant set although a sweep does not use them."""
    for planned in variants.values():
        for key, value in flatten(to_dict(planned.config)).items():
            if key in UNUSED and value != (default := schema()[key][1].default):
                yield (
                    f"{key} is {value}, and a sweep does not use it; set it to {default!r} in "
                    "values"
                )


def _wrong_budgets(sweep: Sweep, wanted: str) -> Iterator[str]:
    for name, budget in sweep.budgets.items():
        if name not in BUDGETS:
            yield f"budgets: unknown {name!r}; a sweep may have {' and '.join(map(repr, BUDGETS))}"
        for field, low in (("seeds", MIN_SEEDS if name == "full" else 2), ("tuning_seeds", 1)):
            if not low <= getattr(budget, field) <= MAX_SEEDS:
                value = short(getattr(budget, field))
                yield (
                    f"budget {name!r}: {field} is {value}; it must be at least {low} and at most "
                    f"{MAX_SEEDS}"
                )
    if wanted not in sweep.budgets:
        has = [name for name in BUDGETS if name in sweep.budgets]
        other = f", or run it with --budget {has[0]}" if has else ""
        yield f"budgets: there is no {wanted!r}; add it{other}"
