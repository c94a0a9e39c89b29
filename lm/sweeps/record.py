"""sweep.json: what determines the runs of a sweep, and all that its report needs besides them."""

import contextlib
import hashlib
import time
from pathlib import Path

from lm.config import Config, to_dict
from lm.config.values import short
from lm.errors import TemporaryError, UserError
from lm.files import is_file_name, lock, read_json, to_json, write_text
from lm.sweeps.declare import Sweep

SWEEP = "sweep.json"
ADVICE = "restore it, or use another --workdir"


def sweep_record(plan, variants: dict, start: dict) -> dict:
    """Return the content of sweep.json for this start.

    Args:
        plan: the `lm.sweeps.plan.Plan`.
        variants: by full name, its `lm.sweeps.variants.Variant`s.
        start: this process; see `lm.workdir.provenance.describe_start`, with its devices.
    """
    from lm.baselines.ngrams import unigram_loss

    sweep = plan.sweep
    described = {
        name: {
            "arm": v.plan.arm,
            "cell": v.plan.cell,
            "changes": {key: str(value) for key, value in v.plan.changes.items()},
            "tune": {key: list(values) for key, values in v.plan.lists.items()},
            "seeds": list(v.seeds),
            "tuning_seeds": list(v.tuning_seeds),
            "n_params": v.n_params,
            "flops_per_token": v.flops,
            "tokens": v.tokens,
            "warm_starts": {str(seed): w.checksum() for seed, w in v.warm_starts.items()},
            "data": {
                "name": v.corpus.name,
                "fingerprint": v.corpus.fingerprint,
                "prepared": v.corpus.record,
                "sources": {p.name: v.corpus.record[p.name]["fingerprint"] for p in v.corpus.split("test").parts},
                "notices": list(v.corpus.notices),
                "test_bytes_per_token": v.corpus.split("test").bytes_per_token,
                "unigram": {s: unigram_loss(v.corpus, s, v.config.model.vocab_size) for s in ("validation", "test")},
            },
            "config": to_dict(v.config),
        }
        for name, v in variants.items()
    }
    return {
        "name": plan.name,
        "budget": plan.budget_name,
        "question": sweep.question,
        "background": plan.background,
        "base": sweep.base,
        "baseline": sweep.baseline,
        "axis": _axis(sweep),
        "cells": list(sweep.cells),
        "comparisons": [list(pair) for pair in plan.comparisons],
        "placebos": [list(pair) for pair in plan.placebos],
        "margin": float(sweep.margin),
        "tune": list(sweep.lists),
        "values": {key: str(value) for key, value in (sweep.values | plan.budget.values).items()},
        "variants": described,
        "starts": [start],
    }


def _axis(sweep: Sweep) -> str | None:
    """Return what the cells are called, if there are several: sizes, texts, or cells if they are both."""
    if len(sweep.cells) == 1:
        return None
    return "cell" if sweep.sizes and sweep.texts else "size" if sweep.sizes else "text"


def _checksum(record: dict) -> str:
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(to_json(content).encode()).hexdigest()


def read_record(workdir: Path) -> dict:
    """Read sweep.json.

    Raises:
        UserError: the file is missing or corrupted.
    """
    path = workdir / SWEEP
    try:
        record = read_json(path, {"sha256": str}, ADVICE)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{workdir} holds no sweep ({SWEEP}); give a directory of python -m lm.sweep") from None
    if record["sha256"] != _checksum(record):
        raise UserError(f"{path} is corrupted: its content differs from its checksum; {ADVICE}")
    return record


def without_cells(record: dict, left_out: list[str]) -> dict:
    """Return the record of a sweep as if it had not these cells, which are named under "unfinished"."""
    cells = [cell for cell in record["cells"] if cell not in left_out]
    variants = {name: about for name, about in record["variants"].items() if about["cell"] in cells}
    pairs = {key: [p for p in record[key] if set(p) <= variants.keys()] for key in ("comparisons", "placebos")}
    axis = record["axis"] if len(cells) > 1 else None
    return record | pairs | {"axis": axis, "cells": cells, "variants": variants, "unfinished": left_out}


def open_sweep(workdir: Path, record: dict, configs: dict[str, Config]) -> dict:
    """Create a sweep's directory, or check that it holds this sweep, and append this start to sweep.json.

    Args:
        workdir: the directory.
        record: what `sweep_record` returned.
        configs: by variant, its resolved config.

    Returns:
        The record with all starts.

    Raises:
        UserError: the directory holds something else or cannot be created.
    """
    if not is_file_name(record["name"]):
        name = short(record["name"])
        raise UserError(f"--config: the file's name {name} may have letters, digits and _ . + - only; rename it")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be created: {error.strerror}") from None
    with wait_for_lock(workdir):
        others = sorted(p.name for p in workdir.iterdir() if not p.name.startswith("."))
        old = read_record(workdir) if SWEEP in others else None
        if old is None and others:
            raise UserError(f"--workdir {workdir} is not empty ({others[0]}) and holds no sweep; use a new directory")
        if old is not None and (found := differences(old, record, configs)):
            raise UserError(f"--workdir {workdir} holds another sweep; use another --workdir:", *found)
        record = record | {"starts": [*(old["starts"] if old else []), *record["starts"]]}
        write_text(workdir / SWEEP, to_json(record | {"sha256": _checksum(record)}, indent=1) + "\n")
    return record


def wait_for_lock(workdir: Path) -> contextlib.AbstractContextManager:
    """Lock the directory; other processes of the same sweep hold the lock for a moment at a time."""
    for _ in range(100):
        with contextlib.suppress(TemporaryError):
            return lock(workdir)
        time.sleep(0.1)
    return lock(workdir)


def differences(old: dict, record: dict, configs: dict[str, Config]) -> list[str]:
    """Return the differences, a line each, between the sweep of a sweep.json and that of `record` and `configs`."""
    from lm.workdir.config_changes import compare_configs

    fixed = ("name", "budget", "baseline", "comparisons", "margin", "placebos", "tune")
    found = [f"  {key}: {old[key]} -> {record[key]} (sweep -> now)" for key in fixed if old[key] != record[key]]
    if old["variants"].keys() != record["variants"].keys():
        return [*found, f"  variants: {', '.join(old['variants'])} -> {', '.join(record['variants'])} (sweep -> now)"]
    for name, now in record["variants"].items():
        was = old["variants"][name]
        lines = compare_configs(was["config"], configs[name])[0]
        pairs = {key: (was[key], now[key]) for key in ("tune", "seeds", "tuning_seeds", "tokens", "warm_starts")}
        pairs["data"] = was["data"]["fingerprint"], now["data"]["fingerprint"]
        for key in ("every", "max_batches", "batch_size", "probes"):  # they decide what is evaluated and when
            pairs[f"config.eval.{key}"] = tuple(_listed(x["config"]["eval"].get(key)) for x in (was, now))
        pairs["config.train.on_spike"] = tuple(x["config"]["train"].get("on_spike", "none") for x in (was, now))
        lines += [f"{key}: {old} -> {new} (sweep -> now)" for key, (old, new) in pairs.items() if old != new]
        found += [f"  variant {name!r}: {line}" for line in dict.fromkeys(lines)]
    return found


def _listed(value):
    return list(value) if isinstance(value, tuple) else value  # as JSON has it


def read_failures(workdir: Path) -> dict[str, str]:
    """Return by variant the last error of its runs that failed. Damaged files are left out."""
    found: dict[str, str] = {}
    for path in sorted((workdir / "failed").glob("*.json")):
        with contextlib.suppress(UserError, OSError):
            failure = read_json(path, {"variants": [str], "error": str})
            found |= dict.fromkeys(failure["variants"], failure["error"])
    return found
