"""Random search: a space of hyperparameters, and the trials that are drawn from it, the same for every variant.

A trial is identified by its learning rate, which is drawn from an interval and so differs between trials.
This module does not import jax.
"""

import dataclasses
import hashlib
from numbers import Real
from typing import Any

from lm.config import schema
from lm.config.convert import suggestion
from lm.config.values import checked, short
from lm.sweeps.design.axes import LEARNING_RATE, Match, Values
from lm.text_tables import table

BATCH_SIZE = "train.batch_size"
OTHER_KEYS = (BATCH_SIZE, "train.z_loss", "model.dropout")  # may be searched, as may all keys of the optimizer
MIN_TRIALS, MAX_TRIALS = 2, 1000
DIGITS = 9  # of a drawn number; further digits of a logarithm depend on the machine


@dataclasses.dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, with a uniform density in the number or in its logarithm."""

    low: float
    high: float
    is_log: bool

    def at(self, u: float) -> float:
        """Return the quantile of u in [0, 1): a fraction u of all draws is below it."""
        value = self.low * (self.high / self.low) ** u if self.is_log else self.low + u * (self.high - self.low)
        return float(f"{value:.{DIGITS}g}")

    def __str__(self) -> str:
        return f"{'log-' * self.is_log}uniform from {self.low:g} to {self.high:g}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Several values, drawn with equal probability."""

    values: tuple

    def at(self, u: float) -> Any:
        """Return the value whose share of [0, 1) contains u."""
        return self.values[int(u * len(self.values))]

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"


def uniform(low: float, high: float) -> Interval:
    """Draw a number with a uniform density between two bounds.

    >>> str(uniform(0, 0.2))
    'uniform from 0 to 0.2'
    """
    return Interval(low, high, is_log=False)


def log_uniform(low: float, high: float) -> Interval:
    """Draw a positive number whose logarithm is uniform: 0.001 to 0.01 is as likely as 0.01 to 0.1.

    >>> log_uniform(1e-3, 1e-1).at(0.5)
    0.01
    """
    return Interval(low, high, is_log=True)


def choice(*values) -> Choice:
    """Draw one of several values with equal probability.

    >>> choice(0.95, 0.99, 0.999).at(0.5)
    0.99
    """
    return Choice(values)


@dataclasses.dataclass(frozen=True)
class Search:
    """A random search: every variant is tried with the same values.

    Attributes:
        trials: how many times all keys are drawn.
        space: by config key, what its values are drawn from. The learning rate must be drawn from an interval.
    """

    trials: int = None
    space: dict[str, Interval | Choice] = None


def draw_trials(name: str, search: Search, n: int | None = None) -> tuple[Values, ...]:
    """Draw the values of every trial. A value depends only on the sweep's name, the number of the trial and the key.

    Args:
        name: the name of the sweep.
        search: its search, without mistakes.
        n: the number of trials, if not the search's.

    Returns:
        For each trial, its values by config key.

    >>> draw_trials("gates", Search(2, {"optimizer.b2": choice(0.95, 0.99, 0.999)}))
    ({'optimizer.b2': 0.95}, {'optimizer.b2': 0.999})
    """

    leaves = schema()

    def draw(trial: int, key: str) -> Any:
        """Return the value of a config key in a trial, counted from 0."""
        digest = hashlib.sha256(f"{name}/{trial}/{key}".encode()).digest()
        u = int.from_bytes(digest[:6], "big") / 2**48
        return checked(search.space[key].at(u), *leaves[key])

    return tuple({key: draw(trial, key) for key in search.space} for trial in range(n or search.trials))


def wrong_types(search):
    """Yield the fields of a sweep's search that are missing or of another type."""
    if search is None:
        return
    if not isinstance(search, Search):
        yield f"search: {short(search)} must be a Search"
        return
    if type(search.trials) is not int:
        found = "trials is missing" if search.trials is None else f"trials is {short(search.trials)}"
        yield f"search: {found}: it must be an integer"
    space = search.space
    if not (isinstance(space, dict) and all(isinstance(key, str) for key in space)):
        found = "space is missing" if space is None else f"space: {short(space)}"
        yield f"search: {found}: it must be a dictionary of config keys and what their values are drawn from"
        return
    for key, values in space.items():
        if not isinstance(values, Interval | Choice):
            yield f"search: {key}: {short(values)} must be log_uniform(low, high), uniform(low, high) or choice(...)"


def wrong_search(sweep):
    """Yield the mistakes in a search whose fields have the right types; loading its configs finds the others."""
    search, budgets = sweep.search, sweep.budgets.items()
    for name, budget in budgets:
        if budget.trials is not None and search is None:
            yield f"budget {name!r}: trials: the sweep has no search; remove it"
        elif budget.trials is not None:
            yield from _wrong_number(f"budget {name!r}: trials", budget.trials)
    if search is None:
        return
    yield from _wrong_number("search: trials", search.trials)
    places = {"learning_rates": sweep.learning_rates}
    places |= {f"budget {name!r}: learning_rates": budget.learning_rates for name, budget in budgets}
    for place, grid in places.items():
        if grid is not None:
            yield f"{place} and search are both given: remove one of them"
    for field in ("sizes", "texts"):
        if getattr(sweep, field):
            yield f"{field} and search are both given: with {field} only the learning rate can be tuned; remove one"
    yield from _wrong_space(search.space)
    yield from _wrong_places(sweep)


def _wrong_number(place: str, n):
    if type(n) is not int or not MIN_TRIALS <= n <= MAX_TRIALS:
        yield f"{place} is {short(n)}; it must be an integer, at least {MIN_TRIALS} and at most {MAX_TRIALS}"


def _wrong_space(space: dict[str, Interval | Choice]):
    if not isinstance(space.get(LEARNING_RATE), Interval):
        yield f"search: {LEARNING_RATE} must be drawn from an interval, such as log_uniform(1e-3, 3e-2)"
    for key, values in space.items():
        if key not in schema():
            yield f"search: {key}: unknown {suggestion(key)}"
        elif not (key.startswith("optimizer.") or key in OTHER_KEYS):
            yield f"search: {key}: only keys of the optimizer, {', '.join(OTHER_KEYS)} can be searched"
        else:
            yield from (f"search: {key}: {problem}" for problem in _wrong_values(key, values))


def _wrong_values(key: str, found: Interval | Choice):
    """Yield the mistakes in the values that a key of the schema is drawn from."""
    if isinstance(found, Choice):
        values = found.values
        if len(values) < 2 or any(value in values[:i] for i, value in enumerate(values)):
            yield f"choice{short(values)} must have at least two values, without duplicates"
    else:
        values = (found.low, found.high)
        if not all(isinstance(value, Real) and not isinstance(value, bool) for value in values):
            yield f"{short(values)} must be two numbers"
            return
        if not found.low < found.high:
            yield f"{short(values)} must be in ascending order"
        if found.is_log and not found.low > 0:
            yield f"log_uniform{short(values)}: the numbers must be positive"
        try:
            values = tuple(map(float, values))  # a key of integers needs a choice
        except OverflowError:
            yield f"{short(values)}: a number is too large"
            return
    for value in values:
        try:
            checked(value, *schema()[key])
        except ValueError as error:
            yield f"{error}"


def _wrong_places(sweep):
    """Yield the places outside of the search that set a key that it draws."""
    places = {"values": sweep.values} | {f"budget {name!r}: values": b.values for name, b in sweep.budgets.items()}
    places |= {f"variant {name!r}": changes for name, changes in sweep.variants.items()}
    for place, values in places.items():
        yield from (f"{place}: {key} is drawn by the search; remove it" for key in values if key in sweep.search.space)
        if BATCH_SIZE in sweep.search.space and isinstance(values.get("train.steps"), Match):
            yield f"{place}: train.steps must be a number, because the search draws {BATCH_SIZE}"


def wrong_trials(trials: tuple[Values, ...], steps: int, batch_size: int):
    """Yield the mistakes in drawn values: equal learning rates, or a batch size that would change the number of tokens.

    Args:
        trials: the values of every trial.
        steps, batch_size: those of a run without the values of a trial.

    >>> list(wrong_trials(({"optimizer.learning_rate": 0.01, "train.batch_size": 12},), 100, 8))
    ['search: train.batch_size: 100 steps of 8 sequences are not a whole number of steps of 12 sequences']
    """
    if len({trial[LEARNING_RATE] for trial in trials}) < len(trials):
        yield f"search: two trials have the same {LEARNING_RATE}; draw it from a wider interval"
    for size in sorted({trial[BATCH_SIZE] for trial in trials if BATCH_SIZE in trial}):
        if steps * batch_size % size:
            yield (
                f"search: {BATCH_SIZE}: {steps} steps of {batch_size} sequences are not a whole number of steps of "
                f"{size} sequences"
            )


def search_record(search: Search | None, trials: tuple[Values, ...]) -> dict | None:
    """Return the search as sweep.json contains it: the space as text, and the values of every trial."""
    return search and {"space": {key: str(values) for key, values in search.space.items()}, "trials": list(trials)}


def summary(record: dict | None) -> str:
    """Describe the search of a sweep.json in one line.

    >>> summary({"space": {"optimizer.b2": "one of 0.95, 0.99"}, "trials": [{"optimizer.b2": 0.99}]})
    '1 trials, optimizer.b2 one of 0.95, 0.99'
    """
    if record is None:
        return "none"
    space = "; ".join(f"{key} {values}" for key, values in record["space"].items())
    return f"{len(record['trials'])} trials, {space}"


def describe_space(search: Search | None, n: int) -> list[str]:
    """Return lines on the number of trials and on what each key is drawn from; none without a search."""
    if not search:
        return []
    rows = [[f"  {key}", str(values)] for key, values in search.space.items()]
    return [f"search: {n} random trials, the same for every variant, over", table(rows)]


def describe_trials(trials: tuple[Values, ...]) -> str:
    """Return a table of the values of each trial."""
    header = ["trial", *(key.rpartition(".")[2] for key in trials[0])]
    rows = [[f"{i}", *map(show_value, trial.values())] for i, trial in enumerate(trials, start=1)]
    return table([header, *rows], right=range(len(header)))


def trial_of(record: dict, rate: float) -> tuple[int, Values]:
    """Return the number of the trial with a learning rate, counted from 1, and its values.

    Args:
        record: sweep.json of a sweep with a search.
        rate: a learning rate of its grids.
    """
    trials = record["search"]["trials"]
    return next((i, trial) for i, trial in enumerate(trials, start=1) if trial[LEARNING_RATE] == rate)


def run_length(record: dict, variant: str, rate: float) -> tuple[int, int]:
    """Return the steps and the batch size of a variant's runs at a learning rate. All trials have the same tokens.

    Args:
        record: sweep.json.
        variant: the name of the variant.
        rate: the learning rate.
    """
    train = record["variants"][variant]["config"]["train"]
    values = trial_of(record, rate)[1] if record["search"] else {}
    batch_size = values.get(BATCH_SIZE, train["batch_size"])
    return train["steps"] * train["batch_size"] // batch_size, batch_size


def describe_trial(values: Values) -> str:
    """Return the values of a trial.

    >>> describe_trial({"optimizer.learning_rate": 0.00123456, "optimizer.warmup_steps": 20})
    'learning_rate 0.00123, warmup_steps 20'
    """
    return ", ".join(f"{key.rpartition('.')[2]} {show_value(value)}" for key, value in values.items())


def show_value(value: Any) -> str:
    """Format a value of a trial, a drawn number with three digits.

    >>> show_value(0.00123456), show_value(0.999), show_value(64), show_value(None)
    ('0.00123', '0.999', '64', 'None')
    """
    return f"{value:.3g}" if isinstance(value, float) else str(value)
