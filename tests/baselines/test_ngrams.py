"""n-gram models: probabilities of NLTK, by hand and by derivation; packed rows."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import ROOT

from lm.baselines import ngrams
from lm.baselines.ngrams import kneser_ney, ngram_losses, unigram_loss
from lm.data import Corpus, Split
from lm.system.errors import UserError

REFERENCE = json.loads((ROOT / "tests" / "references" / "ngrams.json").read_text())


def corpus_of(train, validation):
    splits = {
        name: Split(name, np.asarray(ids, np.uint16), len(ids), None)
        for name, ids in (("train", train), ("validation", validation))
    }
    return Corpus("text", splits, None, "fingerprint")


def losses_of(train, validation, vocab_size):
    corpus = corpus_of(train, validation)
    return ngram_losses(corpus, corpus.split("validation"), vocab_size)


def packed(name, rows, segments):
    return Split(
        name, np.array(rows), int((np.array(segments) > 0).sum()), None, np.array(segments)
    )


def test_probabilities_of_nltk():
    """NLTK does not discount unigrams, so their discount is 0 here. Only tokens with a full context
    are compared.
    """
    ids = {character: i for i, character in enumerate(sorted(set(REFERENCE["train"])))}
    train, scored = (
        np.array([ids[character] for character in REFERENCE[name]]) for name in ("train", "scored")
    )
    for case in REFERENCE["cases"]:
        n, discount = case["order"], case["discount"]
        found = kneser_ney((train, None), (scored, None), len(ids), n, [0.0] + [discount] * (n - 1))
        np.testing.assert_allclose(found[n - 1 :], case["probabilities"], rtol=1e-12)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 4), min_size=40, max_size=40),
    st.integers(1, 3),
)
def test_probabilities_sum_to_one_after_every_history(tokens, documents, order):
    """With 5 ids, one of them never seen; after seen and unseen histories of every length, in any
    text.
    """
    train = np.array(tokens), np.sort(documents)[: len(tokens)]
    histories = [h for n in range(order) for h in itertools.product(range(5), repeat=n)]
    found = [[*history, w] for history in histories for w in range(5)]
    scored = np.concatenate(found), np.repeat(np.arange(len(found)) + 1, list(map(len, found)))
    last = np.cumsum(list(map(len, found))) - 1
    np.testing.assert_allclose(
        kneser_ney(train, scored, 5, order)[last].reshape(-1, 5).sum(1), 1, rtol=1e-12
    )


def test_large_ids_do_not_collide():
    """A trigram over 2^18 ids takes 54 bits; one over 2^21 ids needs all 63, and one over 2^22 is
    left out.
    """
    small = np.array([2, 1, 2] * 4), None
    for vocab_size in (2**18, 2**21):
        # Only the uniform distribution below the unigrams differs; without a discount of unigrams
        # it has no weight.
        large = small[0].astype(np.uint32) + vocab_size - 3, None
        options = {"order": 3, "discounts": [0, 0.5, 0.5]}
        found = kneser_ney(large, large, vocab_size, **options)
        np.testing.assert_allclose(found, kneser_ney(small, small, 3, **options), rtol=1e-12)
    assert losses_of([0, 1, 0, 2], [0, 1], 2**22).keys() == {"unigram", "bigram"}


def test_the_unigram_loss_by_hand():
    """The train split 0 0 0 1 gives the smoothed counts 4 2 1; the targets of 1 0 2 are 0 and 2."""
    corpus = corpus_of([0, 0, 0, 1], [1, 0, 2])
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert unigram_loss(corpus, "validation", 3) == pytest.approx(expected, rel=1e-12)
    assert unigram_loss(corpus, "validation", 3) == losses_of([0, 0, 0, 1], [1, 0, 2], 3)["unigram"]
    assert unigram_loss(corpus, "test", 3) is None
    splits = {
        "train": packed("train", [[0, 0, 0, 0], [1, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]]),
        "validation": packed(
            "validation", [[1, 0, 0, 0], [0, 2, 1, 0]], [[1, 1, 0, 0], [1, 1, 2, 0]]
        ),
    }
    rows = Corpus("rows", splits, None, "")
    assert unigram_loss(rows, "validation", 3) == pytest.approx(expected, rel=1e-12)


def test_the_unigram_loss_reads_the_beginning_of_a_long_split(monkeypatch):
    """With a limit of two tokens, it counts 0 0 of the train split and scores 1 1 of validation,
    packed or not.
    """
    monkeypatch.setattr(ngrams, "MAX_UNIGRAM_TOKENS", 2)
    ids = {"train": [0, 0, 1, 1, 1], "validation": [1, 1, 0, 0, 0]}
    assert unigram_loss(corpus_of(**ids), "validation", 2) == pytest.approx(math.log(4))
    splits = {name: packed(name, [i[:2], i[2:4]], np.ones((2, 2), int)) for name, i in ids.items()}
    assert unigram_loss(Corpus("rows", splits, None, ""), "validation", 2) == pytest.approx(
        math.log(4)
    )


def test_a_cycle_of_aab_is_predicted_by_trigrams():
    """The token after a depends on the one before it: one bit in two of three tokens.

    Discounts and counts of 999 tokens leave less than 0.01 nats.
    """
    losses = losses_of([0, 0, 1] * 333, [0, 0, 1] * 50, 2)
    assert losses["bigram"] == pytest.approx(2 / 3 * math.log(2), abs=0.01)
    assert losses["trigram"] == pytest.approx(0, abs=0.01)


def test_documents_of_packed_rows_count_as_if_they_were_apart():
    """The row number is part of a document's number: the last document of a row and the first of
    the next differ.
    """
    rows = packed("train", [[0, 1, 2, 0], [1, 1, 1, 0]], [[1, 1, 2, 0], [1, 1, 1, 0]])
    tokens, documents = ngrams._first_tokens(rows, 100)
    assert tokens.tolist() == [0, 1, 2, 0, 1, 1, 1, 0]
    assert documents.tolist() == [1, 1, 2, 0, 4, 4, 4, 0]
    whole = np.array([0, 1, 2, 1, 1, 1]), np.array([1, 1, 2, 3, 3, 3])
    for order in (2, 3):
        in_rows = kneser_ney((tokens, documents), (tokens, documents), 3, order)[documents > 0]
        np.testing.assert_array_equal(in_rows, kneser_ney(whole, whole, 3, order))


def test_unsuitable_texts_are_refused():
    for train, scored, problem in (
        ([0, 1, 2, 3], [0, 1], "the id 3 is outside the vocabulary of 3 ids"),
        ([0, 1], [0, 7], "the id 7 is outside the vocabulary of 3 ids"),
        ([0, 1], [0], "no two tokens"),
    ):
        with pytest.raises(UserError, match=problem):
            losses_of(train, scored, 3)
