"""Kneser-Ney n-gram models: probabilities of NLTK, of plain dictionaries, and by derivation."""

import collections
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import ROOT

from lm.baselines import kneser_ney

REFERENCE = json.loads((ROOT / "tests" / "references" / "ngrams.json").read_text())


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda c: f"{c['order']}-grams, {c['discount']}")
def test_equal_discounts_give_the_probabilities_of_nltk(case):
    """NLTK does not discount unigrams, so their discounts are 0 here. Only tokens with a full context are compared."""
    ids = {character: i for i, character in enumerate(sorted(set(REFERENCE["train"])))}
    train, scored = (np.array([ids[character] for character in REFERENCE[name]]) for name in ("train", "scored"))
    n, discount = case["order"], case["discount"]
    model = kneser_ney.fit(train, len(ids), n, discounts=[(0.0,) * 3] + [(discount,) * 3] * (n - 1))
    np.testing.assert_allclose(model.probabilities(scored)[n - 1 :], case["probabilities"], rtol=1e-12)


class Dictionaries:
    """Compute p(w | h) by the definitions, with dictionaries, for one token w and one history h at a time."""

    def __init__(self, documents, vocab_size, order):
        def ngrams(n):
            return [tuple(d[i : i + n]) for d in documents for i in range(len(d) - n + 1)]

        self.vocab_size, self.order, self.counts = vocab_size, order, {}
        for n in range(1, order + 1):
            counted = ngrams(n) if n == order else [ngram[1:] for ngram in set(ngrams(n + 1))]
            self.counts[n] = collections.Counter(counted)
        self.discounts = {n: self._discounts(counts.values()) for n, counts in self.counts.items()}

    @staticmethod
    def _discounts(counts):
        n1, n2, n3, n4 = (sum(c == i for c in counts) for i in (1, 2, 3, 4))
        if 0 in (n1, n2, n3, n4):
            return kneser_ney.FALLBACK
        y = n1 / (n1 + 2 * n2)
        found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        return found if min(found) > 0 else kneser_ney.FALLBACK

    def p(self, w, history):
        n = len(history) + 1
        lower = self.p(w, history[1:]) if history else 1 / self.vocab_size
        after = [c for ngram, c in self.counts[n].items() if ngram[:-1] == history]
        if not after:
            return lower
        removed = [self.discounts[n][min(c, 3) - 1] for c in after]
        c = self.counts[n][(*history, w)]
        return (c - (self.discounts[n][min(c, 3) - 1] if c else 0)) / sum(after) + sum(removed) / sum(after) * lower


@pytest.mark.parametrize(("order", "vocab_size", "n"), [(1, 5, 60), (2, 5, 60), (3, 5, 200), (3, 60, 400), (4, 3, 80)])
def test_probabilities_equal_those_of_dictionaries(order, vocab_size, n, monkeypatch):
    """The dictionaries estimate the discounts too. Chunks are shorter than the text; the first histories are shorter.

    The ids are skewed, so that some n-grams occur often, and those above 2 vocab_size / 3 do not occur in the text.
    """
    monkeypatch.setattr(kneser_ney, "CHUNK", 7)
    draw = np.random.default_rng(order + vocab_size)
    train, scored = (
        (draw.integers(vocab_size, size=size) * draw.random(size) ** 2 * scale).astype(np.uint16)
        for size, scale in ((n, 2 / 3), (50, 1))
    )
    model, reference = kneser_ney.fit(train, vocab_size, order), Dictionaries([train.tolist()], vocab_size, order)
    found, ids = model.probabilities(scored), scored.tolist()
    expected = [reference.p(ids[i], tuple(ids[max(0, i - order + 1) : i])) for i in range(len(ids))]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_discounts_are_estimated_and_not_the_fallback_on_a_large_text():
    """The counts of counts of a text with a Zipfian vocabulary are not zero at any order."""
    draw = np.random.default_rng(0)
    tokens = np.minimum(draw.zipf(1.3, 20_000), 999)
    for n in (2, 3):
        keys = kneser_ney.ngram_keys(tokens, None, n, 1000)
        d1, d2, d3 = kneser_ney.estimate_discounts(np.unique(keys[keys >= 0], return_counts=True)[1])
        assert (d1, d2, d3) != kneser_ney.FALLBACK
        assert 0 < d1 < 1
        assert 0 < d2 < 2
        assert 0 < d3 < 3


def test_no_discount_is_zero():
    """These counts of counts give D3+ = 3 - 4 Y n4 / n3 = 0: an unseen token after "2 2 2" would have probability 0."""
    assert kneser_ney.estimate_discounts(np.repeat([1, 2, 3, 4], [4, 2, 2, 3])) == kneser_ney.FALLBACK


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 4), min_size=40, max_size=40),
    st.integers(1, 3),
)
def test_probabilities_sum_to_one_after_every_history(tokens, documents, order):
    """With 5 ids, one of them never seen; after seen and unseen histories of every length, in any text."""
    documents = np.sort(documents)[: len(tokens)]
    model = kneser_ney.fit(np.array(tokens), 5, order, documents=documents)
    histories = [h for n in range(order) for h in itertools.product(range(5), repeat=n)]
    ngrams = [[*history, w] for history in histories for w in range(5)]
    probs = model.probabilities(np.concatenate(ngrams), np.repeat(np.arange(len(ngrams)) + 1, list(map(len, ngrams))))
    last = np.cumsum(list(map(len, ngrams))) - 1
    np.testing.assert_allclose(probs[last].reshape(-1, 5).sum(1), 1, rtol=1e-12)


def test_ngrams_stay_within_documents_and_leave_out_padding():
    tokens = np.array([1, 2, 0, 0, 2, 1, 1, 2, 0])
    documents = np.array([1, 1, 0, 0, 2, 2, 2, 3, 3])
    model = kneser_ney.fit(tokens, 4, 3, documents=documents)
    reference = Dictionaries([[1, 2], [2, 1, 1], [2, 0]], 4, 3)
    found = model.probabilities(tokens, documents)
    expected = [reference.p(w, h) for w, h in [(1, ()), (2, (1,)), (2, ()), (1, (2,)), (1, (2, 1)), (2, ()), (0, (2,))]]
    np.testing.assert_allclose(found[documents > 0], expected, rtol=1e-12)


def test_large_ids_do_not_collide():
    """With a vocabulary of 2^18 a trigram takes 54 bits; one of 2^21 ids needs all 63, and more is refused."""
    for vocab_size in (2**18, 2**21):
        tokens = np.array([vocab_size - 1, vocab_size - 2, vocab_size - 1] * 4, np.uint32)
        renamed = kneser_ney.fit(np.array([2, 1, 2] * 4), 3, 3, discounts=[(0.5, 1, 1.5)] * 3)
        model = kneser_ney.fit(tokens, vocab_size, 3, discounts=[(0.5, 1, 1.5)] * 3)
        (large,), (small,) = ([level.probs for level in m.levels[2:]] for m in (model, renamed))
        np.testing.assert_array_equal(large, small)
        assert model.levels[2].keys[-1] < 2**63
    with pytest.raises(ValueError, match="do not fit into 63 bits"):
        kneser_ney.fit(tokens, 2**21 + 1, 3)
