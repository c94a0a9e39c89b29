"""Write token shards: the work behind `python -m lm.data.prepare`. `lm/data/shards.py` reads them.

The output directory holds

    train_000000.npy ...        one shard per unit and split
    tokenizer.json              unless the tokenizer is "byte"
    manifest.json               tokenizer, and counts and checksums of all shards; written last
    units/000000.json ...       the record of each finished unit, so that a rerun skips it
"""

import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from lm.config import SPLITS
from lm.data import cache, hf_tokenizer, tokenizers
from lm.data.shards import MANIFEST, RECORD, SPLIT_IN_FILE_NAME
from lm.data.units import Unit, find_units, read_documents
from lm.errors import UserError
from lm.files import lock, read_json, to_json, write_text

FORMAT = 3  # of the shards; a directory of another format is not resumed
TOKENIZER_SAMPLE = 2**27  # characters that bpe:SIZE is trained on, from evenly spaced units
PIECE = 2**20  # characters encoded at once


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `lm.data.prepare`; validation is a fraction, special_tokens as in config.data."""

    input: str
    tokenizer: str
    output: Path
    validation: float = 0.005
    field: str = "text"
    unit_bytes: int = 2**26
    workers: int = 1
    special_tokens: bool = False


def write_shards(o: Options, say: Callable[[str], None] = print) -> None:
    """Tokenize the input into shards, and resume where an interrupted call stopped.

    Raises:
        UserError: the input cannot be read, or the output directory belongs to something else.
    """
    units = find_units(o.input, o.unit_bytes)
    if not units:
        raise UserError(f"--input: {o.input!r} contains no text")
    if not any(unit.split in ("", "train") for unit in units):
        raise UserError(f"--input: {o.input!r} has no train split; give a dataset that has one")
    with _claim(o, units):
        tokenizer = _prepare_tokenizer(o, units, say)
        _write_missing(o, units, say)
        _write_manifest(o, len(units), tokenizer, say)


@contextlib.contextmanager
def _claim(o: Options, units: list[Unit]) -> Iterator[None]:
    """Check the arguments, reserve the output directory for them, and hold its lock."""
    job = {"format": FORMAT, "tokenizer": o.tokenizer, "validation": o.validation, "field": o.field}
    job |= {"special_tokens": True} if o.special_tokens else {}  # else as in earlier versions
    job["units"] = [dataclasses.asdict(unit) for unit in units]
    kind, _, path = o.tokenizer.partition(":")
    content = cache.digest_of(Path(path), o.output) if kind == "hf" and os.path.isfile(path) else None
    key = cache.key_of(job, [os.stat(unit.path).st_mtime_ns for unit in units], content)
    key_file = o.output / "units" / "job"
    try:
        if not key_file.exists() and o.output.exists() and any(p.name != "units" for p in o.output.iterdir()):
            raise UserError(f"--output: {o.output} contains other files; use an empty or new directory")
        key_file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: cannot create {o.output}: {error.strerror}") from None
    with lock(key_file.parent, "--output"):
        if key_file.exists() and key_file.read_bytes() != key.encode():
            raise UserError(
                f"--output: {o.output} was written from other input or with other options; use another directory, or "
                "delete it"
            )
        _check_arguments(o, units[0])  # before the directory is marked, so that a corrected command can use it
        write_text(key_file, key)
        yield


def _check_arguments(o: Options, first: Unit) -> None:
    """Raise UserError if the tokenizer is unknown or the first document cannot be read."""
    kind, _, size = o.tokenizer.partition(":")
    if o.special_tokens and o.tokenizer == "byte":
        raise UserError("--special_tokens: the byte tokenizer has no special tokens; use hf:PATH or bpe:SIZE")
    if kind == "hf":
        tokenizers.make(o.tokenizer, ())
    elif o.tokenizer != "byte" and not (kind == "bpe" and re.fullmatch(r"[0-9]{3,7}", size) and int(size) > 256):
        raise UserError(
            f"--tokenizer: {o.tokenizer[:200]!r} is not one of byte, hf:PATH, bpe:SIZE with SIZE above 256 and below "
            "10000000"
        )
    try:
        next(read_documents(first, o.field), None)
    except (OSError, ValueError) as error:
        raise UserError(f"{first.path}: {error}") from None


def _prepare_tokenizer(o: Options, units: list[Unit], say) -> tokenizers.Tokenizer:
    """Load or train the tokenizer, and save it as the output's tokenizer.json."""
    kind, _, size = o.tokenizer.partition(":")
    path = o.output / "tokenizer.json"
    if kind == "byte":
        return tokenizers.make("byte", ())
    if kind == "hf":
        tokenizer = tokenizers.make(o.tokenizer, (), special_tokens=o.special_tokens)
        for line in tokenizers.warnings_about(tokenizer, o.tokenizer):
            say(line)
    else:
        if path.exists():
            return tokenizers.make(f"hf:{path}", (), special_tokens=o.special_tokens)
        train = [unit for unit in units if unit.split in ("", "train")]
        sample = train[:: max(1, len(train) // 64)]
        say(f"training the tokenizer {o.tokenizer} on up to {TOKENIZER_SAMPLE >> 20} MiB of the text")
        share = TOKENIZER_SAMPLE // len(sample)
        texts = (text for unit in sample for text in _first_characters(read_documents(unit, o.field), share))
        tokenizer = hf_tokenizer.train_bpe(texts, int(size), o.special_tokens)
    write_text(path, tokenizer.json)
    return tokenizer


def _first_characters(texts: Iterator[str], n: int) -> Iterator[str]:
    """Yield the first n characters of the texts."""
    for text in texts:
        yield text[:n]
        n -= len(text)
        if n <= 0:
            return


def _write_missing(o: Options, units: list[Unit], say) -> None:
    """Write the shards of every unit that is not finished, in parallel."""
    missing = [i for i in range(len(units)) if not _is_finished(o.output, i)]
    say(f"{len(units)} units, {len(units) - len(missing)} already finished")
    write = functools.partial(_write_unit, units=units, o=o)
    start, n_tokens = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(o.workers, max(1, len(missing))), mp_context=context) as pool:
        for n_done, future in enumerate(as_completed([pool.submit(write, i) for i in missing]), start=1):
            try:
                record = future.result()
            except BrokenProcessPool:
                raise UserError("a worker process was killed, perhaps out of memory; try fewer --workers") from None
            if "error" in record:
                pool.shutdown(cancel_futures=True)
                raise UserError(record["error"])
            n_tokens += sum(shard["tokens"] for shard in record["shards"])
            seconds = time.monotonic() - start
            left = (len(missing) - n_done) * seconds / n_done
            speed = n_tokens / seconds / 1e6
            say(f"unit {n_done}/{len(missing)}  {n_tokens:,} tokens  {speed:.2f} Mtokens/s  ETA {left:.0f} s")


def _write_manifest(o: Options, n_units: int, tokenizer: tokenizers.Tokenizer, say) -> None:
    records = [_read_record(o.output, i) for i in range(n_units)]
    shards = [shard for record in records for shard in record["shards"]]
    n_tokens = {split: sum(s["tokens"] for s in shards if s["split"] == split) for split in SPLITS}
    if not n_tokens["train"]:
        raise UserError(f"--input: {o.input!r} has no text for the train split; use more text or a lower --validation")
    write_text(o.output / MANIFEST, to_json({"tokenizer": tokenizer.fingerprint, "shards": shards}, indent=1) + "\n")
    for split, n in n_tokens.items():
        if n:
            say(f"{split}: {n:,} tokens")
    if o.validation and not n_tokens["validation"]:
        say("WARNING: the validation split is empty; use more text or a higher --validation")
    spec = "byte" if tokenizer.kind == "byte" else f"hf:{o.output / 'tokenizer.json'}"
    spec += " --config.data.special_tokens=true" if o.special_tokens else ""
    say(f"train with --config.data.source=tokens:{o.output} --config.data.tokenizer={spec}")


def _is_finished(output: Path, i: int) -> bool:
    """Return whether unit i has its record and all of its shards have their recorded sizes."""
    try:
        shards = _read_record(output, i)["shards"]
    except (FileNotFoundError, UserError):  # a corrupted record is written again
        return False
    paths = [(output / shard["file"], shard["size"]) for shard in shards]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _read_record(output: Path, i: int) -> dict:
    return read_json(_record_file(output, i), {"shards": [RECORD]}, "rerun the command")


def _record_file(output: Path, i: int) -> Path:
    return output / "units" / f"{i:06}.json"


# ---- One unit, in a worker process -----------------------------------------------------------------------------------


def _write_unit(i: int, *, units: list[Unit], o: Options) -> dict:
    """Write the shards of unit i and return their record, or {"error": message} if the unit cannot be read."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the units run in parallel already
    unit, path = units[i], o.output / "tokenizer.json"
    tokenizer = tokenizers.make(f"hf:{path}" if path.exists() else "byte", (), special_tokens=o.special_tokens)
    try:
        splits = split_documents(unit, list(read_documents(unit, o.field)), o.validation)
        shards = [_write_shard(o.output, split, i, texts, tokenizer) for split, texts in splits.items() if any(texts)]
    except (OSError, ValueError, UserError) as error:
        return {"error": f"{unit.path}, bytes or records {unit.start} to {unit.end}: {type(error).__name__}: {error}"}
    record = {"shards": shards}
    write_text(_record_file(o.output, i), to_json(record) + "\n")
    return record


def split_documents(unit: Unit, texts: list[str], validation: float) -> dict[str, list[str]]:
    """Assign the documents of a unit to splits.

    A hash of its text assigns each document. So the expected fraction of held-out documents does not depend on the
    units, and copies of a document are in the same split. The single document of a text unit is cut after a line
    instead.

    Args:
        unit: the unit; its `split`, if set, takes all documents.
        texts: the documents.
        validation: fraction of the validation split.

    Returns:
        The documents by split, in their order.
    """
    if unit.split:
        return {unit.split: texts}
    if unit.kind == "text":
        parts = [_cut_after_line(text, validation) for text in texts]
        return {"train": [train for train, _ in parts], "validation": [held_out for _, held_out in parts]}
    splits = {"train": [], "validation": []}
    for text in texts:
        splits["validation" if _uniform(text) < validation else "train"].append(text)
    return splits


def _uniform(text: str) -> float:
    """Hash a text to a number that is uniform in [0, 1)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _cut_after_line(text: str, fraction: float) -> tuple[str, str]:
    """Cut a text after a line, so that the expected size of the second part is `fraction` of it.

    The line at which the exact cut falls goes to either part, with the probabilities that make the expectation exact.
    """
    exact = len(text) * (1 - fraction)
    start = text.rfind("\n", 0, int(exact)) + 1
    end = text.find("\n", int(exact)) + 1 or len(text)
    cut = start if _uniform(text) * (end - start) < end - exact else end
    return text[:cut], text[cut:]


def cut_pieces(text: str, size: int, special_tokens: Sequence[str] = ()) -> Iterator[str]:
    """Cut a text into pieces of `size` characters, longer only where a special token would be cut.

    >>> list(cut_pieces("ab<end>cd", 3)), list(cut_pieces("ab<end>cd", 3, ["<end>"]))
    (['ab<', 'end', '>cd'], ['ab<end>', 'cd'])
    """
    longest_first = sorted(special_tokens, key=len, reverse=True)  # as the tokenizer finds them, from left to right
    pattern, start = re.compile("|".join(map(re.escape, longest_first))), 0
    while start < len(text):
        end = start + size
        matches = pattern.finditer(text, start, end + len(longest_first[0])) if special_tokens else ()
        for match in matches:
            if match.start() >= end:
                break
            end = max(end, match.end())
        yield text[start:end]
        start = end


def _write_shard(output: Path, split: str, i: int, texts: list[str], tokenizer) -> dict:
    """Write one shard and return its record. The end of text, or a newline if there is none, ends each document."""
    end = tokenizer.end_of_text
    ending = tokenizer.encode("\n") if end is None else np.array([end], tokenizer.dtype)
    ids = []
    for text in texts:
        first, *others = cut_pieces(text, PIECE, tokenizer.special_tokens) if text else [""]
        ids += [tokenizer.encode_prompt(first), *(tokenizer.encode(piece) for piece in others), ending]
    tokens = np.concatenate(ids)
    path = output / f"{SPLIT_IN_FILE_NAME[split]}_{i:06}.npy"
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.save(file, tokens)
        file.flush()
        os.fsync(file.fileno())
    with open(partial, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(partial, path)
    return {
        "file": path.name,
        "split": split,
        "tokens": len(tokens),
        "text_bytes": sum(len(text.encode()) + (end is None) for text in texts),
        "size": path.stat().st_size,
        "sha256": digest,
    }
