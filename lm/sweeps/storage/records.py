"""The JSON files of a sweep's directory: their shapes, their checksums, and readers that check both."""

import hashlib
from pathlib import Path

from lm.config.values import short
from lm.errors import UserError
from lm.files import COUNT, check_shape, read_json, to_json
from lm.sweeps.design.axes import LEARNING_RATE
from lm.sweeps.design.search import BATCH_SIZE
from lm.sweeps.design.seeds import count
from lm.sweeps.design.spec import MARGIN

# Shapes; see `lm.files.read_json`.
_DATA = {"name": str, "fingerprint": str, "notices": [str], "unigram": {"validation": float, "test": float}}
_CONFIG = {
    "model": {"d_ff": COUNT},
    "optimizer": {"name": str, "schedule": str},
    "train": {"steps": COUNT, "batch_size": COUNT, "seq_len": COUNT},
    "eval": {"every": COUNT, "max_batches": COUNT, "batch_size": (COUNT, None)},
}
_VARIANT = {
    "changes": {str: str},
    "grid": [float],
    "n_params": COUNT,
    "flops_per_token": float,
    "data": _DATA,
    "config": _CONFIG,
}
_WITHOUT_EMBEDDINGS = {"n_params": COUNT, "flops_per_token": float}
_GIT = ({"commit": str, "dirty": bool}, None)
_START = {
    "time": str,
    "platform": str,
    "processor": str,
    "argv": [str],
    "versions": {str: (str, None)},
    "git": _GIT,
}
_SWEEP = {
    "name": str,
    "budget": str,
    "baseline": str,
    "comparisons": [[str]],
    "tuning_seeds": ([COUNT], {str: [COUNT]}),  # by size if there are sizes; older versions: the same for all
    "seeds": ([COUNT], {str: [COUNT]}),
    "question": str,
    "background": str,
    "base": str,
    "values": {str: str},
    "variants": {str: _VARIANT},
    "starts": [_START],
}
_RUN = {
    "phase": ("tuning", "final"),
    "variant": str,
    "learning_rate": float,
    "seed": COUNT,
    "status": ("finished", "diverged"),
    "diverged_at": (COUNT, None),
    "validation": [[float]],
    "val_loss": (float, None),
    "test_loss": (float, None),
    "test_sums": ([float], None),
    "test_counts": ([COUNT], None),
    "steps": COUNT,
    "seconds": float,
}
_PROVENANCE = {"host": str, "processor": str, "device": str, "git": _GIT}
_SPEEDS = {"alone": float, "at_once": COUNT, "variants": {str: float}, "quartiles": {str: [float]}}
_ATTEMPTS = {"attempts": COUNT, "step": (COUNT, None)}
_FAILURE = {"runs": [[(str, float)]], "error": str}

RERUN = "rerun the sweep to replace it"


def with_checksum(record: dict) -> dict:
    """Return a record with the checksum of its content as "sha256".

    >>> with_checksum({"loss": 2.5}) == with_checksum(with_checksum({"loss": 2.5}))
    True
    >>> with_checksum({"loss": 2.5})["sha256"] == with_checksum({"loss": 2.4})["sha256"]
    False
    """
    content = {key: value for key, value in record.items() if key != "sha256"}
    return content | {"sha256": hashlib.sha256(to_json(content).encode()).hexdigest()}


def _check(record: dict, path: Path, advice: str) -> None:
    """Raise UserError if the content differs from its checksum. Files of older versions have none."""
    if record.get("sha256", digest := with_checksum(record)["sha256"]) != digest:
        raise UserError(f"{path} is corrupted: its content differs from its checksum; {advice}")


def _check_key(record: dict, key: str, expected, path: Path, advice: str) -> None:
    """Raise UserError if the value of a key that files of older versions lack has another shape."""
    try:
        check_shape(record[key], expected, key)
    except ValueError as error:
        raise UserError(f"{path} is corrupted: {error}; {advice}") from None


def read_sweep(path: Path) -> dict:
    """Read sweep.json (see `lm.sweeps.storage.results.sweep_record`); raises UserError if it is corrupted."""
    advice = "restore it, or use another --workdir"
    record = read_json(path, _SWEEP, advice)
    _check(record, path, advice)
    if not _fit_sizes(record):
        raise UserError(f"{path} is corrupted: its seeds do not match its sizes; {advice}")
    n_seeds = count(record["seeds"])
    record = {"looks": [n_seeds], "placebo": None, "search": None} | record  # of older versions
    _check_key(record, "search", ({"space": {str: str}, "trials": [{LEARNING_RATE: float}]}, None), path, advice)
    if not _is_search_of(record):
        raise UserError(f"{path} is corrupted: its trials do not match its search or its variants; {advice}")
    looks = record["looks"]
    if not (isinstance(looks, list) and all(type(n) is int for n in looks) and _ends_at(looks, n_seeds)):
        raise UserError(f"{path} is corrupted: its looks do not match its seeds; {advice}")
    if record["placebo"] not in (None, *record["variants"]):
        raise UserError(f"{path} is corrupted: its placebo is not a variant; {advice}")
    for start in record["starts"]:  # older versions kept the device of the last start only
        start.setdefault("device", record.get("device"))
        _check_key(start, "device", str, path, advice)
    record.setdefault("margin", MARGIN)  # sweeps of older versions declare none
    if type(record["margin"]) not in (int, float) or not record["margin"] > 0:
        raise UserError(f"{path} is corrupted: its margin is {short(record['margin'])}, not above 0; {advice}")
    names = {record["baseline"], *(name for pair in record["comparisons"] for name in pair)}
    pairs_of_two = all(len(pair) == 2 for pair in record["comparisons"])
    pairs_of_two = pairs_of_two and bool(record["comparisons"] or record.get("sizes"))  # without, exponents are fitted
    if not (record["starts"] and n_seeds and pairs_of_two and names <= record["variants"].keys()):
        raise UserError(f"{path} is corrupted: its starts, seeds, comparisons or variants are incomplete; {advice}")
    if not all(variant["grid"] and variant["flops_per_token"] > 0 for variant in record["variants"].values()):
        raise UserError(f"{path} is corrupted: a variant has no learning rate or no FLOPs; {advice}")
    if not record["comparisons"]:  # older versions recorded less, but all of their sweeps had comparisons
        for variant in record["variants"].values():
            _check_key({"without_embeddings": None} | variant, "without_embeddings", _WITHOUT_EMBEDDINGS, path, advice)
            _check_key({"best_test_loss": None} | variant["data"], "best_test_loss", (float, None), path, advice)
    return record


def _is_search_of(record: dict) -> bool:
    """Return whether every trial has the keys of the space, and every grid is the learning rates of the trials."""
    search = record["search"]
    if search is None:
        return True
    rates = [trial[LEARNING_RATE] for trial in search["trials"]]
    sizes = [trial.get(BATCH_SIZE, 1) for trial in search["trials"]]
    return (
        all(trial.keys() == search["space"].keys() for trial in search["trials"])
        and all(variant["grid"] == rates for variant in record["variants"].values())
        and all(type(size) is int and size > 0 for size in sizes)
    )


def _fit_sizes(record: dict) -> bool:
    """Return whether the seeds are the same for all variants, or equally many for each size."""
    both = record["seeds"], record["tuning_seeds"]
    if not any(isinstance(seeds, dict) for seeds in both):
        return True
    sizes = record.get("sizes")
    by_size = isinstance(sizes, list) and sizes and all(isinstance(s, dict) and set(s) == set(sizes) for s in both)
    return bool(by_size) and all(len({len(own) for own in seeds.values()}) == 1 for seeds in both)


def _ends_at(looks: list[int], last: int) -> bool:
    """Return whether the numbers ascend from at least 1 to `last`."""
    return looks == sorted(set(looks)) and looks[:1] > [0] and looks[-1] == last


def read_runs(path: Path) -> list[dict]:
    """Read the finished runs of a file in results/; raises UserError if it is corrupted."""
    runs = read_json(path, [_RUN], RERUN)
    for i, run in enumerate(runs):
        _check(run, path, RERUN)
        run.setdefault("provenance", None)  # older versions did not record it
        _check_key(run, "provenance", (_PROVENANCE, None), path, RERUN)
        run.setdefault("seconds_of", None)
        _check_key(run, "seconds_of", ({str: float}, None), path, RERUN)
        measured = [run[key] is not None for key in ("val_loss", "test_loss", "test_sums", "test_counts")]
        blocks = len(run["test_sums"] or ()) == len(run["test_counts"] or ())
        points = all(len(point) == 2 for point in run["validation"])
        if measured != [run["status"] == "finished"] * 4 or not (blocks and points):
            raise UserError(f"{path} is corrupted: the losses of run {i} are incomplete; {RERUN}")
    return runs


def read_speeds(path: Path) -> dict:
    """Read speeds.json; raises UserError if it is corrupted."""
    speeds = read_json(path, _SPEEDS, RERUN)
    _check(speeds, path, RERUN)
    quartiles = speeds["quartiles"]
    if quartiles.keys() != speeds["variants"].keys() or any(len(pair) != 2 for pair in quartiles.values()):
        raise UserError(f"{path} is corrupted: the quartiles of a variant are missing; {RERUN}")
    return speeds


def read_failure(path: Path) -> dict:
    """Read the record of runs that failed; raises UserError if the file is corrupted."""
    return read_json(path, _FAILURE, RERUN)


def read_attempts(path: Path) -> dict:
    """Read the count of the processes that died in a group (see attempts.py); raises UserError if corrupted."""
    return read_json(path, _ATTEMPTS, RERUN)
