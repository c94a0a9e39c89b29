"""Token shards (`tokens:PATH`): token ids that were prepared in advance, memory-mapped without copying.

`lm/data/shard_writer.py` writes them; files of nanoGPT and llm.c work too.
"""

import glob
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data import cache, tokenizers
from lm.data.concatenated import ConcatenatedArray
from lm.errors import UserError
from lm.files import COUNT, read_json

MANIFEST = "manifest.json"  # written by lm.data.prepare
RECORD = {"file": str, "split": str, "tokens": COUNT, "text_bytes": COUNT, "size": COUNT, "sha256": str}  # of a shard
MANIFEST_SHAPE = {"tokenizer": (str, None), "shards": [RECORD]}
SPLIT_IN_FILE_NAME = {"train": "train", "validation": "val", "test": "test"}
LLMC_HEADER = 256  # int32 numbers: magic, version, number of tokens, zeros
LLMC_MAGIC = 20240520
LLMC_DTYPES = {1: np.uint16, 7: np.uint32}  # for the vocabularies of GPT-2 and Llama 3
SAMPLE = 2**16  # ids, to guess a type


class TokenShards(NamedTuple):
    """The shards of a folder.

    Attributes:
        name: the name of the folder.
        digest: sha256 of everything that determines the tokens.
        tokens: the tokens of each split.
        text_bytes: the UTF-8 bytes of the splits for which a manifest records them.
        tokenizer: the fingerprint of the tokenizer; None if no manifest records it.
    """

    name: str
    digest: str
    tokens: dict[str, np.ndarray | ConcatenatedArray]
    text_bytes: dict[str, int]
    tokenizer: str | None


def open_shards(path: str, cache_dir: Path) -> TokenShards:
    """Memory-map the token shards of a folder, a glob or one file.

    A shard's split is the first "train", "val" or "test" in its file name. The shards of a split are joined in the
    order of their names.

    Args:
        path: as in config.data.source after "tokens:"; "~" is expanded.
        cache_dir: where the digests of large shards are cached.

    Raises:
        UserError: there are no shards, one cannot be read, or one differs from the folder's manifest.
    """
    location = Path(path).expanduser()
    splits = _find_files(location)
    if not splits:
        raise UserError(
            f'config.data.source: "tokens:{path}" has no token shards; it must be a folder, glob or file of .npy or '
            '.bin shards with "train", "val" or "test" in their names'
        )
    files = [file for split in splits.values() for file in split]
    _raise_open_file_limit(len(files))
    parts = {split: [open_shard(file) for file in files] for split, files in splits.items()}
    tokenizer, records = read_manifest(location) if location.is_dir() else (None, {})
    if missing := records.keys() - {file.name for file in files}:
        raise UserError(
            f"{location}: {min(missing)} is listed in {MANIFEST} but does not exist; restore it or prepare the corpus "
            "again"
        )
    for split, arrays in parts.items():
        for file, array in zip(splits[split], arrays, strict=True):
            _check_count(file, array, records.get(file.name))
    digests = {
        split: [_digest(file, records.get(file.name), cache_dir) for file in files] for split, files in splits.items()
    }
    return TokenShards(
        location.name,
        cache.key_of("tokens", digests),
        {split: arrays[0] if len(arrays) == 1 else ConcatenatedArray(arrays) for split, arrays in parts.items()},
        {
            split: sum(records[file.name]["text_bytes"] for file in files)
            for split, files in splits.items()
            if all(file.name in records for file in files)
        },
        tokenizer,
    )


def _find_files(location: Path) -> dict[str, list[Path]]:
    """Return the shard files by split, in the order of their names."""
    names = location.iterdir() if location.is_dir() else map(Path, glob.glob(str(location), recursive=True))
    splits = {split: [] for split in SPLIT_IN_FILE_NAME}
    for file in sorted(names):
        match = re.search("train|val|test", file.name)
        if match and file.suffix in (".npy", ".bin") and file.is_file():
            split = next(split for split, name in SPLIT_IN_FILE_NAME.items() if name == match[0])
            splits[split].append(file)
    return {split: files for split, files in splits.items() if files}


def _raise_open_file_limit(n_files: int) -> None:
    """Raise this process's limit of open files, because each memory map keeps its file open.

    Raises:
        UserError: the system does not allow that many.
    """
    import resource  # POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = n_files + 512  # leave room for checkpoints and logs
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"config.data.source: {n_files} token shards need {needed} open files, but the system allows {hard} "
            "(ulimit -Hn); raise the limit, or make larger shards (lm.data.prepare --unit_mb)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def read_manifest(directory: Path) -> tuple[str | None, dict[str, dict]]:
    """Return the tokenizer's fingerprint and the records of the shards by file name; (None, {}) without a manifest.

    Raises:
        UserError: the manifest is corrupted, or the preparation did not finish.
    """
    try:
        manifest = read_json(directory / MANIFEST, MANIFEST_SHAPE, "prepare the corpus again")
    except FileNotFoundError:
        if (directory / "units").is_dir():
            raise UserError(f"{directory}: lm.data.prepare did not finish; rerun its command to resume") from None
        return None, {}
    return manifest["tokenizer"], {shard["file"]: shard for shard in manifest["shards"]}


def verify(directory: Path) -> str:
    """Compare the shards and the tokenizer of a folder with the checksums in its manifest, which reads all of them.

    Returns:
        A line about what was verified.

    Raises:
        UserError: there is no manifest; or a file is missing, or differs from what was written. Lists all such files.
    """
    fingerprint, records = read_manifest(directory)
    if not records:
        raise UserError(f"--verify: {directory} has no {MANIFEST} with shards; lm.data.prepare writes it")
    with ThreadPoolExecutor() as pool:
        problems = [text for text in pool.map(lambda record: _difference(directory, record), records.values()) if text]
    path = directory / "tokenizer.json"
    made = [tokenizers.make(f"hf:{path}", (), special_tokens=b) for b in (False, True) if path.exists()]
    if made and fingerprint not in [tokenizer.fingerprint for tokenizer in made]:
        problems.append(f"{path} is not the tokenizer of the shards")
    if problems:
        raise UserError(*problems, f"{len(problems)} files differ from {MANIFEST}; restore them or prepare them again")
    n_tokens = sum(record["tokens"] for record in records.values())
    return f"{directory}: {len(records)} shards with {n_tokens:,} tokens are as they were written"


def _difference(directory: Path, record: dict) -> str | None:
    """Return how a shard differs from its record, None if it does not."""
    path = directory / record["file"]
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path} is missing"
    return None if digest == record["sha256"] else f"{path} has another sha256 than when it was written"


def _digest(path: Path, record: dict | None, cache_dir: Path) -> str:
    """Return a shard's sha256; a recorded one is trusted if the size is right, because reading all shards is slow."""
    if record is None:
        return cache.digest_of(path, cache_dir)
    if (size := path.stat().st_size) != record["size"]:
        raise UserError(f"{path} has {size} bytes, but {MANIFEST} lists {record['size']}; prepare the corpus again")
    return record["sha256"]


def _check_count(path: Path, tokens: np.ndarray, record: dict | None) -> None:
    if record is not None and len(tokens) != record["tokens"]:
        raise UserError(
            f"{path} has {len(tokens)} tokens of {tokens.dtype}, but {MANIFEST} lists {record['tokens']}; prepare the "
            "corpus again"
        )


def open_shard(path: Path) -> np.ndarray:
    """Memory-map one shard.

    Args:
        path: .npy of uint16 or uint32; llm.c's .bin, recognized by its header; or a flat .bin of little-endian ids,
            uint32 if the name ends in .uint32.bin, else uint16 (as nanoGPT writes them).

    Returns:
        The ids (n,).

    Raises:
        UserError: the file is corrupted or not a token shard.
        OSError: the file cannot be read, which says nothing about its content.
    """
    try:
        return _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    except OSError:
        raise
    except Exception as e:  # NumPy's parser of .npy headers raises many types
        raise UserError(f"{path} is not a complete token shard ({e}); replace it") from None


def _map_npy(path: Path) -> np.ndarray:
    tokens = np.lib.format.open_memmap(path, mode="r")  # np.load would take other files for pickles
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"expected a 1-D array of uint16 or uint32, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _map_bin(path: Path) -> np.ndarray:
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", 3).tolist()
    if header[:1] == [LLMC_MAGIC]:
        if len(header) < 3 or header[1] not in LLMC_DTYPES:
            raise ValueError(f"llm.c's header must have the version 1 or 7 and the number of tokens, got {header[1:]}")
        return cache.map_tokens(path, LLMC_DTYPES[header[1]], (header[2],), 4 * LLMC_HEADER)
    dtype = np.dtype("<u4" if path.name.endswith(".uint32.bin") else "<u2")
    if size % dtype.itemsize:
        raise ValueError(f"{size} bytes are not a multiple of the {dtype.itemsize} bytes of {dtype.name}")
    tokens = cache.map_tokens(path, dtype, (size // dtype.itemsize,))
    if dtype.itemsize == 2 and _look_like_halves(tokens):
        raise ValueError(
            "it looks like uint32 ids, because every second uint16 is almost 0; if it is, let its name end in "
            ".uint32.bin, else convert it to .npy"
        )
    return tokens


def _look_like_halves(tokens: np.ndarray) -> bool:
    """Return whether ids of uint16 look like uint32 ids that were cut in two.

    The upper half of a little-endian uint32 id is 0 for the first 65,536 ids, and below 4 for a vocabulary of 262,144.
    """
    sample = np.asarray(tokens[:SAMPLE])
    return len(sample) >= 16 and len(tokens) % 2 == 0 and sample[1::2].max() < 4 <= sample[::2].max()


def look_like_pairs(tokens) -> bool:
    """Return whether ids of uint32 look like pairs of uint16 ids: almost none is below 65,536.

    >>> look_like_pairs(np.array([5, 7, 0, 9], np.uint16).view(np.uint32))
    True
    """
    sample = np.asarray(tokens[:SAMPLE])
    return sample.dtype.itemsize == 4 and bool((sample >= 2**16).mean() > 0.75)


def largest_id(tokens, max_read: int = 2**28) -> int:
    """Return the largest id. If there are more than max_read tokens, only 64 evenly spaced blocks of them are read."""
    n_blocks = 64 if len(tokens) > max_read else 1
    block = min(len(tokens), max_read) // n_blocks
    largest, chunk = 0, 2**20
    for start in np.linspace(0, len(tokens) - block, n_blocks).astype(np.int64).tolist():
        for i in range(start, start + block, chunk):
            largest = max(largest, int(tokens[i : min(i + chunk, start + block)].max()))
    return largest
