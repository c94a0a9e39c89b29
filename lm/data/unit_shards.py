"""Tokenize one unit of a corpus into shards, in a process of its own; `lm/data/shard_writer.py` calls it."""

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config import SPLITS
from lm.data import tokenizers
from lm.data.encoding import Piece, cut, encode
from lm.data.readers import Span, read_documents
from lm.data.shards import SPLIT_IN_FILE_NAME
from lm.files import write_bytes

PIECE = 2**17  # characters encoded by one thread, and the rest of a line
SHARD = 2**24  # tokens of a shard, about; the rest of a unit goes to further shards


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `lm.data.prepare`; validation is a fraction, special_tokens as in config.data.

    unit_mb is the MiB of input per shard; min_chars and max_chars (None: no limit) are the shortest and the longest
    document that is kept.
    """

    input: str
    tokenizer: str
    output: Path
    validation: float = 0.005
    field: str = "text"
    unit_mb: float = 64
    workers: int = 1
    special_tokens: bool = False
    min_chars: int = 1
    max_chars: int | None = None
    deduplicate: bool = False


def hash_unit(spans: list[Span], field: str) -> np.ndarray:
    """Hash every document of a unit to 64 bits."""
    return np.fromiter((_hash(text) for span in spans for text in read_documents(span, field)), np.uint64)


def write_unit(i: int, spans: list[Span], o: Options, kept: np.ndarray | None) -> dict:
    """Write the shards of unit i, and return their records and how many documents were left out.

    Args:
        i: number of the unit.
        spans: its input.
        o: the options.
        kept: whether each document is kept; None: all are.

    Raises:
        UserError: the unit cannot be read or encoded.
        OSError: a file cannot be read or written at the moment.
    """
    spec = "byte" if o.tokenizer == "byte" else f"hf:{o.output / 'tokenizer.json'}"
    tokenizer = tokenizers.make(spec, (), special_tokens=o.special_tokens)
    writers = {split: _Shards(o.output, split, i, tokenizer) for split in SPLITS}
    left_out = {"length": 0, "repeated": 0}
    for piece, ids in encode(tokenizer, _pieces(spans, o, kept, left_out)):
        writers[piece.split].add(piece, ids)
    return {"shards": [record for writer in writers.values() for record in writer.close()], **left_out}


def _pieces(spans: list[Span], o: Options, kept: np.ndarray | None, left_out: dict[str, int]) -> Iterator[Piece]:
    """Yield the documents of a unit in pieces, and count those that are left out."""
    documents = ((span, text) for span in spans for text in read_documents(span, o.field))
    for n, (span, text) in enumerate(documents):
        if not o.min_chars <= len(text) <= (o.max_chars or len(text)):
            left_out["length"] += len(text) > 0  # an empty document has nothing to leave out
        elif kept is not None and not kept[n]:
            left_out["repeated"] += 1
        else:
            for split, part in assign(span, text, o.validation).items():
                yield from cut(Piece(split, str(span), part), PIECE)


def assign(span: Span, text: str, validation: float) -> dict[str, str]:
    """Assign a document to splits.

    A hash of its text assigns it. So the expected fraction of held-out documents does not depend on the spans, and
    copies of a document are in the same split. The document of a text span is cut after a line instead.

    Args:
        span: its span, whose `split`, if set, takes all documents.
        text: the document.
        validation: fraction of the validation split.

    Returns:
        The document, or its parts, by split.
    """
    if span.split:
        return {span.split: text}
    if span.kind == "text":
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


class _Shards:
    """The tokens of one split of a unit, written shard by shard.

    The end of text, or a newline if the tokenizer has none, ends each document.
    """

    def __init__(self, output: Path, split: str, i: int, tokenizer: tokenizers.Tokenizer):
        self.output, self.split, self.i = output, split, i
        end = tokenizer.end_of_text
        self.ending = tokenizer.encode("\n") if end is None else np.array([end], tokenizer.dtype)
        self.end_bytes = int(end is None)
        self.ids: list[np.ndarray] = []
        self.counts = {"documents": 0, "tokens": 0, "text_bytes": 0}  # of the next shard
        self.records: list[dict] = []

    def add(self, piece: Piece, ids: np.ndarray) -> None:
        """Add a document or a part of one."""
        self.ids += [ids, *([self.ending] if piece.ends else [])]
        self.counts["documents"] += piece.ends
        self.counts["tokens"] += len(ids) + piece.ends
        self.counts["text_bytes"] += len(piece.text.encode()) + piece.ends * self.end_bytes
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
        if self.ids:
            self._write()
        return self.records
