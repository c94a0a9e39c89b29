"""An ablation: python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick

Tunes the learning rate of every variant on seeds of their own, trains the best rate and its neighbours on fresh
seeds, and leaves what `python -m lm.report` draws its tables and pictures from.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import shutil
import sys
import time
from pathlib import Path

from lm import runs, sweep_file
from lm.config import Config, to_dict
from lm.errors import UserError
from lm.files import to_json, write_text
from lm.sweep_file import Plan

EPILOG = """\
examples:
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --dry-run
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick
  python -m lm.report sweeps/swiglu_vs_silu-quick

The same command, after a kill at any moment, finishes what is missing. Budgets: "quick" proves the machinery and makes
no claim; "full" does.

exit codes: 0 finished; 1 some runs failed, the same command tries them again; 2 a mistake in what was asked;
130 (Ctrl-C) and 143 (SIGTERM) stopped, the same command goes on.
"""


def main(argv: list[str] | None = None) -> int:
    a = command_line(argv)
    try:
        plan = sweep_file.load(a.config, a.budget)
        return sweep(plan, Path(a.workdir or f"sweeps/{plan.name}-{a.budget}"), a.together, dry_run=a.dry_run)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
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
    parser.add_argument("--budget", choices=sweep_file.BUDGETS, default="quick", help="how much to spend (%(default)s)")
    parser.add_argument("--workdir", metavar="DIR", help="where the sweep lives (sweeps/NAME-BUDGET)")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and what they cost, and stop")
    parser.add_argument(
        "--together", type=int, metavar="N", help="runs vectorized on each device (what its memory holds; on CPU 1)"
    )
    return parser.parse_args(argv)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant with its config resolved, its data, and what it costs; `config` has the first rate of the grid."""

    config: Config
    corpus: object
    grid: tuple[float, ...]
    n_params: int
    flops: float
    identity: str

    def member(self, rate: float, seed: int) -> Config:
        return dataclasses.replace(
            self.config,
            optimizer=dataclasses.replace(self.config.optimizer, learning_rate=rate),
            train=dataclasses.replace(self.config.train, seed=seed),
        )


def sweep(plan: Plan, workdir: Path, together: int | None, *, dry_run: bool) -> int:
    """A whole sweep; returns the exit code."""
    jax = start_jax(plan)
    from lm.metrics import Progress

    progress = Progress(plan.configs[plan.sweep.baseline].train.steps, sys.stdout)
    say = progress.say
    variants = prepare(plan, say)
    say(describe(plan, variants))
    if dry_run:
        say(estimate(plan, variants))
        return 0
    record = describe_sweep(plan, variants, jax)
    with start(workdir, record):
        say(f"{workdir}  device {jax.device_count()} x {jax.devices()[0].device_kind}")
        return carry_out(plan, variants, Results(workdir), together, progress)


def start_jax(plan: Plan):
    """Import jax; a CPU becomes one device for each of its cores, so that as many runs train at once."""
    import os

    from lm.train import start_jax

    jax = start_jax(plan.configs[plan.sweep.baseline])
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    return jax


# ---- From the plan to runs that differ -------------------------------------------------------------------------------


def prepare(plan: Plan, say) -> dict[str, Variant]:
    """The variants, resolved and matched; raises UserError for data that is not there and variants that do nothing."""
    from lm import data, flops, identity, parameters
    from lm.train import check_with_data

    corpora, resolved, problems = {}, {}, []
    for name, config in plan.configs.items():
        key = (config.data, config.train.seq_len)
        if key not in corpora:
            corpora[key] = data.prepare(config.data, seq_len=config.train.seq_len, say=say)
        try:
            resolved[name] = check_with_data(config, corpora[key]), corpora[key]
        except UserError as error:
            problems += [f"variant {name!r}: {problem}" for problem in error.problems]
        if missing := [split for split in ("validation", "test") if split not in corpora[key].splits]:
            problems.append(f"variant {name!r}: {corpora[key].name} has no {missing[0]} split, which a sweep needs")
    if problems:
        raise UserError(*problems)
    for name, match in plan.matches.items():
        config, corpus = resolved[name]
        resolved[name] = matched(config, match, resolved[match.variant][0]), corpus
    variants = {}
    for name, (config, corpus) in resolved.items():
        n_params = parameters.count(parameters.parameter_table(config.model))
        cost = flops.flops_per_token(config.model, config.train.seq_len)
        variants[name] = Variant(config, corpus, plan.grids[name], n_params, cost, identity.identity(config, corpus))
    check_that_they_differ(variants)
    return variants


def matched(config: Config, match: sweep_file.Match, target: Config) -> Config:
    """The config with the width whose parameters or FLOPs a token are nearest to the target's. Both are linear in it."""
    from lm import flops, parameters

    def with_width(d_ff: int) -> Config:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=d_ff))

    def measure(c: Config) -> float:
        if match.what == "flops":
            return flops.flops_per_token(c.model, c.train.seq_len)
        return parameters.count(parameters.parameter_table(c.model))

    one, two = measure(with_width(1)), measure(with_width(2))
    return with_width(max(1, 1 + round((measure(target) - one) / (two - one))))


def check_that_they_differ(variants: dict[str, Variant]) -> None:
    """Raises UserError if two variants are one experiment, grids of learning rates aside."""
    from lm.identity import differing_keys

    problems = []
    for (a, first), (b, second) in itertools.combinations(variants.items(), 2):
        if first.identity == second.identity:
            keys = differing_keys(first.config, second.config)
            reason = f"; {', '.join(keys)} {'differs' if len(keys) == 1 else 'differ'} and does nothing" if keys else ""
            problems.append(f"variants {a!r} and {b!r} are the same experiment{reason}")
    if problems:
        raise UserError(*problems)


# ---- What it will cost -----------------------------------------------------------------------------------------------


def describe(plan: Plan, variants: dict[str, Variant]) -> str:
    """The question and a table of the variants."""
    base = variants[plan.sweep.baseline]
    rows = [("variant", "parameters", "FLOPs/token", "learning rates", "changes")]
    for name, v in variants.items():
        changes = dict(plan.sweep.variants[name])
        if name in plan.matches:
            more = v.n_params - variants[plan.matches[name].variant].n_params
            match = plan.matches[name]
            changes["model.d_ff"] = f"{v.config.model.d_ff} ({match.what} of {match.variant!r}, {more:+,} parameters)"
        changes.pop(sweep_file.LEARNING_RATE, None)
        described = ", ".join(f"{key}={value}" for key, value in changes.items()) or "nothing: the base"
        grid = f"{v.grid[0]:g} to {v.grid[-1]:g} ({len(v.grid)})"
        rows.append((name, f"{v.n_params:,}", f"{v.flops:,.0f}", grid, described))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"question: {plan.sweep.question}",
        f"base: {plan.sweep.base}, data {base.corpus.name}, budget {plan.budget_name}",
    ]
    for *cells, last in rows:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "  " + last)
    t = base.config.train
    tuning = sum(len(v.grid) for v in variants.values()) * len(plan.tuning_seeds)
    final = sum(min(3, len(v.grid)) for v in variants.values()) * len(plan.seeds)
    lines.append(
        f"{tuning} runs to tune the learning rate ({len(plan.tuning_seeds)} seeds), then at most {final} of the best "
        f"rate and its neighbours ({len(plan.seeds)} fresh seeds); {t.steps} steps of {t.batch_size * t.seq_len:,} tokens each"
    )
    return "\n".join(lines)


def flops_of_runs(plan: Plan, variants: dict[str, Variant]) -> tuple[float, float]:
    """(tuning, final at most) floating-point operations of training, evaluations left out."""
    total = [0.0, 0.0]
    for v in variants.values():
        each = v.flops * v.config.train.steps * v.config.train.batch_size * v.config.train.seq_len
        total[0] += each * len(v.grid) * len(plan.tuning_seeds)
        total[1] += each * min(3, len(v.grid)) * len(plan.seeds)
    return total[0], total[1]


def estimate(plan: Plan, variants: dict[str, Variant]) -> str:
    """The cost on this machine, from a few timed steps of the baseline on every device."""
    import jax
    import numpy as np

    from lm.cohort import make_programs
    from lm.feeds import to_device, train_feed

    v = variants[plan.sweep.baseline]
    from lm.cohort import split_config

    program, values = split_config(v.config)
    programs, by_member, shared = make_programs(program, None)
    n, split = jax.device_count(), v.corpus.split("train")
    resident = jax.device_put(to_device(split, program.data.device_bytes), shared)
    k = min(program.train.steps_per_dispatch, program.train.steps)
    feed = train_feed(split, resident is not None, program, 0, k)
    stacked = jax.device_put(jax.tree.map(lambda a: np.stack([a] * n), feed), by_member)
    values = jax.device_put({name: np.full(n, value, np.float32) for name, value in values.items()}, by_member)
    states, seconds = programs.init(jax.device_put(np.zeros(n, np.uint32), by_member)), []
    for _ in range(3):
        began = time.monotonic()
        states, out = programs.steps(states, resident, stacked, values, np.int32(k))
        jax.block_until_ready(out)
        seconds.append(time.monotonic() - began)
    t = program.train
    rate = n * k * t.batch_size * t.seq_len * v.flops / min(seconds)
    tuning, final = flops_of_runs(plan, variants)
    return (
        f"training takes {tuning + final:.3g} FLOPs; at the {rate / 1e9:,.1f} GFLOP/s of the baseline here (measured "
        f"now) {(tuning + final) / rate / 60:,.0f} minutes, evaluations and compilation not counted"
    )


# ---- The directory ---------------------------------------------------------------------------------------------------


def describe_sweep(plan: Plan, variants: dict[str, Variant], jax) -> dict:
    """sweep.json: all that the runs follow from, and all that the report needs beside their results."""
    described = {
        name: {
            "changes": {key: str(value) for key, value in plan.sweep.variants[name].items()},
            "grid": list(v.grid),
            "n_params": v.n_params,
            "flops_per_token": v.flops,
            "identity": v.identity,
            "experiment_digest": runs.experiment_digest(v.config),
            "data": {"name": v.corpus.name, "fingerprint": v.corpus.fingerprint, "notices": list(v.corpus.notices)},
            "config": to_dict(v.config),
        }
        for name, v in variants.items()
    }
    fixed = {
        "name": plan.name,
        "budget": plan.budget_name,
        "baseline": plan.sweep.baseline,
        "comparisons": [list(pair) for pair in plan.sweep.comparisons],
        "tuning_seeds": list(plan.tuning_seeds),
        "seeds": list(plan.seeds),
        "experiments": {
            name: [d["experiment_digest"], d["data"]["fingerprint"], d["grid"]] for name, d in described.items()
        },
    }
    digest = hashlib.sha256(to_json(fixed).encode()).hexdigest()
    return {
        **fixed,
        "digest": digest,
        "question": plan.sweep.question,
        "base": plan.sweep.base,
        "variants": described,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "starts": [],
    }


def start(workdir: Path, record: dict):
    """Take the directory and record the sweep in it; raises UserError if it holds another sweep, or is in use."""
    workdir.mkdir(parents=True, exist_ok=True)
    taken = runs.lock(workdir)
    path = workdir / "sweep.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    others = [p.name for p in workdir.iterdir() if p.name not in (".lock", "sweep.json")]
    if old is None and others:
        taken.close()
        raise UserError(f"--workdir {workdir} holds something else ({others[0]}); give an empty or new directory")
    if old is not None and old["digest"] != record["digest"]:
        taken.close()
        parts = [
            k for k in ("name", "budget", "baseline", "comparisons", "tuning_seeds", "seeds") if old[k] != record[k]
        ]
        names = old["experiments"].keys() | record["experiments"].keys()
        parts += [f"variant {n!r}" for n in sorted(names) if old["experiments"].get(n) != record["experiments"].get(n)]
        raise UserError(f"--workdir {workdir} holds another sweep ({', '.join(parts)} differ); give another --workdir")
    record = record | {"starts": [*(old["starts"] if old else []), runs.describe_start()]}
    write_text(path, to_json(record, indent=1) + "\n")
    return taken


class Results:
    """The finished runs of a sweep by (phase, variant, learning rate, seed), in workdir/results."""

    def __init__(self, workdir: Path):
        self.workdir, self.found = workdir, {}
        for path in sorted((workdir / "results").glob("*.json")):
            self._take(json.loads(path.read_text(encoding="utf-8")))

    def _take(self, members: list[dict]) -> None:
        for member in members:
            self.found[member["phase"], member["variant"], member["learning_rate"], member["seed"]] = member

    def add(self, name: str, members: list[dict]) -> None:
        (self.workdir / "results").mkdir(exist_ok=True)
        write_text(self.workdir / "results" / f"{name}.json", to_json(members) + "\n")
        self._take(members)


# ---- The runs --------------------------------------------------------------------------------------------------------


def carry_out(plan: Plan, variants: dict[str, Variant], results: Results, together: int | None, progress) -> int:
    """Tuning, choice, fresh seeds; returns the exit code."""
    from lm.loop import Signals

    with Signals(progress.say) as signals:
        failed = 0
        tuning = [(n, r, s) for n, v in variants.items() for r in v.grid for s in plan.tuning_seeds]
        failed += train("tuning", tuning, variants, results, together, progress, signals)
        if not signals.received:
            chosen = {name: choose(results, name, v.grid, plan.tuning_seeds) for name, v in variants.items()}
            for name, rate in chosen.items():
                edge = (
                    " (the edge of its grid)"
                    if len(variants[name].grid) > 1 and rate in (variants[name].grid[0], variants[name].grid[-1])
                    else ""
                )
                progress.say(f"{name}: best learning rate {rate:g}{edge}")
            final = [(n, r, s) for n, v in variants.items() for r in around(v.grid, chosen[n]) for s in plan.seeds]
            failed += train("final", final, variants, results, together, progress, signals)
    if signals.received:
        progress.say("stopped; the same command goes on")
        return 128 + signals.received
    if failed:
        progress.say(f"{failed} cohorts of runs failed; the same command tries them again")
        return 1
    for notice in identical(results, list(variants)):
        progress.say(f"NOTICE: {notice}")
    progress.say(f"finished; now: python -m lm.report {results.workdir}")
    return 0


def train(phase: str, members, variants, results: Results, together, progress, signals) -> int:
    """Train what is missing of a phase, runs of one program together; returns how many cohorts failed."""
    import jax

    from lm.cohort import Cohort, cohorts_of, together_on_this_machine

    missing = [m for m in members if (phase, *m) not in results.found]
    if not missing:
        return 0
    configs = {m: variants[m[0]].member(m[1], m[2]) for m in missing}
    if together is None:
        biggest = max(missing, key=lambda m: variants[m[0]].n_params)
        together = together_on_this_machine(configs[biggest], variants[biggest[0]].corpus)
    cohorts = cohorts_of(configs, together and together * jax.device_count())
    failed = 0
    for number, keys in enumerate(cohorts, start=1):
        if signals.received:
            break
        names = sorted({name for name, _, _ in keys})
        progress.say(f"{phase} {number}/{len(cohorts)}: {len(keys)} runs of {', '.join(names)}")
        name = f"{phase}-{hashlib.sha256(to_json(keys).encode()).hexdigest()[:12]}"
        try:
            cohort = Cohort(
                [configs[k] for k in keys], variants[keys[0][0]].corpus, results.workdir / "cohorts" / name,
                together=together, stream=sys.stdout,
            )  # fmt: skip
            if not cohort.train(signals):
                break
        except Exception as error:  # whatever ends these runs must not keep the others from running
            progress.say(f"{phase} {number}/{len(cohorts)} failed: {type(error).__name__}: {str(error)[:500]}")
            failed += 1
            continue
        about = [{"phase": phase, "variant": v, "learning_rate": r, "seed": s} for v, r, s in keys]
        shared = {"seconds": cohort.seconds / len(keys), "together": len(keys)}
        results.add(name, [a | r | shared for a, r in zip(about, cohort.results(), strict=True)])
        shutil.rmtree(cohort.workdir)
    return failed


def choose(results: Results, variant: str, grid, seeds) -> float:
    """The rate with the smallest mean validation loss over the tuning seeds; a diverged run makes it infinite."""

    def mean(rate: float) -> float:
        losses = [results.found["tuning", variant, rate, seed]["val_loss"] for seed in seeds]
        return math.inf if None in losses else math.fsum(losses) / len(losses)

    return min(grid, key=mean)


def around(grid, rate: float) -> list[float]:
    """The rate and its neighbours in the grid."""
    i = grid.index(rate)
    return list(grid[max(0, i - 1) : i + 2])


def identical(results: Results, variants: list[str]) -> list[str]:
    """Pairs of variants whose runs at the same rates and seeds all ended with the same loss, to the last bit."""
    notices = []
    for a, b in itertools.combinations(variants, 2):
        ends = {n: {k[2:]: m["test_sums"] for k, m in results.found.items() if k[:2] == ("final", n)} for n in (a, b)}
        shared = [key for key in ends[a].keys() & ends[b].keys() if ends[a][key] is not None]
        if shared and all(ends[a][key] == ends[b][key] for key in shared):
            notices.append(f"{a!r} and {b!r} have identical losses for all seeds: check the switch")
    return notices


if __name__ == "__main__":
    sys.exit(main())
