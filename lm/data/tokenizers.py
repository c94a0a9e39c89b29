"""Text to ids and back. A tokenizer is its JSON: it is saved with the run and loads without the data it came from.

Every tokenizer has encode(text) -> ids, decode(ids) -> text, vocab_size, end_of_text (an id, or None) and to_json().
"""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from lm.errors import UserError

UNK = "<unk>"
END_OF_TEXT = "<|endoftext|>"
SAMPLE = "The café’s  2 dogs\n\tran — “so far”! 日本語 😀 e\u0301 <unk>"  # what a lossless tokenizer gives back
# A word takes the space before it along, as in GPT-2; every other character stands alone. The alternatives cover every
# character, so the pieces of a text joined are the text.
WORD = re.compile(r" ?\w+(?:['-]\w+)*|[^\w\s]|\s")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class Tokenizer:
    """What all tokenizers share. Subclasses define kind, vocab_size, encode, decode and state (what to_json saves)."""

    kind: str
    vocab_size: int
    end_of_text: int | None = None

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind} | self.state(), sort_keys=True)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the JSON: equal fingerprints give equal ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 ids, round-trips every string that UTF-8 can encode."""

    kind = "byte"
    vocab_size = 256

    def state(self):
        return {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(self.dtype)

    def decode(self, ids) -> str:
        """Bytes that are not UTF-8, as an untrained model writes them, become U+FFFD."""
        return bytes(np.asarray(ids).tolist()).decode(errors="replace")


class CharTokenizer(Tokenizer):
    """One id for each character of an alphabet, in the order of their code points; <unk>, where configured, is last."""

    kind = "char"

    def __init__(self, chars: str, unk: bool = False):
        self.chars, self.unk = "".join(sorted(set(chars))), unk
        self.vocab_size = len(self.chars) + unk
        code_points = [ord(c) for c in self.chars]
        # The id of each code point up to the alphabet's last, and one more entry for all beyond it.
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
            _unknown("character", sorted({chr(p) for p in points[unknown]}), "alphabet", len(self.chars))
        return ids.astype(self.dtype)

    def decode(self, ids) -> str:
        return "".join(self.pieces[np.asarray(ids, np.int64)].tolist())


class WordTokenizer(Tokenizer):
    """Words (with the space before them), punctuation marks and other white space: the pieces that `WORD` finds."""

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
            _unknown("word", sorted({pieces[i] for i in np.flatnonzero(ids < 0)}), "vocabulary", len(self.words))
        return np.where(ids < 0, len(self.words), ids).astype(self.dtype)

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in np.asarray(ids).tolist())


class HFTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `tokenizers`: trained here (`train_bpe`) or read from a tokenizer.json."""

    kind = "hf"

    def __init__(self, tokenizer: str):
        import tokenizers

        self.json = tokenizer
        self.model = tokenizers.Tokenizer.from_str(tokenizer)
        # Text that happens to contain "<|endoftext|>" is text, not the end of a document.
        self.model.encode_special_tokens = True
        vocabulary = self.model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
        self.end_of_text = next((vocabulary[name] for name in names if name in vocabulary), None)

    def state(self):
        return {"tokenizer": self.json}

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of several texts, encoded on all cores."""
        for text in texts:
            _utf8(text)
        encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, ids) -> str:
        return self.model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"tokenizer: UTF-8 cannot encode {text[e.start]!r}, a lone surrogate") from None


def _unknown(what: str, unknown: list[str], known: str, size: int):
    shown = ", ".join(repr(u) for u in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    raise UserError(
        f"tokenizer: {len(unknown)} {what}{'s' * (len(unknown) > 1)} not in its {known} of {size}: {shown}; "
        'for data, set data.vocabulary_from = "all" or data.unk = True, or use the byte tokenizer'
    )


def is_lossy(tokenizer: Tokenizer) -> bool:
    """Whether decoding does not give back SAMPLE: accents, runs of spaces, line ends, scripts, composed characters."""
    return tokenizer.decode(tokenizer.encode(SAMPLE)) != SAMPLE


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `to_json` described."""
    state = json.loads(text)
    kinds = {"byte": ByteTokenizer, "char": CharTokenizer, "word": WordTokenizer, "hf": HFTokenizer}
    return kinds[state.pop("kind")](**state)


def train_bpe(documents: Iterable[str], vocab_size: int) -> HFTokenizer:
    """A byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) of at most vocab_size ids, the last for END_OF_TEXT.

    It knows all 256 bytes, so every string that UTF-8 can encode survives the round trip. The same documents give the
    same tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(documents, trainer)
    model.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return HFTokenizer(model.to_str())


def make(spec: str, documents: Iterable[str], unk: bool = False) -> Tokenizer:
    """The tokenizer of a config's "char", "byte", "word", "bpe:SIZE" or "hf:PATH".

    documents: what char and word take their vocabulary from, and bpe is trained on; byte and hf do not look at it.
    Raises UserError for a file that is not a tokenizer.json.
    """
    kind, _, argument = spec.partition(":")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer("".join(set().union(*documents)), unk)
    if kind == "word":
        return WordTokenizer(set().union(*map(WORD.findall, documents)), unk)
    if kind == "bpe":
        return train_bpe(documents, int(argument))
    if kind == "hf":
        try:
            with open(argument, encoding="utf-8") as file:
                return HFTokenizer(file.read())
        except Exception as e:  # `tokenizers` raises bare Exception for text that it cannot read
            raise UserError(
                f'config.data.tokenizer: "{spec}" cannot be read ({e}); it must name a tokenizer.json of Hugging Face'
            ) from None
    raise UserError(f'config.data.tokenizer: "{spec}" is none of char, byte, word, bpe:SIZE, hf:PATH')
