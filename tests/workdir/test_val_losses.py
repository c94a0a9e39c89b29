"""val_losses.json: which losses are compared with the metrics of a run."""

import json

import pytest

from lm.workdir.val_losses import read_val_losses


def write_run(workdir, max_batches: int, lines: list[dict], val_losses: dict):
    (workdir / "config.json").write_text(json.dumps({"eval": {"max_batches": max_batches}}))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "val_losses.json").write_text(json.dumps(val_losses))


FULL = {"step": 20, "split": "validation", "loss": 2.5}


@pytest.mark.parametrize("lines", [[FULL], [{**FULL, "step": 10, "loss": 3.0, "batches": 2}, FULL]])
def test_a_score_of_some_batches_may_differ_from_the_loss_of_the_full_split(tmp_path, lines):
    """Also if no evaluation took place before the end, so that the metrics have no loss of so many batches."""
    scores = {"10": 3.0, "20": 2.75} if len(lines) > 1 else {"20": 2.75}
    write_run(tmp_path, 2, lines, scores)
    messages = []
    assert read_val_losses(tmp_path, messages.append) == ({int(step): loss for step, loss in scores.items()}, True)
    assert messages == []


def test_a_changed_score_of_the_full_split_is_replaced_with_a_warning(tmp_path):
    write_run(tmp_path, 0, [FULL], {"20": 2.75})
    messages = []
    assert read_val_losses(tmp_path, messages.append) == ({20: 2.5}, True)
    assert len(messages) == 1
    assert "val_losses.json is corrupted" in messages[0]
