"""The kit for minutes on a GPU, with its smallest models on a CPU."""

import gzip
import json
import time

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decoding, exact, kernels, lines, speed, stacked, tables
from benchmarks.gpu import tests as tests_on_device
from benchmarks.gpu.kit import Kit, ended


def rows_of(kit: Kit, item: str) -> dict[str, dict]:
    rows = map(json.loads, (kit.out / "results.jsonl").read_text().splitlines())
    return {row["name"]: row for row in rows if row["item"] == item}


def test_variants_are_timed_and_one_that_fails_leaves_an_error(tmp_path, monkeypatch):
    kit = Kit(tmp_path, tiny=True)
    ours = [variant for variant in speed.TINY if variant.side == "ours"]
    monkeypatch.setattr(speed, "TINY", ours)
    monkeypatch.setattr(speed, "SECONDS", 0.1)
    speed.measure(kit)
    rows = rows_of(kit, "speed")
    assert "n_heads = 3" in rows["fails"]["error"]
    for name in ("default", "1 head"):
        assert len(rows[name]["rounds"]) == speed.ROUNDS
        assert rows[name]["tokens_per_second"] == pytest.approx(2 * 16 * 1e3 / rows[name]["ms"])
    assert "no kernels of a GPU" in (tmp_path / "profile.txt").read_text()


def test_nanogpt_is_causal_and_learns_a_batch():
    torch = pytest.importorskip("torch", reason="the extra [bench] is not installed")
    from benchmarks.gpu.nanogpt import GPT2, NanoGPT
    from benchmarks.shapes import named

    with torch.device("meta"):
        sizes = [p.numel() for p in GPT2(named("124M")).parameters()]
    assert sum(sizes) - 1024 * 768 == 123_587_328  # without positions, nanoGPT's 123.59M
    side = NanoGPT(named("tiny"), None)
    ids = torch.arange(16)[None]
    changed = ids.clone()
    changed[0, 10] = 3
    differs = (side.logits(ids) != side.logits(changed)).any(-1)[0]
    assert differs.tolist() == [False] * 10 + [True] * 6
    losses = side.losses([torch.arange(34).reshape(2, 17).numpy() % 19] * 30)
    assert losses[-1] < losses[0] - 0.1


def test_names_of_failed_crashed_and_unfinished_tests_are_in_a_file(tmp_path, monkeypatch):
    path = tmp_path / "test_some.py"
    path.write_text(
        "import os, time\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "def test_crashes(): os._exit(1)\n"
        "def test_hangs(): time.sleep(600)\n"
    )
    monkeypatch.setattr(tests_on_device, "TINY", [str(path)])
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the tests that run this one
    kit = Kit(tmp_path, tiny=True)

    def after_the_others(process, seconds):  # however slow this machine is
        found = lines.outcomes(tmp_path / "tests.txt")
        for _ in range(3000):
            if len(found["failed"]) == 2 and found["passed"] and found["running"]:
                break
            time.sleep(0.1)
            found = lines.outcomes(tmp_path / "tests.txt")
        return ended(process, 1.0)

    monkeypatch.setattr(tests_on_device, "ended", after_the_others)
    tests_on_device.measure(kit)
    (row,) = rows_of(kit, "tests").values()
    failed = [name.split("::")[1] for name in row["names"]]
    assert sorted(name.split()[0] for name in failed) == ["test_crashes", "test_fails"]
    assert any("assert 1 == 2" in name for name in failed)
    assert [name.split("::")[1] for name in row["unfinished"]] == ["test_hangs"]
    assert (row["passed"], row["finished"]) == (1, False)
    assert "test_hangs did not end" in tables.tests([row])


def test_a_test_that_fails_does_not_pass_later(tmp_path):
    path = tmp_path / "lines"
    path.write_text("running a\nfailed a 0.1 E\npassed a 0.2\nrunning b\nrunning c\nskipped c 0\n")
    found = lines.outcomes(path)
    assert found == {"passed": [], "failed": ["a 0.1 E"], "skipped": ["c 0"], "running": ["b"]}


def test_killed_runs_and_runs_beside_one_another_have_the_same_bits(tmp_path):
    kit = Kit(tmp_path, tiny=True)
    exact.measure(kit)
    rows = rows_of(kit, "exact")
    assert rows["20 losses"]["largest_difference"] == 0  # the device is a CPU as well
    for name in ("two processes at once", "killed and resumed"):
        assert (rows[name]["status"], rows[name]["differences"]) == ([0, 0, 0], [])


def test_stacked_runs_have_the_losses_of_single_runs(tmp_path):
    kit = Kit(tmp_path, tiny=True)
    stacked.measure(kit)
    rows = rows_of(kit, "stacked")
    assert rows["10 runs"]["largest_difference"] < 1e-5
    assert len({*rows["10 runs"]["losses_of_last_step"]}) == 10


def test_memory_is_recorded_although_generation_fails(tmp_path):
    """Without the extra [bench] generation has no other side; that is one line, not the end."""
    kit = Kit(tmp_path, tiny=True)
    decoding.measure(kit)
    row = rows_of(kit, "memory")["tiny"]
    assert 0 < row["planned_bytes"] < row["peak_bytes"]


def test_a_profile_is_a_table_by_kind_and_operation(tmp_path):
    def event(name, start, duration, instruction, thread=7):
        args = {"hlo_op": instruction}
        return {
            "ph": "X",
            "pid": 1,
            "tid": thread,
            "name": name,
            "ts": start,
            "dur": duration,
            "args": args,
        }

    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #1"}},
        {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "Steps"}},
        event("nvjet_hsh_128", 0, 3000, "custom-call.1"),
        event("nvjet_hsh_128", 3000, 3000, "custom-call.2"),
        event("loop_add_fusion", 8000, 2000, "add.1"),
        event("step", 0, 10_000, "?", thread=8),
    ]
    program = tmp_path / "program.txt"
    program.write_text(
        '  %custom-call.1 = f32[2] custom-call(%x), metadata={op_name="jit(f)/layers/0/dot"}\n'
        '  ROOT %custom-call.2 = f32[2] custom-call(%x), metadata={op_name="jit(f)/layers/1/dot"}\n'
    )
    trace = tmp_path / "a.trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert kernels.table(trace, program).splitlines() == [
        "10.00 ms, 3 kernels, idle 20.0 %",
        "     6.00 ms  60.0 %  products",
        "     2.00 ms  20.0 %  fusions",
        "    6.000 ms     2 x  products    jit(f)/layers/*/dot",
        "    2.000 ms     1 x  fusions     add.1",
    ]


def test_tables_have_every_result(tmp_path):
    kit = Kit(tmp_path)
    kit.record("machine", "machine", **command.machine())
    timed = {"ms": 20.0, "rounds": [19.0, 20.0, 21.0], "tokens_per_second": 819_200.0}
    kit.record(
        "speed", "default", **timed, mfu=0.4, mfu_full_square=0.43, peak_bytes=8e9, clock_mhz=1980
    )
    kit.record("speed", "batch 64", error="Traceback\nRESOURCE_EXHAUSTED: no memory")
    kit.record("exact", "20 losses", largest_difference=1.5e-6)
    kit.record("exact", "killed and resumed", differences=["metrics.jsonl differs"])
    text = tables.tables(tmp_path / "results.jsonl")
    for cell in (
        "| default | 20.00 | 19.00 to 21.00 | 819,200 | 40.0% | 43.0% | 8.00 GB | 1980 |",
        "| batch 64 | RESOURCE_EXHAUSTED: no memory |",
        "| 20 losses | largest difference from the CPU 1.5e-06 |",
        "| killed and resumed | metrics.jsonl differs |",
        "Measured 20",
    ):
        assert cell in text


def test_an_item_is_stopped_at_its_limit(tmp_path, capfd, monkeypatch):
    """An item that would take a minute, however fast or busy this machine is."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(command, "GRACE", 0.1)
    monkeypatch.setattr(command.sys, "executable", str(slow))
    assert command.run("speed", tmp_path, 0.1, tiny=True) == 1
    assert "speed: stopped after 0 s; its results are in" in capfd.readouterr().out
