"""Tokenizers: text to ids and back.

Every tokenizer has encode(text) -> ids, decode(ids) -> text, vocab_size, end_of_text (an id or
None) and to_json(). The JSON is saved with a run, so its model can be sampled without the data.

A special token, such as <|endoftext|>, is an id that a model knows as a signal. By default its name
in a text is encoded as ordinary text, so that untrusted text cannot send such a signal. With
special_tokens=True it is encoded as the token.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lm.data.hf_tokenizer import HFTokenizer, train_bpe
from lm.data.tokenizer_base import Tokenizer, utf8
from lm.system.errors import UserError, first_line
from lm.system.files import COUNT, PointerError, check_shape, expanded, parse_json, read_bytes
from lm.system.text_tables import plural, some

UNK = "<unk>"
# a lossless tokenizer returns it
SAMPLE = "The café’s  2 dogs\n\tran — “so far”! 日本語 😀 e\u0301 <unk>"
# A word includes the space before it, as in GPT-2; every other character is a piece of its own. The
# alternatives cover every character, so joining the pieces of a text returns the text.
WORD = re.compile(r" ?\w+(?:['-]\w+)*|[^\w\s]|\s")


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 ids, lossless for every string that UTF-8 can encode.

    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    """

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(self.dtype)

    def decode(self, ids) -> str:
        """Decode ids; what is not UTF-8, as from an untrained model, becomes U+FFFD."""
        return bytes(np.asarray(ids).tolist()).decode(errors="replace")


class PieceTokenizer(Tokenizer):
    """The pieces of a vocabulary, in the order of their code points; <unk>, if enabled, is last."""

    piece: str  # names of a piece and of the vocabulary in errors
    vocabulary: str

    def __init__(self, pieces: Iterable[str], unk: bool = False):
        known = sorted(set(pieces))
        self.unk = unk
        self.pieces = known + [UNK] * unk
        self.ids = {piece: i for i, piece in enumerate(known)}
        self.vocab_size = len(self.pieces)

    def split(self, text: str) -> Sequence[str]:
        """Return the pieces of a text, which joined return the text."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        pieces = self.split(text)
        unknown = len(self.ids)
        known = map(self.ids.get, pieces, itertools.repeat(unknown))
        ids = np.fromiter(known, np.uint32, len(pieces))
        if not self.unk and (ids == unknown).any():
            others = sorted(set(pieces) - self.ids.keys())
            before = "".join(pieces[: int(np.argmax(ids == unknown))])
            line = before.count("\n") + 1
            column = len(before) - before.rfind("\n")
            raise UserError(
                f"tokenizer: {plural(len(others), self.piece)} not in its {self.vocabulary} of "
                f"{unknown}: {some([*map(repr, others)])} (the first at line {line:,}, column "
                f"{column:,}, after {before[-20:]!r}); the model cannot predict them: remove them "
                "from the text"
            )
        return ids.astype(self.dtype)

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in np.asarray(ids).tolist())


class CharTokenizer(PieceTokenizer):
    """One id per character of an alphabet.

    >>> CharTokenizer("hello").encode("hole").tolist()
    [1, 3, 2, 0]
    """

    kind = "char"
    piece = "character"
    vocabulary = "alphabet"

    @property
    def chars(self) -> str:
        """Return the alphabet without <unk>."""
        return "".join(self.ids)

    def state(self):
        return {"chars": self.chars, "unk": self.unk}

    def split(self, text: str) -> str:
        return text


class WordTokenizer(PieceTokenizer):
    """Words with the space before them, punctuation marks and other white space, as in `WORD`.

    >>> WORD.findall("To be, or not")
    ['To', ' be', ',', ' or', ' not']
    """

    kind = "word"
    piece = "word"
    vocabulary = "vocabulary"

    def state(self):
        return {"words": [*self.ids], "unk": self.unk}

    def split(self, text: str) -> list[str]:
        return WORD.findall(text)


def load(spec: str, special_tokens: bool, say: Callable[[str], None]) -> Tokenizer:
    """Make a tokenizer that is not learned from text; say what the user must know about it."""
    tokenizer = make(spec, (), special_tokens=special_tokens)
    warning = f'WARNING: the tokenizer "{spec}"'
    if names := getattr(tokenizer, "switched_off", []):
        say(f"{warning} has {' and '.join(names)} switched on; switched off here")
    if is_lossy(tokenizer):
        say(f"{warning} is lossy: decoding does not always return the original text")
    return tokenizer


def known_prompt(prompt: str, tokenizer: Tokenizer) -> str:
    """Return the prompt; in place of a newline that the tokenizer does not know, its first token."""
    with contextlib.suppress(UserError):
        if prompt != "\n" or len(tokenizer.encode(prompt)):
            return prompt
    return tokenizer.decode([0])


def is_lossy(tokenizer: Tokenizer) -> bool:
    """Return whether encoding and decoding change SAMPLE or a special token."""
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
        state = parse_json(text, {"kind": tuple(kinds)})
        tokenizer, shape = kinds[state["kind"]]
        check_shape(state, shape)
        return tokenizer(*(state[name] for name in shape))
    except Exception as e:  # `tokenizers` raises bare Exception for a malformed tokenizer
        raise UserError(f"a saved tokenizer is corrupted: {first_line(e)}") from None


def make(
    spec: str,
    documents: Iterable[str],
    unk: bool = False,
    special_tokens: bool = False,
    markers: Sequence[str] = (),
) -> Tokenizer:
    """Make the tokenizer of config.data.tokenizer.

    Args:
        spec: "char", "byte", "word", "bpe:SIZE" or "hf:PATH".
        documents: the texts that char, word and bpe learn from; not used by byte and hf.
        unk: char, word: encode what is not in the vocabulary as <unk> instead of raising.
        special_tokens: bpe, hf: encode the names of special tokens as these tokens.
        markers: bpe: further special tokens.

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
        return train_bpe(documents, int(argument), special_tokens, markers)
    if kind == "hf":
        try:
            content = read_bytes(expanded(argument), 2**27).decode()
            return HFTokenizer(content, special_tokens)
        except PointerError:
            raise
        except Exception as e:  # `tokenizers` raises bare Exception for a malformed file
            raise UserError(
                f'config.data.tokenizer: cannot read "{spec}" ({first_line(e)}); '
                "PATH must be a tokenizer.json of Hugging Face"
            ) from None
    raise UserError(
        f'config.data.tokenizer: "{spec}" is not one of char, byte, word, bpe:SIZE, hf:PATH'
    )
