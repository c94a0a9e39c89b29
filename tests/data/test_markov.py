"""The synthetic text: its statistics, its entropy rate, and the loss of the best possible model."""

import numpy as np

from lm.data.markov import LETTERS, ORDERS, TOTAL, MarkovChain

N = 200_000


def counted(text: str, order: int) -> np.ndarray:
    """Return how often each letter follows each context (16^order, 16)."""
    letters = np.array([LETTERS.index(c) for c in text])
    counts, contexts = np.zeros((16**order, 16)), np.zeros(len(text) - order, int)
    for i in range(order):  # the oldest letter first
        contexts = 16 * contexts + letters[i : len(text) - order + i]
    np.add.at(counts, (contexts, letters[order:]), 1)
    return counts


def test_the_entropy_rate_is_that_of_the_joint_distribution():
    # H(X | context) = H(context, X) - H(context), with pi from the linear equations of the full
    # transition matrix.
    def entropy(q):
        return -(q * np.log(q)).sum()

    for order in (1, 2):
        chain, n = MarkovChain(order), 16**order
        p = chain.weights / TOTAL
        np.testing.assert_array_equal(p.sum(1), 1.0)
        transitions = np.zeros((n, n))
        for context in range(n):
            transitions[context, (16 * context + np.arange(16)) % n] = p[context]
        equations = np.vstack([transitions.T - np.eye(n), np.ones(n)])
        pi = np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]
        np.testing.assert_allclose(
            chain.entropy_rate, entropy(pi[:, None] * p) - entropy(pi), rtol=1e-10
        )


def test_the_text_has_the_stated_transition_probabilities():
    for order in (1, 2):
        chain = MarkovChain(order)
        counts = counted(chain.text(N), order)
        expected = counts.sum(1, keepdims=True) * chain.weights / TOTAL
        common = expected > 5  # where the chi-squared approximation holds
        statistic, freedom = (
            ((counts - expected) ** 2 / expected)[common].sum(),
            common.sum() - 16**order,
        )
        assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_best_models_loss_on_the_text_is_the_entropy_rate():
    for order in ORDERS:
        chain = MarkovChain(order)
        loss = chain.surprisal(chain.text(N))
        assert (loss[:order] == 0).all()  # their contexts are not part of the text
        assert (loss[order:] > 0).all()
        assert abs(loss[order:].mean() - chain.entropy_rate) < 4 * loss.std() / np.sqrt(N)


def test_the_surprisal_of_a_part_of_the_text_is_that_within_the_whole():
    chain = MarkovChain(3)
    text = chain.text(1000)
    np.testing.assert_array_equal(chain.surprisal(text[400:])[3:], chain.surprisal(text)[403:])
    assert chain.surprisal(text[:2]).tolist() == [0, 0]


def test_the_text_is_deterministic_and_shorter_ones_are_prefixes():
    starts = "hjcgknpjioadahjnjpljckegkegcfomckgigkahl", "cjpockcgcecacecaphcacimcgcgcofbcdjboaeag"
    for order, start in enumerate(starts, 1):
        assert MarkovChain(order).text(40) == MarkovChain(order).text(400)[:40] == start
