"""A sweep's directory: its description (sweep.json), the finished runs (results/), and the choice of learning rates."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm.baselines.ngrams import unigram_loss
from lm.config import Config, to_dict
from lm.data.entropy_floor import best_loss_in_windows
from lm.errors import TemporaryError, UserError
from lm.files import lock, to_json, write_text
from lm.sweeps.design.placebo import placebo_name
from lm.sweeps.design.search import search_record, summary
from lm.sweeps.design.seeds import Seeds, count, first_seeds, seeds_from_json, seeds_of, seeds_to_json
from lm.sweeps.design.spec import SweepPlan
from lm.sweeps.storage.records import read_failure, read_runs, read_speeds, read_sweep, with_checksum
from lm.workdir.config_changes import compare_configs
from lm.workdir.provenance import describe_start

SPEEDS = ("speeds",)  # the key of a failed speed measurement; other failures have the keys of runs
STUCK = 0.95  # a run that ends above this fraction of the unigram baseline's loss is stuck


def sweep_record(plan: SweepPlan, variants: dict, device: str) -> dict:
    """Return the contents of sweep.json for this start: all that determines the runs, and all that the report needs.

    Args:
        plan, variants: the sweep, and by name its resolved `lm.sweeps.training.variants.Variant`s.
        device: the number and kind of the devices, such as "2 x cpu".
    """
    described = {
        name: {
            "changes": {key: str(value) for key, value in plan.sweep.variants[name].items()},
            "grid": list(v.grid),
            "rate_from": v.rate_from,
            "n_params": v.n_params,
            "flops_per_token": v.flops,
            "without_embeddings": dict(zip(("n_params", "flops_per_token"), v.without_embeddings, strict=True)),
            "fingerprint": v.fingerprint,
            "warm_starts": {str(seed): w.checksum() for seed, w in v.warm_starts.items()},
            "data": {
                "name": v.corpus.name,
                "fingerprint": v.corpus.fingerprint,
                "notices": list(v.corpus.notices),
                "test_bytes_per_token": v.corpus.split("test").bytes_per_token,
                "best_test_loss": best_loss_in_windows(v.corpus.split("test"), v.config.train.seq_len),
                "unigram": {s: unigram_loss(v.corpus, s, v.config.model.vocab_size) for s in ("validation", "test")},
            },
            "config": to_dict(v.config),
        }
        for name, v in variants.items()
    }
    return {
        "name": plan.name,
        "budget": plan.budget_name,
        "baseline": plan.sweep.baseline,
        "comparisons": [list(pair) for pair in plan.sweep.comparisons],
        "margin": float(plan.sweep.margin),
        "tuning_seeds": seeds_to_json(plan.tuning_seeds),
        "seeds": seeds_to_json(plan.seeds),
        "looks": list(plan.looks),
        "placebo": placebo_name(plan.sweep) if plan.sweep.placebo else None,
        "question": plan.sweep.question,
        "background": plan.background,
        "base": plan.sweep.base,
        "values": {key: str(value) for key, value in (plan.sweep.values | plan.budget.values).items()},
        "sizes": list(plan.sweep.sizes),
        "texts": list(plan.sweep.texts),
        "search": search_record(plan.sweep.search, plan.trials),
        "variants": described,
        "starts": [describe_start() | {"device": device}],
    }


def keep_seeds(plan: SweepPlan, workdir: Path) -> SweepPlan:
    """Return the plan with the seeds that an existing directory of this sweep lists; older versions chose others."""
    path = workdir / "sweep.json"
    old = read_sweep(path) if path.exists() else None
    if old is None or _counts(old["seeds"], old["tuning_seeds"]) != _counts(plan.seeds, plan.tuning_seeds):
        return plan  # a new sweep, or another one, which `open_sweep` refuses
    if isinstance(old["seeds"], dict) and old["seeds"].keys() != plan.sweep.sizes.keys():
        return plan
    return dataclasses.replace(plan, recorded=(seeds_from_json(old["seeds"]), seeds_from_json(old["tuning_seeds"])))


def _counts(*seeds: Seeds) -> list[int]:
    return [count(found) for found in seeds]


def open_sweep(workdir: Path, record: dict, configs: dict[str, Config]) -> None:
    """Create a sweep's directory, or check that it holds this sweep, and append this start to sweep.json.

    Args:
        workdir: the directory.
        record: what `sweep_record` returned.
        configs: by variant, its resolved config.

    Raises:
        UserError: the directory holds something else or cannot be created.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be created: {error.strerror}") from None
    with _wait_for_lock(workdir):
        path = workdir / "sweep.json"
        old = read_sweep(path) if path.exists() else None
        others = [p.name for p in workdir.iterdir() if not p.name.startswith(".") and p.name != "sweep.json"]
        if old is None and others:
            raise UserError(f"--workdir {workdir} is not empty ({others[0]}) and holds no sweep; use a new directory")
        if old is not None and (found := differences(old, record, configs)):
            raise UserError(f"--workdir {workdir} holds another sweep; use another --workdir:", *found)
        record = record | {"starts": [*(old["starts"] if old else []), *record["starts"]]}
        write_text(path, to_json(with_checksum(record), indent=1) + "\n")


def _wait_for_lock(workdir: Path):
    """Lock the directory; other processes that start the same sweep hold the lock for a moment."""
    for _ in range(100):
        with contextlib.suppress(TemporaryError):
            return lock(workdir)
        time.sleep(0.1)
    return lock(workdir)


def differences(old: dict, record: dict, configs: dict[str, Config]) -> list[str]:
    """Return the differences, a line each, between the sweep of a sweep.json and that of `record` and `configs`."""
    fixed = ("name", "budget", "baseline", "comparisons", "margin", "placebo", "tuning_seeds", "seeds", "looks")
    found = [f"  {key}: {old[key]} -> {record[key]} (sweep -> now)" for key in fixed if old[key] != record[key]]
    searches = old.get("search"), record.get("search")  # sweeps of older versions have none
    if searches[0] != searches[1]:
        found.append("  search: {} -> {} (sweep -> now)".format(*map(summary, searches)))
    if old["variants"].keys() != record["variants"].keys():
        return [*found, f"  variants: {', '.join(old['variants'])} -> {', '.join(record['variants'])} (sweep -> now)"]
    for name, now in record["variants"].items():
        was = old["variants"][name]
        lines = compare_configs(was["config"], configs[name])[0]
        lines += [
            f"{what}: {before} -> {after} (sweep -> now)"
            for what, before, after in (
                ("config.train.steps", was["config"]["train"]["steps"], now["config"]["train"]["steps"]),
                *([] if record.get("search") else [("learning rates", was["grid"], now["grid"])]),
                ("learning rate from", was.get("rate_from"), now["rate_from"]),
                ("config.eval", _evaluation(was), _evaluation(now)),
                ("initial parameters", was.get("warm_starts", {}), now["warm_starts"]),
                ("data", was["data"]["fingerprint"], now["data"]["fingerprint"]),
            )
            if before != after
        ]
        found += [f"  variant {name!r}: {line}" for line in lines]
    return found


def _evaluation(variant: dict) -> dict:
    """Return the config keys that decide what is evaluated and when."""
    return {key: variant["config"]["eval"][key] for key in ("every", "max_batches", "batch_size")}


class Results:
    """The finished runs of a sweep, shared by the processes that train it.

    A corrupted file is renamed to NAME.corrupted with a warning, and its runs are trained again.

    Args:
        workdir: the sweep's directory.
        warn: called with each warning.

    Attributes:
        runs: the results of each finished run, by (phase, variant, learning rate, seed); phase is "tuning" or "final".
        speeds: what lm.sweeps.training.throughput.measure_variants returned; None before the measurement.
    """

    def __init__(self, workdir: Path, warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr)):
        self.workdir, self.runs, self._read, self._warn = workdir, {}, set(), warn
        self._old_failures = set(self._failure_files())
        self.reload()

    def reload(self) -> None:
        """Read what other processes have finished."""
        self.speeds = self._intact(self.workdir / "speeds.json", read_speeds)
        for path in sorted((self.workdir / "results").glob("*.json")):
            if path.name not in self._read and (runs := self._intact(path, read_runs)) is not None:
                self._remember(runs)
                self._read.add(path.name)

    def _intact(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """Read a file; return None if it does not exist, or if it is corrupted, after renaming it."""
        try:
            return read(path)
        except FileNotFoundError:
            return None
        except UserError as error:
            aside = path.with_name(f"{path.name}.corrupted")
            with contextlib.suppress(OSError):
                path.rename(aside)
            self._warn(f"WARNING: {error} (renamed to {aside.name})")
            return None

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Try to lock the unit of work of this name; yields whether it succeeded, with the results reloaded if so."""
        directory = self.workdir / ".claims" / name  # never deleted: that would break the lock of another process
        directory.mkdir(parents=True, exist_ok=True)
        try:
            held = lock(directory)
        except TemporaryError:
            yield False
            return
        with held:
            self.reload()
            yield True

    def set_speeds(self, speeds: dict) -> None:
        """Save what lm.sweeps.training.throughput.measure_variants returned."""
        write_text(self.workdir / "speeds.json", to_json(with_checksum(speeds)) + "\n")
        self.speeds = speeds

    def add(self, name: str, runs: list[dict]) -> None:
        """Save finished runs in results/NAME.json."""
        (self.workdir / "results").mkdir(exist_ok=True)
        write_text(self.workdir / "results" / f"{name}.json", to_json([with_checksum(run) for run in runs]) + "\n")
        self._remember(runs)

    def add_failure(self, name: str, keys: list[tuple], error: str) -> None:
        """Save the error of runs with these keys (as in `runs`, or SPEEDS); reports show it until the runs finish."""
        with contextlib.suppress(OSError):  # a full disk must not stop the other runs
            (self.workdir / "failed").mkdir(exist_ok=True)
            write_text(self.workdir / "failed" / f"{name}.json", to_json({"runs": keys, "error": error}) + "\n")

    def failures(self, *, new: bool = False) -> dict[tuple, str]:
        """Return the latest error of each run that failed, by key.

        Args:
            new: only those that any process has saved since this object was made.
        """
        files = [file for file in self._failure_files() if not (new and file in self._old_failures)]
        found = [self._intact(path, read_failure) for _, path in files]
        return {tuple(key): failure["error"] for failure in found if failure for key in failure["runs"]}

    def _failure_files(self) -> list[tuple[int, Path]]:
        """Return the files of failures with the times at which they were written, the latest last."""
        return sorted((path.stat().st_mtime_ns, path) for path in (self.workdir / "failed").glob("*.json"))

    def _remember(self, runs: list[dict]) -> None:
        for run in runs:
            self.runs[run["phase"], run["variant"], run["learning_rate"], run["seed"]] = run


def ordered(runs: dict[tuple, dict], record: dict) -> dict[tuple, dict]:
    """Return runs by variant in the order of the sweep, then tuning before final runs, then by learning rate and seed.

    The files of results/ are named by hashes that depend on the number of devices.
    """
    variants = list(record["variants"])
    keys = sorted(runs, key=lambda key: (variants.index(key[1]), key[0] == "final", *key[2:]))
    return {key: runs[key] for key in keys}


def tuning_runs(grids: dict[str, tuple], seeds: Seeds) -> list[tuple[str, float, int]]:
    """Return (variant, rate, seed) of all tuning runs; a variant with one learning rate needs none."""
    tuned = {name: grid for name, grid in grids.items() if len(grid) > 1}
    return [(name, rate, seed) for name, grid in tuned.items() for rate in grid for seed in seeds_of(seeds, name)]


def final_runs(results: Results, record: dict, variant: str, seeds: Seeds) -> list[tuple[str, float, int]]:
    """Return (variant, rate, seed) of a tuned variant's runs on fresh seeds: at its best rate and the neighbors.

    The best trial of a random search has no neighbors.
    """
    best = best_rate(results, record, variant)
    rates = [best] if record.get("search") else neighbors(record["variants"][variant]["grid"], best)
    return [(variant, rate, seed) for rate in rates for seed in seeds_of(seeds, variant)]


def missing_runs(results: Results, record: dict, n_seeds: dict[str, int]) -> dict[str, set[tuple]]:
    """Return by variant the keys of the runs that are not finished. Final runs are counted once tuning is complete.

    Args:
        results, record: the sweep.
        n_seeds: by variant, the number of fresh seeds that it needs; see `lm.sweeps.analysis.looks.seeds_needed`.
    """
    found = {}
    for name, n in n_seeds.items():
        tuned = rate_from(record, name) or name
        grid = record["variants"][tuned]["grid"]
        wanted = [("tuning", *run) for run in tuning_runs({tuned: grid}, record["tuning_seeds"])]
        if results.runs.keys() >= set(wanted):
            wanted = [("final", *run) for run in final_runs(results, record, name, first_seeds(record["seeds"], n))]
        if missing := set(wanted) - results.runs.keys():
            found[name] = missing
    return found


def stuck_above(record: dict, variant: str, split: str) -> float:
    """Return the loss on "validation" or "test" above which a run of the variant counts as stuck."""
    return STUCK * record["variants"][variant]["data"]["unigram"][split]


class TuningResult(NamedTuple):
    """The tuning runs of a variant at one learning rate."""

    n_diverged: int
    n_stuck: int
    loss: float  # mean validation loss of the runs that learned, else of the stuck ones; infinite if all diverged


def tuning_result(results: Results, record: dict, variant: str, rate: float) -> TuningResult:
    """Summarize the tuning runs of a variant at one learning rate."""
    seeds = seeds_of(record["tuning_seeds"], variant)
    losses = [results.runs["tuning", variant, rate, seed]["val_loss"] for seed in seeds]
    finite = [loss for loss in losses if loss is not None]
    learned = [loss for loss in finite if loss <= stuck_above(record, variant, "validation")]
    used = learned or finite
    mean = math.fsum(used) / len(used) if used else math.inf
    return TuningResult(losses.count(None), len(finite) - len(learned), mean)


def best_rate(results: Results, record: dict, variant: str) -> float:
    """Return the learning rate with the fewest diverged or stuck tuning runs; among those, the lowest loss.

    A variant without tuning runs uses the best rate of `rate_from`, scaled: the one at the same index of its own grid.
    """
    grid = record["variants"][variant]["grid"]
    if len(grid) == 1:
        return grid[0]
    if tuned := rate_from(record, variant):
        return grid[record["variants"][tuned]["grid"].index(best_rate(results, record, tuned))]

    def rank(rate: float) -> tuple[int, int, float]:
        t = tuning_result(results, record, variant, rate)
        return t.n_diverged + t.n_stuck, t.n_diverged, t.loss

    return min(grid, key=rank)


def rate_from(record: dict, variant: str) -> str | None:
    """Return the variant whose best learning rate this one uses, scaled; None if it is tuned itself."""
    return record["variants"][variant].get("rate_from")


def at_edge(grid, rate: float) -> bool:
    """Return whether the rate is the first or last of its grid, so that a better one may lie beyond.

    >>> at_edge([0.1, 0.2, 0.4], 0.4), at_edge([0.1], 0.1)
    (True, False)
    """
    return len(grid) > 1 and rate in (grid[0], grid[-1])


def neighbors(grid, rate: float) -> list[float]:
    """Return the rate and its neighbors in the grid.

    >>> neighbors([0.1, 0.2, 0.4], 0.1)
    [0.1, 0.2]
    """
    i = grid.index(rate)
    return list(grid[max(0, i - 1) : i + 2])
