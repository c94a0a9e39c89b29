"""The command lm.sweep: dry run, errors, interruption, resumption, several processes, and the report."""

import itertools
import json
import signal
import subprocess
import sys
import time

import pytest
from running import ROOT
from sweeping import EAGER, SWEEP, changed, results, run

from lm import sweep
from lm.sweeps.design.seeds import fresh_seeds, tuning_seeds
from lm.sweeps.report.pages import WRITTEN

SEEDS, (TUNING_SEED,) = fresh_seeds("tiny_sweep", 2), tuning_seeds("tiny_sweep", 1)
# All runs of one variant fail.
FAILING = """
import sys
from lm import sweep
from lm.sweeps.training import runner
train_group = runner.train_group
def failing(sweep, phase, keys):
    if keys[0][0] == "glu":
        raise MemoryError("too wide")
    train_group(sweep, phase, keys)
runner.train_group = failing
sys.exit(sweep.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def finished(bench):
    """A complete quick sweep without interruptions, and its output."""
    workdir = bench.base / "sweep"
    done = run(bench, "--workdir", workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    return workdir, done.stdout


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_writes_nothing(bench, tmp_path):
    done = run(bench, "--dry-run", "--workdir", tmp_path / "sweep")
    assert done.returncode == 0, done.stderr
    # 2 x 16 x 64 weights in the MLP against 3 x 16 x 43 in the GLU: 16 more.
    assert "model.d_ff=43 (params of 'mlp': +16 parameters, +96 FLOPs/token)" in done.stdout
    assert "6 runs to tune the learning rate (1 tuning seed), then at most 12 runs at" in done.stdout
    assert "training: at most" in done.stdout
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_every_run_is_trained_once_and_divergence_is_a_result(finished):
    workdir, output = finished
    found = results(workdir)
    tuning = [("tuning", n, r, TUNING_SEED) for n in ("mlp", "glu") for r in (1e-3, 1e-2)]
    tuning += [("tuning", "wild", r, TUNING_SEED) for r in (0.1, 1e30)]
    final = [("final", n, r, s) for (_, n, r, _), s in itertools.product(tuning, SEEDS)]
    zero, one = SEEDS
    assert set(found) == {*tuning, *final}
    for (_, variant, rate, _), trained in found.items():
        diverged = rate == 1e30
        assert trained["status"] == ("diverged" if diverged else "finished"), (variant, rate)
        assert (trained["test_loss"] is None) == diverged
        assert len(trained["train_loss"]) == 8
    assert found["final", "wild", 1e30, zero]["diverged_at"] in (1, 2)
    assert found["final", "mlp", 1e-2, zero]["train_loss"][0] == found["final", "mlp", 1e-3, zero]["train_loss"][0]
    assert found["final", "mlp", 1e-2, zero]["train_loss"] != found["final", "mlp", 1e-2, one]["train_loss"]
    assert "wild: best learning rate 0.1" in output
    speeds = json.loads((workdir / "speeds.json").read_text())
    assert min(speeds["alone"], *(speeds["variants"][name] for name in ("mlp", "glu", "wild"))) > 0
    assert not (workdir / "unfinished").exists()


@pytest.mark.slow
def test_a_run_of_a_sweep_equals_the_run_of_lm_train(bench, finished, tmp_path):
    record = json.loads((finished[0] / "sweep.json").read_text())["variants"]["mlp"]["config"]
    assert record["train"]["steps"] == 8
    changes = ["--config.model.ffn=mlp", "--config.model.dropout=0", "--config.train.steps=8"]
    changes += [f"--config.train.seed={SEEDS[1]}"]
    changes += ["--config.optimizer.warmup_steps=1", "--config.optimizer.learning_rate=1e-2"]
    assert bench.train(tmp_path / "run", *changes).returncode == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    ours = results(finished[0])["final", "mlp", 1e-2, SEEDS[1]]
    assert ours["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert ours["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-5)


@pytest.mark.slow
def test_vectorized_runs_equal_single_runs(bench, finished, tmp_path):
    """Losses differ by rounding only, far less than between seeds."""
    workdir = tmp_path / "sweep"
    done = run(bench, "--workdir", workdir, "--together", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = results(finished[0]), results(workdir)
    assert one.keys() == two.keys()
    for phase, name, rate, seed in one:
        ours, theirs = two[phase, name, rate, seed]["test_loss"], one[phase, name, rate, seed]["test_loss"]
        assert (ours is None) == (theirs is None)
        if phase == "final" and ours is not None:
            first, second = (one[phase, name, rate, other]["test_loss"] for other in SEEDS)
            spread = abs(first - second)
            assert abs(ours - theirs) < 0.1 * spread, (name, rate, seed)


@pytest.mark.slow
def test_repeated_kills_do_not_change_the_results(bench, finished, tmp_path):
    workdir, reference = tmp_path / "sweep", results(finished[0])
    command = [sys.executable, "-c", EAGER, f"--config={SWEEP}", "--workdir", str(workdir)]
    moments = ["step 4/8", "tuning 2/", "final 1/", "step 6/8", "final 2/"]
    ends = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL]
    for moment, end in zip(moments, ends, strict=True):
        before = results(workdir)
        with subprocess.Popen(command, cwd=bench.base, env=bench.env, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith(moment):
                    time.sleep(0.2)
                    process.send_signal(end)
                    break
            process.stdout.read()
            expected = -end if end == signal.SIGKILL else 128 + end
            assert process.wait(timeout=300) == expected
        assert before.items() <= results(workdir).items()  # finished runs do not change
    done = run(bench, "--workdir", workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(workdir) == reference
    assert "measuring" in done.stdout
    again = run(bench, "--workdir", workdir)
    assert again.returncode == 0
    assert not [line for line in again.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
def test_several_processes_divide_the_work(bench, finished, tmp_path):
    """One process is killed while it trains; another then trains its runs."""
    command = [sys.executable, "-c", EAGER, f"--config={SWEEP}", "--workdir", str(tmp_path / "sweep")]
    pipes = {"cwd": bench.base, "env": bench.env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for line in processes[0].stdout:
        if line.startswith(("step", "waiting")):
            processes[0].kill()
            break
    output = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0], output
    assert results(tmp_path / "sweep") == results(finished[0])
    assert sum("measuring" in text for text in output[1:]) == 1


@pytest.mark.slow
def test_a_variant_that_fails_does_not_stop_the_others(bench, finished, tmp_path):
    workdir = tmp_path / "sweep"
    command = [sys.executable, "-c", FAILING, f"--config={SWEEP}", "--workdir", str(workdir)]
    done = subprocess.run(command, cwd=bench.base, env=bench.env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: MemoryError: too wide" in done.stdout
    assert "measuring" not in done.stdout
    reference = results(finished[0])
    assert results(workdir) == {key: run for key, run in reference.items() if key[1] != "glu"}
    reported = run(bench, workdir, module="lm.report", config=None)
    assert reported.returncode == 0, reported.stderr
    assert "glu is left out: runs failed (MemoryError: too wide)" in (workdir / "report.md").read_text()
    done = run(bench, "--workdir", workdir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(workdir) == reference
    assert run(bench, workdir, module="lm.report", config=None).returncode == 0
    assert "left out" not in (workdir / "report.md").read_text()


@pytest.mark.slow
def test_another_sweep_is_refused(bench, finished, tmp_path):
    done = run(bench, "--workdir", finished[0], "--budget", "full")
    assert done.returncode == 2
    assert "holds another sweep" in done.stderr
    assert "budget: quick -> full (sweep -> now)" in done.stderr
    assert f"seeds: {list(SEEDS)} -> {list(fresh_seeds('tiny_sweep', 5))} (sweep -> now)" in done.stderr
    wild = '{"wild": tiny.variants["wild"] | {"optimizer.learning_rate": (0.2, 1e30)}}'
    fields = f'values=tiny.values | {{"train.steps": 9}}, variants=tiny.variants | {wild}'
    done = run(bench, "--workdir", finished[0], config=changed(tmp_path / "tiny_sweep.py", fields))
    assert done.returncode == 2
    assert "variant 'glu': config.train.steps: 8 -> 9 (sweep -> now)" in done.stderr
    assert "variant 'wild': learning rates: [0.1, 1e+30] -> [0.2, 1e+30] (sweep -> now)" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    done = run(bench, "--workdir", tmp_path / "full")
    assert done.returncode == 2
    assert "is not empty (something) and holds no sweep" in done.stderr


@pytest.mark.slow
def test_the_report_of_a_quick_sweep_supports_no_conclusions(bench, finished):
    done = run(bench, finished[0], module="lm.report", config=None)
    assert done.returncode == 0, done.stderr
    assert "No conclusion" in done.stdout
    assert set(WRITTEN) <= {path.name for path in finished[0].iterdir()}


def test_a_variant_without_an_effect_is_refused(bench, tmp_path):
    idle = 'variants=tiny.variants | {"mlp": {"model.window_pattern": (16,)}, "glu": {"model.norm_bias": False}}'
    done = run(bench, "--workdir", tmp_path / "sweep", config=changed(tmp_path / "idle.py", idle))
    assert done.returncode == 2
    assert "variants 'mlp' and 'glu' are the same experiment" in done.stderr
    assert "model.norm_bias, model.window_pattern have no effect here" in done.stderr
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("together", [0, -1])
def test_together_must_be_at_least_1(capsys, together):
    assert sweep.main([f"--config={SWEEP}", f"--together={together}"]) == 2
    assert capsys.readouterr().err == f"--together must be at least 1, not {together}\n"


def test_a_config_of_one_run_is_refused(capsys):
    assert sweep.main(["--config", str(ROOT / "configs" / "shakespeare.py")]) == 2
    assert "use python -m lm.train --config" in capsys.readouterr().err


def test_help_needs_no_jax(bench):
    env = bench.env | {"PYTHONPATH": f"{bench.without_jax()}:{bench.env['PYTHONPATH']}"}
    command = [sys.executable, "-m", "lm.sweep", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dry-run" in done.stdout
