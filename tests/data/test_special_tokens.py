"""Special tokens: encoded as tokens if config.data.special_tokens asks for it, as ordinary text
otherwise.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from lm.config import DataConfig
from lm.data import hf_tokenizer, open_corpus, prepare, tokenizers, unit_shards
from lm.data.hf_tokenizer import END_OF_TEXT, HFTokenizer
from lm.generation.text import Continuation
from lm.system.errors import UserError

STORED = json.loads(
    (Path(__file__).parents[1] / "references" / "special_tokens.json").read_text(encoding="utf-8")
)
SPEC = STORED["tokenizer"]
END, START, STOP = [token["id"] for token in SPEC["added_tokens"]]
NAMES = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")


def make(special_tokens: bool = True, **changes) -> HFTokenizer:
    """Return the stored tokenizer, with changes of its tokenizer.json."""
    return HFTokenizer(json.dumps(SPEC | changes), special_tokens)


def added(name: str, i: int, **flags) -> dict:
    """Return a special token, as tokenizer.json has it."""
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": name, "special": True} | off | flags


ON, OFF = make(), make(special_tokens=False)
BEGINNING = processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
)
LLAMA_LIKE = Tokenizer.from_str(json.dumps(SPEC))
LLAMA_LIKE.post_processor = (
    BEGINNING  # as that of Llama and Gemma, which begins a text with a special token
)
LLAMA_LIKE = HFTokenizer(LLAMA_LIKE.to_str(), True)


# Ids


def test_ids_are_those_of_tiktoken():
    """Stored results; see tests/references/make_special_tokens.py."""
    assert (
        sum(len(with_special) < len(without) for _, with_special, without in STORED["cases"]) > 30
    )
    for text, with_special, without in STORED["cases"]:
        for tokenizer, ids in ((ON, with_special), (OFF, without)):
            assert tokenizer.encode(text).tolist() == ids, text
            assert tokenizer.decode(ids) == text


def test_a_special_token_that_drops_spaces_is_lossy():
    assert not tokenizers.is_lossy(make())
    assert tokenizers.is_lossy(
        make(added_tokens=[*SPEC["added_tokens"][:2], added("<|im_end|>", STOP, lstrip=True)])
    )


# The beginning of a text


def test_a_document_and_a_prompt_begin_as_the_tokenizer_json_says_once():
    assert LLAMA_LIKE.begin_of_text == (START,)
    for text in ("cat", "<|im_start|>cat"):
        assert LLAMA_LIKE.encode_prompt(text).tolist() == [START, *ON.encode("cat")]
    assert LLAMA_LIKE.encode_prompt("").tolist() == [START]
    for tokenizer in (ON, LLAMA_LIKE.with_special_tokens(False)):
        assert tokenizer.begin_of_text == ()
        assert tokenizer.encode_prompt("cat").tolist() == tokenizer.encode("cat").tolist()


def test_a_tokenizer_json_that_panics_or_names_other_ids_is_refused(tmp_path):
    for change, message in (
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap"),
        (
            {
                "post_processor": {
                    "type": "BertProcessing",
                    "sep": ["x", 9],
                    "cls": ["y", 4_000_000_000],
                }
            },
            "begins a text with id 4000000000, which the vocabulary lacks",
        ),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(SPEC | change))
        with pytest.raises(UserError, match=message):
            tokenizers.make(f"hf:{tmp_path / 'tokenizer.json'}", (), special_tokens=True)


UNIGRAM = {
    "type": "Unigram",
    "unk_id": 0,
    "vocab": [["<unk>", 0.0], ["</s>", 0.0], *([c, -3.0] for c in "ab<>/s")],
}
WORDS = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}}


def test_a_name_that_the_model_itself_makes_a_special_token_is_refused():
    tokens = [added(name, i) for i, name in enumerate(("<unk>", "</s>"))]
    for model in (UNIGRAM, WORDS):
        spec = {
            "version": "1.0",
            "model": model,
            "added_tokens": tokens,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
        }
        off = HFTokenizer(
            json.dumps(spec | dict.fromkeys(("normalizer", "post_processor", "decoder")))
        )
        with pytest.raises(
            UserError,
            match=r"the text has '</s>', which this tokenizer can only encode as the special",
        ):
            off.encode_all(["a", "a </s>"])
        # unknown text may be encoded as <unk>
        assert off.encode("a \u65e5 <unk>").tolist().count(0) == 2
        assert 1 in off.with_special_tokens(True).encode("a </s>")


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel", "Unigram"])
def test_an_unknown_word_is_not_called_the_name_of_a_special_token(kind):
    """The token of unknown text is the one that the model names, whatever a normalizer removes."""
    models = {
        "WordPiece": WORDS | {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
        "WordLevel": WORDS, "Unigram": UNIGRAM,
    }  # fmt: skip
    normalizer = {"type": "BertNormalizer"} | dict.fromkeys(
        ("clean_text", "handle_chinese_chars", "lowercase"), True
    )
    spec = {
        "version": "1.0",
        "model": models[kind],
        "added_tokens": [added("<unk>", 0)],
        "normalizer": normalizer,
    }
    spec |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None}
    assert (
        HFTokenizer(json.dumps(spec | {"normalizer": normalizer | {"strip_accents": None}})).encode(
            "a zq"
        )[-1]
        == 0
    )


def test_a_continuation_ends_at_the_end_of_text_and_of_a_turn_in_a_chat():
    for prompt, text, stop, tokenizer in (
        ("<|im_start|>The cat", " sat<|im_start|>", END, LLAMA_LIKE),
        ("The cat", " sat", STOP, ON),
    ):
        row = Continuation(prompt, 0)
        row.add([*tokenizer.encode(text), stop, 7], tokenizer, (), 99)
        assert (row.text, row.ids, row.finish) == (
            text,
            tokenizer.encode(text).tolist(),
            "end_of_text",
        )


# What is saved


def test_the_option_is_saved():
    assert ON.fingerprint != OFF.fingerprint
    for tokenizer in (OFF, ON, OFF.with_special_tokens(True)):
        loaded = tokenizers.from_json(tokenizer.to_json())
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode(NAMES[0]).tolist() == tokenizer.encode(NAMES[0]).tolist()
    assert OFF.with_special_tokens(True).fingerprint == ON.fingerprint


# Corpora


def test_a_text_is_tokenized_again_if_the_option_changes(tmp_path):
    text = "one\n<|endoftext|>two\n" * 40
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(json.dumps(SPEC))
    data = {
        "source": f"text:{tmp_path / 'text.txt'}",
        "cache_dir": str(tmp_path / "cache"),
        "splits": (1.0, 0.0, 0.0),
    }
    for spec in (f"hf:{tmp_path / 'tokenizer.json'}", "bpe:270"):
        off, on, again = (
            open_corpus(DataConfig(**data, tokenizer=spec, special_tokens=b), say=str)
            for b in (False, True, True)
        )
        assert off.fingerprint != on.fingerprint == again.fingerprint
        ends = [
            int((np.asarray(c.split("train").tokens) == c.tokenizer.end_of_text).sum())
            for c in (off, on, again)
        ]
        assert ends == [0, 40, 40]
        assert on.tokenizer.decode(on.split("train").tokens) == text
        assert on.split("train").n_bytes == len(text)


def test_each_document_begins_as_the_tokenizer_json_says(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    (tmp_path / ".tokenizer.json").write_text(LLAMA_LIKE.json)  # hidden, so it is not a document
    data = {
        "tokenizer": f"hf:{tmp_path / '.tokenizer.json'}",
        "cache_dir": str(tmp_path / ".cache"),
    }
    data |= {"source": f"text:{tmp_path}", "splits": (1.0, 0.0, 0.0), "special_tokens": True}
    tokens = open_corpus(DataConfig(**data), say=str).split("train").tokens
    start, end = "<|im_start|>", END_OF_TEXT
    expected = end.join(f"{start}document {i}" for i in range(3))
    assert LLAMA_LIKE.decode(tokens) == expected


def test_a_learned_bpe_learns_nothing_from_the_name_of_its_end_of_text():
    texts = ["aaabdaaabac", f"{END_OF_TEXT * 99}aaabdaaabac"]
    plain, special = (hf_tokenizer.train_bpe([text], 260, special_tokens=True) for text in texts)
    assert special.to_json() == plain.to_json()


def test_shards_are_written_with_special_tokens_if_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(unit_shards, "PIECE", 3)
    (tmp_path / "tokenizer.json").write_text(LLAMA_LIKE.json)
    spec, text, output = (
        f"hf:{tmp_path / 'tokenizer.json'}",
        "one <|im_end|>\n two <|im_end|>",
        tmp_path / "out",
    )
    (tmp_path / "dump.jsonl").write_text((json.dumps({"text": text}) + "\n") * 3)
    options = [
        f"--input=jsonl:{tmp_path / 'dump.jsonl'}",
        f"--tokenizer={spec}",
        f"--output={output}",
    ]
    # one unit, in this process
    assert prepare.main([*options, "--validation=0", "--special_tokens"]) == 0
    assert "tokenizer.json --config.data.special_tokens=true" in capsys.readouterr().out
    data = DataConfig(
        source=f"tokens:{output}",
        tokenizer=f"hf:{output / 'tokenizer.json'}",
        cache_dir=str(tmp_path),
    )
    with pytest.raises(
        UserError, match="special_tokens = False is not the tokenizer of the shards"
    ):
        open_corpus(data, say=str)
    corpus = open_corpus(DataConfig(**(vars(data) | {"special_tokens": True})), say=str)
    tokens = np.asarray(corpus.split("train").tokens)
    assert corpus.tokenizer.decode(tokens) == f"<|im_start|>{text}{END_OF_TEXT}" * 3
    assert [(tokens == i).sum() for i in (START, END, STOP)] == [3, 3, 6]
    assert prepare.main(["--verify", str(output)]) == 0
    assert prepare.main([*options, "--validation=0"]) == 2  # the same directory, without the option
    assert "other options" in capsys.readouterr().err


def test_the_longest_of_the_special_tokens_that_start_at_a_character_is_taken():
    short, long = STOP + 1, STOP + 2
    tokenizer = make(
        added_tokens=[*SPEC["added_tokens"], added("<|im", short), added("<|im_start|><|", long)]
    )
    assert tokenizer.encode("<|im_start|><|im_start|>").tolist()[0] == long
    assert tokenizer.encode("<|im<|im_start|>").tolist() == [short, START]
