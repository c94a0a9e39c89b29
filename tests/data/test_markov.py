import numpy as np
from surprisal import surprisal

from lm.data import markov


def test_the_entropy_rate_is_that_of_the_joint_distribution():
    # H(X_2 | X_1) = H(X_1, X_2) - H(X_1), with pi from powers of P instead of linear equations.
    p = markov.weights() / 2**16
    np.testing.assert_array_equal(p.sum(1), 1.0)
    pi = np.linalg.matrix_power(p, 4096)[0]
    joint = pi[:, None] * p

    def entropy(q):
        return -(q * np.log(q)).sum()

    np.testing.assert_allclose(markov.entropy_rate(), entropy(joint) - entropy(pi), rtol=1e-12)


def test_the_text_has_the_stated_transition_probabilities():
    text = markov.text(200_000)
    states = np.array([markov.LETTERS.index(c) for c in text])
    counts = np.zeros((16, 16))
    np.add.at(counts, (states[:-1], states[1:]), 1)
    expected = counts.sum(1, keepdims=True) * markov.weights() / 2**16
    common = expected > 5  # where the chi-squared approximation holds
    statistic, freedom = ((counts - expected) ** 2 / expected)[common].sum(), common.sum() - 16
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_best_models_loss_on_the_text_is_the_entropy_rate():
    loss = surprisal(markov.text(200_000))
    assert abs(loss.mean() - markov.entropy_rate()) < 4 * loss.std() / np.sqrt(len(loss))


def test_the_text_is_deterministic_and_shorter_ones_are_prefixes():
    assert markov.text(40) == markov.text(400)[:40] == "hjcgknpjioadahjnjpljckegkegcfomckgigkahl"
