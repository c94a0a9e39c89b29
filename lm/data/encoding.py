"""Encode documents in batches, in memory that does not grow with the text."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lm.data import chats
from lm.data.chats import Chat, Encoded
from lm.data.tokenizer_base import Tokenizer
from lm.system.errors import UserError

# characters encoded at once, unless a piece has more; BPE takes about 140 bytes of memory per
# character
BATCH = 2**20
MAX_PIECES = 1024


class Piece(NamedTuple):
    """A document of a split, or a part of one; `where` names it in errors."""

    split: str
    where: str
    text: str
    begins: bool = True
    ends: bool = True


def cut(document: Piece, size: int) -> Iterator[Piece]:
    r"""Cut a document after the line in which each `size` characters end; a chat stays whole.

    >>> [piece.text for piece in cut(Piece("train", "a.txt", "ab|cd|ef|".replace("|", chr(10))), 4)]
    ['ab\ncd\n', 'ef\n']
    """
    text = document.text
    if isinstance(text, Chat):
        yield document
        return
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield document._replace(text=text[start:end], begins=start == 0, ends=end == len(text))
        start = end


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Encoded]]:
    """Yield each piece and its tokens.

    The tokenizer's begin_of_text begins a document, and its end of text, or a newline if it has
    none, ends it. All tokens of a text count as an answer; of a chat, both of these do not, and of
    labeled parts the end does as the last part. Raises UserError, which names the piece, if one
    cannot be encoded.
    """
    for batch in _batches(pieces):
        for piece, encoded in zip(batch, _encode_batch(tokenizer, batch), strict=True):
            yield piece, _surround(tokenizer, piece, encoded)


def _surround(tokenizer: Tokenizer, piece: Piece, encoded: Encoded) -> Encoded:
    """Return the tokens of a piece with what begins and ends its document."""
    is_text = not isinstance(piece.text, Chat)
    ids = tokenizer.begin(encoded.ids) if piece.begins else encoded.ids
    before = np.full(len(ids) - len(encoded.ids), is_text, np.uint8)
    ending = tokenizer.ending if piece.ends else ids[:0]
    is_target = not isinstance(piece.text, Chat) or piece.text.learns_end
    after = np.full(len(ending), is_target, np.uint8)
    newline = int(piece.ends and tokenizer.end_of_text is None)
    return Encoded(
        np.concatenate([ids, ending]),
        np.concatenate([before, encoded.is_answer, after]),
        encoded.n_bytes + newline,
        encoded.answer_bytes + newline * is_target,
    )


def _encode_batch(tokenizer: Tokenizer, batch: list[Piece]) -> list[Encoded]:
    texts = [piece.text for piece in batch if not isinstance(piece.text, Chat)]
    parts = [piece.text.parts for piece in batch if isinstance(piece.text, Chat)]
    try:
        of_texts = map(Encoded.of_text, texts, tokenizer.encode_all(texts))
        of_chats = iter(chats.encode(tokenizer, parts))
    except UserError as error:
        if len(batch) == 1:
            error.problems = (f"{batch[0].where}: {error}",)
            raise
        # one by one, to name the piece
        return [encoded for piece in batch for encoded in _encode_batch(tokenizer, [piece])]
    return [next(of_chats if isinstance(piece.text, Chat) else of_texts) for piece in batch]


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    n_characters = 0
    for piece in pieces:
        batch.append(piece)
        n_characters += len(piece.text)
        if n_characters >= BATCH or len(batch) == MAX_PIECES:
            yield batch
            batch = []
            n_characters = 0
    if batch:
        yield batch
