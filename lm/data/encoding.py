"""Encode documents in batches, in memory that does not grow with the text."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lm.data.tokenizer_base import Tokenizer
from lm.errors import UserError

BATCH = 2**20  # characters encoded at once, unless a piece has more; BPE takes about 140 bytes of memory per character
MAX_PIECES = 1024


class Piece(NamedTuple):
    """A document of a split, or a part of it that begins or ends it, or neither; `where` it is, for errors."""

    split: str
    where: str
    text: str
    begins: bool = True
    ends: bool = True


def cut(document: Piece, size: int) -> Iterator[Piece]:
    r"""Cut a document after the first line that ends beyond each `size` characters.

    >>> [piece.text for piece in cut(Piece("train", "a.txt", "ab|cd|ef|".replace("|", chr(10))), 4)]
    ['ab\ncd\n', 'ef\n']
    """
    text, start = document.text, 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield document._replace(text=text[start:end], begins=start == 0, ends=end == len(text))
        start = end


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, np.ndarray, int]]:
    """Yield each piece, its ids, and the number of UTF-8 bytes that they stand for.

    The tokenizer's begin_of_text begins a document, and its end of text, or a newline if it has none, ends it. Raises
    UserError, which names the piece, if one cannot be encoded.
    """
    for batch in _batches(pieces):
        for piece, ids in zip(batch, _encode_batch(tokenizer, batch), strict=True):
            ids, n_bytes = tokenizer.begin(ids) if piece.begins else ids, len(piece.text.encode())
            if piece.ends:
                ids, n_bytes = np.concatenate([ids, tokenizer.ending]), n_bytes + (tokenizer.end_of_text is None)
            yield piece, ids, n_bytes


def _encode_batch(tokenizer: Tokenizer, batch: list[Piece]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_all([piece.text for piece in batch])
    except UserError as error:
        if len(batch) == 1:
            error.problems = (f"{batch[0].where}: {error}",)
            raise
        return [ids for piece in batch for ids in _encode_batch(tokenizer, [piece])]


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    n_characters = 0
    for piece in pieces:
        batch.append(piece)
        n_characters += len(piece.text)
        if n_characters >= BATCH or len(batch) == MAX_PIECES:
            yield batch
            batch, n_characters = [], 0
    if batch:
        yield batch
