"""Token shards (`tokens:PATH`): ids prepared in advance, memory-mapped without copying.

`lm/data/shard_writer.py` writes them; files of nanoGPT and llm.c work too.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm.config import SPLITS
from lm.config.values import short
from lm.data import cache, tokenizers
from lm.data.chats import IGNORED
from lm.data.concatenated import ConcatenatedArray
from lm.data.corpus import Corpus, Split, Targets
from lm.data.data_sets import splits_in
from lm.data.text_files import shorten
from lm.system.errors import UserError
from lm.system.files import (
    COUNT,
    PointerError,
    expanded,
    is_file,
    is_file_name,
    matching_files,
    open_regular,
    read_json,
)

MANIFEST = "manifest.json"  # written by lm.data.prepare
MARKS = ".answers"  # after the name of a shard: which of its tokens are of answers
SPLIT_IN_FILE_NAME = {"train": "train", "validation": "val", "test": "test"}
RECORD = {
    "file": str,
    "split": SPLITS,
    "size": COUNT,
    "documents": COUNT,
    "tokens": COUNT,
    "text_bytes": COUNT,
    "sha256": str,
    # If the shard has chats; those that say themselves what is not learned.
    "chats?": COUNT,
    "marked_chats?": COUNT,
    "answer_tokens?": COUNT,
    "answer_bytes?": COUNT,
    "answers_sha256?": str,
}
MANIFEST_SHAPE = {
    "job": dict,  # the format and the options
    "input": [{"file": str, "size": COUNT, "sha256": str}],
    "tokenizer": (str, None),  # fingerprint; None before it is known
    "commit": (str, None),
    # The shards of each unit, and how many documents were left out for their length or as copies;
    # None: not finished.
    "units": [({"shards": [RECORD], "length": COUNT, "repeated": COUNT}, None)],
}
# Headers of llm.c's files: 256 int32 numbers, which begin with a magic number, a version and the
# number of tokens.
LLMC_HEADER = 256
# for the vocabularies of GPT-2 and Llama 3
LLMC_DTYPES = {
    (20240520, 1): np.uint16,
    (20240801, 7): np.uint32,
}
# of known tokenizers; pairs of uint16 ids that are read as uint32 have larger values
LARGEST_VOCABULARY = 2**20
# Of npy, zip, gzip, zstd, Parquet, HDF5, and Megatron's index.
SIGNATURES = (
    b"\x93NUMPY",
    b"PK\3\4",
    b"\x1f\x8b\x08",
    b"\x28\xb5\x2f\xfd",
    b"PAR1",
    b"\x89HDF",
    b"MMIDIDX",
)
SAMPLE = 2**16  # ids, to guess a type


def open_shards(
    path: str, cache_dir: Path, say: Callable[[str], None] = print, *, marks: bool = False
) -> Corpus:
    """Memory-map the token shards of a folder, a glob or one file, as a corpus without a tokenizer.

    A manifest lists the shards of its folder. Otherwise a shard's split is the word "train", "val"
    or "test" in its file name. The shards of a split are joined in the order of their names.

    Args:
        path: as in config.data.source after "tokens:"; "~" is expanded.
        cache_dir: where the digests of large shards are cached.
        say: receives a line about which file belongs to which split.
        marks: whether only answers of chats are targets (config.data.targets).

    Raises:
        UserError: there are no shards, one cannot be read, or one differs from the folder's
            manifest; or `marks` is true and they have chats without marked answers.
    """
    location = Path(expanded(path))
    manifest = read_manifest(location) if location.is_dir() else None
    records = {}
    if manifest:
        records = shard_records(manifest)
        files = [(record["split"], location / name) for name, record in sorted(records.items())]
        shards = {file.name for file in location.iterdir() if file.suffix in (".npy", ".bin")}
        if others := shards - records.keys():
            say(f"not used, because {MANIFEST} does not list it: {shorten(sorted(others), '')}")
    else:
        files = _find_files(location, say)
    if not files:
        raise UserError(
            f'config.data.source: "tokens:{path}" has no token shards; it must be a folder, glob '
            'or file of .npy or .bin shards with the word "train", "val" or "test" in their names, '
            "such as corpus_train_000.bin; python -m lm.data.prepare makes some, and the first "
            "lines of a config file say how its own are made"
        )
    _raise_open_file_limit(len(files))
    splits = {}
    digests = {}
    for split in SPLITS:
        of_split = [file for name, file in files if name == split]
        if not of_split:
            continue
        arrays = [open_shard(file, records.get(file.name)) for file in of_split]
        tokens = arrays[0] if len(arrays) == 1 else ConcatenatedArray(arrays)
        if records:
            listed = [records[file.name] for file in of_split]
            n_bytes = sum(record["text_bytes"] for record in listed)
            n_chats = sum(record.get("chats", 0) for record in listed)
            targets = _targets(of_split, listed, marks)
            splits[split] = Split(
                split, tokens, len(tokens), n_bytes, targets=targets, n_chats=n_chats
            )
            # The sha256 of a manifest are trusted, because reading all shards is slow.
            digests[split] = [record["sha256"] for record in listed]
            if targets:
                digests[split] += [record.get("answers_sha256", "") for record in listed]
        else:
            splits[split] = Split(split, tokens, len(tokens), n_bytes=None)
            digests[split] = [cache.digest_of(file, cache_dir) for file in of_split]
    record = {location.name: summary(manifest)} if manifest else None
    return Corpus(location.name, splits, None, cache.key_of("tokens", digests), record=record)


def _targets(files: list[Path], records: list[dict], marks: bool) -> Targets | None:
    """Return which tokens of a split count; None: all. For `marks` see `open_shards`."""
    with_chats = [record for record in records if record.get("chats")]
    name = files[0].parent.name
    if not marks:
        if any(record.get("marked_chats") for record in with_chats):
            raise UserError(IGNORED.format(f"the shards in {name}"))
        return None
    if not with_chats:
        return None
    if not all("answers_sha256" in record for record in with_chats):
        raise UserError(
            f"config.data.targets: assistant, but the shards in {name} do not mark the answers of "
            "their chats, as an older version wrote them; use all, or prepare them again"
        )
    is_target = []
    for file, record in zip(files, records, strict=True):
        n = record["tokens"]
        of_shard: np.ndarray = np.broadcast_to(np.uint8(1), n)
        if record.get("chats"):
            path = file.with_name(file.name + MARKS)
            of_shard = _open_marks(path)
            if (of_shard.dtype, of_shard.shape) != (np.uint8, (n,)):
                raise UserError(f"{path} is not as {MANIFEST} lists it; prepare the corpus again")
        is_target.append(of_shard)
    return Targets(
        ConcatenatedArray(is_target),
        sum(record.get("answer_tokens", record["tokens"]) for record in records),
        sum(record.get("answer_bytes", record["text_bytes"]) for record in records),
    )


def _open_marks(path: Path) -> np.ndarray:
    try:
        open_regular(path).close()
        return np.lib.format.open_memmap(path, mode="r")
    except (FileNotFoundError, ValueError) as e:
        raise UserError(
            f"{path} is missing or damaged ({e}); restore it or prepare the corpus again"
        ) from None


def _find_files(location: Path, say: Callable[[str], None]) -> list[tuple[str, Path]]:
    """Return the split and the path of each shard file in order, and say which is which."""
    paths = location.iterdir() if location.is_dir() else map(Path, matching_files(str(location)))
    by_split: dict[str, list[Path]] = {split: [] for split in (*SPLITS, "")}
    for file in sorted(paths):
        if file.suffix not in (".npy", ".bin") or not is_file(file):
            continue
        words = splits_in(file.stem)
        if len(words) > 1:
            raise UserError(
                f"{file}: its name has the words of several splits ({', '.join(sorted(words))}); "
                "rename it"
            )
        by_split["".join(words)].append(file)
    for split, files in by_split.items():
        if files:
            names = shorten([file.name for file in files], "")
            say(f"{split or 'not used, because no split is in the name'}: {names}")
    return [(split, file) for split in SPLITS for file in by_split[split]]


def _raise_open_file_limit(n_files: int) -> None:
    """Raise this process's limit of open files: each memory map keeps one open."""
    import resource  # POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux has -1 for no limit
    needed = n_files + 512  # leave room for checkpoints and logs
    if 0 <= hard < needed:
        raise UserError(
            f"config.data.source: {n_files} token shards need {needed} open files, but the system "
            f"allows {hard} (ulimit -Hn); raise the limit, or prepare larger shards "
            "(lm.data.prepare --unit_mb 64: about 2^24 tokens)"
        )
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def read_manifest(directory: Path) -> dict | None:
    """Return a folder's manifest or None; raises UserError if it is corrupted or not finished."""
    try:
        manifest = read_json(directory / MANIFEST, MANIFEST_SHAPE, "prepare the corpus again")
    except FileNotFoundError:
        return None
    if None in manifest["units"]:
        raise UserError(f"{directory}: lm.data.prepare did not finish; rerun its command to resume")
    if strange := [name for name in shard_records(manifest) if not is_file_name(name)]:
        raise UserError(
            f"{directory / MANIFEST} is corrupted: {short(strange[0])} is no name of a file; "
            "prepare the corpus again"
        )
    return manifest


def shard_records(manifest: dict) -> dict[str, dict]:
    """Return the records of the shards by file name."""
    return {shard["file"]: shard for unit in manifest["units"] for shard in unit["shards"]}


def summary(manifest: dict) -> dict:
    """Return what a run, an evaluation and a report repeat of a manifest."""
    shards = shard_records(manifest).values()
    files = manifest["input"]
    inputs = manifest["job"].get("input")
    if isinstance(inputs, list):
        inputs = " and ".join(map(str, inputs))
    return {
        "input": inputs,
        "files": len(files),
        "bytes": sum(file["size"] for file in files),
        "sha256": cache.key_of([file["sha256"] for file in files]),
        "tokenizer": manifest["tokenizer"],
        "commit": manifest["commit"],
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
    }


def describe(record: dict | None) -> list[str]:
    """Return a line for each source of a `Corpus.record` that was prepared.

    >>> web = {"input": "hf:web", "files": 2, "bytes": 3_000_000, "sha256": "9f86d081884c", "commit": None}
    >>> describe({"web": web | {"documents": 1000, "tokens": 700_000}})
    ['web: prepared from hf:web, 2 files of 3.0 MB (sha256 9f86d0818), 1,000 documents, 700,000 tokens']
    """
    lines = []
    for name, made in (record or {}).items():
        if "sha256" not in made:  # a source that was tokenized for the run
            continue
        line = (
            f"{name}: prepared from {made['input']}, {made['files']:,} files of "
            f"{made['bytes'] / 1e6:,.1f} MB (sha256 {made['sha256'][:9]}), {made['documents']:,} "
            f"documents, {made['tokens']:,} tokens"
        )
        if made["commit"]:
            line += f", with commit {made['commit'][:9]}"
        lines.append(line)
    return lines


def verify(directory: Path) -> str:
    """Compare a folder's shards and tokenizer with its manifest; return a line about the result.

    Raises UserError if there is no manifest, and one that lists all files that are missing or were
    changed.
    """
    manifest = read_manifest(directory)
    if not manifest or not (records := shard_records(manifest)):
        raise UserError(
            f"--verify: {directory} has no {MANIFEST} with shards; lm.data.prepare writes it"
        )
    recorded = {name: record["sha256"] for name, record in records.items()}
    recorded |= {
        name + MARKS: record["answers_sha256"]
        for name, record in records.items()
        if "answers_sha256" in record
    }
    problems = [
        f"{directory / name} {problem}" for name, problem in cache.changes(directory, recorded)
    ]
    path = directory / "tokenizer.json"
    if path.exists():
        spec = f"hf:{path}"
        damage = "not the tokenizer of the shards"
    else:
        spec = "byte"
        damage = "missing"
    # The manifest does not say whether special tokens were encoded.
    readings = [tokenizers.make(spec, (), special_tokens=special) for special in (False, True)]
    if manifest["tokenizer"] not in [tokenizer.fingerprint for tokenizer in readings]:
        problems.append(f"{path} is {damage}")
    if problems:
        raise UserError(
            *problems,
            f"{len(problems)} files differ from {MANIFEST}; restore them or prepare them again",
        )
    n_tokens = sum(record["tokens"] for record in records.values())
    return f"{directory}: {len(records)} shards with {n_tokens:,} tokens are as they were written"


def open_shard(path: Path, record: dict | None = None) -> np.ndarray:
    """Memory-map one shard.

    Args:
        path: .npy of uint16 or uint32; llm.c's .bin, recognized by its header; or a flat .bin of
            little-endian ids, uint32 if the name ends in .uint32.bin, else uint16 (as nanoGPT
            writes them).
        record: of the shard in the manifest; its size and count are compared, its content is not.

    Returns:
        The ids (n,).

    Raises:
        UserError: the file is corrupted, not a token shard, or not that of the record.
        OSError: the file cannot be read, which says nothing about its content.
    """
    try:
        open_regular(path).close()
        tokens = _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    except FileNotFoundError:
        raise UserError(
            f"{path} is listed in {MANIFEST} but does not exist; restore it or prepare the corpus "
            "again"
        ) from None
    except (OSError, PointerError):
        raise
    except Exception as e:  # NumPy's parser of .npy headers raises many types
        raise UserError(f"{path} is not a complete token shard ({e}); replace it") from None
    counts = {
        "size": (path.stat().st_size, "bytes"),
        "tokens": (len(tokens), f"{tokens.dtype} ids"),
    }
    for name, (n, unit) in counts.items():
        if record and n != record[name]:
            raise UserError(
                f"{path} has {n} {unit}, but {MANIFEST} lists {record[name]}; prepare the corpus "
                "again"
            )
    return tokens


def _map_npy(path: Path) -> np.ndarray:
    tokens = np.lib.format.open_memmap(path, mode="r")  # np.load would take other files for pickles
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"expected a 1-D array of uint16 or uint32, got {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def _map_bin(path: Path) -> np.ndarray:
    header = np.fromfile(path, "<i4", LLMC_HEADER)
    llmc_dtype = LLMC_DTYPES.get(tuple(header[:2].tolist()))
    if llmc_dtype and len(header) > 2:
        return _map_ids(path, llmc_dtype, int(header[2]), 4 * LLMC_HEADER)
    if _is_foreign(header):
        known = " or ".join(
            f"magic {magic} with version {version}" for magic, version in LLMC_DTYPES
        )
        raise ValueError(
            f"it begins with {header[:2].tobytes()!r}, a header; those of llm.c's token files that "
            f"are read have {known}; convert other files to .npy of uint16 or uint32"
        )
    is_uint32 = path.name.endswith(".uint32.bin")
    dtype: np.dtype = np.dtype("<u4" if is_uint32 else "<u2")
    n_tokens, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest:
        raise ValueError(
            f"{path.stat().st_size} bytes are not a multiple of the {dtype.itemsize} bytes of "
            f"{dtype.name}"
        )
    tokens = _map_ids(path, dtype, n_tokens)
    sample = np.asarray(tokens[:SAMPLE])
    if not is_uint32 and n_tokens % 2 == 0 and _look_like_halves(sample):
        raise ValueError(
            "it looks like uint32 ids, because every second uint16 is almost 0; if it is, let its "
            "name end in .uint32.bin, else convert it to .npy"
        )
    if is_uint32 and sample.max(initial=0) >= LARGEST_VOCABULARY:
        raise ValueError(
            f"its ids of uint32 are up to {sample.max():,}, which look like pairs of uint16 ids; "
            'remove ".uint32" from its name, or convert it to .npy'
        )
    return tokens


def _map_ids(path: Path, dtype, n: int, offset: int = 0) -> np.ndarray:
    """Memory-map the n ids after `offset` bytes; raises ValueError for a file of another size."""
    expected = offset + n * np.dtype(dtype).itemsize
    if (size := path.stat().st_size) != expected:
        raise ValueError(f"{path.name} has {size} bytes, expected {expected}")
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r", offset, (n,)) if n else np.empty(0, dtype)


def _is_foreign(header: np.ndarray) -> bool:
    """Return whether a file begins like no flat ids: a dated number, padding or a signature."""
    if header[:2].tobytes().startswith(SIGNATURES):
        return True
    if len(header) == LLMC_HEADER and header.any() and not header[8:].any():
        return True
    # llm.c's magic numbers are dates
    year, month_and_day = divmod(int(header[0]) if len(header) else 0, 10_000)
    month, day = divmod(month_and_day, 100)
    return 2020 <= year < 2100 and 1 <= month <= 12 and 1 <= day <= 31


def _look_like_halves(sample: np.ndarray) -> bool:
    """Return whether ids of uint16 look like uint32 ids that were cut in two.

    The upper half of a little-endian uint32 id is 0 for the first 65,536 ids, and below 4 for a
    vocabulary of 262,144.
    """
    return len(sample) >= 16 and bool(sample[1::2].max() < 4 <= sample[::2].max())
