"""Tokenizers: round trips, ids, and errors that name what cannot be encoded."""

import json
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import hf_tokenizer, tokenizers
from lm.system.errors import UserError

ENGLISH = "To be, or not to be: that's the ques-tion.\n\tWhether 'tis  nobler"
UTF8 = st.text(st.characters(exclude_categories=["Cs"]))  # every code point but surrogates


@pytest.fixture(scope="module")
def bpe():
    return hf_tokenizer.train_bpe([ENGLISH * 20], 280)


@settings(max_examples=200, deadline=None)
@given(text=UTF8)
def test_every_utf8_string_makes_the_round_trip(bpe, text):
    assert "".join(tokenizers.WORD.findall(text)) == text
    words = tokenizers.WordTokenizer(tokenizers.WORD.findall(text))
    for tokenizer in (tokenizers.ByteTokenizer(), tokenizers.CharTokenizer(text), words, bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids.max(initial=0) < max(1, tokenizer.vocab_size)
    assert tokenizers.ByteTokenizer().encode(text).tolist() == list(text.encode())


def test_words_include_the_space_before_them():
    first, second = ENGLISH.splitlines()
    assert tokenizers.WORD.findall(first) == (
        ["To", " be", ",", " or", " not", " to", " be", ":", " that's", " the", " ques-tion", "."]
    )
    assert tokenizers.WORD.findall(second) == ["\t", "Whether", " ", "'", "tis", " ", " nobler"]


def test_bpe_of_a_text_without_spaces_takes_time_in_proportion_to_its_length():
    """DNA is a single word. No word of the trainer has more than 4,096 characters, and none is
    lost.
    """
    dna = "".join(np.random.default_rng(0).choice(list("ACGT"), 50_000))
    for text in (dna, "x" * 9000, " " * 9000 + "é" * 9000 + "a b", "1" * 4096, "to be " * 5000):
        parts = list(hf_tokenizer._cut_long_words(text))
        assert "".join(parts) == text
        assert max(len(word) for part in parts for word in re.findall(r"\S+|\s+", part)) <= 4096
    assert parts == [text]  # ordinary text is not cut
    tokenizer = hf_tokenizer.train_bpe([dna], 300)
    assert len(tokenizer.encode(dna)) < 0.45 * len(dna)


def test_bpe_is_deterministic_has_the_given_size_and_an_end_of_text_that_no_text_is_encoded_as(bpe):
    assert bpe.vocab_size == 280
    assert bpe.end_of_text == 279
    assert hf_tokenizer.train_bpe([ENGLISH * 20], 280).to_json() == bpe.to_json()
    assert bpe.end_of_text not in bpe.encode(f"a{hf_tokenizer.END_OF_TEXT}b")
    assert bpe.decode([bpe.end_of_text]) == hf_tokenizer.END_OF_TEXT


def test_errors_name_what_cannot_be_encoded(bpe):
    for tokenizer, text, named in (
        (
            tokenizers.CharTokenizer("abc"),
            "abxcy",
            "2 characters not in its alphabet of 3: 'x', 'y'",
        ),
        (tokenizers.CharTokenizer(""), "a", "'a'"),
        (tokenizers.CharTokenizer("abc"), "a\ud800", r"'\ud800'"),
        (
            tokenizers.WordTokenizer(["so", " it"]),
            "so is it",
            "1 word not in its vocabulary of 2: ' is'",
        ),
        (tokenizers.ByteTokenizer(), "a\ud800", r"'\ud800'"),
        (bpe, "a\udc00", "surrogate"),
    ):
        with pytest.raises(UserError) as error:
            tokenizer.encode(text)
        assert named in str(error.value)
    # Python reads bytes of the command line that are not UTF-8 as lone surrogates, which cannot be
    # printed again.
    with pytest.raises(UserError, match="surrogate"):
        tokenizers.CharTokenizer("ab", unk=True).encode_prompt("a\udcff")


def test_unk_encodes_unknown_characters_and_words():
    chars = tokenizers.CharTokenizer("ab", unk=True)
    assert chars.encode("axb").tolist() == [0, 2, 1]
    assert chars.decode([0, 2, 1]) == "a<unk>b"
    words = tokenizers.WordTokenizer(["a", " b"], unk=True)
    assert words.decode(words.encode("a c b")) == "a<unk> b"
    assert chars.vocab_size == words.vocab_size == 3
    assert tokenizers.ByteTokenizer().decode([97, 0xC3, 98]) == "a\ufffdb"  # not UTF-8


def test_a_tokenizer_is_restored_from_its_json(bpe):
    made = [
        tokenizers.ByteTokenizer(), tokenizers.CharTokenizer(ENGLISH), tokenizers.CharTokenizer(ENGLISH, unk=True),
        tokenizers.WordTokenizer(tokenizers.WORD.findall(ENGLISH)), bpe,
    ]  # fmt: skip
    for tokenizer in made:
        loaded = tokenizers.from_json(tokenizer.to_json())
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.end_of_text == tokenizer.end_of_text
        assert loaded.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(loaded.encode(ENGLISH), tokenizer.encode(ENGLISH))
        assert loaded.decode(loaded.encode(ENGLISH)) == ENGLISH
    assert len({tokenizer.fingerprint for tokenizer in made}) == len(made)


def test_a_bad_spec_is_an_error_that_quotes_it(bpe, tmp_path):
    spec = json.loads(bpe.json)
    empty = spec | {"added_tokens": [], "model": spec["model"] | {"vocab": {}, "merges": []}}
    (tmp_path / "empty.json").write_text(json.dumps(empty))
    with pytest.raises(UserError, match="its vocabulary is empty"):
        tokenizers.make(f"hf:{tmp_path / 'empty.json'}", ())
    os.mkfifo(tmp_path / "pipe")
    for spec in (
        "hf:/no/such/tokenizer.json",
        f"hf:{tmp_path}/pipe",
        "hf:/dev/zero",
        "letters",
        "none",
    ):
        with pytest.raises(UserError, match=rf'^config.data.tokenizer: .*"{spec}"'):
            tokenizers.make(spec, ["text"])


TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "[PAD]",
}


def test_no_token_of_a_corpus_is_truncated_padded_or_drawn_at_random(bpe, tmp_path):
    for name, setting in (
        ("truncation", {"truncation": TRUNCATION}),
        ("padding", {"padding": PADDING | {"pad_to_multiple_of": None}}),
        ("BPE dropout", {"dropout": 0.9}),
    ):
        spec = json.loads(bpe.json)
        spec = spec | {"model": spec["model"] | setting} if "dropout" in setting else spec | setting
        tokenizer = hf_tokenizer.HFTokenizer(json.dumps(spec))
        kept = tokenizers.from_json(tokenizer.to_json())  # what a run and a cache keep
        for made in (tokenizer, kept):
            np.testing.assert_array_equal(made.encode(ENGLISH), bpe.encode(ENGLISH))
            assert made.fingerprint == tokenizer.fingerprint
        assert hf_tokenizer.HFTokenizer(kept.json).switched_off == []  # what lm.data.prepare keeps
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        given, lines = f"hf:{tmp_path / 'tokenizer.json'}", []
        tokenizers.load(given, False, lines.append)
        assert lines == [
            f'WARNING: the tokenizer "{given}" has {name} switched on; switched off here'
        ]


def test_a_tokenizer_without_its_unknown_token_is_an_error():
    from tokenizers import Tokenizer, models

    for model in (
        models.WordLevel({"a": 0}, unk_token="[UNK]"),
        models.WordPiece({"a": 0}, unk_token="[UNK]"),
        models.BPE({"a": 0}, [], unk_token="[UNK]"),
        models.Unigram([("a", -1.0)]),
    ):
        tokenizer = hf_tokenizer.HFTokenizer(Tokenizer(model).to_str())
        assert tokenizers.is_lossy(tokenizer)
        with pytest.raises(
            UserError, match=r"(?i)unk.*add the unknown token to the vocabulary"
        ) as error:
            tokenizer.encode("b")
        assert "\n" not in str(error.value)


def test_a_saved_tokenizer_that_is_corrupted_is_an_error_of_one_line():
    for text in (
        "", "[]", '{"kind": 3}', '{"kind": "chars"}', '{"kind": "hf"}', "[" * 10**5,
        '{"kind": "char", "chars": ["a"], "unk": false}', '{"kind": "char", "chars": "ab", "unk": "no"}',
        '{"kind": "word", "words": [1], "unk": false}',
        '{"kind": "hf", "tokenizer": {}, "special_tokens": false, "end_ids": []}',
        '{"kind": "hf", "tokenizer": "{}", "special_tokens": false, "end_ids": []}',
        '{"kind": "hf", "tokenizer": "{}", "special_tokens": "no", "end_ids": []}',
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"^a saved tokenizer is corrupted: ") as error:
            tokenizers.from_json(text)
        assert "\n" not in str(error.value)
