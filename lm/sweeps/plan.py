"""Load a sweep file under a budget, and report its mistakes, as many as can be found at once.

A file in configs/sweeps/ defines `get_sweep()`, which returns a Sweep. This module does not import
jax.
"""

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import types
import typing
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

from lm.command_line.loading import load_values, locate, print_note, run_file
from lm.command_line.sweeping import BUDGETS
from lm.config import Config, flatten, to_dict
from lm.config.schema import schema
from lm.config.values import checked, close_match, short
from lm.sweeps.declare import PLACEBO, PLACEBO_KEYS, Budget, Match, Sweep, Values, in_cell
from lm.sweeps.tuning import CURVE, LEARNING_RATE
from lm.system.errors import UserError
from lm.system.files import MAX_NAME, is_name

MIN_SEEDS = 5  # of the full budget
MAX_SEEDS = 1000  # fresh ones, and for tuning
MARGINS = (0.0001, 1)  # rounding errors may exceed a smaller one, no difference a larger one
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
    cell: str  # the size, text or length; "" without them
    changes: Values  # the values that the file gives it
    lists: dict[str, tuple]  # by tuned key, the values to choose from
    # fresh ones, of the final runs; variants of a cell are paired by them, and cells are
    # independent
    seeds: range
    tuning_seeds: range  # of the tuning runs; no final run has them
    config: Config  # with the first value of each list, before its width is matched
    match: str | None  # the full name of the variant whose number of parameters is matched

    @property
    def tuned(self) -> list[tuple]:
        """Return the lists from which a value is chosen."""
        return [values for values in self.lists.values() if len(values) > 1]

    @property
    def n_points(self) -> int:
        """Return the number of points that are tuned before any extension; 0 if nothing is tuned."""
        return sum(map(len, self.tuned))


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
    # by full name, the variants to which a width is matched and which are not trained
    targets: dict[str, PlannedVariant] = dataclasses.field(default_factory=dict)
    rule: str = CURVE  # where the final runs train; an addition has that of its study
    # by cell, that of a published study, which a change that is added must not alter
    shapes: dict[str, float] = dataclasses.field(default_factory=dict)
    # Arms that are finished in all cells before the next ones begin, which needs known shapes. ():
    # all arms of a cell, then the next cell.
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def placebos(self) -> tuple[tuple[str, str], ...]:
        """Return each placebo and the variant that it is like, in each cell."""
        like = self.sweep.placebos_of(self.budget)
        return tuple(
            (name, in_cell(like[v.arm][0], v.cell))
            for name, v in self.variants.items()
            if v.arm in like
        )

    @property
    def cells(self) -> list[str]:
        """Return the names of the sweep's cells; [""] without them."""
        return list(dict.fromkeys(v.cell for v in self.variants.values()))


def draw_seeds(name: str, n: int, above: int = 0) -> range:
    """Return n seeds above a number, drawn by a name. Two names share them with probability 1e-6.

    >>> draw_seeds("norms", 3)
    range(168696000, 168696003)
    """
    digest = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    first = above + digest % (FIRST_TUNING_SEED // MAX_SEEDS) * MAX_SEEDS
    return range(first, first + n)


def load_sweep(path: str, budget_name: str) -> Plan:
    """Load a sweep file under a budget; raises UserError with all mistakes of the file."""
    return plan_sweep(path, read_sweep(path), budget_name)


def read_sweep(path: str) -> Sweep:
    """Return the Sweep of a file; raises UserError without one, or if its types are wrong."""
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
        raise UserError(f"{path}: sizes, texts and lengths: {error}") from None
    budget = sweep.budgets.get(budget_name, Budget(tuning_seeds=1, seeds=2))
    notes: list[str] = []
    variants, of_configs = _plan_variants(Path(path).stem, sweep, budget, notes)
    if problems := [
        *_wrong_names(sweep),
        *_wrong_values(sweep),
        *_wrong_lists(sweep),
        *_wrong_budgets(sweep, budget_name),
        *_wrong_lengths(sweep, budget_name, variants),
        *of_configs,
        *_wrong_matches(sweep, variants),
        *_unequal_lists(sweep, variants),
        *_unused_keys(variants),
    ]:
        raise UserError(*(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    for note in dict.fromkeys(notes):  # once for all variants
        print_note(note)
    background = ast.get_docstring(ast.parse(Path(locate(path)).read_bytes())) or ""
    pairs = tuple(
        (in_cell(a, cell), in_cell(b, cell)) for a, b in sweep.comparisons for cell in cells
    )
    return Plan(Path(path).stem, background, sweep, budget_name, budget, variants, pairs)


def _plan_variants(
    name: str, sweep: Sweep, budget: Budget, notes: list[str]
) -> tuple[dict[str, PlannedVariant], list[str]]:
    """Return every variant in every cell of the sweep of this name, and what is wrong; add notes."""
    arms = dict(sweep.variants)
    placebos = sweep.placebos_of(budget)
    for placebo, (variant, changes) in placebos.items():
        arms[placebo] = sweep.variants.get(variant, {}) | changes
    planned: dict[str, PlannedVariant] = {}
    problems: list[str] = []
    for (cell, of_cell), (arm, of_arm) in itertools.product(sweep.cells.items(), arms.items()):
        full_name = in_cell(arm, cell)
        # The values of a budget replace those of a cell, but not those of a variant.
        changes = {k: v for k, v in of_cell.items() if k not in budget.values} | of_arm
        lists = {key: as_list(key, changes.get(key, values)) for key, values in sweep.lists.items()}
        values = sweep.values | budget.values | changes
        for key in lists:
            values.pop(key, None)
        match = None
        if isinstance(values.get("model.d_ff"), Match):
            match = in_cell(values.pop("model.d_ff").of, cell)
        if "train.seed" in values:
            problems.append(f"variant {full_name!r}: train.seed is set by the sweep; remove it")
        # One config for each value of each list, so that no run fails after hours.
        first = {key: choices[0] for key, choices in lists.items() if choices}
        points = [first]
        for key, choices in lists.items():
            points += [first | {key: value} for value in choices[1:]]
        configs = []
        for point in points:
            try:
                configs.append(load_values(sweep.base, values | point, notes.append))
            except UserError as error:
                problems += [f"variant {full_name!r}: {problem}" for problem in error.problems]
        if full_name in planned:
            problems.append(
                f"{full_name!r} would be the name of two variants; rename a variant or a cell"
            )
        if not configs:
            continue
        if arm in placebos and configs[0].init_from:
            problems.append(
                "placebos: with init_from all runs start from the loaded weights, which a placebo "
                "must not change; give the budgets placebos=0, and no placebo"
            )
        seeds = draw_seeds(in_cell(name, cell), budget.seeds)
        tuning_seeds = draw_seeds(in_cell(name, cell), budget.tuning_seeds, FIRST_TUNING_SEED)
        planned[full_name] = PlannedVariant(
            arm, cell, changes, lists, seeds, tuning_seeds, configs[0], match
        )
    return planned, problems


def as_list(key: str, given: Any) -> tuple:
    """Return the values of a tuned key, given in any list or as one value, in the key's type.

    >>> as_list("optimizer.learning_rate", [1, 2e-3]), as_list("optimizer.weight_decay", 0)
    ((1.0, 0.002), (0.0,))
    """
    values = []
    for value in given if isinstance(given, tuple | list) else [given]:
        value = value.item() if hasattr(value, "item") else value  # a number of numpy
        with contextlib.suppress(KeyError, ValueError):  # the config reports a wrong value
            value = checked(value, *schema()[key])
        values.append(value)
    return tuple(values)


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
        is_dict = isinstance(value, dict)
        return is_dict and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
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
    for name in (*sweep.variants, *sweep.sizes, *sweep.texts, *sweep.lengths):
        if not is_name(name):
            yield (
                f"the name {short(name)} must be one line of printable text, of 1 to {MAX_NAME} "
                "bytes"
            )
    for name in names:
        if name.split(" ")[0] == PLACEBO:
            yield f"variants: {name!r} is a name of placebos; choose another name"
    for name in sweep.placebos:
        against = [b for _, b in sweep.comparisons]
        if name not in against or name == sweep.baseline:
            yield (
                f"placebos: {name!r} is no variant, besides the baseline, that others are "
                "compared with; those of the baseline are in a budget"
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
    where = [("baseline", sweep.baseline)]
    where += [("comparisons", name) for pair in sweep.comparisons for name in pair]
    for place, name in where:
        if name == PLACEBO:
            yield f"{place}: {PLACEBO!r} is always compared with the baseline; remove it"
        elif name not in names:
            yield f"{place}: there is no variant {name!r}" + close_match(
                name, names, "; did you mean {!r}?"
            )
    for i, (a, b) in enumerate(sweep.comparisons):
        if a == b:
            yield f"comparisons: {a!r} is compared with itself"
        if pairs[i] in pairs[:i]:
            yield f"comparisons: {a!r} and {b!r} are compared twice"


def _wrong_values(sweep: Sweep) -> Iterator[str]:
    """Yield the keys that are set where they are not allowed, and a margin out of range."""
    low, high = MARGINS
    if sweep.lengths and (sweep.sizes or sweep.texts):
        yield "lengths: a sweep with lengths has no sizes or texts; write a file for each of those"
    if len(sweep.lengths) == 1:
        yield "lengths: there is one; give two or more, from short to long, or set it in values"
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
    """Yield keys that cannot be tuned, and lists that are empty, unordered or have duplicates."""
    if LEARNING_RATE not in sweep.lists:
        yield "learning_rates is missing: give a tuple of numbers, in ascending order"
    if sweep.learning_rates is not None and LEARNING_RATE in sweep.tune:
        yield f"learning_rates and tune both have {LEARNING_RATE}; remove one of them"
    for key in sweep.tune:
        if not key.startswith("optimizer."):
            yield f"tune: {key}: only keys of the optimizer are tuned; declare variants instead"
    places = {"": sweep.lists}
    declared = {
        "size": sweep.sizes,
        "text": sweep.texts,
        "length": sweep.lengths,
        "variant": sweep.variants,
    }
    for kind, tables in declared.items():
        places |= {f"{kind} {name!r}: ": values for name, values in tables.items()}
    for place, table in places.items():
        for key in sweep.lists.keys() & table.keys():
            values = as_list(key, table[key])
            is_unique = len(set(map(repr, values))) == len(values)
            are_numbers = all(_fits(value, float) for value in values)
            is_sorted = not are_numbers or list(values) == sorted(values)
            if not (values and is_unique and is_sorted):
                yield (
                    f"{place}{key}: {short(table[key])} must be values in ascending order, at "
                    "least one, without duplicates"
                )


def _wrong_lengths(
    sweep: Sweep, budget_name: str, variants: dict[str, PlannedVariant]
) -> Iterator[str]:
    """Yield lengths that do not grow, or that the budget replaces."""
    budget = sweep.budgets.get(budget_name)
    of_lengths = {key for values in sweep.lengths.values() for key in values}
    if budget and (replaced := sorted(of_lengths & budget.values.keys())):
        yield (
            f"budget {budget_name!r}: it sets {', '.join(replaced)}, which the lengths set; leave "
            "that to them, or declare the budget without it"
        )
        return
    n_tokens = {}
    for length in sweep.lengths:
        if planned := variants.get(in_cell(sweep.baseline, length)):
            t = planned.config.train
            n_tokens[length] = t.steps * t.batch_size * t.seq_len
    for shorter, longer in itertools.pairwise(n_tokens):
        if n_tokens[longer] <= n_tokens[shorter]:
            yield (
                f"lengths: {longer!r} is not longer than {shorter!r}; list them from short to long, "
                "with train.steps"
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


def _unequal_lists(sweep: Sweep, variants: dict[str, PlannedVariant]) -> Iterator[str]:
    """Yield pairs tuned over different numbers of points."""
    for (a, b), cell in itertools.product(sweep.comparisons, sweep.cells):
        one = variants.get(in_cell(a, cell))
        two = variants.get(in_cell(b, cell))
        if one and two and one.n_points != two.n_points:
            yield (
                f"comparisons: {in_cell(a, cell)!r} is tuned over {one.n_points} points and "
                f"{in_cell(b, cell)!r} over {two.n_points}; give both the same number"
            )


def _unused_keys(variants: dict[str, PlannedVariant]) -> Iterator[str]:
    """Yield the keys that the base, the values or a variant set although a sweep does not use them."""
    for planned in variants.values():
        config = flatten(to_dict(planned.config))
        for key in UNUSED:
            default = schema()[key][1].default
            if config[key] != default:
                yield (
                    f"{key} is {config[key]}, and a sweep does not use it; set it to {default!r} "
                    "in values"
                )


def _wrong_budgets(sweep: Sweep, wanted: str) -> Iterator[str]:
    for name, budget in sweep.budgets.items():
        if name not in BUDGETS:
            yield f"budgets: unknown {name!r}; a sweep may have {' and '.join(map(repr, BUDGETS))}"
        lowest = {"seeds": MIN_SEEDS if name == "full" else 2, "tuning_seeds": 1, "placebos": 0}
        for field, low in lowest.items():
            if not low <= getattr(budget, field) <= MAX_SEEDS:
                value = short(getattr(budget, field))
                yield (
                    f"budget {name!r}: {field} is {value}; it must be at least {low} and at most "
                    f"{MAX_SEEDS}"
                )
    if wanted not in sweep.budgets:
        others = [f", or run it with --budget {name}" for name in BUDGETS if name in sweep.budgets]
        yield f"budgets: there is no {wanted!r}; add it{''.join(others)}"
