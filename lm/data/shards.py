"""tokens:PATH: token ids that were prepared elsewhere, memory-mapped where they lie."""

import glob
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data import cache
from lm.data.concatenated import ConcatenatedArray
from lm.errors import UserError

MANIFEST = "manifest.json"  # of lm.data.prepare
LLMC_HEADER = 256  # int32 words: magic, version, number of tokens, zeros
LLMC_MAGIC = 20240520
LLMC_DTYPES = {1: np.uint16, 7: np.uint32}  # GPT-2's and Llama 3's vocabulary
_SPLIT = re.compile(r"train|val|test")
_NAMES = {"train": "train", "val": "validation", "test": "test"}


class Found(NamedTuple):
    """Token shards: the tokens by split, and what lm.data.prepare recorded of them where it made them."""

    name: str
    digest: str
    tokens: dict[str, np.ndarray | ConcatenatedArray]
    text_bytes: dict[str, int]  # by split
    tokenizer: str | None  # fingerprint


def find(path: str, cache_dir: Path) -> Found:
    """What a folder, a glob or one file of token shards holds.

    A shard's split is the first "train", "val" or "test" in its file name; the shards of a split are joined in
    the order of their names, without copying. Raises UserError when there is none, or one of them is not readable.
    """
    location = Path(path).expanduser()
    names = location.iterdir() if location.is_dir() else map(Path, glob.glob(str(location), recursive=True))
    files = sorted(f for f in names if f.suffix in (".npy", ".bin") and f.is_file() and _SPLIT.search(f.name))
    if not files:
        raise UserError(
            f'config.data.source: "tokens:{path}" has no token shards; it must name a folder, glob or file of .npy or '
            '.bin shards with "train", "val" or "test" in their names'
        )
    splits = {}
    for file in files:
        splits.setdefault(_NAMES[_SPLIT.search(file.name)[0]], []).append(file)
    _allow_open(len(files))
    tokens = {split: [open_shard(file) for file in splits[split]] for split in _NAMES.values() if split in splits}
    tokenizer, known = manifest(location) if location.is_dir() else (None, {})
    if missing := known.keys() - {file.name for file in files}:
        raise UserError(f"{location}: {min(missing)} is in {MANIFEST} and not there; prepare it anew, or bring it back")
    digests = {f: _digest(f, known.get(f.name), cache_dir) for files in splits.values() for f in files}
    digest = cache.key_of("tokens", {split: [digests[f] for f in splits[split]] for split in splits})
    joined = {split: parts[0] if len(parts) == 1 else ConcatenatedArray(parts) for split, parts in tokens.items()}
    text_bytes = {
        split: sum(known[f.name]["text_bytes"] for f in splits[split])
        for split in splits
        if all(f.name in known for f in splits[split])
    }
    return Found(location.name, digest, joined, text_bytes, tokenizer)


def _allow_open(n_files: int) -> None:
    """Have the system let so many files be open, since each map keeps one; raises UserError if it does not."""
    import resource  # POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = n_files + 512  # checkpoints, logs and programs are files too
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"config.data.source: {n_files} token shards need {needed} open files and the system allows {hard} "
            "(ulimit -Hn); raise that, or make larger shards (lm.data.prepare --unit_mb)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def manifest(directory: Path) -> tuple[str | None, dict[str, dict]]:
    """The tokenizer's fingerprint and the record of each shard, by file name; nothing where others made them."""
    try:
        recorded = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (directory / "units").is_dir():
            raise UserError(f"{directory} was not prepared to its end; the command that began it goes on") from None
        return None, {}
    except ValueError as e:
        raise UserError(f"{directory / MANIFEST} is damaged ({e}); prepare it anew") from None
    return recorded["tokenizer"], {shard["file"]: shard for shard in recorded["shards"]}


def _digest(path: Path, recorded: dict | None, cache_dir: Path) -> str:
    """sha256 of a shard: as recorded when it was made, where it still has that size, since reading all takes long."""
    if recorded is None:
        return cache.digest_of(path, cache_dir)
    if (size := path.stat().st_size) != recorded["size"]:
        raise UserError(f"{path} has {size} bytes and {MANIFEST} says {recorded['size']}; prepare it anew")
    return recorded["sha256"]


def open_shard(path: Path) -> np.ndarray:
    """Memory-maps a shard (n,): .npy of uint16 or uint32, llm.c's .bin (told by its header), or flat little-endian ids.

    Flat files are uint16, as nanoGPT writes them, unless their name ends in .uint32.bin. Raises UserError for a file
    that is damaged or not a shard.
    """
    try:
        return _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    except Exception as e:  # NumPy's reader of .npy headers raises what Python's tokenizer does, among others
        raise UserError(f"{path} is not a whole token shard ({e}); put a whole one in its place") from None


def _map_npy(path: Path) -> np.ndarray:
    tokens = np.lib.format.open_memmap(path, mode="r")  # np.load would take what is no .npy for a pickle
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"it holds {tokens.dtype} of shape {tokens.shape} and not one row of uint16 or uint32")
    return tokens


def _map_bin(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size >= 4 * LLMC_HEADER:
        magic, version, n_tokens = np.fromfile(path, "<i4", 3).tolist()
        if magic == LLMC_MAGIC and version in LLMC_DTYPES:
            return cache.map_tokens(path, LLMC_DTYPES[version], (n_tokens,), 4 * LLMC_HEADER)
    dtype = np.dtype("<u4" if path.name.endswith(".uint32.bin") else "<u2")
    if size % dtype.itemsize:
        raise ValueError(f"its {size} bytes are no whole number of {dtype.name}")
    return cache.map_tokens(path, dtype, (size // dtype.itemsize,))


def largest_id(tokens, most: int = 2**28) -> int:
    """The largest id among the tokens; where they are more than `most`, among as many in 64 evenly spaced blocks."""
    n_blocks = 64 if len(tokens) > most else 1
    block = min(len(tokens), most) // n_blocks
    largest, chunk = 0, 2**22
    for start in np.linspace(0, len(tokens) - block, n_blocks).astype(np.int64).tolist():
        for i in range(start, start + block, chunk):
            largest = max(largest, int(tokens[i : min(i + chunk, start + block)].max()))
    return largest
