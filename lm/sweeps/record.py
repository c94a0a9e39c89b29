"""sweep.json: what determines the runs of a sweep, and all that its report needs besides them."""

import contextlib
import hashlib
import json
from pathlib import Path

from lm.config import flatten, to_dict
from lm.config.schema import schema
from lm.config.values import short
from lm.sweeps.tuning import CURVE, GRID, VERTEX
from lm.system.errors import UserError
from lm.system.files import COUNT, SCALAR, is_file_name, is_name, read_json, to_json, write_text
from lm.system.locks import lock
from lm.system.text_tables import without_secrets

SWEEP = "sweep.json"
ADVICE = "restore it, or use another --workdir"
PATIENCE = 10.0  # seconds; other processes of a sweep lock its directory for a moment at a time
# Keys that may change when a run is resumed, but that decide what of a sweep's runs is evaluated.
EVALUATED = ("eval.every", "eval.max_batches", "eval.batch_size", "eval.probes", "train.on_spike")


# The shape of sweep.json, also of a published page, which has configs of baselines alone; see
# `lm.system.files.parse_json`.
_VARIANT = {
    "arm": str, "cell": str, "changes": {str: str}, "tune": {str: [SCALAR]}, "seeds": [COUNT], "tuning_seeds": [COUNT],
    "n_params": COUNT, "flops_per_token": float, "tokens": COUNT, "warm_starts?": {str: str}, "config?": dict,
    "tokens_per_second?": float,
    "data": {
        "name": str, "fingerprint": str, "prepared?": (dict, None), "notices": [str],
        "test_bytes_per_token": (float, None), "unigram": {"validation": (float, None), "test": (float, None)},
    },
}  # fmt: skip
_START = {
    "time": str, "platform": str, "processor": str, "device": str, "argv": [str], "versions": {str: (str, None)},
    "git": ({"commit": str, "dirty": bool}, None),
}  # fmt: skip
_RECORD = {
    "name": str, "budget": str, "question": str, "background": str, "base": str, "baseline": str,
    "axis": ("cell", "size", "text", "length", None), "cells": [str], "comparisons": [[str, str]],
    "placebos": [[str, str]], "margin": float, "tune": [str], "values": {str: str}, "variants": {str: _VARIANT},
    "starts": [_START],
    "unfinished?": [str], "minutes?": float, "control?": ("baseline", "mean"), "design?": (GRID, VERTEX, CURVE),
    "shapes?": {str: float},
}  # fmt: skip


def sweep_record(plan, variants: dict, start: dict) -> dict:
    """Return the content of sweep.json for a `Plan`, its `Variant`s and this start.

    For the start see `lm.workdir.provenance.describe_start`; it also has the devices.
    """
    from lm.baselines.ngrams import unigram_loss

    sweep = plan.sweep
    axis = None
    if len(plan.cells) > 1:
        given = {"text": sweep.texts, "size": sweep.sizes, "length": sweep.lengths}
        axes = [name for name, cells in given.items() if cells]
        axis = axes[0] if len(axes) == 1 else "cell"
    described = {
        name: {
            "arm": v.plan.arm,
            "cell": v.plan.cell,
            "changes": {key: str(value) for key, value in v.plan.changes.items()},
            "tune": v.plan.lists,
            "seeds": list(v.plan.seeds),
            "tuning_seeds": list(v.plan.tuning_seeds),
            "n_params": v.n_params,
            "flops_per_token": v.flops,
            "tokens": v.tokens,
            "warm_starts": {str(seed): w.checksum() for seed, w in v.warm_starts.items()},
            "data": {
                "name": v.corpus.name,
                "fingerprint": v.corpus.fingerprint,
                "prepared": v.corpus.record,
                "sources": v.sources,
                "notices": v.corpus.notices,
                "test_bytes_per_token": v.corpus.split("test").bytes_per_token,
                "unigram": {
                    s: unigram_loss(v.corpus, s, v.config.model.vocab_size)
                    for s in ("validation", "test")
                },
            },
            "config": to_dict(v.config),
        }
        for name, v in variants.items()
    }
    record = {
        "name": plan.name,
        "budget": plan.budget_name,
        "question": sweep.question,
        "background": plan.background,
        "base": sweep.base,
        "baseline": sweep.baseline,
        "axis": axis,
        "cells": plan.cells,
        "comparisons": plan.comparisons,
        "placebos": plan.placebos,
        "control": "mean" if plan.budget.placebos else "baseline",
        "margin": float(sweep.margin),
        "tune": list(sweep.lists),
        "design": plan.rule,
        "shapes": plan.shapes,
        "values": {key: str(value) for key, value in (sweep.values | plan.budget.values).items()},
        "variants": described,
        "starts": [start],
    }
    return without_secrets(json.loads(to_json(record)))


def _checksum(record: dict) -> str:
    content = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(to_json(content).encode()).hexdigest()


def read_record(workdir: Path) -> dict:
    """Read sweep.json; raises UserError if it is missing or corrupted."""
    path = workdir / SWEEP
    record = read_page_record(workdir)
    if "sha256" not in record:
        raise UserError(f"{path} is corrupted: its content has no 'sha256'; {ADVICE}")
    if record["sha256"] != _checksum(record):
        raise UserError(f"{path} is corrupted: its content differs from its checksum; {ADVICE}")
    return record


def read_page_record(directory: Path) -> dict:
    """Read the sweep.json of a sweep or, without a checksum, of a page; raises UserError."""
    path = directory / SWEEP
    try:
        record = read_json(path, _RECORD, ADVICE)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{directory} holds no sweep ({SWEEP}); give a directory of python -m lm.sweep"
        ) from None
    if wrong := _contradiction(record):
        raise UserError(f"{path} is corrupted: {wrong}; {ADVICE}")
    check_names(record, path)
    return record


def _contradiction(record: dict) -> str | None:
    """Return what names something that the record does not have."""
    variants = record["variants"]
    cells = record["cells"]
    if not variants or not record["starts"]:
        return "it has no variants or no starts"
    for name, about in variants.items():
        if about["cell"] not in cells:
            return f"variants.{short(name)}.cell is {short(about['cell'])}, which cells do not have"
        if about["tune"].keys() != {*record["tune"]} or not all(about["tune"].values()):
            return (
                f"variants.{short(name)}.tune has not the keys {', '.join(record['tune'])}, or "
                "an empty list"
            )
        if not about["seeds"]:
            return f"variants.{short(name)}.seeds is empty"
    for kind in ("comparisons", "placebos", "beside"):
        for pair in record.get(kind, ()):
            if unknown := [name for name in pair if name not in variants]:
                return f"{kind} name {short(unknown[0])}, which is no variant"
    return None


def check_names(record: dict, path: Path) -> None:
    """Raise UserError if a name in sweep.json, which tables and figures show, is no text."""
    for name in (record.get("name"), *record.get("variants", ()), *record.get("cells", ())):
        if name != "" and not (isinstance(name, str) and all(map(is_name, name.split(", ")))):
            raise UserError(
                f"{path} has the name {short(name)}, which is not a line of text; {ADVICE}"
            )


def without_cells(record: dict, left_out: list[str]) -> dict:
    """Return the record of a sweep as if it had not these cells, named under "unfinished"."""
    cells = [cell for cell in record["cells"] if cell not in left_out]
    variants = {name: about for name, about in record["variants"].items() if about["cell"] in cells}
    return record | {
        "axis": record["axis"] if len(cells) > 1 or record["axis"] == "length" else None,
        "cells": cells,
        "variants": variants,
        "comparisons": [pair for pair in record["comparisons"] if set(pair) <= variants.keys()],
        "placebos": [pair for pair in record["placebos"] if set(pair) <= variants.keys()],
        "unfinished": left_out,
    }


def text_of(record: dict, cell: str) -> str:
    """Return the name of the text of a cell: the file's, or that of the data."""
    if record["axis"] == "cell":  # a size on a text
        return cell.rpartition(", ")[0]
    if record["axis"] == "text":
        return cell
    return next(v["data"]["name"] for v in record["variants"].values() if v["cell"] == cell)


def open_sweep(workdir: Path, record: dict) -> dict:
    """Create a sweep's directory, or check that it holds this sweep; record this start.

    Returns:
        The record, which `sweep_record` made, with all starts.

    Raises:
        UserError: the directory holds something else or cannot be created.
    """
    if not is_file_name(record["name"]):
        name = short(record["name"])
        raise UserError(
            f"--config: the file's name {name} may have letters, digits and _ . + - only; rename it"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be created: {error.strerror}") from None
    with lock(workdir, timeout=PATIENCE):
        others = sorted(p.name for p in workdir.iterdir() if not p.name.startswith("."))
        old = read_record(workdir) if SWEEP in others else None
        if old is None and others:
            raise UserError(
                f"--workdir {workdir} is not empty ({others[0]}) and holds no sweep; use a new "
                "directory"
            )
        if old is not None:
            if differences := _differences(old, record):
                lines = [f"  {line} (sweep -> now)" for line in differences]
                raise UserError(
                    f"--workdir {workdir} holds another sweep; use another --workdir:", *lines
                )
            record = record | {"starts": old["starts"] + record["starts"]}
        content = record | {"sha256": _checksum(record)}
        write_text(workdir / SWEEP, to_json(content, indent=1) + "\n")
    return record


def _differences(old: dict, record: dict) -> list[str]:
    """Return the differences between two sweeps, a line each."""
    fixed = (
        "name",
        "budget",
        "baseline",
        "comparisons",
        "margin",
        "placebos",
        "tune",
        "design",
        "control",
    )
    old = {
        "design": VERTEX,
        "control": "baseline",
    } | old  # of sweeps that were started before December 2026
    changed = [key for key in fixed if old[key] != record[key]]
    lines = [f"{key}: {old[key]} -> {record[key]}" for key in changed]
    before = old["variants"]
    now = record["variants"]
    if before.keys() != now.keys():
        return [*lines, f"variants: {', '.join(before)} -> {', '.join(now)}"]
    for name in now:
        differences = variant_differences(before[name], now[name])
        lines += [f"variant {name!r}: {line}" for line in differences]
    return lines


def variant_differences(was: dict, now: dict, only_shared: bool = False) -> list[str]:
    """Return the differences between two entries of a variant that may change its runs.

    Their configs may be flat; only_shared leaves out config keys that only one of the two has.
    """
    fixed = ("n_params", "tune", "seeds", "tuning_seeds", "tokens", "warm_starts")
    pairs = {key: (was[key], now[key]) for key in fixed}
    pairs["data"] = was["data"]["fingerprint"], now["data"]["fingerprint"]
    before = flatten(was["config"])
    after = flatten(now["config"])
    keys = before.keys() & after.keys() if only_shared else before.keys() | after.keys()
    for key in sorted(keys):
        missing = "absent"
        if key in schema():
            field = schema()[key][1]
            if field.metadata["execution"] and key not in EVALUATED:
                continue
            missing = json.loads(to_json(field.default))  # of a key that is newer than the sweep
        pairs[f"config.{key}"] = before.get(key, missing), after.get(key, missing)
    return [f"{key}: {a} -> {b}" for key, (a, b) in pairs.items() if a != b]


def read_failures(workdir: Path) -> dict[str, str]:
    """Return by variant the last error of its runs that failed. Damaged files are left out."""
    failures: dict[str, str] = {}
    for path in sorted((workdir / "failed").glob("*.json")):
        with contextlib.suppress(UserError, OSError):
            failure = read_json(path, {"variants": [str], "error": str})
            failures |= dict.fromkeys(failure["variants"], failure["error"])
    return failures
