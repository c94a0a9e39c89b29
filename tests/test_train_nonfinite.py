"""The command lm.train: a loss, gradient or update that is not finite."""

import re

import jax
import numpy as np
import pytest
from running import checkpoint_steps, checksums, metrics_of, summary_of

from lm.workdir.checkpoints import restore_params

UNBOUNDED = (
    "--config.optimizer.schedule=constant",
    "--config.optimizer.clip_norm=none",
    "--config.eval.every=0",
)
DIVERGING = (
    "--config.optimizer.name=sgd",
    "--config.optimizer.learning_rate=1e30",
    "--config.optimizer.weight_decay=0.0",
    *UNBOUNDED,
)


def assert_only_finite_checkpoints(workdir):
    for step in checkpoint_steps(workdir):
        _, params, _ = restore_params(workdir, step)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def bad_step(workdir) -> int:
    """Return the step whose loss or gradients were not finite; no later step was logged."""
    *good, last = metrics_of(workdir)
    assert not np.isfinite(last["loss"]) or not np.isfinite(last["grad_norm"])
    assert all(np.isfinite(line["loss"]) and np.isfinite(line["grad_norm"]) for line in good)
    assert [line["step"] for line in good] == list(range(1, last["step"]))
    return last["step"]


@pytest.mark.slow
def test_a_diverging_run_stops_with_a_report(train, tmp_path):
    code, output = train(tmp_path / "run", *DIVERGING)
    assert code == 3
    step = bad_step(tmp_path / "run")
    # The report has the step, the learning rate, norms by group, and the last finite checkpoint.
    assert re.search(
        rf"step {step}: the (loss|gradient norm) is not finite; training stopped", output
    )
    assert "learning rate 1e+30" in output
    assert all(
        group in output for group in ("gradient norm", "layers/attention ", "final_norm", "head")
    )
    assert f"step {step - 1}, in {tmp_path / 'run' / 'checkpoints'}" in output
    assert (summary_of(tmp_path / "run")["status"], summary_of(tmp_path / "run")["steps"]) == (
        "nonfinite",
        step - 1,
    )
    assert max(checkpoint_steps(tmp_path / "run")) == step - 1
    assert_only_finite_checkpoints(tmp_path / "run")
    # The last finite state does not depend on the number of steps in a dispatch.
    assert train(tmp_path / "one", *DIVERGING, "--config.train.steps_per_dispatch=1")[0] == 3
    assert checksums(tmp_path / "one", step - 1) == checksums(tmp_path / "run", step - 1)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_the_report_distinguishes_an_update_from_a_loss_or_gradient(train, tmp_path, action):
    """A learning rate near the largest float32 overflows the parameters in the first step."""
    keys = ("--config.optimizer.learning_rate=3.4e38", "--config.train.steps=2")
    keys += ("--config.optimizer.weight_decay=10.0", f"--config.train.on_nonfinite={action}")
    code, output = train(tmp_path / "run", *UNBOUNDED, *keys)
    assert code == {"stop": 3, "skip": 0}[action]
    assert "step 1: the update is not finite (the loss and the gradient norm are); " in output


@pytest.mark.slow
def test_steps_that_are_not_finite_can_be_skipped(train, tmp_path):
    assert train(tmp_path / "run", *DIVERGING)[0] == 3
    code, output = train(
        tmp_path / "run", *DIVERGING, "--resume", "--config.train.on_nonfinite=skip"
    )
    assert code == 0
    assert "the update was skipped" in output
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 12)
    lines = [line for line in metrics_of(tmp_path / "run") if "split" not in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert (
        summary["skipped"]
        == sum(not np.isfinite(line["loss"] + line["grad_norm"]) for line in lines)
        > 0
    )
    assert_only_finite_checkpoints(tmp_path / "run")
