"""Probes during a run: their answers follow from the tokens before them, and they are logged,
plotted and kept.
"""

import math
import shutil

import jax
import numpy as np
import pytest
from running import assert_same_run, checkpoint_steps, metrics_of, summary_of
from tiny import redrawn, tiny

from lm.data import Corpus, Split, tokenizers
from lm.system.errors import UserError
from lm.training import probes
from lm.training import scores as module
from lm.training.loss_curve import loss_curve
from lm.training.run import Run
from lm.training.scores import probe_losses

PROBES = "--config.eval.probes=repeat,recall"


@pytest.mark.parametrize(
    ("length", "n_ids"), [(4, 2), (9, 19), (64, 65), (129, 300), (1000, 50_000)]
)
def test_answers_follow_from_the_tokens_before_them(length, n_ids):
    rows, answers = probes.repeat(7, length, n_ids)
    (targets,) = np.nonzero(answers)
    half = length // 2
    assert (targets[0], targets[-1]) == (half, length - 2)
    np.testing.assert_array_equal(rows[:, targets + 1], rows[:, targets + 1 - half])

    rows, answers = probes.recall(7, length, n_ids)
    assert answers.sum() == min(length // 4, n_ids // 2, 16)
    for row in rows:
        n = answers.sum()
        pairs = dict(row[: 2 * n].reshape(n, 2))
        assert len({*pairs.keys(), *pairs.values()}) == 2 * n
        asked = [(row[i], row[i + 1]) for i in np.nonzero(answers)[0]]
        assert sorted(asked) == sorted(pairs.items())
    for tokens in (rows, probes.repeat(7, length, n_ids)[0]):
        assert (tokens.min() >= 0, tokens.max() < n_ids, tokens.dtype) == (True, True, np.int32)
    assert len({tuple(row) for row in rows}) == (7 if n_ids > 2 else 2)


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_that_predicts_all_tokens_alike_has_the_loss_of_chance(packed):
    config = tiny(eval={"probes": ("repeat", "recall"), "batch_size": 5})
    tokenizer = tokenizers.make("char", ["abcdefghijklmnopqrs"])
    rows = np.ones((1, 9), np.uint16)
    split = Split("train", rows if packed else rows[0], 9, None, rows if packed else None)
    run = Run(config, Corpus("text", {"train": split}, tokenizer, ""), {}, {})
    params = redrawn(config.model)
    learned = probe_losses(run, params)
    params["head"] = jax.tree.map(np.zeros_like, params["head"])
    for name, loss in probe_losses(run, params).items():
        assert loss == pytest.approx(math.log(19), rel=1e-6)
        assert abs(learned[name] - loss) > 0.01


def test_scores_that_fail_at_the_end_leave_the_last_state(train, tmp_path, monkeypatch):
    """A task may have a character that the tokenizer does not know."""

    def fail(run, params):
        raise UserError("an unknown character")

    monkeypatch.setattr(module, "probe_losses", fail)
    code, output = train(
        tmp_path / "run", PROBES, "--config.eval.every=0", "--config.checkpoint.every=0"
    )
    assert (code, "an unknown character" in output, checkpoint_steps(tmp_path / "run")) == (
        2,
        True,
        [12],
    )


def test_scores_are_logged_once_plotted_and_in_the_summary(train, bench, tmp_path):
    workdir, resumed = tmp_path / "run", tmp_path / "resumed"
    keys = PROBES, "--config.train.ema=0.5"
    code, output = train(workdir, *keys)
    assert code == 0, output
    lines = [line for line in metrics_of(workdir) if "scores" in line]
    names = ["probe/repeat", "probe/recall", "probe/repeat/ema", "probe/recall/ema"]
    assert [(line["step"], sorted(line["scores"])) for line in lines] == [
        (step, sorted(names)) for step in (4, 8, 12)
    ]
    summary = summary_of(workdir)
    assert summary["scores"] == lines[-1]["scores"]
    finals = [line for line in metrics_of(workdir) if line["step"] == 12 and "split" in line]
    assert summary["ema_losses"]["test"] == finals[-1]["ema_loss"] != summary["losses"]["test"]
    assert (workdir / "scores.png").read_bytes().startswith(b"\x89PNG")
    # The loss is that of a run without probes, and a resumed run scores what is missing.
    assert metrics_of(bench.reference())[0]["loss"] == metrics_of(workdir)[0]["loss"]
    shutil.copytree(workdir, resumed)
    shutil.rmtree(resumed / "checkpoints" / "12")
    (resumed / "summary.json").unlink()
    assert train(resumed, *keys, "--resume")[0] == 0
    assert_same_run(resumed, workdir)
    # The picture of the losses has a curve of the average.
    labels = [
        text.get_text() for text in loss_curve(metrics_of(workdir)).axes[0].get_legend().get_texts()
    ]
    assert labels == ["training", "validation", "validation, averaged parameters"]
