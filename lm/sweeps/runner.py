"""Run a sweep: tune each variant, then train the final runs at the tuned values.

Several processes may run the same sweep in one directory. Work is divided into groups of runs that
share a compiled program. A process claims a group by locking it, and waits at the end for the
groups that other processes train.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from lm.cost.units import duration
from lm.sweeps.plan import Plan
from lm.sweeps.record import PATIENCE, SWEEP, open_sweep, sweep_record
from lm.sweeps.results import (
    Run,
    append_runs,
    drop_damaged_lines,
    outcomes_of,
    read_runs,
    rule_of,
)
from lm.sweeps.speedometer import Speedometer
from lm.sweeps.stacked import StackedRuns, group_by_program, runs_that_fit
from lm.sweeps.tuning import Outcome, choose_in_cell
from lm.sweeps.variants import Variant, describe_variants, refuse_idle_changes, resolve_variants
from lm.system.files import to_json, without_links, write_text
from lm.system.locks import InUse, lock
from lm.system.text_tables import plural
from lm.training.progress import Progress
from lm.training.signals import Signals
from lm.workdir.provenance import describe_start
from lm.workdir.saved_run import newest_checkpoint

MAX_DEATHS = 3  # a group of runs in which so many processes died counts as failed


class Key(NamedTuple):
    """What identifies a run, as `Run.key`."""

    phase: str
    variant: str
    point: tuple  # its tuned values
    seed: int


def run_sweep(
    plan: Plan,
    workdir: Path,
    together: int | None,
    *,
    dry_run=False,
    timed=False,
    speed=False,
    published=None,
) -> int:
    """Run or resume a sweep.

    Args:
        together: how many runs each device vectorizes; None: as many as fit in its memory (one on
            CPU).
        dry_run: print the runs and their cost, and stop.
        timed: in a dry run, also trace the variants and measure the baseline's speed.
        speed: in the end, measure the speeds (lm/sweeps/speedometer.py).
        published: the `lm.sweeps.addition.Published` whose runs are not trained again, or None.

    Returns:
        The exit code: 0 finished, 1 some runs failed (in a dry run: some variants cannot be
        traced), 128 + n stopped by signal n.

    Raises:
        UserError: the sweep cannot run, or `workdir` holds another one.
    """
    progress = Progress(next(iter(plan.variants.values())).config.train.steps, sys.stdout)
    variants = resolve_variants(plan, progress.say)
    if published:
        published.check(sweep_record(plan, variants, {}))
    progress.say(describe_variants(plan, variants))
    if published and published.runs:
        progress.say(
            f"{plural(len(published.runs), 'run')} of these are published and reused; one of the "
            "baseline in each cell is trained again, to compare its loss"
        )
    if dry_run and not timed:
        return 0
    # A sweep that was started before passed this check, which takes a second for each variant.
    resumed = (workdir / SWEEP).is_file() and not dry_run
    traced = set(variants) if resumed else refuse_idle_changes(variants, progress.say)
    if together is None:
        together = min(runs_that_fit(v.run_config(v.first_point, 0)) for v in variants.values())
    # The final runs of one variant always share a program.
    together = min(together, -(-plan.budget.seeds // jax.device_count()))
    if dry_run:
        if plan.sweep.baseline in {variants[name].plan.arm for name in traced}:
            progress.say(_estimate(plan, variants, together))
        return int(traced != variants.keys())
    if plan.groups:
        arms = sorted(arm for group in plan.groups for arm in group)
        if arms != sorted({v.arm for v in plan.variants.values()}):
            raise ValueError("groups must have each arm once")
        if plan.shapes.keys() != set(plan.cells):
            raise ValueError("groups need the shape of each cell")
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    record = sweep_record(plan, variants, describe_start() | {"device": device})
    record = open_sweep(workdir, record)
    if published:
        published.begin(workdir)
    progress.say(f"workdir {workdir}  device {device}  {plural(together, 'run')} at once on each")
    with Signals(progress.say) as signals:
        runner = _Runner(variants, record, workdir, together, progress.say, signals, plan.groups)
        code = runner.run(again=bool(published and published.runs))
        if speed and code == 0:
            Speedometer(variants, workdir, together, progress.say, signals).measure()
            code = 128 + signals.received if signals.received else 0
        return code


def _estimate(plan: Plan, variants: dict[str, Variant], together: int) -> str:
    """Estimate the time of all training from a short measurement of the baseline's speed."""
    base = next(v for v in reversed(variants.values()) if v.plan.arm == plan.sweep.baseline)
    seeds = range(together * jax.device_count())
    configs = [base.run_config(base.first_point, seed) for seed in seeds]
    runs = StackedRuns(configs, base.corpus, Path(), runs_per_device=together, stream=io.StringIO())
    speed = base.flops * runs.tokens_per_second()
    total = sum(v.n_runs * v.flops * v.tokens for v in variants.values())
    return (
        f"training: {total / speed / 60:,.0f} minutes at the baseline's measured "
        f"{speed / 1e9:,.1f} GFLOP/s; evaluation, compilation and extensions of the lists are not "
        "included"
    )


@dataclasses.dataclass
class _Runner:
    """The runs of a sweep. This process trains those that no other process has claimed."""

    variants: dict[str, Variant]
    record: dict
    workdir: Path
    together: int
    say: Callable[[str], None]
    signals: Signals
    groups: tuple[tuple[str, ...], ...] = ()  # of the plan

    def __post_init__(self):
        self.failed: list[list[Key]] = []  # groups of runs
        with lock(self.workdir, timeout=PATIENCE):
            self.runs = {run.key: run for run in read_runs(self.workdir, self.say)}
            drop_damaged_lines(self.workdir)

    def run(self, again: bool = False) -> int:
        """Train everything that is missing, group by group and cell by cell; returns the exit code.

        With `again`, one run of the baseline, whose result is published, is first trained again in
        each cell.
        """
        everything = tuple(dict.fromkeys(v.plan.arm for v in self.variants.values()))
        for arms, cell in itertools.product(self.groups or [everything], self.record["cells"]):
            names = [
                name
                for name, v in self.variants.items()
                if v.plan.cell == cell and v.plan.arm in arms
            ]
            points = self.tune(names, self.record.get("shapes", {}).get(cell))
            final = []
            for name, point in points.items():
                plan = self.variants[name].plan
                keys = [Key("final", name, point, seed) for seed in plan.seeds]
                if again and plan.arm == self.record["baseline"]:
                    self.train([keys[0]._replace(phase="again")])
                final += keys
            self.train(final)
        if self.signals.received:
            self.say("stopped; rerun the same command to resume")
            return 128 + self.signals.received
        if self.failed:
            self.say(
                f"{plural(len(self.failed), 'group')} of runs failed; rerun the same command to "
                "try them again"
            )
            self.say(f"report without them: python -m lm.report {self.workdir}")
            return 1
        for name in ("unfinished", "failed"):
            shutil.rmtree(self.workdir / name, ignore_errors=True)
        self.say(f"finished; next: python -m lm.report {self.workdir}")
        return 0

    def tune(self, names: list[str], shape: float | None) -> dict[str, tuple]:
        """Train the tuning runs of the variants of a cell, and return the chosen points.

        The shape of their curves is estimated from them if it is None.

        A variant some of whose runs failed has none. The rounds are the same in all processes,
        whatever has finished, because groups of runs are claimed by their content.
        """
        known: dict[str, dict[tuple, Outcome]] = {name: {} for name in names}
        while True:
            if self.signals.received:
                return {}
            choices = choose_in_cell(
                {name: self.record["variants"][name]["tune"] for name in known},
                known,
                rule_of(self.record),
                shape,
            )
            keys = []
            for name, choice in choices.items():
                seeds = self.variants[name].plan.tuning_seeds
                of_variant = [Key("tuning", name, p, s) for p in choice.missing for s in seeds]
                for key, best, beyond in choice.added if self._missing(of_variant) else ():
                    self.say(
                        f"{name}: the best {key}, {best}, is at the edge of its list: adding "
                        f"{beyond}"
                    )
                keys += of_variant
            if not keys:
                break
            self.train(keys)
            for name, choice in choices.items():
                outcomes = outcomes_of(self.record, self.runs.values(), name)
                if outcomes.keys() >= set(choice.missing):
                    known[name] |= {point: outcomes[point] for point in choice.missing}
                else:
                    del known[name]  # some of its runs failed
        for name, choice in choices.items():
            if len(self.record["variants"][name]["tune"]) > 1 or self.variants[name].plan.n_points:
                self.say(
                    f"{name}: tuned to {self._describe(choice.point)} (best tried: "
                    f"{self._describe(choice.best)})"
                )
            for key in choice.at_edge:
                self.say(
                    f"WARNING: {name}: the best {key} is still at the edge of its list, which was "
                    "extended"
                )
        return {name: choice.point for name, choice in choices.items() if choice.point}

    def _describe(self, point: tuple | None) -> str:
        keys = [key.rpartition(".")[2] for key in self.record["tune"]]
        return ", ".join(f"{key} {value}" for key, value in zip(keys, point or (), strict=True))

    def train(self, keys: list[Key]) -> None:
        """Train the missing runs of these, in groups that share a program."""
        configs = {key: self.variants[key.variant].run_config(key.point, key.seed) for key in keys}
        groups = group_by_program(configs, self.together * jax.device_count())
        began = time.monotonic()
        n_trained = 0
        waited = False
        n_first = len(self._unfinished(groups))
        while todo := self._unfinished(groups):
            n_before = n_trained + len(self.failed)
            todo.sort(key=lambda group: n_deaths(self._directory(self._missing(group))))
            for group in todo:
                with self._claim(_digest(group)) as claimed:
                    if self.signals.received:
                        return
                    missing = self._missing(group)
                    if not (claimed and missing):
                        continue
                    phase = group[0].phase
                    title = f"{phase} {groups.index(group) + 1}/{len(groups)}"
                    left = ""
                    if n_trained:
                        n_left = len(self._unfinished(groups))  # other processes may train, too
                        seconds = (time.monotonic() - began) / max(n_first - n_left, 1) * n_left
                        left = f", {duration(seconds)} left for all {phase} runs"
                    names = ", ".join(sorted({key.variant for key in group}))
                    self.say(f"{title}: {plural(len(missing), 'run')} of {names}{left}")
                    if self._try(title, group, missing):
                        n_trained += 1
            # Without progress here, other processes have claimed all that is left.
            if n_trained + len(self.failed) == n_before:
                if not waited:
                    self.say(
                        f"waiting for {plural(len(todo), 'group')} of runs that other processes "
                        "train"
                    )
                waited = True
                time.sleep(1)
                self._reload()

    def _try(self, title: str, group: list[Key], missing: list[Key]) -> bool:
        """Train the missing runs of a group; return False if they fail, and let others continue."""
        failure = self.workdir / "failed" / f"{_digest(group)}.json"
        try:
            self._train_group(missing)
        except Exception as error:
            if self.signals.received:  # Ctrl-C also ends the compiler
                return False
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            self.say(f"{title} failed: {reason}")
            self.failed.append(group)
            if group[0].phase == "again":  # the published result of this run is there
                return False
            with contextlib.suppress(OSError):  # a full disk must not stop the other runs
                failure.parent.mkdir(exist_ok=True)
                names = list(dict.fromkeys(key.variant for key in group))
                write_text(failure, to_json({"variants": names, "error": reason}) + "\n")
            return False
        failure.unlink(missing_ok=True)
        return True

    def _train_group(self, keys: list[Key]) -> None:
        """Train runs that share a program, and save their results unless a signal stops them."""
        variants = [self.variants[key.variant] for key in keys]
        directory = self._directory(keys)
        configs = []
        warm_starts = []
        for v, key in zip(variants, keys, strict=True):
            configs.append(v.run_config(key.point, key.seed))
            if v.warm_starts:
                warm_starts.append(v.warm_starts[key.seed])
        try:
            with attempt(directory):
                runs = StackedRuns(
                    configs,
                    variants[0].corpus,
                    directory,
                    runs_per_device=-(-len(keys) // jax.device_count()),
                    stream=sys.stdout,
                    warm_starts=warm_starts,
                )
                results = runs.train(self.signals)
            if results is None:
                return
        except Exception:
            if not self.signals.received:
                shutil.rmtree(directory, ignore_errors=True)  # the checkpoint may be the cause
            raise
        process = self.record["starts"][-1]
        git = process["git"] or {"commit": "", "dirty": False}
        about = {
            "processor": process["processor"],
            "device": jax.devices()[0].device_kind,
            "commit": git["commit"] + " with uncommitted changes" * git["dirty"],
        }
        finished = []
        for key, v, result in zip(keys, variants, results, strict=True):
            chosen = {"point": dict(zip(v.plan.lists, key.point, strict=True)), "tokens": v.tokens}
            finished.append(Run(**key._asdict() | chosen | result | about))
        with lock(self.workdir, timeout=PATIENCE):
            append_runs(self.workdir, finished)
        self.runs |= {run.key: run for run in finished}
        shutil.rmtree(directory, ignore_errors=True)

    def _missing(self, keys: list[Key]) -> list[Key]:
        return [key for key in keys if key not in self.runs]

    def _unfinished(self, groups: list[list[Key]]) -> list[list[Key]]:
        return [group for group in groups if self._missing(group) and group not in self.failed]

    def _reload(self) -> None:
        """Read what other processes have finished, but no line that one is just writing."""
        self.runs |= {run.key: run for run in read_runs(self.workdir, lambda warning: None)}

    @contextlib.contextmanager
    def _claim(self, name: str) -> Iterator[bool]:
        """Try to lock the group of this name; yields whether it did, and then reloads the runs."""
        # Never deleted: that would break the lock of another process.
        directory = self.workdir / ".claims" / name
        directory.mkdir(parents=True, exist_ok=True)
        try:
            held = lock(directory)
        except InUse:
            yield False
            return
        with held:
            self._reload()
            yield True

    def _directory(self, keys: list[Key]) -> Path:
        """Return the directory of the checkpoints of unfinished runs that share a program.

        Its name depends on all that a checkpoint depends on, so with another number of devices the
        runs start anew.
        """
        n = jax.device_count()
        return self.workdir / "unfinished" / _digest([keys, -(-len(keys) // n), n])


def _attempts(directory: Path) -> Path:
    """Return the file with a byte for each process that trains these runs, or died in them.

    Its name has the step of the newest checkpoint: with progress, the count begins anew.
    """
    return directory / f"attempts-{newest_checkpoint(directory) or 0}"


def n_deaths(directory: Path) -> int:
    """Return how many processes have died while they trained these runs, without progress."""
    path = _attempts(directory)
    return path.stat().st_size if path.is_file() else 0


@contextlib.contextmanager
def attempt(directory: Path) -> Iterator[None]:
    """Count a death if this process dies in the block: killed for lack of memory, for example.

    Without the count, every start of a sweep would begin with the same group and die again.

    Raises:
        RuntimeError: there were MAX_DEATHS before.
    """
    deaths = n_deaths(directory)
    if deaths >= MAX_DEATHS:
        raise RuntimeError(
            f"{deaths} processes died while they trained these runs; do they fit in memory?"
        )
    directory.mkdir(parents=True, exist_ok=True)
    path = _attempts(directory)
    with open(path, "ab", opener=without_links) as file:
        file.write(b".")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _digest(value) -> str:
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:12]
