"""Records of ours: whoever reads one with wrong values says which, in lines without a traceback,
and exits with 2.

A checksum protects a record from damage. It says nothing of one that somebody else, or other code,
has written, so each is changed here and its checksum computed again: types, ranges, missing keys,
nesting, numbers beyond any machine's.
"""

import copy
import csv
import dataclasses
import io
import json
import random
import shutil
from pathlib import Path

import pytest
from running import slow
from synthetic_sweep import sweep

import lm
from lm import compare, report, runs, show
from lm.config import DataConfig, from_dict
from lm.data import open_corpus, prepare, shards
from lm.data.cache import CHECKSUMS, sha256_of
from lm.sweeps import record as sweep_record
from lm.sweeps import results
from lm.sweeps.report import publish
from lm.system.errors import TemporaryError, UserError
from lm.system.files import to_json, with_checksum
from lm.training.loss_curve import loss_curve
from lm.workdir import metrics
from lm.workdir.checkpoints import _record_digest, read_metas
from lm.workdir.mirror import Mirror
from lm.workdir.saved_run import check_checkpoints, check_workdir

WRONG = (
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    0.5,
    "NaN",
    "Infinity",
    "",
    "many",
    [],
    [1],
    ["a", []],
    {},
    {"a": {"b": 1}},
)
# a wrong line costs its run alone, and a resumed run writes the summary again
SUFFERED = (
    results.RUNS,
    "summary.json",
)
AMOUNT = [10, slow(100)]


def places(value, where=()):
    """Yield (container, key, where) of every value inside nested lists and objects."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in list(items):
        yield value, key, (*where, key)
        yield from places(item, (*where, key))


def mutated(value, draw: random.Random):
    """Return a copy with one value changed, left out, nested or added, and what was done; each
    depth is as likely.
    """
    value = copy.deepcopy(value)
    groups = {}
    for place in places(value):
        groups.setdefault(repr((len(place[2]), place[2][:1])), []).append(place)
    container, key, where = draw.choice(groups[draw.choice(sorted(groups))])
    way = draw.choice(["wrong"] * 6 + ["missing", "nested", "more"])
    if way == "missing":
        del container[key]
    elif way == "nested":
        container[key] = [container[key]]
    elif way == "more" and isinstance(container, dict):
        container["unknown"] = draw.choice(WRONG)
    else:
        container[key] = draw.choice(WRONG)
    return value, f"{'.'.join(map(str, where))}: {way}"


def fuzz(path: Path, load, dump, readers, n: int) -> None:
    """Change a record n times; each reader succeeds, or refuses it so that launchers do not try
    again.
    """
    before, draw = path.read_bytes(), random.Random(2)
    good, refused = load(before.decode()), 0
    for _ in range(n):
        value, what = mutated(good, draw)
        path.write_text(dump(value))
        for name, read in readers.items():
            try:
                found = read()
            except TemporaryError:  # launchers would try again
                raise
            except UserError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name} of {path.name}, {what}") from error
            else:
                code, output = found if isinstance(found, tuple) else (0, "")
                assert code in (0, 2), f"{name} of {path.name}, {what}: {output}"
                refused += code == 2
    path.write_bytes(before)
    assert refused > n // 10 or path.name in SUFFERED


def without(key: str, record):
    return (
        {name: value for name, value in record.items() if name != key}
        if isinstance(record, dict)
        else record
    )


def signed(record: dict) -> str:
    return to_json(with_checksum(without("crc32", record)))


def signed_checkpoint(record: dict) -> str:
    record = without("sha256", record)
    return to_json(record | {"sha256": _record_digest(record)})


@pytest.mark.parametrize("n", AMOUNT)
def test_records_of_a_run_are_read_by_their_shapes(bench, command, tmp_path, n):
    """run.json, config.json, summary.json, the record of a checkpoint; a table says "damaged" and
    shows the others.
    """
    reference, run = bench.reference(), tmp_path / "runs" / "a"
    shutil.copytree(reference, run)
    config = from_dict(json.loads((reference / "config.json").read_text()))
    data = json.loads((reference / "run.json").read_text())["data"]
    quick = {
        "runs": lambda: command(runs.main, run.parent, "--keys"),
        "resume": lambda: check_workdir(run, config, resume=True),
    }
    of_checkpoints = {
        "checkpoints": lambda: check_checkpoints(run, read_metas(run), config, data),
        "load": lambda: lm.load(run),
    }
    for name in ("config.json", "run.json"):
        fuzz(run / name, json.loads, to_json, quick, n)
        fuzz(
            run / name,
            json.loads,
            to_json,
            {"show": lambda: command(show.main, f"--workdir={run}", "--step=3")},
            n,
        )
    fuzz(run / "summary.json", json.loads, signed, quick, 5 * n)
    fuzz(
        run / "summary.json",
        json.loads,
        signed,
        {"compare": lambda: command(compare.main, run, reference)},
        n,
    )
    fuzz(
        run / "checkpoints" / "12" / "meta" / "metadata",
        json.loads,
        signed_checkpoint,
        of_checkpoints,
        3 * n,
    )
    (run / "summary.json").write_text(
        signed(json.loads((run / "summary.json").read_text()) | {"goodput": None})
    )
    shutil.copytree(reference, run.parent / "b")
    code, output = command(runs.main, run.parent)
    assert (code, output.count("finished"), output.count("damaged")) == (0, 1, 1)
    assert f"{run / 'summary.json'} is corrupted: goodput is null, not an object" in output


@pytest.mark.parametrize("n", AMOUNT)
def test_lines_of_metrics_are_read_by_their_shape(bench, tmp_path, n):
    path = Path(shutil.copy(bench.reference() / "metrics.jsonl", tmp_path))

    def dump(lines) -> str:
        texts = (
            metrics.to_line(without("crc32", x)) if isinstance(x, dict) else to_json(x)
            for x in lines
        )
        return "".join(f"{text}\n" for text in texts)

    readers = {
        "evaluations": lambda: (
            metrics.validation_losses(metrics.read_evaluations(path)[0]) and None
        ),
        "curve": lambda: loss_curve(metrics.iter_metrics(path)) and None,
        "resume": lambda: metrics.MetricsWriter(tmp_path, resume_step=12, writes=False) and None,
    }
    fuzz(path, lambda text: list(map(json.loads, text.splitlines())), dump, readers, 3 * n)


@pytest.mark.parametrize("n", AMOUNT)
def test_a_manifest_of_a_mirror_is_read_by_its_shape(bench, tmp_path, n):
    """An error is no reason to try again: a KeyError was one, for ever."""
    url, run = f"file://{tmp_path}/mirror", shutil.copytree(bench.reference(), tmp_path / "run")
    config = from_dict(json.loads((run / "config.json").read_text()))
    mirror = Mirror(url, run)
    mirror.claim(config)
    mirror.start(lambda steps: None, lambda line: None)
    mirror.finish()
    (manifest,) = (tmp_path / "mirror").glob("manifest-*")

    def fetch():
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        Mirror(url, tmp_path / "new").fetch(config, lambda line: None)

    fuzz(manifest, json.loads, signed, {"fetch": fetch}, 3 * n)


@pytest.mark.parametrize("n", AMOUNT)
@pytest.mark.parametrize("axis", [None, "size"])
def test_records_of_a_sweep_and_of_a_page_are_read_by_their_shapes(
    command, tmp_path, monkeypatch, axis, n
):
    monkeypatch.setattr("lm.sweeps.report.figures", lambda analysis: {})
    record, found = sweep({"s": (100, 0.1), "m": (200, 0.0)} if axis else None, axis)

    def lines(text: str) -> list:
        return [without("checksum", json.loads(line)) for line in text.splitlines()]

    def dump_lines(rows) -> str:
        rows = (x | {"checksum": results._checksum(x)} if isinstance(x, dict) else x for x in rows)
        return "".join(f"{to_json(row)}\n" for row in rows)

    def dump_table(rows) -> str:
        file = io.StringIO()
        csv.writer(file).writerows(row if isinstance(row, list) else [row] for row in rows)
        return file.getvalue()

    def dump_record(value) -> str:
        return to_json(value | {"sha256": sweep_record._checksum(value)})

    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "sweep.json").write_text(dump_record(record))
    results.append_runs(folder, found)
    page = tmp_path / "pages" / "gates"
    page.parent.mkdir()
    publish(report.read_finished(folder), page.parent)
    of_sweep, of_page = (
        {"report": lambda path=path: command(report.main, path)} for path in (folder, page)
    )
    fuzz(folder / "sweep.json", json.loads, dump_record, of_sweep, n)
    fuzz(folder / "runs.jsonl", lines, dump_lines, of_sweep, n)
    fuzz(page / "sweep.json", json.loads, to_json, of_page, n)
    fuzz(
        page / "runs.csv", lambda text: list(csv.reader(io.StringIO(text))), dump_table, of_page, n
    )
    (page / "sweep.json").write_text(to_json(record | {"margin": [0.005]}))
    code, output = command(report.main, page)
    assert (code, "sweep.json is corrupted: margin is a list, not a number" in output) == (2, True)


@pytest.mark.parametrize("n", AMOUNT)
def test_records_of_a_corpus_are_read_by_their_shapes(command, tmp_path, n):
    """The manifest of shards, and the counts in a cache."""
    (tmp_path / "a.txt").write_text("the cat sat on a mat and ran home\n" * 100)
    assert command(prepare.main, "--input=text:a.txt", "--output=out", "--tokenizer=byte")[0] == 0
    cache = tmp_path / "cache"
    readers = {
        "open": lambda: (
            shards.describe(
                shards.open_shards(str(tmp_path / "out"), cache, lambda line: None).record
            )
            and None
        ),
        "verify": lambda: command(prepare.main, "--verify=out"),
    }
    fuzz(tmp_path / "out" / "manifest.json", json.loads, to_json, readers, 3 * n)
    config = dataclasses.replace(
        DataConfig(), source=f"text:{tmp_path / 'a.txt'}", cache_dir=str(cache)
    )
    open_corpus(config, seq_len=16, say=lambda line: None)
    (counts,) = cache.glob("*/*/counts.json")

    def read():
        recorded = {
            path.name: sha256_of(path) for path in counts.parent.iterdir() if path.name != CHECKSUMS
        }
        (counts.parent / CHECKSUMS).write_text(to_json(recorded))
        open_corpus(config, seq_len=16, say=lambda line: None)

    fuzz(counts, json.loads, to_json, {"open": read}, 3 * n)
