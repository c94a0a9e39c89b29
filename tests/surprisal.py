"""The loss per character of the best possible model of the markov text."""

import numpy as np

from lm.data import markov


def surprisal(text: str) -> np.ndarray:
    """Return -ln P(x_t | x_{t-1}) for t = 1, 2, ... of a markov text; its mean tends to the entropy rate."""
    states = np.array([markov.LETTERS.index(c) for c in text])
    return -np.log(markov.weights()[states[:-1], states[1:]] / 2**16)
