"""Opening a corpus: tokens, splits and fingerprints, and what happens to damaged or missing files."""

import errno
import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, flip_a_bit

from lm.config import DataConfig
from lm.data import (
    cache,
    check_corpus,
    encoding,
    hf_tokenizer,
    open_corpus,
    python_docs,
    readers,
    tokenizers,
)
from lm.data import tokens as tokens_module
from lm.data.markov import LETTERS, MarkovChain
from lm.system.errors import UserError

TEXT = "It was the best of times,\nit was the worst of times. " * 40


@pytest.fixture
def config(tmp_path):
    """Make a DataConfig of a text file of 2,120 characters, with config(**changes)."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)

    def make(**changes):
        return DataConfig(
            **{"source": f"text:{path}", "cache_dir": str(tmp_path / "cache")} | changes
        )

    return make


def quiet(config, **options):
    return open_corpus(config, say=lambda line: None, **options)


def test_the_tokens_decode_to_the_text(config, tmp_path):
    text = TEXT.replace("best", "bést")
    (tmp_path / "text.txt").write_text(text)
    i, j = int(0.9 * len(text)), int(0.95 * len(text))
    expected = {"train": text[:i], "validation": text[i:j], "test": text[j:]}
    for tokenizer in ("char", "byte", "word", "bpe:300"):
        corpus = quiet(config(tokenizer=tokenizer))
        assert {
            name: corpus.tokenizer.decode(split.tokens) for name, split in corpus.splits.items()
        } == expected
        for name, part in expected.items():
            assert corpus.splits[name].n_bytes == len(part.encode())
        assert all(split.n_tokens == len(split.tokens) for split in corpus.splits.values())


def test_the_vocabulary_has_all_splits_and_what_the_training_text_lacks_is_printed(
    config, tmp_path
):
    """Both letters are in the test split alone. Without them, the text could not be scored."""
    (tmp_path / "late.txt").write_text("a" * 95 + "bcaaa")
    source, lines = f"text:{tmp_path / 'late.txt'}", []
    corpus = open_corpus(config(source=source), say=lines.append)
    assert corpus.tokenizer.chars == "abc"
    (notice,) = (line for line in lines if "training text" in line)
    assert notice.startswith(
        "2 of the 3 characters of late.txt occur in no training text: 'b', 'c'"
    )
    assert "--config.data.unk=true" in notice
    (tmp_path / "long.txt").write_text("a " * 1000 + "b" * 100)
    open_corpus(config(source=f"text:{tmp_path / 'long.txt'}", tokenizer="word"), say=lines.append)
    assert "bbb... (103 characters); for <unk>" in next(
        line for line in lines if "long.txt occur" in line
    )
    unk = quiet(config(source=source, unk=True))
    assert unk.tokenizer.decode(unk.splits["test"].tokens) == "<unk><unk>aaa"
    with pytest.raises(
        UserError, match=r"the test split: .* 2 characters .* 'b', 'c'.*remove them from the text"
    ):
        quiet(config(source=source), tokenizer=tokenizers.make("char", ["a"]))


def test_splits_joined_keep_their_order(config):
    corpus = quiet(config())
    both = corpus.split("validation+test")
    assert corpus.tokenizer.decode(np.asarray(both.tokens)) == TEXT[int(0.9 * len(TEXT)) :]
    assert both.n_tokens == both.n_bytes == len(TEXT) - int(0.9 * len(TEXT))
    with pytest.raises(UserError, match='no split "dev"; it has train, validation, test'):
        corpus.split("validation+dev")


def test_opening_a_text_again_does_not_read_it(config, monkeypatch):
    first = quiet(config(tokenizer="word"))
    monkeypatch.setattr(
        readers, "read_documents", lambda *_: pytest.fail("the text was read again")
    )
    second = quiet(config(tokenizer="word"))
    assert isinstance(second.splits["train"].tokens, np.memmap)
    np.testing.assert_array_equal(first.splits["train"].tokens, second.splits["train"].tokens)
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_depends_on_content_and_settings_but_not_on_the_path(config, tmp_path):
    def fingerprint(**changes):
        return quiet(config(**changes)).fingerprint

    (tmp_path / "copy.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT.replace("best", "beat"))
    same = {fingerprint(), fingerprint(source=f"text:{tmp_path / 'copy.txt'}")}
    others = {
        fingerprint(source=f"text:{tmp_path / 'other.txt'}"),
        fingerprint(tokenizer="byte"),
        fingerprint(splits=(0.8, 0.1, 0.1)),
        quiet(config(packing="documents"), seq_len=8).fingerprint,
        quiet(config(packing="documents"), seq_len=9).fingerprint,
    }
    assert len(same) == 1
    assert len(others) == 5
    assert not same & others


def write_folder(root):
    (root / "b").mkdir(parents=True)
    (root / "a.txt").write_text("one ")
    (root / "b" / "c.txt").write_text("two ")
    (root / "d.txt").write_text("three ")
    (root / ".hidden").write_text("not this")
    return root


def test_files_of_a_folder_are_joined_with_separators_and_tokenized_in_batches_of_any_size(
    config, tmp_path, monkeypatch
):
    source = f"text:{write_folder(tmp_path / 'folder')}"
    for tokenizer, text, n_bytes in (
        ("char", "one \ntwo \nthree ", 16),
        ("bpe:260", "one <|endoftext|>two <|endoftext|>three ", 14),
    ):
        for batch in (2**20, 8, 1):
            monkeypatch.setattr(encoding, "BATCH", batch)
            corpus = quiet(config(source=source, splits=(1.0, 0.0, 0.0), tokenizer=tokenizer))
            split = corpus.splits["train"]
            assert (corpus.tokenizer.decode(split.tokens), split.n_bytes) == (text, n_bytes)
            shutil.rmtree(tmp_path / "cache")


def test_each_file_is_a_packed_document(config, tmp_path):
    source = f"text:{write_folder(tmp_path / 'folder')}"
    corpus = quiet(config(source=source, splits=(1.0, 0.0, 0.0), packing="documents"), seq_len=9)
    split = corpus.split("train")
    assert corpus.packed
    assert split.packed
    assert [
        corpus.tokenizer.decode(row[:n]) for row, n in zip(split.tokens, [10, 6], strict=True)
    ] == [
        "one \ntwo \n",
        "three ",
    ]
    assert split.segments.tolist() == [[1] * 5 + [2] * 5, [1] * 6 + [0] * 4]


def test_a_missing_or_unknown_source_is_a_user_error(config):
    for changes, message in (
        ({"source": "text:/no/such/file"}, "is not a file, nor a folder"),
        ({"source": "webtext"}, "is not one of tfds:NAME"),
        ({"source": __file__}, f"did you mean text:{__file__}"),
        ({"source": "markov:7"}, '"markov:7" is not one of markov, markov:2, markov:3, markov:4'),
        ({"source": "tokens:/no/such/folder", "tokenizer": "none"}, "has no token shards"),
    ):
        with pytest.raises(UserError, match=message):
            quiet(config(**changes))


def test_an_unwritable_cache_names_the_key_to_set(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*config\.data\.cache_dir"):
        quiet(config(cache_dir=str(tmp_path / "file")))


FILES = ["counts.json", "validation.npy", "test.segments.npy", "tokenizer.json", "checksums.json"]


def test_a_damaged_cache_entry_is_rebuilt_with_one_warning(config, tmp_path):
    def in_memory(corpus):
        return {
            name: (np.array(split.tokens), np.array(split.segments))
            for name, split in corpus.splits.items()
        }

    given = config(packing="documents")
    whole = quiet(given, seq_len=8)
    before = in_memory(whole)
    paths = [path for name in FILES for path in (tmp_path / "cache").glob(f"*/*/{name}")]
    assert len(paths) == 6  # two entries with checksums
    for path, damage in itertools.product(paths, (Path.unlink, flip_a_bit)):
        damage(path)
        lines = []
        after = open_corpus(given, seq_len=8, say=lines.append)
        (warning,) = (line for line in lines if "WARNING" in line)
        assert warning.startswith(f"WARNING: the cache entry {path.parent} is corrupted (")
        # whose damage is found in what it lists
        assert path.name in warning or path.name == "checksums.json"
        assert after.notices == (warning,)
        np.testing.assert_equal(in_memory(after), before)
        assert (after.fingerprint, after.tokenizer.to_json()) == (
            whole.fingerprint,
            whole.tokenizer.to_json(),
        )
        assert quiet(given, seq_len=8).notices == ()


def test_a_cache_entry_that_cannot_be_read_is_not_rebuilt(config, monkeypatch):
    quiet(config())

    def fail(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(cache, "sha256_of", fail)
    with pytest.raises(PermissionError):
        quiet(config())


def test_check_corpus_lists_every_problem_at_once(config):
    corpus = quiet(config(splits=(0.9, 0.06, 0.04)))
    assert check_corpus(corpus, 50, 100) == []
    problems = check_corpus(corpus, 100, 5)
    assert problems[0].startswith(
        "config.model.vocab_size: 5 is too small for the tokenizer, which has 17 ids"
    )
    assert problems[1].startswith(
        "config.train.seq_len: 100 needs windows of 101 tokens, but the test split has 85"
    )
    assert "--validation" in problems[1]  # of lm.data.prepare: token shards have no data.splits
    assert len(problems) == 2


# Warnings, the text inside Python, processes


def test_a_lossy_tokenizer_gives_a_warning(config, tmp_path):
    spec = json.loads(hf_tokenizer.train_bpe([TEXT], 280).json) | {
        "normalizer": {"type": "Lowercase"}
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    lines = []
    corpus = open_corpus(config(tokenizer=f"hf:{tmp_path / 'tokenizer.json'}"), say=lines.append)
    assert "lossy" in corpus.notices[0]
    assert corpus.notices[0] in lines


def test_the_entropy_floor_is_known_for_characters_alone(config, monkeypatch):
    # the real one takes longer to generate
    monkeypatch.setattr(MarkovChain, "text", lambda chain: LETTERS * 20)
    for source, order in (("markov", 1), ("markov:2", 2)):
        corpus = quiet(config(source=source))
        assert (corpus.name, corpus.entropy_floor) == (source, MarkovChain(order).entropy_rate)
        for name, split in corpus.splits.items():
            text = corpus.tokenizer.decode(split.tokens)
            np.testing.assert_array_equal(
                split.surprisal(split.tokens), MarkovChain(order).surprisal(text), name
            )
    for other in (config(source="markov", tokenizer="byte"), config()):
        corpus = quiet(other)
        assert corpus.entropy_floor is None
        assert all(split.surprisal is None for split in corpus.splits.values())


@pytest.mark.slow
def test_python_docs_is_large_and_its_train_split_has_every_character(config):
    corpus = quiet(config(source="python_docs"))
    assert corpus.name == "python_docs"
    assert sum(split.n_bytes for split in corpus.splits.values()) > 1_000_000
    assert corpus.tokenizer.vocab_size == 96  # printable ASCII and the newline
    text = corpus.tokenizer.decode(corpus.splits["train"].tokens)
    assert text.isascii()
    assert 'The "for" statement is used to iterate over the elements of a sequence' in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("study", "tokenizer"), [("changes_2026", "bpe:2048"), ("swiglu_texts", "char")]
)
def test_python_docs_is_the_text_of_the_published_runs_on_every_python(config, study, tokenizer):
    variants = json.loads((ROOT / "docs" / "results" / study / "sweep.json").read_text())[
        "variants"
    ].values()
    (published,) = {
        v["data"]["fingerprint"] for v in variants if v["data"]["name"] == "python_docs"
    }
    corpus = quiet(config(source="python_docs", tokenizer=tokenizer))
    assert corpus.fingerprint.startswith(published)
    assert python_docs.PATH.stat().st_size < 1_000_000
    text = "".join(python_docs.documents())
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "d58bfdc3cc33a29660c5665bbe79efb3393e17df95bbb711f284a45b897ec0c0"
    )


def test_a_new_format_makes_new_cache_entries(config, monkeypatch):
    before = quiet(config()).fingerprint
    monkeypatch.setattr(tokens_module, "FORMAT", tokens_module.FORMAT + 1)
    assert quiet(config()).fingerprint != before
