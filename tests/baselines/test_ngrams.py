"""Losses of n-gram models: values by hand, packed rows, and what is cached."""

import math
import threading

import numpy as np
import pytest

from lm.baselines import ngrams
from lm.baselines.ngrams import ngram_losses, unigram_loss
from lm.data import Corpus, Split
from lm.errors import UserError


def corpus_of(train, validation, fingerprint="text"):
    splits = {
        name: Split(name, np.asarray(ids, np.uint16), len(ids), None)
        for name, ids in (("train", train), ("validation", validation))
    }
    return Corpus("text", splits, None, fingerprint)


def packed(name, rows, segments):
    return Split(name, np.array(rows), int((np.array(segments) > 0).sum()), None, np.array(segments))


def test_the_unigram_loss_by_hand():
    """The train split 0 0 0 1 gives the smoothed counts 4 2 1; the targets of 1 0 2 are 0 and 2."""
    corpus = corpus_of([0, 0, 0, 1], [1, 0, 2])
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert unigram_loss(corpus, "validation", 3) == pytest.approx(expected, rel=1e-12)
    assert unigram_loss(corpus, "test", 3) is None
    splits = {
        "train": packed("train", [[0, 0, 0, 0], [1, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]]),
        "validation": packed("validation", [[1, 0, 0, 0], [0, 2, 1, 0]], [[1, 1, 0, 0], [1, 1, 2, 0]]),
    }
    rows = Corpus("rows", splits, None, "", packed=True)
    assert unigram_loss(rows, "validation", 3) == pytest.approx(expected, rel=1e-12)


def test_the_unigram_loss_reads_the_beginning_of_a_long_split(monkeypatch):
    """With a limit of two tokens, it counts 0 0 of the train split and scores 1 1 of validation, packed or not."""
    monkeypatch.setattr(ngrams, "MAX_UNIGRAM_TOKENS", 2)
    ids = {"train": [0, 0, 1, 1, 1], "validation": [1, 1, 0, 0, 0]}
    assert unigram_loss(corpus_of(**ids), "validation", 2) == pytest.approx(math.log(4))
    splits = {name: packed(name, [i[:2], i[2:4]], np.ones((2, 2), int)) for name, i in ids.items()}
    assert unigram_loss(Corpus("rows", splits, None, "", packed=True), "validation", 2) == pytest.approx(math.log(4))


def test_the_unigram_loss_of_a_run_is_that_beside_the_bigrams(tmp_path):
    corpus = corpus_of([0, 1, 0, 2] * 9, [0, 1, 2, 2, 1])
    losses = ngram_losses(corpus, corpus.split("validation"), 4, cache_dir=tmp_path)
    assert losses["unigram"] == unigram_loss(corpus, "validation", 4)


def test_a_cycle_of_two_is_predicted_by_bigrams_and_one_of_aab_by_trigrams(tmp_path):
    """In a a b a a b the token after a depends on the one before it: one bit in two of three tokens.

    Discounts and counts of 999 tokens leave less than 0.01 nats.
    """
    options = {"vocab_size": 2, "cache_dir": tmp_path}
    two = corpus_of([0, 1] * 500, [0, 1] * 50, "two")
    losses = ngram_losses(two, two.split("validation"), **options)
    assert losses["unigram"] == pytest.approx(math.log(2), abs=0.01)
    assert losses["bigram"] == pytest.approx(0, abs=0.01)
    three = corpus_of([0, 0, 1] * 333, [0, 0, 1] * 50, "three")
    losses = ngram_losses(three, three.split("validation"), **options)
    assert losses["bigram"] == pytest.approx(2 / 3 * math.log(2), abs=0.01)
    assert losses["trigram"] == pytest.approx(0, abs=0.01)


def test_documents_of_packed_rows_count_as_if_they_were_apart():
    """The row number is part of a document's number: the last document of a row and the first of the next differ."""
    rows = packed("train", [[0, 1, 2, 0], [1, 1, 1, 0]], [[1, 1, 2, 0], [1, 1, 1, 0]])
    tokens, documents = ngrams._first_tokens(rows, 100)
    assert tokens.tolist() == [0, 1, 2, 0, 1, 1, 1, 0]
    assert documents.tolist() == [1, 1, 2, 0, 4, 4, 4, 0]
    whole = np.array([0, 1, 2, 1, 1, 1]), np.array([1, 1, 2, 3, 3, 3])
    assert ngrams.compute_losses((tokens, documents), (tokens, documents), 3) == ngrams.compute_losses(whole, whole, 3)


def test_losses_are_computed_once_per_corpus_and_text(tmp_path, monkeypatch):
    corpus, computed, lines = corpus_of([0, 1, 0, 2] * 9, [0, 1, 2]), [], []
    compute = ngrams.compute_losses
    monkeypatch.setattr(ngrams, "compute_losses", lambda *a: computed.append(a) or compute(*a))

    def losses(corpus, vocab_size=3, split="validation"):
        return ngram_losses(corpus, corpus.split(split), vocab_size, cache_dir=tmp_path, say=lines.append)

    first = losses(corpus)
    assert losses(corpus) == first
    assert len(computed) == len(lines) == 1
    assert lines == ["counting the n-grams of text"]
    others = [corpus_of([0, 1, 0, 2] * 9, [0, 0, 1]), corpus_of([0, 1, 0, 2] * 9, [0, 1, 2], "other")]
    different = [losses(other) for other in others] + [losses(corpus, 4), losses(corpus, split="train")]
    assert len(computed) == 5
    assert different[0] != first
    assert different[2] != first


def test_a_damaged_entry_of_the_cache_is_computed_again(tmp_path):
    corpus = corpus_of([0, 1, 0, 2] * 9, [0, 1, 2])
    first = ngram_losses(corpus, corpus.split("validation"), 3, cache_dir=tmp_path)
    (entry,) = [path for path in (tmp_path / "ngrams").iterdir() if path.suffix != ".lock"]
    whole = entry.read_text()
    for damaged in (whole[:-3], whole.replace("0", "1"), ""):
        entry.write_text(damaged)
        assert ngram_losses(corpus, corpus.split("validation"), 3, cache_dir=tmp_path) == first
        assert entry.read_text() == whole


def test_processes_that_share_the_cache_compute_losses_once(tmp_path, monkeypatch):
    """Threads simulate processes: each opens the lock file itself, and flock locks open files, not processes."""
    corpus, computed, results = corpus_of([0, 1, 0, 2] * 9, [0, 1, 2]), [], []
    compute, waiting = ngrams.compute_losses, threading.Event()

    def slow(*args):
        assert waiting.wait(60)  # for the other one to find the lock
        computed.append(args)
        return compute(*args)

    def losses():
        split = corpus.split("validation")
        results.append(
            ngram_losses(corpus, split, 3, cache_dir=tmp_path, say=lambda s: "waiting" in s and waiting.set())
        )

    monkeypatch.setattr(ngrams, "compute_losses", slow)
    threads = [threading.Thread(target=losses) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(computed) == 1
    assert results[0] == results[1]


def test_a_cache_that_cannot_be_written_gives_a_warning(tmp_path):
    corpus, lines = corpus_of([0, 1, 0, 2] * 9, [0, 1, 2]), []
    (tmp_path / "ngrams").write_text("a file, not a directory")
    losses = ngram_losses(corpus, corpus.split("validation"), 3, cache_dir=tmp_path, say=lines.append)
    assert losses["trigram"] > 0
    assert lines[-1].startswith("WARNING: the losses of n-gram models are not cached: cannot write")


@pytest.mark.parametrize(
    ("train", "scored", "problem"),
    [
        ([0, 1, 2, 3], [0, 1], "the id 3 is outside the vocabulary of 3 ids"),
        ([0, 1], [0, 7], "the id 7 is outside the vocabulary of 3 ids"),
        ([0, 1], [0], "the text to predict has no two tokens in a document"),
    ],
)
def test_unsuitable_texts_are_refused(train, scored, problem, tmp_path):
    corpus = corpus_of(train, scored)
    with pytest.raises(UserError, match=problem):
        ngram_losses(corpus, corpus.split("validation"), 3, cache_dir=tmp_path)


def test_trigrams_over_a_very_large_vocabulary_are_left_out(tmp_path):
    corpus = corpus_of([0, 1, 0, 2] * 9, [0, 1, 2])
    losses = ngram_losses(corpus, corpus.split("validation"), 2**22, cache_dir=tmp_path)
    assert losses.keys() == {"unigram", "bigram"}
