"""An ablation: python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick

Tunes the learning rate of every variant on seeds of their own, trains the best rate and its neighbours on fresh
seeds, and leaves what `python -m lm.report` draws its tables and pictures from.
"""

import argparse
import hashlib
import shutil
import statistics
import sys
import time
from pathlib import Path

from lm import runtime
from lm.errors import TemporaryError, UserError
from lm.files import to_json
from lm.sweeps.results import Results, at_edge, choose, describe_sweep, final_runs, identical, start, tuning_runs
from lm.sweeps.spec import BUDGETS, Plan, load

EPILOG = """\
examples:
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --dry-run
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick
  python -m lm.report sweeps/swiglu_vs_silu-quick

The same command, after a kill at any moment, finishes what is missing; given several times at once, on machines alike
that share the directory, they share the work. Budgets: "quick" proves the machinery and makes
no claim; "full" does.

exit codes: 0 finished; 1 some runs failed, or a disk did, the same command tries again; 2 a mistake in what was asked;
130 (Ctrl-C) and 143 (SIGTERM) stopped, the same command goes on.
"""


def main(argv: list[str] | None = None) -> int:
    a = command_line(argv)
    try:
        if a.together is not None and a.together < 1:
            raise UserError(f"--together: {a.together} runs are none; give at least 1")
        plan = load(a.config, a.budget)
        return sweep(plan, Path(a.workdir or f"sweeps/{plan.name}-{a.budget}"), a.together, dry_run=a.dry_run)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except OSError as error:  # a full disk, a directory that cannot be read
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return TemporaryError.code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


def command_line(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lm.sweep",
        description="Train the variants of an ablation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a file of configs/sweeps/")
    parser.add_argument("--budget", choices=BUDGETS, default="quick", help="how much to spend (%(default)s)")
    parser.add_argument("--workdir", metavar="DIR", help="where the sweep lives (sweeps/NAME-BUDGET)")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and what they cost, and stop")
    parser.add_argument(
        "--together",
        type=int,
        metavar="N",
        help="runs vectorized on each device (as many as fit in its memory; on CPU 1)",
    )
    return parser.parse_args(argv)


def sweep(plan: Plan, workdir: Path, together: int | None, *, dry_run: bool) -> int:
    """A whole sweep; returns the exit code."""
    jax = start_jax(plan)
    from lm.sweeps.stacked import runs_that_fit
    from lm.sweeps.throughput import Workload, measure
    from lm.sweeps.variants import describe, flops_of_runs, prepare
    from lm.training.progress import Progress

    progress = Progress(plan.configs[plan.sweep.baseline].train.steps, sys.stdout)
    say = progress.say
    variants = prepare(plan, say)
    say(describe(plan, variants))
    if together is None:
        together = min(runs_that_fit(v.config, v.corpus) for v in variants.values())
    most = 3 * len(plan.seeds)  # runs of one variant, which are all that share a program for certain
    together = min(together, -(-most // jax.device_count()))
    if dry_run:
        base, total = variants[plan.sweep.baseline], flops_of_runs(plan, variants)
        at_once = Workload(base.config, base.corpus, together, jax.device_count())
        speed = base.flops * statistics.median(measure({"": at_once}, rounds=3)[""])
        say(
            f"training takes {total:.3g} FLOPs at most: {total / speed / 60:,.0f} minutes at the baseline's "
            f"{speed / 1e9:,.1f} GFLOP/s, measured here and now; evaluations and compilation come on top"
        )
        return 0
    record = describe_sweep(plan, variants, jax)
    start(workdir, record, {name: v.config for name, v in variants.items()})
    say(f"{workdir}  device {jax.device_count()} x {jax.devices()[0].device_kind}, {together} runs at once on each")
    return carry_out(plan, variants, record, Results(workdir), together, progress)


def start_jax(plan: Plan):
    """Import jax; a CPU becomes one device for each of its cores, so that as many runs train at once."""
    import os

    config = plan.configs[plan.sweep.baseline]
    jax = runtime.start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # not on macOS
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", n_cores)
    return jax


def carry_out(plan: Plan, variants: dict, record: dict, results: Results, together: int, progress) -> int:
    """Tuning, choice, fresh seeds, speeds; returns the exit code."""
    from lm.runtime import log_to
    from lm.sweeps.throughput import measure_variants
    from lm.training.signals import Signals

    say = progress.say
    with log_to(progress.say), Signals(say) as signals:
        tuning = tuning_runs({name: v.grid for name, v in variants.items()}, plan.tuning_seeds)
        failed = train("tuning", tuning, variants, results, together, say, signals)
        final = []
        for name, v in variants.items():
            if any(("tuning", *run) not in results.found for run in tuning if run[0] == name):
                continue  # its tuning failed or was stopped; the others go on
            rate = choose(results, record, name)
            edge = ", at the edge of its grid" if at_edge(v.grid, rate) else ""
            say(f"{name}: best learning rate {rate:g}{edge}")
            final += final_runs(results, record, name)
        if not signals.received:
            failed += train("final", final, variants, results, together, say, signals)
        while not (signals.received or failed or results.speeds):
            with results.claim("speeds") as mine:
                if mine and not results.speeds:
                    say("measuring the speeds of the variants beside each other")
                    pairs = {name: (v.config, v.corpus) for name, v in variants.items()}
                    results.set_speeds(measure_variants(pairs, plan.sweep.baseline, together))
                    # What a cohort of other members left unfinished.
                    shutil.rmtree(results.workdir / "cohorts", ignore_errors=True)
            time.sleep(0 if results.speeds else 1)
    if signals.received:
        say("stopped; the same command goes on")
        return 128 + signals.received
    if failed:
        say(f"{failed} cohorts of runs failed; the same command tries them again")
        say(f"without them: python -m lm.report {results.workdir}")
        return 1
    for notice in identical(results, list(variants)):
        say(f"NOTICE: {notice}")
    say(f"finished; now: python -m lm.report {results.workdir}")
    return 0


def train(phase: str, members, variants, results: Results, together, say, signals) -> int:
    """Train what is missing of a phase, runs of one program together; returns how many cohorts failed.

    Other processes may be at the same sweep: each takes what none of them has, and waits for theirs at the end.
    """
    import jax

    from lm.sweeps.stacked import group_by_program
    from lm.training.progress import duration

    configs = {m: variants[m[0]].member(m[1], m[2]) for m in members}
    cohorts = group_by_program(configs, together * jax.device_count())
    began, made, failed, waits = time.monotonic(), 0, [], False

    def unmade(keys):
        return [key for key in keys if (phase, *key) not in results.found]

    while todo := [keys for keys in cohorts if unmade(keys) and keys not in failed]:
        before = made + len(failed)
        for place, keys in enumerate(todo):
            with results.claim(digest([phase, keys])) as mine:
                if signals.received:
                    return len(failed)
                if not (mine and unmade(keys)):
                    continue
                ahead = (time.monotonic() - began) / max(made, 1) * (len(todo) - place)
                ahead = f", {duration(ahead)} left of the {phase} runs" if made else ""
                names = ", ".join(sorted({name for name, _, _ in keys}))
                here = f"{phase} {cohorts.index(keys) + 1}/{len(cohorts)}"
                say(f"{here}: {len(unmade(keys))} runs of {names}{ahead}")
                try:
                    train_cohort(phase, unmade(keys), configs, variants, results, signals)
                    made += 1
                except Exception as error:  # whatever ends these runs must not keep the others from running
                    why = f"{type(error).__name__}: {str(error)[:500]}"
                    say(f"{here} failed: {why}")
                    results.fail(digest([phase, keys]), [(phase, *key) for key in keys], why)
                    failed.append(keys)
        if made + len(failed) == before:
            if not waits:
                say(f"waiting for {len(todo)} cohorts of runs that other processes train")
            waits = True
            time.sleep(1)
            results.reload()
    return len(failed)


def train_cohort(phase: str, keys, configs, variants, results: Results, signals) -> None:
    """Train runs of one program, and take down what they come to unless a signal stops them."""
    import jax

    from lm.sweeps.stacked import StackedRuns

    carried = [variants[v].carried[seed] for v, _, seed in keys if variants[v].carried]
    share = -(-len(keys) // jax.device_count())
    # What was saved fits the same members on as many devices; any others start anew.
    name = f"{phase}-{digest([keys, share, jax.device_count()])}"
    directory, corpus = results.workdir / "cohorts" / name, variants[keys[0][0]].corpus
    try:
        runs = StackedRuns(
            [configs[k] for k in keys], corpus, directory, runs_per_device=share, stream=sys.stdout, warm_starts=carried
        )
        found = runs.train(signals)
        if found is None:
            return
    except Exception:
        shutil.rmtree(directory, ignore_errors=True)  # so that what was saved is not what fails again
        raise
    about = [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys]
    results.add(name, [a | r for a, r in zip(about, found, strict=True)])
    shutil.rmtree(directory, ignore_errors=True)


def digest(value) -> str:
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
