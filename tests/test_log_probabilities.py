"""Log-probabilities of texts in windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import redrawn, tiny

from lm import model
from lm.generation.log_probabilities import Window, likelihoods, split_text

T = 8  # the context


@pytest.fixture(scope="module")
def trained():
    c = tiny(model={"n_layers": 1}).model
    return redrawn(c), c


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.slow
def test_likelihoods_are_sums_of_log_probabilities_in_the_order_of_the_windows(trained, batch_size):
    draw, (params, c) = np.random.default_rng(0), trained
    sizes = [(9, 8), (2, 1), (5, 2), (9, 1), (3, 2), (7, 6)]
    of = [Window(draw.integers(0, 19, n).tolist(), n_scored) for n, n_scored in sizes]
    found = likelihoods(params, c, of, seq_len=T, batch_size=batch_size)
    for window, result in zip(of, found, strict=True):
        logits = np.float64(model.logits(params, c, np.array([window.ids[:-1]]))[0])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        scored = range(len(window.ids) - 1 - window.n_scored, len(window.ids) - 1)
        assert result.log_p == pytest.approx(
            sum(log_p[t, window.ids[t + 1]] for t in scored), abs=1e-5
        )
        assert result.is_greedy == all(log_p[t].argmax() == window.ids[t + 1] for t in scored)


@pytest.mark.slow
def test_a_greedy_continuation_is_greedy(trained):
    params, c = trained
    ids = [3, 5]
    for _ in range(4):
        ids.append(int(model.logits(params, c, np.array([ids]))[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 19]
    found = likelihoods(params, c, [Window(ids, 4), Window(other, 4), Window(other, 5)], seq_len=T)
    assert [result.is_greedy for result in found] == [True, False, False]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_each_token_is_scored_once_with_at_most_seq_len_inputs(n_context, n, seq_len, full_last):
    context, ids = list(range(-n_context, 0)), list(range(n))
    found = list(split_text(context, ids, seq_len, full_last=full_last))
    assert [i for window in found for i in window.ids[len(window.ids) - window.n_scored :]] == ids
    for window in found:
        assert window.n_scored < len(window.ids) <= seq_len + 1
        # consecutive
        assert list(window.ids) == list(range(window.ids[0], window.ids[0] + len(window.ids)))
    if full_last and found:
        assert len(found[-1].ids) == min(seq_len + 1, n_context + n)
