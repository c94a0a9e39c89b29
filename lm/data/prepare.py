"""Tokenize a large corpus into token shards.

    python -m lm.data.prepare --input jsonl:DUMP --tokenizer bpe:32000 --output DIR

The input is cut into units of about --unit_mb. Each becomes a shard a split, all of them in parallel; a unit that is
done is never done again, so the same command goes on after a kill. DIR/manifest.json, written last, lists the shards
with their counts and checksums; DIR/tokenizer.json belongs to them. Train with config.data.source = "tokens:DIR".
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path

import numpy as np

from lm.data import cache, sources, tokenizers
from lm.data.shards import MANIFEST
from lm.errors import UserError
from lm.files import lock, to_json, write_text

SAMPLE_BYTES = 2**27  # of text that bpe:SIZE is trained on, from evenly spaced units
PIECE = 2**20  # characters encoded at once
SHORT = {"train": "train", "validation": "val", "test": "test"}


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of the input: bytes [start, end) of a file, from line to line, or records of a file or a split."""

    kind: str  # text, jsonl, arrayrecord or tfds:SPLIT
    path: str  # of the file or the prepared directory
    start: int
    end: int
    split: str = ""  # tfds: all of it is of this split


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.data.prepare", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--input", required=True, metavar="KIND:PATH", help="text:PATH, jsonl:PATH, arrayrecord:PATH or tfds:DIR"
    )
    parser.add_argument("--tokenizer", required=True, metavar="SPEC", help="byte, hf:PATH, or bpe:SIZE to train one")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the shards go")
    parser.add_argument("--validation", type=float, default=0.005, help="fraction of text and jsonl (%(default)s)")
    parser.add_argument("--field", default="text", help="of a line of jsonl that has the text (%(default)s)")
    parser.add_argument("--unit_mb", type=float, default=64, help="input of one shard (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (%(default)s)")
    a = parser.parse_args(argv)
    try:
        prepare(a)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def prepare(a) -> None:
    """All of it; raises UserError for input that cannot be read and a directory that holds something else."""
    if not 0 <= a.validation < 1 or a.unit_mb <= 0 or a.workers < 1:
        raise UserError("--validation must be in [0, 1), --unit_mb above 0 and --workers at least 1")
    output, todo = Path(a.output), units(a.input, int(a.unit_mb * 2**20))
    if not todo:
        raise UserError(f"--input {a.input} has no text")
    job = {"tokenizer": a.tokenizer, "validation": a.validation, "field": a.field}
    job["units"] = [dataclasses.asdict(unit) for unit in todo]
    learned = Path(a.tokenizer.partition(":")[2])  # of hf:PATH
    content = cache.digest_of(learned, output) if learned.is_file() else None
    key = cache.key_of(job, [os.stat(unit.path).st_mtime_ns for unit in todo], content)
    with closing(_take(output, key, lambda: _check(a, todo))):
        _make(a, output, todo)


def _check(a, todo: list[Unit]) -> None:
    """Raises UserError for a tokenizer that is none, and if the first document cannot be read."""
    kind, _, size = a.tokenizer.partition(":")
    if kind == "hf":
        tokenizers.make(a.tokenizer, ())
    elif a.tokenizer != "byte" and not (kind == "bpe" and size.isdecimal() and int(size) > 256):
        raise UserError(f"--tokenizer: {a.tokenizer!r} is none of byte, hf:PATH, bpe:SIZE with a size above 256")
    try:
        next(documents(todo[0], a.field), None)
    except (OSError, ValueError) as error:
        raise UserError(f"{todo[0].path}: {error}") from None


def _make(a, output: Path, todo: list[Unit]) -> None:
    """The shards that are missing, and the manifest."""
    tokenizer = _tokenizer(a, output, todo)
    missing = [i for i in range(len(todo)) if not _done(output, i)]
    print(f"{len(todo)} units, {len(todo) - len(missing)} of them done")
    work = functools.partial(tokenize, todo=todo, output=output, validation=a.validation, field=a.field)
    began, n_tokens = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(a.workers, max(1, len(missing))), mp_context=context) as pool:
        for done, future in enumerate(as_completed([pool.submit(work, i) for i in missing]), start=1):
            try:
                found = future.result()
            except BrokenProcessPool:
                raise UserError("a worker was killed, for lack of memory perhaps; try fewer --workers") from None
            if "problem" in found:
                pool.shutdown(cancel_futures=True)
                raise UserError(found["problem"])
            n_tokens += sum(shard["tokens"] for shard in found["shards"])
            speed = n_tokens / (time.monotonic() - began)
            left = (len(missing) - done) * (time.monotonic() - began) / done
            print(f"unit {done}/{len(missing)}  {n_tokens:,} tokens  {speed / 1e6:.2f} Mtokens/s  ETA {left:.0f} s")
    shards = [shard for i in range(len(todo)) for shard in json.loads(_record(output, i).read_text())["shards"]]
    if not any(shard["split"] == "train" for shard in shards):
        raise UserError(f"--input {a.input} has no text")
    write_text(output / MANIFEST, to_json({"tokenizer": tokenizer.fingerprint, "shards": shards}, indent=1) + "\n")
    for split in SHORT:
        print(f"{split}: {sum(s['tokens'] for s in shards if s['split'] == split):,} tokens")
    spec = "byte" if tokenizer.kind == "byte" else f"hf:{output / 'tokenizer.json'}"
    print(f"train with --config.data.source=tokens:{output} --config.data.tokenizer={spec}")


def _take(output: Path, key: str, check: Callable[[], None]):
    """Make the directory this job's, after check(); returns its lock. Raises UserError if it is not free."""
    mark = output / "units" / "job"
    try:
        if not mark.exists() and output.exists() and any(p.name != "units" for p in output.iterdir()):
            raise UserError(f"--output {output} holds something else; give an empty or new directory")
        mark.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be made: {error.strerror}") from None
    taken = lock(mark.parent, "--output")
    if mark.exists() and mark.read_text() != key:
        raise UserError(
            f"--output {output} was made from other input, or with other options; give another directory, or delete it"
        )
    check()
    write_text(mark, key)
    return taken


def _done(output: Path, i: int) -> bool:
    """Whether a unit's record is there, and with it its shards in their sizes."""
    if not _record(output, i).exists():
        return False
    shards = json.loads(_record(output, i).read_text())["shards"]
    paths = [(output / shard["file"], shard["size"]) for shard in shards]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _record(output: Path, i: int) -> Path:
    """Where a unit that is done says what it came to."""
    return output / "units" / f"{i:06}.json"


# ---- Input -----------------------------------------------------------------------------------------------------------


def units(source: str, unit_bytes: int) -> list[Unit]:
    """The parts of the input, in its order; raises UserError if there is none."""
    kind, _, argument = source.partition(":")
    path = Path(argument).expanduser()
    if kind == "tfds":
        return _tfds_units(path, unit_bytes)
    if kind not in ("text", "jsonl", "arrayrecord") or not argument:
        raise UserError(f"--input: {source!r} is none of text:PATH, jsonl:PATH, arrayrecord:PATH, tfds:DIR")
    files = sources.files_of(path)
    if not files:
        raise UserError(f"--input: {source!r} has no file to read")
    sizes = {file: file.stat().st_size for file in files}
    if kind == "arrayrecord":
        return [
            Unit(kind, str(file), *part) for file in files for part in _parts(_n_records(file), sizes[file], unit_bytes)
        ]
    starts = [(file, start) for file in files for start in range(0, sizes[file], unit_bytes)]
    return [Unit(kind, str(file), start, min(start + unit_bytes, sizes[file])) for file, start in starts]


def _tfds_units(directory: Path, unit_bytes: int) -> list[Unit]:
    found = []
    for split, (shards, n_records) in sources.check_prepared(directory).items():
        size = sum(shard.stat().st_size for shard in shards)
        named = split if split in SHORT else "train"
        parts = _parts(n_records, size, unit_bytes)
        found += [Unit(f"tfds:{split}", str(directory), *part, named) for part in parts]
    return found


def _parts(n_records: int, size: int, unit_bytes: int) -> list[tuple[int, int]]:
    """[start, end) of parts of about unit_bytes, of records of that size together."""
    n_units = min(n_records, max(1, round(size / unit_bytes)))  # none of no records
    ends = [n_records * (i + 1) // n_units for i in range(n_units)]
    return list(zip([0, *ends], ends, strict=False))


def _n_records(file: Path) -> int:
    with closing(_reader(file)) as reader:
        return reader.num_records()


def _reader(file: Path | str):
    """Of an ArrayRecord file; raises UserError if it is none."""
    from array_record.python.array_record_module import ArrayRecordReader  # comes with tensorflow-datasets, on Linux

    reader = ArrayRecordReader(str(file))
    if not reader.ok():
        raise UserError(f"{file} is not a whole ArrayRecord file; put a whole one in its place, or leave it out")
    return reader


def documents(unit: Unit, field: str) -> Iterator[str]:
    """The documents of a unit; those of a text file are its parts of about a unit, cut after a line."""
    if unit.kind.startswith("tfds:"):
        split = unit.kind.partition(":")[2]
        n_records = sources.check_prepared(Path(unit.path))[split][1]
        yield from sources.Records(Path(unit.path), split, n_records).between(unit.start, unit.end)
        return
    if unit.kind == "arrayrecord":
        with closing(_reader(unit.path)) as reader:
            yield from (record.decode() for record in reader.read(unit.start, unit.end))
        return
    lines = _lines(unit)
    if unit.kind == "text":
        yield "".join(line.decode() for line in lines)
        return
    for line in lines:
        if line.strip():
            document = json.loads(line)
            text = document.get(field) if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"a line has no text in its field {field!r} (--field): {line[:100]!r}")
            yield text


def _lines(unit: Unit) -> Iterator[bytes]:
    """The lines that begin in [start, end): each line of a file is in one of its units."""
    with open(unit.path, "rb") as file:
        file.seek(max(0, unit.start - 1))
        if unit.start:
            file.readline()  # the rest of a line that begins before, or the end of the one before that
        while file.tell() < unit.end and (line := file.readline()):
            yield line


# ---- Tokens ----------------------------------------------------------------------------------------------------------


def _tokenizer(a, output: Path, todo: list[Unit]) -> tokenizers.Tokenizer:
    """The tokenizer, trained where that was asked for, and kept in the output's tokenizer.json."""
    kind, _, size = a.tokenizer.partition(":")
    path = output / "tokenizer.json"
    if kind == "byte":
        return tokenizers.make("byte", ())
    if kind == "hf":
        tokenizer = tokenizers.make(a.tokenizer, ())
    else:
        if path.exists():
            return tokenizers.make(f"hf:{path}", ())
        train = [unit for unit in todo if unit.split in ("", "train")]
        step = max(1, len(train) // 64)
        share = SAMPLE_BYTES // len(train[::step])
        print(f"training the tokenizer {a.tokenizer} on up to {SAMPLE_BYTES >> 20} MB of the text")
        tokenizer = tokenizers.train_bpe(
            (t for u in train[::step] for t in _first(documents(u, a.field), share)), int(size)
        )
    write_text(path, tokenizer.json)
    return tokenizer


def _first(texts: Iterator[str], n: int) -> Iterator[str]:
    """The first n characters of the texts."""
    for text in texts:
        yield text[:n]
        n -= len(text)
        if n <= 0:
            return


def tokenize(i: int, *, todo: list[Unit], output: Path, validation: float, field: str) -> dict:
    """The record of unit i, whose shards are then in the output; {"problem"} if its text cannot be read."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the units are what runs in parallel
    unit, path = todo[i], output / "tokenizer.json"
    tokenizer = tokenizers.make(f"hf:{path}" if path.exists() else "byte", ())
    try:
        texts = list(documents(unit, field))
        if unit.split:
            parts = {unit.split: texts}
        else:
            parts = dict(zip(("train", "validation"), _cut(texts, 1 - validation), strict=True))
        shards = [_write(output, split, i, part, tokenizer) for split, part in parts.items() if any(part)]
    except (OSError, ValueError, UserError) as error:
        return {"problem": f"{unit.path}, bytes or records {unit.start} to {unit.end}: {type(error).__name__}: {error}"}
    record = {"shards": shards}
    write_text(_record(output, i), to_json(record) + "\n")
    return record


def _cut(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """The first documents and the rest; a document alone is cut after a line."""
    if len(texts) == 1:
        at = texts[0].find("\n", int(len(texts[0]) * fraction)) + 1 if fraction < 1 else 0
        return ([texts[0][:at]], [texts[0][at:]]) if at else (texts, [])
    n = min(round(len(texts) * fraction), len(texts) - (fraction < 1))
    return texts[:n], texts[n:]


def _write(output: Path, split: str, i: int, texts: list[str], tokenizer) -> dict:
    """One shard; each document ends with the tokenizer's end of text, or a newline where it has none."""
    end = tokenizer.end_of_text
    ending = tokenizer.encode("\n") if end is None else np.array([end], tokenizer.dtype)
    ids = []
    for text in texts:
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        ids += [*(piece for part in pieces for piece in tokenizer.encode_all([part])), ending]
    tokens = np.concatenate(ids)
    path = output / f"{SHORT[split]}_{i:06}.npy"
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.save(file, tokens)
        file.flush()
        os.fsync(file.fileno())
    with open(partial, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(partial, path)
    n_bytes = sum(len(text.encode()) + (end is None) for text in texts)
    return {
        "file": path.name,
        "split": split,
        "tokens": len(tokens),
        "text_bytes": n_bytes,
        "size": path.stat().st_size,
        "sha256": digest,
    }


if __name__ == "__main__":
    sys.exit(main())
