"""The comparison of a loss with that of the best possible model of the same text."""

import dataclasses
import math

import numpy as np
import pytest

from lm.data import Corpus, Split
from lm.data.entropy_floor import MARGIN, ROUNDING, BelowEntropy, check_loss
from lm.data.markov import LETTERS, TOTAL, MarkovChain
from lm.data.tokenizers import CharTokenizer

CHAIN, TOKENIZER = MarkovChain(), CharTokenizer(LETTERS)


def split_of(text: str, name="validation") -> Split:
    ids = TOKENIZER.encode(text)
    return Split(
        name, ids, len(ids), len(ids), surprisal=lambda ids: CHAIN.surprisal(TOKENIZER.decode(ids))
    )


@pytest.fixture(scope="module")
def split():
    return split_of(CHAIN.text(5000)[1000:])


def test_the_best_loss_is_that_of_the_true_probabilities_of_the_predicted_tokens(split):
    p = CHAIN.weights / TOTAL
    losses = -np.log(p[split.tokens[:-1], split.tokens[1:]])
    for n in (3999, 64):
        assert check_loss(split, math.inf, n) == pytest.approx(losses[:n].mean(), rel=1e-12)


def test_a_loss_below_the_best_one_is_an_error(split):
    n = 3999
    best = check_loss(split, math.inf, n)
    for allowed in (best + 1, best, best - 0.9 * MARGIN / n):
        assert check_loss(split, allowed, n) == best
    with pytest.raises(
        BelowEntropy, match=r"the validation loss is 1\.\d{4} .* cannot get below 1\.\d{4}"
    ) as error:
        check_loss(split, best - 1.1 * MARGIN / n - ROUNDING, n)
    assert error.value.code == 3
    check_loss(split, float("nan"), n)


def test_training_text_packed_rows_and_other_text_are_not_compared(split):
    rows = np.zeros((2, 9), np.uint16)
    others = [
        dataclasses.replace(split, name="train"),
        dataclasses.replace(split, name="train+validation"),
        dataclasses.replace(split, tokens=rows, segments=rows),
        dataclasses.replace(split, surprisal=None),
    ]
    assert [check_loss(other, 0.0, 100) for other in others] == [None] * 4


def test_joined_splits_are_compared(split):
    text = CHAIN.text(6000)
    splits = {"validation": split_of(text[:3000]), "test": split_of(text[3000:], "test")}
    corpus = Corpus("markov", splits, TOKENIZER, fingerprint="")
    assert check_loss(corpus.split("validation+test"), math.inf, 5999) == pytest.approx(
        CHAIN.surprisal(text)[1:].mean()
    )
