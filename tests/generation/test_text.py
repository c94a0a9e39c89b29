"""Texts from drawn ids: where they end, and which part is shown during generation."""

import itertools
from functools import cache

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm.data import hf_tokenizer, tokenizers
from lm.data.tokenizers import ByteTokenizer
from lm.generation.decoding import make_decoder
from lm.generation.filters import Sampling
from lm.generation.text import Continuation, stream_texts


def grow(pieces, tokenizer=None, stop=(), n_tokens=100):
    """Add pieces of UTF-8 to a continuation; return it, and its text after each piece."""
    row, shown = Continuation("prompt", 0), []
    for piece in pieces:
        row.add(list(piece), tokenizer or ByteTokenizer(), stop, n_tokens)
        shown.append(row.text)
    return row, shown


@hypothesis.given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=40, max_size=40),
)
@hypothesis.example("xabcd", ["abcd", "bc"], [4, 1])
def test_overlapping_stop_strings_end_a_text_where_the_first_is_complete(text, stop, sizes):
    """Independently of how many ids are drawn at once: as if each character was looked at alone."""
    complete = next(
        (i for i in range(len(text) + 1) if any(text[:i].endswith(s) for s in stop)), None
    )
    expected = text
    if complete is not None:
        expected = text[: complete - max(len(s) for s in stop if text[:complete].endswith(s))]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size].encode())
        start += size
    row, shown = grow([piece for piece in pieces if piece], stop=stop, n_tokens=len(text))
    assert row.text == expected
    assert bytes(row.ids).decode() == expected
    assert row.finish == ("length" if complete is None else "stop") or not text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


def generate_texts(*args, **options):
    return list(stream_texts(*args, **options))[-1]


def test_no_prompts_give_no_texts():
    assert generate_texts(None, ByteTokenizer(), [], 3, Sampling()) == []


TEXT = "the caf\u00e9s \u201cof\u201d \U0001f600 \u65e5\u672c the cat's hat\n" * 3


@cache
def tokenizer_of(kind):
    """Return a tokenizer; "metaspace" is one that drops a space at the start of a text."""
    if kind == "metaspace":
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        pieces = ["\u2581the", "\u2581", "\u2581cat", "s", "'", "\u2581\u2581"]
        model = Tokenizer(
            models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="s")
        )
        model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        return hf_tokenizer.HFTokenizer(model.to_str())
    return tokenizers.make(kind, [TEXT])


@pytest.mark.parametrize("kind", ["byte", "char", "bpe:300", "metaspace"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_the_text_is_that_of_all_ids_decoded_at_once(kind, data):
    """For ids drawn at random or from a text, in calls of any sizes."""
    tokenizer = tokenizer_of(kind)
    drawn = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=60)
    of_text = st.just(tokenizer.encode(TEXT).tolist()[:80])
    prompt_ids, ids = data.draw(drawn), data.draw(drawn | of_text)
    ids = [i for i in ids if i != tokenizer.end_of_text] or [0]
    prompt_ids = tokenizer.encode(tokenizer.decode(prompt_ids)).tolist()  # prompts are texts
    row, shown = Continuation("", 0, prompt_ids=prompt_ids), [""]
    while not row.finish:
        n = data.draw(st.integers(1, 20))
        row.add(ids[len(row.ids) :][:n], tokenizer, (), len(ids))
        shown.append(row.text)
    before, everything = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + ids)
    assert before + row.text == everything
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


@pytest.mark.slow
def test_generated_texts_stop_and_differ_by_sample():
    config = tiny(model={"n_layers": 1})
    decoder = make_decoder(redrawn(config.model), config.model, seq_len=config.train.seq_len)
    tokenizer = tokenizers.make("char", ["abcdefghijklmnopqrs"])
    options = (decoder, tokenizer, ["bcd", "q"], 30, Sampling(temperature=1.0))
    rows = generate_texts(*options, n_samples=2)
    assert [(row.prompt, row.sample, row.finish) for row in rows] == [
        (prompt, sample, "length") for prompt in ("bcd", "q") for sample in (0, 1)
    ]
    assert len({row.text for row in rows}) == 4
    np.testing.assert_array_equal(tokenizer.encode(rows[0].text), rows[0].ids)
    assert [row.text for row in generate_texts(*options, n_samples=2, batch_size=3)] == [
        row.text for row in rows
    ]
    letter = rows[0].text[7]
    stopped = generate_texts(*options, n_samples=2, stop=[letter])
    assert [row.text for row in stopped] == [row.text.partition(letter)[0] for row in rows]
    assert stopped[0].finish == "stop"
