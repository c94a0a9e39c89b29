"""Measure the speed of variants in turn with the baseline: python -m lm.sweep ... --speed"""

import dataclasses
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from lm.sweeps.record import read_record
from lm.sweeps.results import Run, choices_of, final_runs, read_runs
from lm.sweeps.speed import SHORTER, Speeds, read_speeds, write_speeds
from lm.sweeps.stacked import StackedRuns
from lm.sweeps.variants import Variant
from lm.system.locks import InUse, lock
from lm.system.text_tables import plural
from lm.training.signals import Signals

PAIRS = 10
SECONDS = 0.5  # of a measurement, at least
SHORTER_RUNS = 4  # with the first final seeds


@dataclasses.dataclass
class Speedometer:
    """Measures the finished variants of a sweep, and the slope of the baseline in each cell.

    Results are written as they come, so that the same command continues after a stop.
    """

    variants: dict[str, Variant]
    workdir: Path
    together: int  # runs on each device
    say: Callable[[str], None]
    signals: Signals

    def __post_init__(self):
        self.record = read_record(self.workdir)
        self.runs = read_runs(self.workdir, self.say)
        self.points = {
            name: choice.point for name, choice in choices_of(self.record, self.runs).items()
        }
        self.speeds = Speeds({}, {})

    def measure(self) -> None:
        """Measure what is missing, cell by cell; of several processes, one does."""
        directory = self.workdir / ".claims" / "speed"
        directory.mkdir(parents=True, exist_ok=True)
        try:
            held = lock(directory)
        except InUse:
            self.say("another process measures the speeds")
            return
        with held:
            self.speeds = read_speeds(self.workdir) or self.speeds
            self._measure_cells()

    def _measure_cells(self) -> None:
        for cell in dict.fromkeys(v.plan.cell for v in self.variants.values()):
            if self.signals.received:
                return
            names = [name for name, v in self.variants.items() if v.plan.cell == cell]
            arms = {self.variants[name].plan.arm: name for name in names}
            baseline = arms[self.record["baseline"]]
            if not self._final(baseline):
                continue
            if cell not in self.speeds.slopes and (slopes := self._slopes(baseline)):
                self.speeds.slopes[cell] = slopes
                write_speeds(self.workdir, self.speeds)
            missing = [n for n in names if n != baseline and n not in self.speeds.ratios]
            missing = [name for name in missing if self._final(name)]
            if not missing or self.signals.received:
                continue
            of_baseline = self._meter(baseline)
            for name in missing:
                if self.signals.received:
                    return
                self.say(f"speed of {name}, in turn with {baseline}")
                self.speeds.ratios[name] = ratios_in_turn(self._meter(name), of_baseline)
                write_speeds(self.workdir, self.speeds)

    def _final(self, name: str) -> dict[int, Run]:
        return final_runs(self.record, self.runs, name, self.points[name])

    def _meter(self, name: str) -> Callable[[], float]:
        v = self.variants[name]
        together = max(1, self.together // 2)  # two programs are in memory
        n = together * jax.device_count()
        configs = [v.run_config(self.points[name], seed) for seed in v.plan.seeds[:n]]
        return _stacked(configs, v, together, self.workdir).speedometer(SECONDS)

    def _slopes(self, baseline: str) -> list[float]:
        """Return dL / d ln(steps) of the baseline, by shorter runs with its first final seeds.

        Runs that diverged, in either length, are left out; without two there are none.
        """
        v = self.variants[baseline]
        finals = self._final(baseline)
        seeds = [seed for seed in v.plan.seeds if seed in finals][:SHORTER_RUNS]
        steps = v.config.train.steps
        shorter = max(1, round(SHORTER * steps))
        configs = []
        for seed in seeds:
            config = v.run_config(self.points[baseline], seed)
            optimizer = config.optimizer
            if optimizer.decay_steps is not None:
                decay_steps = max(1, round(SHORTER * optimizer.decay_steps))
                optimizer = dataclasses.replace(optimizer, decay_steps=decay_steps)
            train = dataclasses.replace(config.train, steps=shorter)
            configs.append(dataclasses.replace(config, train=train, optimizer=optimizer))
        self.say(f"{plural(len(seeds), 'run')} of {baseline} with {shorter} of {steps} steps")
        slopes = []
        n_at_once = self.together * jax.device_count()
        for first in range(0, len(seeds), n_at_once):
            some = slice(first, first + n_at_once)
            with tempfile.TemporaryDirectory() as directory:
                stacked = _stacked(configs[some], v, self.together, Path(directory))
                results = stacked.train(self.signals)
            if results is None:
                return []
            for seed, result in zip(seeds[some], results, strict=True):
                full, short = finals[seed].test_loss, result["test_loss"]
                if full is not None and short is not None:
                    slopes.append((full - short) / math.log(steps / shorter))
        return slopes if len(slopes) > 1 else []


def _stacked(configs: list, v: Variant, together: int, directory: Path) -> StackedRuns:
    warm_starts = []
    if v.warm_starts:
        warm_starts = [v.warm_starts[config.train.seed] for config in configs]
    return StackedRuns(
        configs,
        v.corpus,
        directory,
        runs_per_device=together,
        stream=io.StringIO(),
        warm_starts=warm_starts,
    )


def ratios_in_turn(
    one: Callable[[], float], other: Callable[[], float], pairs: int = PAIRS
) -> list[float]:
    """Return the ratios of two speeds, each of two measurements one after the other.

    The order alternates, so that a machine that becomes slower or faster favors neither.
    """
    ratios = []
    for i in range(pairs):
        if i % 2:
            first, second = other(), one()
            ratios.append(second / first)
        else:
            first, second = one(), other()
            ratios.append(first / second)
    return ratios
