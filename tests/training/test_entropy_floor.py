"""A run and an evaluation on synthetic text stop if the loss is below that of the best possible
model.
"""

import dataclasses

import numpy as np
import pytest
from running import metrics_of
from tiny import redrawn, tiny

from lm.data import Split
from lm.data.entropy_floor import BelowEntropy
from lm.evaluate import main as evaluate
from lm.layers.attention import Mask
from lm.training.batch_source import BatchSource
from lm.training.evaluation import evaluate as evaluate_split

TINY = (
    "--config.data.source=markov", "--config.model.d_model=32", "--config.model.dropout=0.0",
    "--config.train.batch_size=32", "--config.train.seq_len=32", "--config.train.steps_per_dispatch=50",
    "--config.train.steps=200", "--config.optimizer.learning_rate=0.01", "--config.optimizer.warmup_steps=20",
    "--config.eval.every=200", "--config.eval.batch_size=1000", "--config.checkpoint.every=0", "--config.log.every=50",
)  # fmt: skip


def leak(monkeypatch):
    """Let every query see the next key, which is the token that it predicts."""
    visible = Mask.visible
    monkeypatch.setattr(
        Mask, "visible", lambda m: visible(dataclasses.replace(m, q_positions=m.q_positions + 1))
    )


def test_an_evaluation_compares_its_own_tokens_with_the_best_loss():
    """With max_batches the first tokens count alone."""
    tokens = np.random.default_rng(0).integers(0, 19, 9 * 30).astype(np.uint16)
    surprisals = np.where(np.arange(len(tokens)) <= 32, 1.0, 50.0)  # 32 predictions are one batch
    split = Split(
        "validation", tokens, tokens.size, None, surprisal=lambda ids: surprisals[: len(ids)]
    )
    config = tiny()
    params, source = redrawn(config.model), BatchSource(split, config)
    assert evaluate_split(params, source, max_batches=1)["best_loss"] == 1.0
    with pytest.raises(BelowEntropy):
        evaluate_split(params, source)


@pytest.mark.slow
def test_an_honest_run_is_not_stopped(train, tmp_path):
    code, output = train(tmp_path / "run", *TINY)
    assert code == 0, output
    lines = {line["split"]: line for line in metrics_of(tmp_path / "run") if "split" in line}
    assert lines["validation"]["best_loss"] == pytest.approx(1.9236, abs=5e-5)
    assert all(line["loss"] > line["best_loss"] for line in lines.values())
    assert (
        evaluate(
            [
                f"--workdir={tmp_path / 'run'}",
                "--split=validation+test",
                "--stride=16",
                "--no-baselines",
            ]
        )
        == 0
    )


@pytest.mark.slow
def test_a_leaking_mask_stops_the_run_and_the_evaluation(train, tmp_path, monkeypatch, capsys):
    leak(monkeypatch)
    # another model than above, whose compiled programs have the right mask
    width = "--config.model.d_ff=80"
    code, output = train(tmp_path / "run", *TINY, width)
    assert code == 3
    assert "a causal model cannot get below 1.9236 on this text" in output
    monkeypatch.setattr("lm.training.evaluation.check_loss", lambda *arguments, **options: None)
    assert train(tmp_path / "unseen", *TINY, width)[0] == 0
    assert evaluate([f"--workdir={tmp_path / 'unseen'}", "--no-baselines"]) == 3
    assert "the test loss is 0." in capsys.readouterr().err
