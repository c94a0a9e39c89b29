"""Losses and hits of a text, compared with those of the model in NumPy
(tests/references/numpy_model.py).
"""

import jax
import numpy as np
import pytest
from references import numpy_model
from tiny import redrawn, tiny, unstack_layers

from lm.data import Split
from lm.generation import log_probabilities
from lm.scoring.means import TextMeans
from lm.scoring.predictions import score_split

T = 8
CONFIG = tiny(model={"n_layers": 1})
PARAMS = redrawn(CONFIG.model)
IDS = np.random.default_rng(0).integers(0, CONFIG.model.vocab_size, 77)
TEXT = Split("test", IDS, len(IDS), n_bytes=2 * len(IDS))


def reference(config, params, ids, stride: int) -> list[tuple[int, float, bool]]:
    """Return (context, loss, hit) of every token but the first, each in the first window that has
    it as a target.
    """
    wide, found = jax.tree.map(np.float64, unstack_layers(params)), []
    for place in range(1, len(ids)):
        start = stride * max(0, -(-(place - T) // stride))
        logits = numpy_model.logits(config.model, wide, ids[start:place])[-1]
        loss = np.log(np.exp(logits).sum()) - logits[ids[place]]
        found.append((place - start, loss, int(logits.argmax()) == ids[place]))
    return found


def assert_means(means: TextMeans, expected: list[tuple[int, float, bool]]) -> None:
    contexts, losses, hits = (np.array(column) for column in zip(*expected, strict=True))
    assert means.tokens == len(expected)
    assert means.loss.value == pytest.approx(losses.mean(), abs=1e-5)
    assert means.accuracy.value == hits.mean()
    for b in means.by_context:
        inside = (contexts >= b.first) & (contexts <= b.last)
        assert b.tokens == inside.sum()
        assert b.loss.value == pytest.approx(losses[inside].mean(), abs=1e-5)
        assert b.accuracy.value == hits[inside].mean()


@pytest.fixture(scope="module")
def plain() -> TextMeans:
    # the same compiled program in several tests
    return score_split(PARAMS, CONFIG, TEXT, batch_size=10)


def test_plain_windows_equal_the_reference(plain):
    assert_means(plain, reference(CONFIG, PARAMS, IDS, T))
    assert [(b.first, b.last) for b in plain.by_context] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert plain.bits_per_byte.value == pytest.approx(plain.loss.value / np.log(2) / 2)
    assert plain.blocks == 10


def test_sliding_windows_equal_the_reference():
    # ten: the shapes that are compiled already
    means = score_split(PARAMS, CONFIG, TEXT, stride=3, batch_size=10)
    assert_means(means, reference(CONFIG, PARAMS, IDS, 3))


@pytest.mark.slow
def test_bfloat16_agrees_to_its_precision(plain):
    config = tiny(model={"n_layers": 1, "compute_dtype": "bfloat16"})
    assert score_split(PARAMS, config, TEXT).loss.value == pytest.approx(plain.loss.value, rel=2e-2)


def test_the_scores_do_not_depend_on_the_batch_size_nor_on_the_parts_of_the_logits(
    plain, monkeypatch
):
    np.testing.assert_allclose(
        score_split(PARAMS, CONFIG, TEXT, batch_size=3).sums, plain.sums, atol=1e-5
    )
    n_logits = 3 * len(IDS) // T * CONFIG.model.vocab_size  # 3 positions at a time
    monkeypatch.setattr(log_probabilities, "MAX_LOGITS", n_logits)
    np.testing.assert_allclose(
        score_split(PARAMS, CONFIG, TEXT, batch_size=10).sums, plain.sums, atol=1e-5
    )


@pytest.mark.slow
def test_a_batch_size_beyond_the_number_of_windows_is_reduced(plain):
    """Rows beyond the last window are computed in vain, and 2^31 of them do not fit into memory."""
    np.testing.assert_allclose(
        score_split(PARAMS, CONFIG, TEXT, batch_size=2**31 - 1).sums, plain.sums, atol=1e-5
    )


def test_documents_of_packed_rows_are_scored_alone_and_in_any_order():
    """A row has the documents 0-2 and 3-7, and a token of padding; the other one document."""
    rows = IDS[: 2 * (T + 1)].reshape(2, T + 1)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0], [1] * 9], np.uint16)
    expected = [
        line
        for ids in (rows[0, :3], rows[0, 3:8], rows[1])
        for line in reference(CONFIG, PARAMS, ids, T)
    ]
    means = score_split(PARAMS, CONFIG, Split("test", rows, 17, None, segments))
    assert_means(means, expected)
    turned = score_split(PARAMS, CONFIG, Split("test", rows[::-1], 17, None, segments[::-1]))
    np.testing.assert_allclose(turned.sums[::-1], means.sums, atol=1e-5)
    assert means.bits_per_byte is None
