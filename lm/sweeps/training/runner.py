"""Run a sweep: tune each variant's learning rate, train the final runs, measure the speeds.

Several processes may run the same sweep in one directory. Work is divided into groups of runs that share a compiled
program. A process claims a group by locking it, and waits at the end for the groups that other processes train.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from lm.config import Config
from lm.errors import first_line
from lm.files import to_json
from lm.runtime import log_to
from lm.sweeps.analysis.looks import seeds_needed
from lm.sweeps.design.search import describe_trial, describe_trials, trial_of
from lm.sweeps.design.seeds import seeds_of
from lm.sweeps.design.spec import SweepPlan
from lm.sweeps.storage.attempts import ProcessDied, attempt, n_deaths
from lm.sweeps.storage.results import (
    SPEEDS,
    Results,
    at_edge,
    best_rate,
    final_runs,
    keep_seeds,
    open_sweep,
    sweep_record,
    tuning_runs,
)
from lm.sweeps.storage.run_checks import identical_variants
from lm.sweeps.training.stacked import StackedRuns, group_by_program, program_of, runs_that_fit
from lm.sweeps.training.throughput import Workload, measure, measure_variants
from lm.sweeps.training.variants import Variant, describe_variants, resolve_variants, total_flops
from lm.text_tables import plural
from lm.training.progress import Progress, duration
from lm.training.signals import Signals

Key = tuple[str, float, int]  # variant, learning rate, seed


def run_sweep(plan: SweepPlan, workdir: Path, together: int | None = None, *, dry_run: bool = False) -> int:
    """Run or resume a sweep.

    Args:
        plan: what `load_sweep` returned.
        workdir: the sweep's directory.
        together: how many runs each device vectorizes; None: as many as fit in its memory (one on CPU).
        dry_run: print the runs and their cost, and stop.

    Returns:
        The exit code: 0 finished, 1 some runs failed (in a dry run: some variants cannot be traced), 128 + n stopped by
        signal n.

    Raises:
        UserError: the sweep cannot run, or `workdir` holds another one.
    """
    plan = keep_seeds(plan, workdir)
    progress = Progress(plan.configs[plan.sweep.baseline].train.steps, sys.stdout)
    variants = resolve_variants(plan, progress.say)
    progress.say(describe_variants(plan, variants))
    if together is None:
        together = _runs_that_fit(variants)
    # The final runs of one variant always share a program; those of a look train together.
    largest_group = 3 * max(n - before for before, n in itertools.pairwise((0, *plan.looks)))
    together = min(together, -(-largest_group // jax.device_count()))
    if dry_run:
        if plan.trials:
            progress.say(describe_trials(plan.trials))
        if variants[plan.sweep.baseline].fingerprint:
            progress.say(_estimate(plan, variants, together))
        return int(not all(v.fingerprint for v in variants.values()))
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    record = sweep_record(plan, variants, device)
    open_sweep(workdir, record, {name: v.config for name, v in variants.items()})
    progress.say(f"workdir {workdir}  device {device}  {plural(together, 'run')} at once on each")
    with log_to(progress.say), Signals(progress.say) as signals:
        return _Runner(plan, variants, record, Results(workdir, progress.say), together, progress.say, signals).run()


def _runs_that_fit(variants: dict[str, Variant]) -> int:
    """Return how many runs of any variant fit on a device; a variant that fails to compile will fail in training."""
    found = []
    for v in variants.values():
        with contextlib.suppress(Exception):
            largest = max((v.run_config(rate, 0) for rate in v.grid), key=lambda config: config.train.batch_size)
            found.append(runs_that_fit(largest, v.corpus))
    return min(found, default=1)


def _estimate(plan: SweepPlan, variants: dict[str, Variant], together: int) -> str:
    """Estimate the time of all training from a short measurement of the baseline's speed."""
    base, total = variants[plan.sweep.baseline], total_flops(plan, variants)
    at_once = Workload(base.config, base.corpus, together, jax.device_count())
    speed = base.flops * statistics.median(measure({"": at_once}, rounds=3)[""])
    return (
        f"training: at most {total:.3g} FLOPs, {total / speed / 60:,.0f} minutes at the baseline's measured "
        f"{speed / 1e9:,.1f} GFLOP/s; evaluation and compilation are not included"
    )


@dataclasses.dataclass(frozen=True)
class _Runner:
    plan: SweepPlan
    variants: dict[str, Variant]
    record: dict  # sweep.json
    results: Results
    together: int  # runs vectorized on each device
    say: Callable[[str], None]
    signals: Signals

    def run(self) -> int:
        """Train everything that is missing; returns the exit code."""
        tuning = tuning_runs({name: v.tuning_grid for name, v in self.variants.items()}, self.plan.tuning_seeds)
        n_failed = self.train("tuning", tuning)
        self.warn_of_identical_variants("tuning")
        tuned = []
        for name, v in self.variants.items():
            if any(("tuning", *run) not in self.results.runs for run in tuning if run[0] == (v.rate_from or name)):
                continue  # its tuning failed or was stopped
            rate = best_rate(self.results, self.record, name)
            self.say(f"{name}: best {_describe(self.record, v, rate)}")
            tuned.append(name)
        for before, n in itertools.pairwise((0, *self.record["looks"])):
            if not self.signals.received:
                n_failed += self.train("final", self.runs_of_look(tuned, before, n))
        if not (n_failed or self.signals.received):
            self.measure_speeds()
        workdir = self.results.workdir
        if self.signals.received:
            self.say("stopped; rerun the same command to resume")
            return 128 + self.signals.received
        if n_failed:
            self.say(f"{plural(n_failed, 'group')} of runs failed; rerun the same command to try them again")
            self.say(f"report without them: python -m lm.report {workdir}")
            return 1
        self.warn_of_identical_variants("final")
        self.say(f"finished; next: python -m lm.report {workdir}")
        return 0

    def runs_of_look(self, tuned: list[str], before: int, n: int) -> list[Key]:
        """Return the final runs that a look needs in addition to those of the look before.

        Args:
            tuned: the variants whose tuning is complete.
            before, n: the number of seeds of the look before (0: none), and of this one.
        """
        needed = seeds_needed(self.record, self.results)
        names = [name for name in tuned if needed[name] >= n]
        if before and names:
            self.say(f"undecided at {before} seeds; training with up to {n}: {', '.join(names)}")
        seeds = {name: seeds_of(self.record["seeds"], name)[before:n] for name in names}
        return [key for name in names for key in final_runs(self.results, self.record, name, seeds[name])]

    def warn_of_identical_variants(self, phase: str) -> None:
        for warning in identical_variants(self.results, list(self.variants), phase):
            self.say(f"WARNING: {warning}")

    def train(self, phase: str, keys: list[Key]) -> int:
        """Train the missing runs of a phase, in groups that share a program; returns how many groups failed."""
        configs = {key: self.variants[key[0]].run_config(*key[1:]) for key in keys}
        groups = group_by_program(configs, self.together * jax.device_count())
        began, n_trained, failed, waited = time.monotonic(), 0, [], False
        while todo := [group for group in groups if self._missing(phase, group) and group not in failed]:
            n_before = n_trained + len(failed)
            for place, group in enumerate(self._fewest_deaths_first(phase, todo)):
                with self.results.claim(_digest([phase, group])) as claimed:
                    if self.signals.received:
                        return len(failed)
                    missing = self._missing(phase, group)
                    if not (claimed and missing):
                        continue
                    title = f"{phase} {groups.index(group) + 1}/{len(groups)}"
                    left = (time.monotonic() - began) / max(n_trained, 1) * (len(todo) - place)
                    left = f", {duration(left)} left for all {phase} runs" if n_trained else ""
                    names = ", ".join(sorted({name for name, _, _ in group}))
                    self.say(f"{title}: {plural(len(missing), 'run')} of {names}{left}")
                    try:
                        self._refuse_deadly(phase, program_of(configs[group[0]]))
                        train_group(self, phase, missing)
                        n_trained += 1
                    except Exception as error:  # a group that fails must not stop the others
                        reason = f"{type(error).__name__}: {str(error)[:500]}"
                        self.say(f"{title} failed: {reason}")
                        self.results.add_failure(_digest([phase, group]), [(phase, *key) for key in group], reason)
                        failed.append(group)
            if n_trained + len(failed) == n_before:  # other processes have claimed all that is left
                if not waited:
                    self.say(f"waiting for {plural(len(todo), 'group')} of runs that other processes train")
                waited = True
                time.sleep(1)
                self.results.reload()
        return len(failed)

    def _missing(self, phase: str, keys: list[Key]) -> list[Key]:
        return [key for key in keys if (phase, *key) not in self.results.runs]

    def _refuse_deadly(self, phase: str, program: tuple) -> None:
        """Raise ProcessDied if runs of this program have failed with ProcessDied since this process started.

        This process or another one may have tried them. The failure deletes the count of deaths, so that the next start
        tries again.
        """
        for key, error in self.results.failures(new=True).items():
            kind, _, reason = error.partition(": ")
            if kind == ProcessDied.__name__ and key[0] == phase and program_of(self._config(key)) == program:
                raise ProcessDied(reason)

    def _config(self, key: tuple[str, str, float, int]) -> Config:
        """Return the config of a run of a phase."""
        return self.variants[key[1]].run_config(*key[2:])

    def _fewest_deaths_first(self, phase: str, groups: list[list[Key]]) -> list[list[Key]]:
        """Sort groups by program, the program with the fewest deaths first.

        The deaths of a program are the most in any of its groups. Within a program, the most deaths come first.
        """
        programs = [program_of(self.variants[name].run_config(rate, seed)) for ((name, rate, seed), *_) in groups]
        deaths = [n_deaths(self.directory(phase, self._missing(phase, group))) for group in groups]
        most = {p: max(n for n, q in zip(deaths, programs, strict=True) if p == q) for p in programs}
        ranks = [(most[p], programs.index(p), -n) for p, n in zip(programs, deaths, strict=True)]
        return [groups[i] for i in sorted(range(len(groups)), key=ranks.__getitem__)]

    def directory(self, phase: str, keys: list[Key]) -> Path:
        """Return the directory of the checkpoints of unfinished runs that share a program.

        Its name depends on all that a checkpoint depends on, so with another number of devices the runs start anew.
        """
        n = jax.device_count()
        return self.results.workdir / "unfinished" / f"{phase}-{_digest([keys, -(-len(keys) // n), n])}"

    def measure_speeds(self) -> None:
        """Measure the throughput of all variants, unless another process does. The sweep can finish without it."""
        while not (self.results.speeds or self.signals.received):
            with self.results.claim("speeds") as claimed:
                if claimed and not self.results.speeds:
                    self.say("measuring the throughput of all variants")
                    # What the report says if this process dies; the file is ignored once there are speeds.
                    self.results.add_failure("speeds", [SPEEDS], "its measurement did not end")
                    try:
                        self._measure_speeds()
                    except Exception as error:  # the results are complete
                        reason = first_line(error)
                        self.results.add_failure("speeds", [SPEEDS], reason)
                        advice = "" if isinstance(error, ProcessDied) else "; rerun to try again"
                        self.say(f"WARNING: the throughput is not measured ({reason}){advice}")
                        return
            time.sleep(0 if self.results.speeds else 1)

    def _measure_speeds(self) -> None:
        unfinished = self.results.workdir / "unfinished"
        pairs = {name: (v.config, v.corpus) for name, v in self.variants.items()}
        with attempt(unfinished / f"speeds-{self.together}-{jax.device_count()}"):
            speeds = measure_variants(pairs, self.plan.sweep.baseline, self.together)
        self.results.set_speeds(speeds)
        shutil.rmtree(unfinished, ignore_errors=True)


def _describe(record: dict, variant: Variant, rate: float) -> str:
    """Return the learning rate that a variant chose, or the trial."""
    if variant.trials:
        number, values = trial_of(record, rate)
        return f"trial {number}, {describe_trial(values)}"
    return f"learning rate {rate:g}" + ", at the edge of its grid" * at_edge(variant.grid, rate)


def train_group(runner: _Runner, phase: str, keys: list[Key]) -> None:
    """Train runs that share a program, and save their results unless a signal stops them.

    Args:
        runner: the sweep.
        phase: "tuning" or "final".
        keys: the runs, (variant, learning rate, seed).

    Raises:
        ProcessDied: too many processes died while they trained these runs.
    """
    variants, results, directory = runner.variants, runner.results, runner.directory(phase, keys)
    configs = [variants[name].run_config(rate, seed) for name, rate, seed in keys]
    warm_starts = [variants[name].warm_starts[seed] for name, _, seed in keys if variants[name].warm_starts]
    share, corpus = -(-len(keys) // jax.device_count()), variants[keys[0][0]].corpus
    try:
        with attempt(directory):
            runs = StackedRuns(
                configs, corpus, directory, runs_per_device=share, stream=sys.stdout, warm_starts=warm_starts
            )
            found = runs.train(runner.signals)
            if found is None:
                return
    except Exception:
        shutil.rmtree(directory, ignore_errors=True)  # the checkpoint may be the cause
        raise
    about = [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys]
    start = runner.record["starts"][-1]
    provenance = {key: start[key] for key in ("host", "processor", "git")} | {"device": jax.devices()[0].device_kind}
    results.add(directory.name, [a | {"provenance": provenance} | r for a, r in zip(about, found, strict=True)])
    shutil.rmtree(directory, ignore_errors=True)


def _digest(value) -> str:
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:12]
