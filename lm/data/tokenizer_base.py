"""What all tokenizers have in common; lm/data/tokenizers.py makes and loads them."""

import hashlib
import json
from functools import cached_property

import numpy as np

from lm.system.errors import UserError


class Tokenizer:
    """Base class: subclasses define kind, vocab_size, encode, decode and, if needed, state."""

    kind: str
    vocab_size: int
    end_of_text: int | None = None  # the id that ends a document
    begin_of_text: tuple[int, ...] = ()  # the ids that begin a document or a prompt
    # names of the special tokens that are encoded as tokens, in any order
    special_tokens: tuple[str, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text; raises UserError for a text that has none."""
        raise NotImplementedError

    def decode(self, ids) -> str:
        raise NotImplementedError

    def state(self) -> dict:
        """Return what determines the ids, as JSON."""
        return {}

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end a generated text."""
        return frozenset() if self.end_of_text is None else frozenset([self.end_of_text])

    def with_special_tokens(self, special_tokens: bool) -> "Tokenizer":
        """Return this tokenizer with or without special tokens; raises UserError if it has none."""
        if special_tokens:
            raise UserError(f"tokenizer: a {self.kind} tokenizer has no special tokens")
        return self

    def special_ids(self) -> dict[str, int]:
        """Return the id of each special token by name, also of those that are encoded as text."""
        return {}

    @property
    def as_text(self) -> "Tokenizer":
        """Return this tokenizer without special tokens: it encodes their names as text."""
        return self

    @cached_property
    def ending(self) -> np.ndarray:
        """Return the ids after a document: the end of text, or a newline if there is none."""
        if self.end_of_text is None:
            return self.encode("\n")
        return np.array([self.end_of_text], self.dtype)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode a text with begin_of_text before it, once; a lone surrogate is a UserError."""
        utf8(text)
        return self.begin(self.encode(text))

    def begin(self, ids: np.ndarray) -> np.ndarray:
        """Put begin_of_text before the ids of a document, unless they begin with it."""
        begin = np.array(self.begin_of_text, ids.dtype)
        return ids if np.array_equal(ids[: len(begin)], begin) else np.concatenate([begin, ids])

    def _json(self, **more) -> str:
        return json.dumps({"kind": self.kind} | self.state() | more, sort_keys=True)

    def to_json(self) -> str:
        return self._json()

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of kind and state: equal fingerprints give equal ids."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """Return the smaller of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


def utf8(text: str) -> bytes:
    """Encode a text in UTF-8; raises UserError if it has a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise UserError(
            f"tokenizer: UTF-8 cannot encode the lone surrogate {text[e.start]!r}"
        ) from None
