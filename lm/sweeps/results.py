"""A sweep's directory: what it is (sweep.json), which runs are finished (results/), and what was chosen from them."""

import contextlib
import itertools
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

from lm.config import Config, to_dict
from lm.data import unigram_loss
from lm.errors import UserError
from lm.files import lock, to_json, write_text
from lm.sweeps.spec import Plan
from lm.training import workdir as runs

STUCK = 0.95  # of the loss of counting tokens alone: a run that ends above it has hardly learned


def describe_sweep(plan: Plan, variants: dict, jax) -> dict:
    """sweep.json: all that the runs follow from, and all that the report needs beside their results."""
    described = {
        name: {
            "changes": {key: str(value) for key, value in plan.sweep.variants[name].items()},
            "grid": list(v.grid),
            "n_params": v.n_params,
            "flops_per_token": v.flops,
            "identity": v.identity,
            "carried": {str(seed): c.checksum() for seed, c in v.carried.items()},
            "data": {
                "name": v.corpus.name,
                "fingerprint": v.corpus.fingerprint,
                "notices": list(v.corpus.notices),
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
        "tuning_seeds": list(plan.tuning_seeds),
        "seeds": list(plan.seeds),
        "question": plan.sweep.question,
        "background": plan.background,
        "base": plan.sweep.base,
        "values": {key: str(value) for key, value in (plan.sweep.values | plan.budget.values).items()},
        "variants": described,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "starts": [],
    }


def start(workdir: Path, record: dict, configs: dict[str, Config]) -> None:
    """Record this start of the sweep in its directory; raises UserError if that holds another sweep."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be made: {error.strerror}") from None
    here = runs.describe_start()
    taken = _soon(workdir)
    try:
        _record(workdir, record, configs, here)
    finally:
        taken.release()


def _record(workdir: Path, record: dict, configs: dict[str, Config], here: dict) -> None:
    path = workdir / "sweep.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    others = [p.name for p in workdir.iterdir() if not p.name.startswith(".") and p.name != "sweep.json"]
    if old is None and others:
        raise UserError(f"--workdir {workdir} holds something else ({others[0]}); give an empty or new directory")
    if old is not None and (found := differences(old, record, configs)):
        raise UserError(f"--workdir {workdir} holds another sweep; give another --workdir:", *found)
    record = record | {"starts": [*(old["starts"] if old else []), here]}
    write_text(path, to_json(record, indent=1) + "\n")


def _soon(workdir: Path):
    """The directory's lock, which others that start the same sweep hold for a moment."""
    for _ in range(100):
        with contextlib.suppress(UserError):
            return lock(workdir)
        time.sleep(0.1)
    return lock(workdir)


def _measure(variant: dict) -> dict:
    """The keys that say what is evaluated and when."""
    return {key: variant["config"]["eval"][key] for key in ("every", "max_batches", "batch_size")}


def differences(old: dict, record: dict, configs: dict[str, Config]) -> list[str]:
    """What makes the sweep of one sweep.json another than that of `record`, whose variants have these configs."""
    fixed = ("name", "budget", "baseline", "comparisons", "tuning_seeds", "seeds")
    found = [f"  {key}: {old[key]} -> {record[key]} (sweep -> now)" for key in fixed if old[key] != record[key]]
    if old["variants"].keys() != record["variants"].keys():
        return [*found, f"  variants: {', '.join(old['variants'])} -> {', '.join(record['variants'])} (sweep -> now)"]
    for name, now in record["variants"].items():
        was = old["variants"][name]
        lines = runs.compare_configs(was["config"], configs[name])[0]
        lines += [
            f"{what}: {before} -> {after} (sweep -> now)"
            for what, before, after in (
                ("config.train.steps", was["config"]["train"]["steps"], now["config"]["train"]["steps"]),
                ("learning rates", was["grid"], now["grid"]),
                ("config.eval", _measure(was), _measure(now)),
                ("initial values", was["carried"], now["carried"]),
                ("data", was["data"]["fingerprint"], now["data"]["fingerprint"]),
            )
            if before != after
        ]
        found += [f"  variant {name!r}: {line}" for line in lines]
    return found


class Results:
    """The finished runs of a sweep by (phase, variant, learning rate, seed), in workdir/results."""

    def __init__(self, workdir: Path):
        self.workdir, self.found, self._read = workdir, {}, set()
        self.reload()

    def reload(self) -> None:
        """Take in what other processes have finished since."""
        speeds = self.workdir / "speeds.json"
        self.speeds = json.loads(speeds.read_text(encoding="utf-8")) if speeds.exists() else None
        for path in sorted((self.workdir / "results").glob("*.json")):
            if path.name not in self._read:
                self._take(json.loads(path.read_text(encoding="utf-8")))
                self._read.add(path.name)

    @contextlib.contextmanager
    def claim(self, name: str):
        """Whether the work of this name is this process's and no other's; what others have finished is then known."""
        directory = self.workdir / ".claims" / name  # which stays: a lock whose file is deleted is none
        directory.mkdir(parents=True, exist_ok=True)
        try:
            taken = lock(directory)
        except UserError:
            yield False
            return
        try:
            self.reload()
            yield True
        finally:
            taken.release()

    def set_speeds(self, speeds: dict) -> None:
        """What lm.sweeps.throughput.measure_variants found."""
        write_text(self.workdir / "speeds.json", to_json(speeds) + "\n")
        self.speeds = speeds

    def fail(self, name: str, keys: list[tuple], error: str) -> None:
        """Take down how these runs failed; it counts as long as they are missing."""
        with contextlib.suppress(OSError):  # a full disk must not keep other runs from being tried
            (self.workdir / "failed").mkdir(exist_ok=True)
            write_text(self.workdir / "failed" / f"{name}.json", to_json({"runs": keys, "error": error}) + "\n")

    def failures(self) -> dict[tuple, str]:
        """By the keys of runs how they failed the last time."""
        paths = sorted((self.workdir / "failed").glob("*.json"), key=lambda path: path.stat().st_mtime)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return {tuple(key): failure["error"] for failure in found for key in failure["runs"]}

    def _take(self, members: list[dict]) -> None:
        for member in members:
            self.found[member["phase"], member["variant"], member["learning_rate"], member["seed"]] = member

    def add(self, name: str, members: list[dict]) -> None:
        (self.workdir / "results").mkdir(exist_ok=True)
        write_text(self.workdir / "results" / f"{name}.json", to_json(members) + "\n")
        self._take(members)


def tuning_runs(grids: dict[str, tuple], seeds) -> list[tuple[str, float, int]]:
    """(variant, rate, seed) of the runs that choose the learning rates; a grid of one rate leaves nothing to choose."""
    return [(name, rate, seed) for name, grid in grids.items() if len(grid) > 1 for rate in grid for seed in seeds]


def stuck_above(record: dict, variant: str, split: str) -> float:
    """The loss on a split above which a run of the variant has hardly learned."""
    return STUCK * record["variants"][variant]["data"]["unigram"][split]


class Tuned(NamedTuple):
    """What the tuning seeds of a variant came to at one learning rate."""

    n_diverged: int
    n_stuck: int
    loss: float  # validation, mean of the seeds that learned; of those that got stuck where none did; else infinite


def tuned(results: Results, record: dict, variant: str, rate: float) -> Tuned:
    """record: sweep.json."""
    losses = [results.found["tuning", variant, rate, seed]["val_loss"] for seed in record["tuning_seeds"]]
    finite = [loss for loss in losses if loss is not None]
    learned = [loss for loss in finite if loss <= stuck_above(record, variant, "validation")]
    of = learned or finite
    return Tuned(losses.count(None), len(finite) - len(learned), math.fsum(of) / len(of) if of else math.inf)


def choose(results: Results, record: dict, variant: str) -> float:
    """The rate at which the fewest tuning seeds diverged or got stuck; of such, that of the lowest loss.

    A seed that got stuck has learned nothing, but is better than one that diverged.
    """
    grid = record["variants"][variant]["grid"]
    if len(grid) == 1:
        return grid[0]

    def rank(rate: float) -> tuple[int, int, float]:
        t = tuned(results, record, variant, rate)
        return t.n_diverged + t.n_stuck, t.n_diverged, t.loss

    return min(grid, key=rank)


def final_runs(results: Results, record: dict, variant: str) -> list[tuple[str, float, int]]:
    """(variant, rate, seed) of a tuned variant's runs on fresh seeds: the chosen rate and its neighbours."""
    rates = around(record["variants"][variant]["grid"], choose(results, record, variant))
    return [(variant, rate, seed) for rate in rates for seed in record["seeds"]]


def missing(results: Results, record: dict) -> dict[str, set[tuple]]:
    """By variant the keys of the runs that its plan lacks; those of fresh seeds are known once its tuning is done."""
    found = {}
    for name, described in record["variants"].items():
        wanted = [("tuning", *run) for run in tuning_runs({name: described["grid"]}, record["tuning_seeds"])]
        if results.found.keys() >= set(wanted):
            wanted = [("final", *run) for run in final_runs(results, record, name)]
        if lacking := set(wanted) - results.found.keys():
            found[name] = lacking
    return found


def at_edge(grid, rate: float) -> bool:
    """Whether a better rate may lie beyond the grid."""
    return len(grid) > 1 and rate in (grid[0], grid[-1])


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
