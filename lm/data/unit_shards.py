"""Tokenize one unit of a corpus into shards, in a process of its own; `lm/data/shard_writer.py` calls it."""

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config import SPLITS
from lm.data import tokenizers
from lm.data.readers import Unit, read_documents
from lm.data.shards import SPLIT_IN_FILE_NAME
from lm.errors import UserError
from lm.files import write_bytes

PIECE = 2**17  # characters encoded by one thread, and the rest of a line
BATCH = 2**20  # characters encoded at once; BPE takes about 140 bytes of memory per character
SHARD = 2**24  # tokens of a shard, at most; the rest of a unit goes to further shards


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `lm.data.prepare`; validation is a fraction, special_tokens as in config.data.

    min_chars and max_chars (None: no limit) are the shortest and the longest document that is kept.
    """

    input: str
    tokenizer: str
    output: Path
    validation: float = 0.005
    field: str = "text"
    unit_bytes: int = 2**26
    workers: int = 1
    special_tokens: bool = False
    min_chars: int = 1
    max_chars: int | None = None
    deduplicate: bool = False


def hash_unit(unit: Unit, field: str) -> np.ndarray:
    """Hash every document of a unit to 64 bits."""
    return np.fromiter((_hash(text) for text in read_documents(unit, field)), np.uint64)


def write_unit(i: int, unit: Unit, o: Options, kept: np.ndarray | None) -> dict:
    """Write the shards of unit i, and return their records and how many documents were left out.

    Args:
        i: number of the unit.
        unit: the unit.
        o: the options.
        kept: whether each document is kept; None: all are.

    Raises:
        UserError: the unit cannot be read or encoded.
        OSError: a file cannot be read or written at the moment.
    """
    path = o.output / "tokenizer.json"
    spec = "byte" if o.tokenizer == "byte" else f"hf:{path}"
    tokenizer = tokenizers.make(spec, (), special_tokens=o.special_tokens)
    writers = {split: _Shards(o.output, split, i, tokenizer) for split in SPLITS}
    left_out = {"length": 0, "repeated": 0}
    try:
        for n, text in enumerate(read_documents(unit, o.field)):
            if not o.min_chars <= len(text) <= (o.max_chars or len(text)):
                left_out["length"] += len(text) > 0  # an empty document has nothing to leave out
            elif kept is not None and not kept[n]:
                left_out["repeated"] += 1
            else:
                for split, part in assign(unit, text, o.validation).items():
                    writers[split].add(part)
        return {"shards": [record for writer in writers.values() for record in writer.close()], **left_out}
    except UserError as error:
        if str(error).startswith(str(unit)):
            raise
        raise UserError(f"{unit}: {error}") from None


def assign(unit: Unit, text: str, validation: float) -> dict[str, str]:
    """Assign a document to splits.

    A hash of its text assigns it. So the expected fraction of held-out documents does not depend on the units, and
    copies of a document are in the same split. The document of a text unit is cut after a line instead.

    Args:
        unit: its unit, whose `split`, if set, takes all documents.
        text: the document.
        validation: fraction of the validation split.

    Returns:
        The document, or its parts, by split.
    """
    if unit.split:
        return {unit.split: text}
    if unit.kind == "text":
        parts = zip(("train", "validation"), _cut_after_line(text, validation), strict=True)
        return {split: part for split, part in parts if part}
    return {"validation" if _uniform(text) < validation else "train": text}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _uniform(text: str) -> float:
    """Hash a text to a number that is uniform in [0, 1)."""
    return (_hash(text) >> 11) * 2.0**-53


def _cut_after_line(text: str, fraction: float) -> tuple[str, str]:
    """Cut a text after a line, so that the expected size of the second part is `fraction` of it.

    The line at which the exact cut falls goes to either part, with the probabilities that make the expectation exact.
    """
    exact = len(text) * (1 - fraction)
    start = text.rfind("\n", 0, int(exact)) + 1
    end = text.find("\n", int(exact)) + 1 or len(text)
    cut = start if _uniform(text) * (end - start) < end - exact else end
    return text[:cut], text[cut:]


def cut_pieces(text: str, size: int) -> Iterator[str]:
    r"""Cut a text after the first line that ends beyond each `size` characters; encoding takes memory.

    >>> list(cut_pieces("ab|cd|ef|".replace("|", chr(10)), 4))
    ['ab\ncd\n', 'ef\n']
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


class _Shards:
    """The tokens of one split of a unit, encoded in batches and written shard by shard.

    The end of text, or a newline if the tokenizer has none, ends each document.
    """

    def __init__(self, output: Path, split: str, i: int, tokenizer: tokenizers.Tokenizer):
        self.output, self.split, self.i, self.tokenizer = output, split, i, tokenizer
        end = tokenizer.end_of_text
        self.ending = tokenizer.encode("\n") if end is None else np.array([end], tokenizer.dtype)
        self.end_bytes = int(end is None)
        self.pieces: list[str] = []  # not encoded yet
        self.places: list[tuple[bool, bool]] = []  # whether each piece begins and ends a document
        self.n_characters = 0
        self.ids: list[np.ndarray] = []
        self.counts = {"documents": 0, "tokens": 0, "text_bytes": 0}  # of the next shard
        self.records: list[dict] = []

    def add(self, text: str) -> None:
        """Add a document."""
        position = 0
        for piece in cut_pieces(text, PIECE):
            self.pieces.append(piece)
            self.places.append((position == 0, (position := position + len(piece)) == len(text)))
            self.n_characters += len(piece)
            if self.n_characters >= BATCH or len(self.pieces) >= 1024:
                self._encode()

    def _encode(self) -> None:
        for piece, ids, (begins, ends) in zip(
            self.pieces, self.tokenizer.encode_all(self.pieces), self.places, strict=True
        ):
            self.ids += [self.tokenizer.begin(ids) if begins else ids, *([self.ending] if ends else [])]
            self.counts["documents"] += ends
            self.counts["text_bytes"] += len(piece.encode()) + ends * self.end_bytes
        self.counts["tokens"] = sum(map(len, self.ids))
        self.pieces, self.places, self.n_characters = [], [], 0
        if self.counts["tokens"] >= SHARD:
            self._write()

    def _write(self) -> None:
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(self.ids))
        content = buffer.getvalue()
        more = f"_{len(self.records):03}" if self.records else ""
        path = self.output / f"{SPLIT_IN_FILE_NAME[self.split]}_{self.i:06}{more}.npy"
        write_bytes(path, content)
        record = {"file": path.name, "split": self.split, "size": len(content)}
        self.records.append(record | self.counts | {"sha256": hashlib.sha256(content).hexdigest()})
        self.ids, self.counts = [], dict.fromkeys(self.counts, 0)

    def close(self) -> list[dict]:
        """Write what is left, and return the records of the shards."""
        if self.pieces:
            self._encode()
        if self.ids:
            self._write()
        return self.records
