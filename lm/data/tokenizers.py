"""Tokenizers: text to ids and back.

Every tokenizer has encode(text) -> ids, decode(ids) -> text, vocab_size, end_of_text (an id or None) and to_json().
The JSON is saved with a run, so its model can be sampled without the data.

A special token, such as <|endoftext|>, is an id that a model knows as a signal. By default its name in a text is
encoded as ordinary text, so that untrusted text cannot send such a signal. With special_tokens=True it is encoded as
the token.
"""

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from lm.data.hf_tokenizer import HFTokenizer, train_bpe
from lm.data.tokenizer_base import Tokenizer, utf8
from lm.errors import UserError, first_line
from lm.files import COUNT, check_shape, parse_json, read_bytes

UNK = "<unk>"
SAMPLE = "The café’s  2 dogs\n\tran — “so far”! 日本語 😀 e\u0301 <unk>"  # a lossless tokenizer returns it
# A word includes the space before it, as in GPT-2; every other character is a piece of its own. The alternatives cover
# every character, so joining the pieces of a text returns the text.
WORD = re.compile(r" ?\w+(?:['-]\w+)*|[^\w\s]|\s")


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 ids, lossless for every string that UTF-8 can encode.

    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    """

    kind = "byte"
    vocab_size = 256

    def state(self):
        return {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(self.dtype)

    def decode(self, ids) -> str:
        """Decode ids; bytes that are not UTF-8, such as those of an untrained model, become U+FFFD."""
        return bytes(np.asarray(ids).tolist()).decode(errors="replace")


class CharTokenizer(Tokenizer):
    """One id per character of an alphabet, in the order of their code points; <unk>, if enabled, is last.

    >>> CharTokenizer("hello").encode("hole").tolist()
    [1, 3, 2, 0]
    """

    kind = "char"

    def __init__(self, chars: str, unk: bool = False):
        self.chars, self.unk = "".join(sorted(set(chars))), unk
        self.vocab_size = len(self.chars) + unk
        code_points = [ord(c) for c in self.chars]
        # The id of each code point up to the alphabet's last; one more entry is for all higher code points.
        self.table = np.full(max(code_points, default=-1) + 2, len(self.chars), np.uint32)
        self.table[code_points] = np.arange(len(self.chars))
        self.pieces = np.array([*self.chars, *([UNK] if unk else [])], object)

    def state(self):
        return {"chars": self.chars, "unk": self.unk}

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = self.table[np.minimum(points, len(self.table) - 1)]
        unknown = ids == len(self.chars)
        if unknown.any() and not self.unk:
            found = sorted({chr(p) for p in points[unknown]})
            where = _describe_place(text, int(np.argmax(unknown)))
            raise _unknown("character", found, f"alphabet of {len(self.chars)}", where)
        return ids.astype(self.dtype)

    def decode(self, ids) -> str:
        return "".join(self.pieces[np.asarray(ids, np.int64)].tolist())


class WordTokenizer(Tokenizer):
    """Words (with the space before them), punctuation marks and other white space: the pieces that `WORD` matches.

    >>> WORD.findall("To be, or not")
    ['To', ' be', ',', ' or', ' not']
    """

    kind = "word"

    def __init__(self, words: Iterable[str], unk: bool = False):
        self.words, self.unk = sorted(set(words)), unk
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.vocab_size = len(self.words) + unk
        self.pieces = [*self.words, *([UNK] if unk else [])]

    def state(self):
        return {"words": self.words, "unk": self.unk}

    def encode(self, text: str) -> np.ndarray:
        pieces = WORD.findall(text)
        ids = np.array([self.ids.get(piece, -1) for piece in pieces], np.int64)
        if (ids < 0).any() and not self.unk:
            found = sorted({pieces[i] for i in np.flatnonzero(ids < 0)})
            where = _describe_place(text, sum(map(len, pieces[: int(np.argmax(ids < 0))])))
            raise _unknown("word", found, f"vocabulary of {len(self.words)}", where)
        return np.where(ids < 0, len(self.words), ids).astype(self.dtype)

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in np.asarray(ids).tolist())


def _unknown(what: str, unknown: list[str], known: str, where: str) -> UserError:
    """Return an error for characters or words that a vocabulary does not have, and where the first one is."""
    shown = ", ".join(repr(u) for u in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    count = f"{len(unknown):,} {what}{'s' * (len(unknown) > 1)}"
    return UserError(
        f"tokenizer: {count} not in its {known}: {shown} (the first at {where}); the model cannot predict them: remove "
        "them from the text"
    )


def _describe_place(text: str, index: int) -> str:
    """Return the line and column of a character, counted from 1, and the characters before it.

    >>> _describe_place("To be or not!", 9)
    "line 1, column 10, after 'To be or '"
    """
    line, column = text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)
    return f"line {line:,}, column {column:,}, after {text[max(0, index - 20) : index]!r}"


def warnings_about(tokenizer: Tokenizer, spec: str) -> list[str]:
    """Return what the user must know about the tokenizer of a spec: one line each."""
    lines = []
    if names := getattr(tokenizer, "switched_off", []):
        lines.append(f'WARNING: the tokenizer "{spec}" has {" and ".join(names)} switched on; switched off here')
    if is_lossy(tokenizer):
        lines.append(f'WARNING: the tokenizer "{spec}" is lossy: decoding does not always return the original text')
    return lines


def is_lossy(tokenizer: Tokenizer) -> bool:
    """Return whether encoding and decoding change SAMPLE (accents, spaces, scripts, emoji) or a special token."""
    sample = SAMPLE + "".join(f"{name}{name} a {name}" for name in tokenizer.special_tokens)
    try:
        return tokenizer.decode(tokenizer.encode(sample)) != sample
    except UserError:  # it encodes some texts only
        return True


def from_json(text: str) -> Tokenizer:
    """Load a tokenizer from its `to_json`; raises UserError if the text is not one."""
    kinds: dict[str, tuple[Callable[..., Tokenizer], dict[str, Any]]] = {
        "byte": (ByteTokenizer, {}),
        "char": (CharTokenizer, {"chars": str, "unk": bool}),
        "word": (WordTokenizer, {"words": [str], "unk": bool}),
        "hf": (HFTokenizer, {"tokenizer": str, "special_tokens": bool, "end_ids": [COUNT]}),
    }
    try:
        state = parse_json(text, {"kind": str})
        kind = state["kind"]
        if kind not in kinds:
            raise ValueError(f"kind is {kind[:40]!r}, not one of {', '.join(kinds)}")
        tokenizer, shape = kinds[kind]
        check_shape(state, shape)
        return tokenizer(**{name: state[name] for name in shape})
    except Exception as e:  # `tokenizers` raises bare Exception for a malformed tokenizer
        raise UserError(f"a saved tokenizer is corrupted: {first_line(e)}") from None


def make(spec: str, documents: Iterable[str], unk: bool = False, special_tokens: bool = False) -> Tokenizer:
    """Make the tokenizer of config.data.tokenizer.

    Args:
        spec: "char", "byte", "word", "bpe:SIZE" or "hf:PATH".
        documents: the texts that char, word and bpe learn from; not used by byte and hf.
        unk: char, word: encode what is not in the vocabulary as <unk> instead of raising.
        special_tokens: bpe, hf: encode the names of special tokens as these tokens.

    Raises:
        UserError: the spec is unknown, or its file is not a tokenizer.json.
    """
    kind, _, argument = spec.partition(":")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer("".join(set().union(*documents)), unk)
    if kind == "word":
        return WordTokenizer(set().union(*map(WORD.findall, documents)), unk)
    if kind == "bpe":
        return train_bpe(documents, int(argument), special_tokens)
    if kind == "hf":
        try:
            content = read_bytes(os.path.expanduser(argument), 2**27).decode()
            return HFTokenizer(content, special_tokens)
        except Exception as e:  # `tokenizers` raises bare Exception for a malformed file
            raise UserError(
                f'config.data.tokenizer: cannot read "{spec}" ({first_line(e)}); '
                "PATH must be a tokenizer.json of Hugging Face"
            ) from None
    raise UserError(f'config.data.tokenizer: "{spec}" is not one of char, byte, word, bpe:SIZE, hf:PATH')
