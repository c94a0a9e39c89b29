"""Damaged files of a sweep cause a one-line error, or a warning, after which the runs are trained again."""

import copy
import json

import pytest
import synthetic_sizes
from synthetic_sweep import sweep, write

from lm import report as command
from lm.errors import UserError
from lm.files import to_json, write_text
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.storage import results as results_module
from lm.sweeps.storage.records import read_runs, read_speeds, read_sweep, with_checksum
from lm.sweeps.storage.results import Results, differences, missing_runs, open_sweep

WRONG_JSON = [b"", b"\0" * 64, b"\xff\xfe", b"null", b"3", b'"text"', b'{"a": [', b"9" * 5000, b"[" * 10**5]


def paths_of(value, path=()):
    """Yield the path of every value in nested dicts and lists; of a list, only the first item."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_of(item, (*path, key))


def replaced(value, path, new):
    """Return a copy of nested dicts and lists with another value at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("content", [*WRONG_JSON, b"[]", b"{}"])
def test_a_damaged_description_is_an_error_that_names_the_file(tmp_path, capsys, content):
    workdir = write(tmp_path / "s", *sweep())
    (workdir / "sweep.json").write_bytes(content)
    assert command.main([str(workdir)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{workdir / 'sweep.json'} is corrupted: ")
    assert error.endswith("; restore it, or use another --workdir\n")
    assert error.count("\n") == 1


def test_any_value_of_another_type_is_reported_or_has_no_effect(tmp_path):
    """Replace each value of the three files by four others, one at a time; only UserError may be raised."""
    record, runs = sweep()
    workdir = write(tmp_path / "s", record, runs)
    speeds = json.loads((workdir / "speeds.json").read_text())
    for name, content, read in (
        ("sweep.json", record, read_sweep),
        ("results/000.json", runs[:1], read_runs),
        ("speeds.json", speeds, read_speeds),
    ):
        path, n_refused = workdir / name, 0
        before = path.read_bytes()
        for where in paths_of(content):
            for new in (None, -1.5, [], {"a": "NaN"}):
                path.write_text(json.dumps(replaced(content, where, new)))
                try:
                    read(path)
                except UserError:
                    n_refused += 1
        path.write_bytes(before)
        assert n_refused > 2 * len(list(paths_of(content)))


@pytest.mark.parametrize("content", [*WRONG_JSON, b"[3]", b'[{"phase": "final"}]'])
def test_runs_of_a_damaged_file_are_trained_again(tmp_path, content):
    record, runs = sweep()
    workdir, printed = write(tmp_path / "s", record, runs), []
    whole = len(Results(workdir).runs)
    path = workdir / "results" / "000.json"
    intact = path.read_bytes()
    path.write_bytes(content)
    results = Results(workdir, printed.append)
    assert len(results.runs) == whole - 4
    assert sum(map(len, missing_runs(results, record, dict.fromkeys(record["variants"], 5)).values())) > 0
    results.reload()
    (line,) = printed
    assert line.startswith(f"WARNING: {path} is corrupted: ")
    assert line.endswith("; rerun the sweep to replace it (renamed to 000.json.corrupted)")
    assert path.with_name("000.json.corrupted").read_bytes() == content
    path.write_bytes(intact)  # as another process of the sweep does
    results.reload()
    assert len(results.runs) == whole


def test_a_record_without_a_margin_has_the_default_and_another_one_is_used(tmp_path):
    record, runs = sweep()
    path = write(tmp_path / "s", record, runs) / "sweep.json"
    assert read_sweep(path)["margin"] == 0.005
    path.write_text(json.dumps(record | {"margin": 0.02}))
    assert read_sweep(path)["margin"] == 0.02
    for wrong in (0, -0.1, "0.02", None, True):
        path.write_text(json.dumps(record | {"margin": wrong}))
        with pytest.raises(UserError, match="is corrupted: its margin is"):
            read_sweep(path)


def test_a_sweep_is_not_resumed_with_another_margin(tmp_path):
    """The margin is declared before the runs, not chosen after them."""
    old = read_sweep(write(tmp_path / "s", *sweep()) / "sweep.json") | {"variants": {}}
    assert differences(old, old | {"margin": 0.005}, {}) == []
    assert differences(old, old | {"margin": 0.5}, {}) == ["  margin: 0.005 -> 0.5 (sweep -> now)"]


def test_a_sweep_is_not_resumed_with_the_best_rate_of_another_size(tmp_path):
    """The grids of the sizes 48 and 64 times a factor can be the same."""
    record = synthetic_sizes.sweep(1.0)[0] | {"margin": 0.005, "placebo": None, "looks": [5]}
    for variant in record["variants"].values():
        variant["warm_starts"] = {}
    changed = copy.deepcopy(record)
    changed["variants"]["plain, 96"]["rate_from"] = "plain, 64"
    configs = dict.fromkeys(record["variants"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_module, "compare_configs", lambda old, config: ([], []))
        assert differences(record, record, configs) == []
        expected = "  variant 'plain, 96': learning rate from: None -> plain, 64 (sweep -> now)"
        assert differences(record, changed, configs) == [expected]


def test_a_changed_digit_is_detected(tmp_path):
    """Each file is written as a sweep writes it, then one digit of one number is changed; the JSON stays valid."""
    record, runs = sweep()
    results = Results(tmp_path)
    results.add("000", runs[:2])
    results.set_speeds({"alone": 123.0, "at_once": 2, "variants": {"a": 1.25}, "quartiles": {"a": [1.0, 1.5]}})
    write_text(tmp_path / "sweep.json", to_json(with_checksum(record)))
    loss = to_json(runs[1]["val_loss"])
    for name, number, read in (
        ("results/000.json", loss, read_runs),
        ("speeds.json", "1.25", read_speeds),
        ("sweep.json", to_json(record["variants"]["plain"]["flops_per_token"]), read_sweep),
    ):
        path = tmp_path / name
        before = path.read_text()
        read(path)
        changed = str(int(number[0]) % 9 + 1) + number[1:]
        assert number in before
        path.write_text(before.replace(number, changed, 1))
        with pytest.raises(UserError, match="its content differs from its checksum"):
            read(path)


def start(device: str) -> dict:
    return sweep()[0]["starts"][0] | {"device": device}


def test_every_start_keeps_its_device(tmp_path, monkeypatch):
    """Older versions had one device per sweep: that of the last start."""
    monkeypatch.setattr(results_module, "differences", lambda *sweeps: [])
    record, _ = sweep()
    (tmp_path / "sweep.json").write_text(to_json(record))  # as an older version
    for device in ("2 x cpu", "1 x gpu"):
        now = {key: value for key, value in record.items() if key != "device"} | {"starts": [start(device)]}
        open_sweep(tmp_path, now, {})
    found = read_sweep(tmp_path / "sweep.json")
    assert [s["device"] for s in found["starts"]] == ["1 x cpu", "2 x cpu", "1 x gpu"]


def test_the_provenance_of_a_run_may_be_missing_but_not_damaged(tmp_path):
    _, runs = sweep()
    known = {"host": "a", "processor": "b", "device": "cpu", "git": None}
    path = tmp_path / "000.json"
    for given, expected in (({}, None), ({"provenance": None}, None), ({"provenance": known}, known)):
        path.write_text(to_json([runs[0] | given]))
        assert read_runs(path)[0]["provenance"] == expected
    for wrong in ({}, [], "cpu", known | {"device": 3}, known | {"git": {"commit": "abc"}}):
        path.write_text(to_json([runs[0] | {"provenance": wrong}]))
        with pytest.raises(UserError, match=r"000\.json is corrupted: provenance"):
            read_runs(path)


@pytest.mark.parametrize("content", WRONG_JSON)
def test_damaged_speeds_are_measured_again(tmp_path, capsys, content):
    workdir = write(tmp_path / "s", *sweep())
    (workdir / "speeds.json").write_bytes(content)
    with pytest.raises(UserError, match="the throughput is not measured; resume with"):
        analyze(workdir)
    assert "WARNING: " in capsys.readouterr().err
    assert Results(workdir).speeds is None


def test_a_damaged_record_of_a_failure_is_ignored_with_a_warning(tmp_path):
    workdir, printed = write(tmp_path / "s", *sweep()), []
    results = Results(workdir, printed.append)
    results.add_failure("good", [("final", "plain", 0.002, 0)], "MemoryError")
    (workdir / "failed" / "bad.json").write_text('{"runs": [3]}')
    assert results.failures() == {("final", "plain", 0.002, 0): "MemoryError"}
    assert len(printed) == 1


def test_results_of_another_sweep_are_refused(tmp_path):
    record, runs = sweep()
    workdir = write(tmp_path / "s", record, [runs[0] | {"variant": "other"}, *runs[1:]])
    with pytest.raises(UserError, match="results/ has runs of 'other', which sweep"):
        analyze(workdir)


def test_a_linked_lock_of_a_group_is_an_error_and_not_another_process(tmp_path):
    results = Results(tmp_path)
    (tmp_path / ".claims" / "group").mkdir(parents=True)
    (tmp_path / ".claims" / "group" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a symbolic link"), results.claim("group"):
        pass
