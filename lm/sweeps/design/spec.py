"""Sweep files: the question, the base config, the variants, the comparisons and the budgets.

A file in configs/sweeps/ defines `get_sweep()`, which returns a Sweep. This module does not import jax.
"""

import ast
import dataclasses
import difflib
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path

from lm.command_line.loading import load_values, run_file
from lm.command_line.sweeping import BUDGETS
from lm.config import Config
from lm.config.values import is_text, short
from lm.errors import UserError
from lm.sweeps.design import search
from lm.sweeps.design.axes import LEARNING_RATE, MATCHED_KEYS, Match, Values, Variants, at_size, axis_of, size_of
from lm.sweeps.design.placebo import PLACEBO, expanded, wrong_placebo
from lm.sweeps.design.search import Search
from lm.sweeps.design.seeds import (
    Seeds,
    by_size,
    fresh_seeds,
    tuning_seeds,
    wrong_numbers,
    wrong_types,
)
from lm.sweeps.design.text_axis import wrong_texts

WIDTHS = ("params", "flops")  # the ways to match a width
MIN_SEEDS = 5  # of the full budget
MIN_SIZES = 3  # else the slope of the loss over the compute is a guess
MIN_SIZES_OF_FIT = 4  # one more than the number of coefficients of a power law
MARGIN = 0.005  # nats per token
MARGINS = (0.0001, 1)  # rounding errors may exceed a smaller margin, and no difference exceeds a larger one


@dataclasses.dataclass(frozen=True)
class Budget:
    """The size of a sweep: seeds, learning rates, and config values such as the number of steps.

    Attributes:
        tuning_seeds: seeds per learning rate for choosing the rate.
        seeds: fresh seeds for the result.
        looks: instead of `seeds`, numbers of fresh seeds in ascending order. All variants train with the first number.
            Variants of comparisons that are then undecided train with the next number, and so on.
        values: config values for all runs of this budget (`train.steps`, for example).
        learning_rates: the grid of this budget, if not the sweep's.
        trials: the number of random trials of this budget, if not the search's.
    """

    tuning_seeds: int = None  # None: missing, which `load_sweep` reports together with all other mistakes
    seeds: int = None
    values: Values = dataclasses.field(default_factory=dict)
    learning_rates: tuple[float, ...] | None = None
    looks: tuple[int, ...] | None = None
    trials: int | None = None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One ablation. All fields but `values`, `sizes`, `texts`, `margin`, `placebo` and `search` are required.

    Attributes:
        question: what the sweep should answer, in one sentence.
        base: the path of the config file that all variants start from.
        variants: by name, the config values that each variant changes. The value of `optimizer.learning_rate` may be a
            grid of the variant's own, and that of `model.d_ff` may be `match_params` or `match_flops`.
        baseline: the variant that the placebo changes, that is also timed one run at a time, and whose parameters
            `match_tokens` counts.
        comparisons: pairs (variant, against). p-values are corrected for their number. May be empty if there are sizes:
            the report then fits how the loss of each variant falls with the size.
        learning_rates: the grid from which each variant takes its best learning rate, in ascending order.
        budgets: "quick", "full" or both.
        values: config values for all variants. `train.steps` may be `match_tokens`, here and in a budget.
        sizes: by name, from small to large, the config values of each size. Every variant is trained at every size, and
            the comparisons report how much compute a variant saves. `optimizer.learning_rate` may be a grid of the
            size's own, or `match_rate`.
        texts: by name, the config values of each text: {"data.source": "python_docs"}, for example. Every variant is
            tuned, trained and compared on every text, and the report tests whether the differences depend on the text.
        margin: the smallest difference in loss that matters, in nats per token.
        placebo: config values that change the baseline's program but not the distribution of its results, such as
            {"model.rope_pairing": "adjacent"}. A variant with them is compared with the baseline as a check; with sizes
            or texts, at the first one only (see placebo.py).
        search: instead of `learning_rates`, a random search over several hyperparameters.
    """

    question: str = None
    base: str = None
    variants: Variants = None
    baseline: str = None
    comparisons: tuple[tuple[str, str], ...] = None
    learning_rates: tuple[float, ...] = None
    budgets: dict[str, Budget] = None
    values: Values = dataclasses.field(default_factory=dict)
    sizes: Variants = dataclasses.field(default_factory=dict)
    texts: Variants = dataclasses.field(default_factory=dict)
    margin: float = MARGIN
    placebo: Values = dataclasses.field(default_factory=dict)
    search: Search | None = None


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep under one budget.

    Attributes:
        name: the file's name without ".py".
        background: the file's docstring.
        budget_name, budget: the chosen budget.
        sweep: what the file returned, with the placebo as one more variant. With sizes, it has each variant at each
            size (the placebo at one), the baseline at the last size, and each pair of the comparisons at all sizes
            before the next pair. Likewise with texts.
        configs: by variant, its config at the first learning rate of its grid, or without the values of a trial.
            Matched values are the base's.
        grids: by variant, its learning rates, in ascending order or in the order of the trials.
        matches: by variant, the widths that are still to be computed.
        lengths: by variant, the steps that are still to be computed.
        rates_from: by variant without tuning runs, the variant whose best learning rate it uses, scaled.
        trials: the values of every random trial; empty if only the learning rate is tuned, or nothing.
        recorded: the seeds and tuning seeds of an existing directory, instead of those that follow from the name.
    """

    name: str
    background: str
    budget_name: str
    sweep: Sweep
    budget: Budget
    configs: dict[str, Config]
    grids: dict[str, tuple[float, ...]]
    matches: dict[str, Match]
    lengths: dict[str, Match] = dataclasses.field(default_factory=dict)
    rates_from: dict[str, str] = dataclasses.field(default_factory=dict)
    trials: tuple[Values, ...] = ()
    recorded: tuple[Seeds, Seeds] | None = None

    @property
    def looks(self) -> tuple[int, ...]:
        """Return the numbers of fresh seeds after which the comparisons are tested; one in a fixed design."""
        return tuple(self.budget.looks or (self.budget.seeds,))

    @property
    def seeds(self) -> Seeds:
        return self.recorded[0] if self.recorded else self._draw(fresh_seeds, self.looks[-1])

    @property
    def tuning_seeds(self) -> Seeds:
        return self.recorded[1] if self.recorded else self._draw(tuning_seeds, self.budget.tuning_seeds)

    def _draw(self, draw: Callable[[str, int], tuple[int, ...]], n: int) -> Seeds:
        return by_size(draw, self.name, self.sweep.sizes, n)


def load_sweep(path: str, budget_name: str) -> SweepPlan:
    """Load a sweep file under a budget, "quick" or "full".

    Raises:
        UserError: the file has mistakes; the error lists as many as can be found at once.
    """
    sweep = run_file(path, "get_sweep", "configs/sweeps")
    if not isinstance(sweep, Sweep):
        raise UserError(f"{path}: get_sweep() returned {type(sweep).__name__}; it must return a Sweep")
    if problems := list(_wrong_fields(sweep)):  # everything below relies on the types of the fields
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    if problems := [*_wrong_sizes(sweep), *wrong_texts(sweep)]:
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    problems = dict.fromkeys(wrong_placebo(sweep))
    if sweep.placebo:
        of_baseline = sweep.variants.get(sweep.baseline, {})
        sweep = dataclasses.replace(sweep, variants=sweep.variants | {PLACEBO: of_baseline | sweep.placebo})
    problems |= dict.fromkeys(_problems(sweep, budget_name))
    grids_are_right = not any(_wrong_grids(sweep)) and not any(search.wrong_search(sweep))
    budget = sweep.budgets.get(budget_name, Budget())
    trials = ()
    if sweep.search and grids_are_right:
        trials = search.draw_trials(Path(path).stem, sweep.search, budget.trials)
    sizes = axis_of(sweep)
    baselines = {at_size(name, size): at_size(sweep.baseline, size) for size in sizes for name in sweep.variants}
    sweep = dataclasses.replace(
        sweep,
        variants=expanded(sweep),
        baseline=at_size(sweep.baseline, list(sizes)[-1]),
        comparisons=tuple((at_size(a, size), at_size(b, size)) for a, b in sweep.comparisons for size in sizes),
    )
    configs, grids, matches, lengths, rates_from = {}, {}, {}, {}, {}
    for name, changes in sweep.variants.items():
        values = sweep.values | budget.values | changes
        grids[name] = tuple(trial[LEARNING_RATE] for trial in trials) or _grid_of(sweep, budget, name)
        if isinstance(own := values.pop(LEARNING_RATE, None), Match):
            rates_from[name] = own.of
        if isinstance(values.get("model.d_ff"), Match):
            matches[name] = values["model.d_ff"]
        if isinstance(values.get("train.steps"), Match):
            lengths[name] = dataclasses.replace(values["train.steps"], of=baselines[name])
        values = {key: value for key, value in values.items() if not isinstance(value, Match)}
        points = [{LEARNING_RATE: rate} for rate in reversed(grids[name])] if grids_are_right else [{}]
        for point in [*trials, {}] if trials else points:
            try:
                configs[name] = load_values(sweep.base, values | point)
            except UserError as error:
                problems |= {f"variant {name!r}: {problem}": None for problem in error.problems}
                if trials:
                    break  # other trials would repeat the problem with other numbers
        if name in configs:
            train = configs[name].train
            wrong = search.wrong_trials(trials, train.steps, train.batch_size)
            problems |= {f"variant {name!r}: {problem}": None for problem in wrong}
    for a, b in sweep.comparisons:
        if {a, b} <= grids.keys() and len(grids[a]) != len(grids[b]):
            problems[
                f"comparisons: {a!r} has {len(grids[a])} learning rates to choose from and {b!r} has {len(grids[b])}; "
                "give both the same number"
            ] = None
    if problems:
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    background = ast.get_docstring(ast.parse(Path(path).read_bytes())) or ""
    for text in (sweep.question, background, *sweep.variants):
        if not is_text(text):
            raise UserError(f"{path}: {short(text)} has a character that UTF-8 cannot encode; remove it")
    return SweepPlan(
        Path(path).stem, background, budget_name, sweep, budget, configs, grids, matches, lengths, rates_from, trials
    )


def _grid_of(sweep: Sweep, budget: Budget, name: str) -> tuple:
    """Return the learning rates of a variant: its own, those of its size, the budget's or the sweep's."""
    own = sweep.variants[name].get(LEARNING_RATE)
    if isinstance(own, Match):
        return tuple(rate * own.ratio if _is_number(rate) else rate for rate in _grid_of(sweep, budget, own.of))
    of_budget = sweep.learning_rates if budget.learning_rates is None else budget.learning_rates
    return _grid(of_budget if own is None else own)


def _grid(rates) -> tuple:
    """Return learning rates in any list, or a single one, as a tuple; NumPy's numbers become Python's."""
    rates = tuple(rates) if isinstance(rates, tuple | list) else (rates,)
    return tuple(float(rate) if _is_number(rate) and abs(rate) <= sys.float_info.max else rate for rate in rates)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong_fields(s: Sweep):
    """Yield the fields that are missing or of another type."""
    comparisons = isinstance(s.comparisons, tuple | list) and all(_is_pair(pair) for pair in s.comparisons)
    axes = s.variants, s.sizes, s.texts
    variants, sizes, texts = (_has_keys(v) and all(map(_has_keys, v.values())) for v in axes)
    budgets = _has_keys(s.budgets) and all(isinstance(budget, Budget) for budget in s.budgets.values())
    for field, right, wanted in (
        ("question", isinstance(s.question, str), "a question"),
        ("base", isinstance(s.base, str), "the path of a config file"),
        ("values", _has_keys(s.values), "a dictionary of config keys and values"),
        ("sizes", sizes, "a dictionary, by name, of dictionaries of config keys and values"),
        ("texts", texts, "a dictionary, by name, of dictionaries of config keys and values"),
        ("placebo", _has_keys(s.placebo), "a dictionary of config keys and values"),
        ("variants", variants, "a dictionary, by name, of dictionaries of config keys and values"),
        ("baseline", isinstance(s.baseline, str), "the name of a variant"),
        ("comparisons", comparisons, "pairs (variant, against) of names"),
        *([] if s.search else [("learning_rates", s.learning_rates is not None, "a tuple of numbers")]),
        ("budgets", budgets, "a dictionary of Budgets by name"),
        ("margin", _is_number(s.margin), "a number, in nats per token"),
    ):
        if getattr(s, field) is None:
            yield f"{field} is missing: it must be {wanted}"
        elif not right:
            yield f"{field}: {short(getattr(s, field))} must be {wanted}"
    yield from search.wrong_types(s.search)
    for name, budget in s.budgets.items() if budgets else ():
        yield from (f"budget {name!r}: {problem}" for problem in wrong_types(budget))
        if not _has_keys(budget.values):
            yield f"budget {name!r}: values: {budget.values!r} must be a dictionary of config keys and values"


def _has_keys(found) -> bool:
    return isinstance(found, dict) and all(isinstance(key, str) for key in found)


def _is_pair(found) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(name, str) for name in found)


def _problems(sweep: Sweep, budget_name: str):
    """Yield the mistakes in a sweep whose fields have the right types, except for those in its configs."""
    yield from _wrong_names(sweep)
    yield from _wrong_comparisons(sweep)
    yield from _wrong_values(sweep)
    yield from _wrong_grids(sweep)
    yield from search.wrong_search(sweep)
    yield from _wrong_budgets(sweep.budgets, budget_name)
    low, high = MARGINS
    if not low <= sweep.margin <= high:
        yield f"margin: {short(sweep.margin)} must be between {low:g} and {high:g} nats per token"


def _wrong_names(sweep: Sweep):
    names = list(sweep.variants)
    if len(names) < (2 if sweep.comparisons or not sweep.sizes else 1):
        yield f"variants: there {'is' if names else 'are'} {len(names)}, and a comparison needs at least 2"
    where = [("baseline", sweep.baseline)]
    where += [("comparisons", name) for pair in sweep.comparisons for name in pair]
    for variant, changes in sweep.variants.items():
        where += [(f"variant {variant!r}", v.of) for v in changes.values() if isinstance(v, Match) and v.what in WIDTHS]
    for place, name in where:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            yield f"{place}: there is no variant {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _wrong_comparisons(sweep: Sweep):
    if not sweep.comparisons and not sweep.sizes:
        yield "comparisons: there are none; name the pairs (variant, against) whose difference is the question"
    yield from (f"comparisons: {a!r} is compared with itself" for a, b in sweep.comparisons if a == b)
    pairs = [frozenset(pair) for pair in sweep.comparisons]
    twice = (pair for i, pair in enumerate(sweep.comparisons) if pairs[i] in pairs[:i])
    yield from (f"comparisons: {a!r} and {b!r} are compared twice" for a, b in twice)


def _wrong_sizes(sweep: Sweep):
    """Yield the mistakes in the sizes. They are reported first, because the names of the variants depend on them."""
    if 0 < len(sweep.sizes) < MIN_SIZES:
        yield f"sizes: there are {len(sweep.sizes)}, and a trend needs at least {MIN_SIZES}"
    elif sweep.sizes and not sweep.comparisons and len(sweep.sizes) < MIN_SIZES_OF_FIT:
        yield (
            f"sizes: there are {len(sweep.sizes)}; without comparisons a sweep fits loss = E + A N^-a, whose 3 "
            f"coefficients need at least {MIN_SIZES_OF_FIT} sizes"
        )
    if "" in sweep.sizes:
        yield "sizes: a size must have a name"
    for size in sweep.sizes:
        if (other := size_of(size, sweep.sizes)) and size:
            yield f"sizes: {size!r} ends with {at_size('', other)!r}, so names would be ambiguous; rename it"
    for name, budget in sweep.budgets.items() if sweep.sizes else ():
        if budget.looks is not None:
            yield f"budget {name!r}: looks: a sweep with sizes needs a fixed number of seeds; give seeds instead"
    rates = {name: values.get(LEARNING_RATE) for name, values in sweep.sizes.items()}
    for name, rate in rates.items():
        if isinstance(rate, Match) and isinstance(rates.get(rate.of, rate), Match):
            yield f"size {name!r}: {LEARNING_RATE}: {rate.of!r} is not the name of another size with tuning runs"
    for name, changes in sweep.variants.items():
        if isinstance(changes.get(LEARNING_RATE), Match):
            yield f"variant {name!r}: {LEARNING_RATE}: match_rate belongs in sizes"


def _wrong_values(sweep: Sweep):
    """Yield the config keys that are set in a place where they are not allowed."""
    places = {"values": sweep.values} | {f"budget {name!r}: values": b.values for name, b in sweep.budgets.items()}
    for place, values in places.items():
        if any(isinstance(v, Match) and v.what != "tokens" for v in values.values()) or LEARNING_RATE in values:
            yield f"{place}: set learning rates in learning_rates or variants, and matched widths in variants"
    sizes = {f"size {name!r}": values for name, values in sweep.sizes.items()}
    texts = {f"text {name!r}": values for name, values in sweep.texts.items()}
    variants = {f"variant {name!r}": changes for name, changes in sweep.variants.items()}
    for place, values in (places | sizes | texts | variants).items():
        if "train.seed" in values:
            yield f"{place}: train.seed is set by the sweep; remove it"
        for key, value in values.items():
            if isinstance(value, Match) and key != MATCHED_KEYS[value.what]:
                yield f"{place}: {key}: {value}: only {MATCHED_KEYS[value.what]} can be matched this way"
            elif isinstance(value, Match) and value.what in WIDTHS and place in sizes:
                yield f"{place}: {key}: {value}: matched widths belong in variants"
    for variant, changes in sweep.variants.items():
        matches = [value for value in changes.values() if isinstance(value, Match) and value.what in WIDTHS]
        targets = [sweep.variants.get(match.of, {}) for match in matches]
        if any(isinstance(value, Match) for target in targets for value in target.values()):
            yield f"variant {variant!r}: it is matched to a variant that is itself matched; match both to a third"
        for key in changes:
            if key.startswith("eval."):
                yield f"variant {variant!r}: {key} must be the same for all variants; set it in values"


def _wrong_grids(sweep: Sweep):
    grids = {f"budget {name!r}: learning_rates": b.learning_rates for name, b in sweep.budgets.items()}
    grids |= {f"variant {name!r}: {LEARNING_RATE}": v.get(LEARNING_RATE) for name, v in sweep.variants.items()}
    grids |= {f"size {name!r}: {LEARNING_RATE}": v.get(LEARNING_RATE) for name, v in sweep.sizes.items()}
    grids = {"learning_rates": sweep.learning_rates} | grids
    grids = {place: grid for place, grid in grids.items() if grid is not None and not isinstance(grid, Match)}
    for place, given in grids.items():
        grid = _grid(given)
        if not (grid and all(map(_is_number, grid)) and list(grid) == sorted(set(grid))):
            yield f"{place}: {given} must be numbers in ascending order, at least one, without duplicates"


def _wrong_budgets(budgets: dict[str, Budget], wanted: str):
    for name, budget in budgets.items():
        if name not in BUDGETS:
            yield f"budgets: unknown {name!r}; a sweep may have {' and '.join(map(repr, BUDGETS))}"
        least = MIN_SEEDS if name == "full" else 2
        yield from (f"budget {name!r}: {problem}" for problem in wrong_numbers(budget, least))
    if wanted not in budgets:
        has = [name for name in BUDGETS if name in budgets]
        other = f", or run it with --budget {has[0]}" if has else ""
        yield f"budgets: there is no {wanted!r}; add it{other}"
