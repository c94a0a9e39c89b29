"""Several processes on one machine, connected over loopback, train one model."""

import signal
import time

import numpy as np
import pytest
from running import checkpoint_steps, checksums, flip_a_bit, metrics_of, several, slow, summary_of

from lm.parallel.processes import has_several_tasks

DENSE = ("--config.model.dropout=0", "--config.train.batch_size=4")


def processes(bench, workdir, n: int, *more: str, **options):
    given = {word.partition("=")[0] for word in more}
    dense = [word for word in DENSE if word.partition("=")[0] not in given]
    return several(bench, workdir, n, *dense, *more, **options)


def output_of(workdir, i: int) -> str:
    """Return the output of process i."""
    return (workdir.parent / f"{workdir.name}.{i}.log").read_text()


def run(bench, workdir, n: int, *more: str) -> list[int]:
    with processes(bench, workdir, n, *more) as running:
        codes = [process.wait(timeout=600) for process in running]
    assert codes == [0] * n, output_of(workdir, 0)[-2000:]


def wait_for(workdir, step: int, running) -> None:
    """Wait until the run has logged a step."""
    path = workdir / "metrics.jsonl"
    for _ in range(3000):
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        assert all(process.poll() is None for process in running), output_of(workdir, 0)[-2000:]
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not logged in 5 minutes")


def losses(workdir) -> np.ndarray:
    return np.array([line["loss"] for line in metrics_of(workdir) if "split" not in line])


def evaluations(workdir) -> list[float]:
    return [line["loss"] for line in metrics_of(workdir) if "split" in line]


@pytest.fixture(scope="module")
def alone(bench):
    """Return the workdir of a finished run of one process."""
    workdir = bench.base / "alone"
    run(bench, workdir, 1)
    return workdir


@pytest.mark.parametrize("n", [2, slow(4)])
def test_several_processes_have_the_losses_of_one(bench, tmp_path, n):
    """So they see the same data in the same order, and drop the same activations. Only the first
    writes and prints.
    """
    alone, workdir = bench.reference(), tmp_path / "run"
    sampled = 10 if n == 4 else 0  # compiles for seconds
    run(bench, workdir, n, "--config.model.dropout=0.1", f"--config.eval.sample_tokens={sampled}")
    np.testing.assert_allclose(losses(workdir)[:10], losses(alone)[:10], rtol=0, atol=1e-5)
    np.testing.assert_allclose(evaluations(workdir), evaluations(alone), rtol=0, atol=1e-5)
    assert summary_of(workdir)["status"] == "finished"
    assert len(list(workdir.glob("samples/*"))) == bool(sampled)
    for i in range(1, n):
        # also no line of Gloo, and no second warning of the config
        assert output_of(workdir, i) == ""
    assert "Gloo" not in output_of(workdir, 0)
    assert "step 12/12" in output_of(workdir, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (1, ("--config.mesh.fsdp=-1", "--config.mesh.replica=1")),
        (1, ("--config.mesh.sequence=2",)),
        (2, ("--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.mesh.replica=1")),
        (2, ("--config.mesh.sequence=2",)),
    ],
)
def test_a_mesh_over_two_processes_has_the_losses_of_one(
    bench, alone, tmp_path, monkeypatch, devices, mesh
):
    """Each process has `devices` simulated devices."""
    monkeypatch.setitem(bench.env, "JAX_NUM_CPU_DEVICES", str(devices))
    # each process gathers its own rows
    run(bench, tmp_path / "run", 2, *mesh, "--config.data.device_bytes=0")
    assert f"device {2 * devices} x cpu" in output_of(tmp_path / "run", 0)
    np.testing.assert_allclose(losses(tmp_path / "run")[:10], losses(alone)[:10], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_restored_by_four_and_by_one(bench, tmp_path):
    constant = "--config.optimizer.schedule=constant"
    for n, steps in ((2, 6), (4, 9), (1, 12)):
        mesh = ("--config.mesh.fsdp=-1", "--config.mesh.replica=1", f"--config.train.steps={steps}")
        run(bench, tmp_path / "run", n, constant, *mesh, "--resume")
    run(bench, tmp_path / "whole", 1, constant)
    assert len(losses(tmp_path / "run")) == 12
    np.testing.assert_allclose(
        losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=0, atol=1e-5
    )


ENDLESS = ("--config.train.steps=200", "--config.eval.every=0", "--config.checkpoint.every=0")


@pytest.fixture(scope="module")
def undisturbed(bench):
    """Return the workdir of an uninterrupted run of two processes."""
    workdir = bench.base / "undisturbed"
    run(bench, workdir, 2, *ENDLESS)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("signaled", [0, 1])
def test_sigterm_to_any_process_saves_the_same_step_in_all(bench, undisturbed, tmp_path, signaled):
    """The resumed run then equals an uninterrupted one, bit for bit."""
    with processes(bench, tmp_path / "run", 2, *ENDLESS) as running:
        wait_for(tmp_path / "run", 5, running)
        running[signaled].send_signal(signal.SIGTERM)
        assert [process.wait(timeout=400) for process in running] == [143, 143], output_of(
            tmp_path / "run", 0
        )[-2000:]
    (saved,) = checkpoint_steps(tmp_path / "run")
    assert 5 <= saved < 200
    assert len(losses(tmp_path / "run")) == saved
    run(bench, tmp_path / "run", 2, *ENDLESS, "--resume")
    assert checksums(tmp_path / "run", 200) == checksums(undisturbed, 200)
    assert metrics_of(tmp_path / "run") == metrics_of(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "n_after"), [(0, 1), (1, 2)])
def test_after_a_kill_the_others_exit_and_any_number_of_processes_resumes(
    bench, tmp_path, victim, n_after
):
    """With as many processes as before the result has the same bits, with another number it differs
    by rounding.
    """
    endless = ("--config.train.steps=60", "--config.eval.every=0", "--config.checkpoint.every=4")
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    run(bench, whole, 2, *endless)
    with processes(bench, workdir, 2, *endless) as running:
        wait_for(workdir, 10, running)
        running[victim].kill()
        began, other = time.monotonic(), 1 - victim
        assert running[other].wait(timeout=90) != 0
        # JAX waits 30 s for a heartbeat; the machine may be busy
        assert time.monotonic() - began < 60
    # Our error, if a message to the killed process failed; JAX's, if its 30 s without a heartbeat
    # ended first.
    expected = (
        "--resume to continue from the last intact checkpoint",
        "most likely indicates that another task died",
    )
    assert any(text in output_of(workdir, other) for text in expected)
    run(bench, workdir, n_after, *endless, "--resume")
    assert "resuming at step" in output_of(workdir, 0)
    if n_after == 2:
        assert metrics_of(workdir) == metrics_of(whole)
        assert checksums(workdir, 60) == checksums(whole, 60)
    else:
        np.testing.assert_allclose(losses(workdir), losses(whole), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_corrupted_checkpoint_is_skipped_by_all_processes(bench, tmp_path):
    short = (
        "--config.train.steps=8",
        "--config.checkpoint.every=4",
        "--config.optimizer.schedule=constant",
    )
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    run(bench, whole, 2, *short)
    run(bench, workdir, 2, *short)
    files = [
        p
        for p in (workdir / "checkpoints" / "8" / "state").rglob("*")
        if p.is_file() and p.stat().st_size > 500
    ]
    for path in files:
        flip_a_bit(path)
    (workdir / "summary.json").unlink()
    run(bench, workdir, 2, *short, "--resume")
    assert "corrupted checkpoint of step 8" in output_of(workdir, 0)
    assert checksums(workdir, 8) == checksums(whole, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("--config.train.batch_size=3", ["config.train.batch_size: 3 is not divisible by"] * 2),
        ("--config.optimizer.weight_decay=0.{i}", ["the config differs between processes"] * 2),
        (
            "--config.data.source=text:only-on-{i}",
            ["process 1 ended: config.data.source", '"text:only-on-1" is not a'],
        ),
    ],
)
def test_a_mistake_ends_all_processes_with_exit_code_2(bench, tmp_path, mistake, expected):
    (bench.base / "only-on-0").write_text(bench.text.read_text())
    with several(bench, tmp_path / "run", 2, mistake) as running:
        assert [process.wait(timeout=400) for process in running] == [2, 2]
    assert [text in output_of(tmp_path / "run", i) for i, text in enumerate(expected)] == [
        True,
        True,
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((0, 2), "process 1 of 3 did not connect to process 0 within 30 s (--connect_timeout)"),
        ((1,), "process 1 could not reach process 0 at 127.0.0.1:"),
    ],
)
def test_a_missing_process_ends_all_others(bench, tmp_path, ids, expected):
    with processes(bench, tmp_path / "run", 3, "--connect_timeout=30", ids=ids) as running:
        assert [process.wait(timeout=400) for process in running] == [1] * len(ids)
    for place in range(len(ids)):
        assert expected in output_of(tmp_path / "run", place)
        assert "Traceback" not in output_of(tmp_path / "run", place)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_wait_for_one_that_opens_its_data_late(bench, tmp_path):
    """The delay is longer than the 30 s after which a collective of Gloo fails."""
    short = ("--config.train.steps=2", "--config.optimizer.schedule=constant")
    with processes(bench, tmp_path / "run", 2, *short, at={1: "SLEEP=40 data 1"}) as running:
        assert [process.wait(timeout=300) for process in running] == [0, 0], output_of(
            tmp_path / "run", 0
        )[-2000:]
    assert "waiting for process 1, at most 12 hours" in output_of(tmp_path / "run", 0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, True),
        (
            {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
            False,
        ),  # the only task: it uses all visible devices
        (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"},
            False,
        ),  # in the job script, outside of any task
        (
            {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
            False,
        ),  # a shell of salloc
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
    ],
)
def test_clusters_are_detected_by_their_environment(environment, expected):
    assert has_several_tasks(environment) == expected
