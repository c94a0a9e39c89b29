"""The smallest models and batches, all numbers in 16 bits, a clock that jumps, and a slow shared
file system.
"""

import math
import random
import shutil
import threading
import time

import numpy as np
import pytest
from running import assert_same_run, checkpoint_steps, metrics_of, summary_of

from benchmarks.faults.runs import stopped_at
from lm.workdir import checkpoints as checkpoints_module
from lm.workdir.checkpoints import Checkpoints
from lm.workdir.metrics import MetricsWriter

EXTREMES = (
    "data.tokenizer=char", "train.seq_len=1", "train.batch_size=1", "model.n_layers=1", "model.n_heads=1",
    "model.n_kv_heads=1", "model.param_dtype=bfloat16", "model.compute_dtype=bfloat16",
)  # fmt: skip


@pytest.mark.slow
def test_extreme_sizes_train_and_resume(train, tmp_path):
    """A run that is stopped at step 9 and resumed equals an uninterrupted one."""
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(0).choice("ab") for _ in range(4000)))
    keys = [f"--config.data.source=text:{text}"]
    keys += [f"--config.{key}" for key in EXTREMES]
    code, output = train(tmp_path / "whole", *keys)
    assert code == 0, output
    assert math.isfinite(summary_of(tmp_path / "whole")["val_loss"])
    with stopped_at(9):
        assert train(tmp_path / "run", *keys, "--config.train.steps_per_dispatch=1")[0] == 143
    code, output = train(tmp_path / "run", *keys, "--resume")
    assert (code, "resuming at step 10" in output) == (0, True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_wall_clock(bench, train, tmp_path, monkeypatch):
    """It jumps at every call, by less than the ten minutes after which Orbax gives up a save."""
    draw, now = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: now() + draw.uniform(-250, 250))
    with stopped_at(9):
        assert train(tmp_path / "run", "--config.train.steps_per_dispatch=1")[0] == 143
    code, output = train(tmp_path / "run", "--resume")
    assert code == 0
    assert "-" not in "".join(line.partition("ETA ")[2] for line in output.splitlines())
    assert all(line.get("tokens_per_second", 1) > 0 for line in metrics_of(tmp_path / "run"))
    assert 0 < summary_of(tmp_path / "run")["wall_seconds"] < 600
    assert_same_run(tmp_path / "run", bench.reference())


@pytest.mark.slow
def test_a_checkpoint_that_appears_late_is_not_overwritten(bench, train, tmp_path, monkeypatch):
    """A run that resumes before its newest checkpoint is visible stops with one line, and later
    resumes with it.
    """
    workdir, hidden = shutil.copytree(bench.reference(), tmp_path / "run"), tmp_path / "hidden"
    (workdir / "summary.json").unlink()
    (workdir / "checkpoints" / "12").rename(hidden)
    write = MetricsWriter.write

    def appearing(self, line):
        if hidden.exists():
            hidden.rename(workdir / "checkpoints" / "12")
        write(self, line)

    monkeypatch.setattr(MetricsWriter, "write", appearing)
    code, output = train(workdir, "--resume")
    assert (code, "resuming at step 8" in output) in ((0, True), (1, True)), output
    assert "Traceback" not in output
    if code:
        assert str(workdir / "checkpoints") in output.splitlines()[-1]
        assert train(workdir, "--resume")[0] == 0
    assert checkpoint_steps(workdir) == checkpoint_steps(bench.reference())
    assert_same_run(workdir, bench.reference())


def test_another_process_waits_for_a_checkpoint_that_it_sees_late(tmp_path, monkeypatch):
    """Process 0 lists the checkpoints. Another process that does not see one yet must not call it
    corrupted.
    """
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, {"x": np.float32(4)}, {})
    checkpoints.wait()
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "hidden")
    monkeypatch.setattr(checkpoints_module.jax, "process_index", lambda: 1)
    later = threading.Timer(
        0.3, lambda: (tmp_path / "hidden").rename(tmp_path / "checkpoints" / "4")
    )
    later.start()
    assert checkpoints.restore({"x": np.float32(0)})[0] == 4
    later.join()
    monkeypatch.undo()
    checkpoints.close()
