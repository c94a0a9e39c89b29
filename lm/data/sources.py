"""Sources of text. A source has a name and a digest; its documents are only read if the cache lacks their tokens."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from lm.config import SPLITS
from lm.data import cache, shakespeare
from lm.data.markov import ORDERS, VERSION, MarkovChain
from lm.data.text_files import find_text_files, printable, read_text
from lm.errors import UserError
from lm.files import read_json

DEFAULT_FRACTIONS = (0.9, 0.05, 0.05)
# What is read of the metadata of a prepared TFDS directory. The lengths are strings, as all int64 in JSON of proto3.
INFO = {"name": str, "splits": [{"name": str, "shardLengths": [str]}]}


@dataclass(frozen=True)
class Source:
    """A text that was found but not read yet.

    Attributes:
        name: shown to the user.
        digest: sha256 of everything that determines the text.
        read: returns the documents of each split, which can be iterated over repeatedly.
        chain: the generator of synthetic text, which knows its entropy; None for other text.
    """

    name: str
    digest: str
    read: Callable[[], Mapping[str, Iterable[str]]]
    chain: MarkovChain | None = None

    @cached_property
    def documents(self) -> Mapping[str, Iterable[str]]:
        """Return the documents of each split, read at first use."""
        return self.read()


def find_source(config, cache_dir: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> Source:
    """Find the text of config.data.source.

    Args:
        config: a `DataConfig`.
        cache_dir: caches the digests of large files.
        say: receives lines of information.
        warn: receives warnings.

    Raises:
        Unavailable: the text must be downloaded, and cannot be.
        UserError: any other reason that it cannot be read.
    """
    kind, _, argument = config.source.partition(":")
    if kind == "tfds" and argument:
        return find_tfds(argument, config, cache_dir, say)
    if kind == "text" and argument:
        return find_text(Path(argument).expanduser(), config, cache_dir, say, warn)
    if config.source == "python_docs":
        return find_python_docs(config)
    if kind == "markov":
        return find_markov(config)
    raise UserError(
        f'config.data.source: "{config.source}" is not one of tfds:NAME, text:PATH, tokens:PATH, python_docs, markov, '
        "markov:ORDER" + _suggest(config.source)
    )


def _suggest(source: str) -> str:
    if source.startswith("jsonl:"):
        return f"; tokenize it first: python -m lm.data.prepare --input {source} --tokenizer bpe:32000 --output DIR"
    return f"; did you mean text:{source}?" if Path(source).expanduser().exists() else ""


def cut(documents: list[str], fractions: tuple[float, ...]) -> dict[str, list[str]]:
    """Split documents, concatenated in order, at the characters where the fractions end.

    The boundaries are floor(n (f_1 + ... + f_i)), so 0.9, 0.05, 0.05 cut Tiny Shakespeare where TFDS does. A fraction
    of 0 gives no split.

    >>> cut(["abcd", "efgh"], (0.75, 0.25, 0.0))
    {'train': ['abcd', 'ef'], 'validation': ['gh']}
    """
    n = sum(map(len, documents))
    ends = [int(n * round(sum(fractions[: i + 1]), 9)) for i in range(len(fractions))]
    splits = {}
    for name, fraction, start, end in zip(SPLITS, fractions, [0, *ends], ends, strict=False):
        if fraction > 0:
            splits[name] = list(_slice(documents, start, end))
    return splits


def _slice(documents, start, end) -> Iterator[str]:
    offset = 0
    for document in documents:
        if piece := document[max(0, start - offset) : max(0, end - offset)]:
            yield piece
        offset += len(document)


# ---- text:PATH -------------------------------------------------------------------------------------------------------


def find_text(path: Path, config, cache_dir: Path, say, warn) -> Source:
    """Find text files, each of which is one document in UTF-8; see `find_source`."""
    files = find_text_files(path, f'config.data.source: "{config.source}"', say, warn)
    fractions = config.splits or DEFAULT_FRACTIONS
    digest = cache.key_of("text", [cache.digest_of(file, cache_dir) for file in files], fractions)
    return Source(printable(path.resolve().name), digest, lambda: cut([read_text(file) for file in files], fractions))


# ---- tfds:NAME -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """The texts of one split of a prepared TFDS directory, read through TFDS without TensorFlow."""

    directory: Path
    split: str
    n_records: int

    def __iter__(self) -> Iterator[str]:
        return self.between(0, self.n_records)

    def between(self, start: int, end: int) -> Iterator[str]:
        """Yield the texts of the records [start, end)."""
        import tensorflow_datasets as tfds

        try:
            records = tfds.builder_from_directory(self.directory).as_data_source(split=self.split)
            if len(records) != self.n_records:
                raise ValueError(f"{len(records)} records instead of {self.n_records}")
            for i in range(start, end):
                yield records[i]["text"].decode()
        except Exception as e:  # ArrayRecord raises many types
            reason = " ".join(str(e).split())[:300]
            raise UserError(
                f"{self.directory}: cannot read the {self.split} split ({reason}); "
                "delete the directory and prepare it again"
            ) from e


def find_tfds(name: str, config, cache_dir: Path, say: Callable[[str], None]) -> Source:
    """Find a text dataset in a prepared TFDS directory; see `find_source`.

    tiny_shakespeare is downloaded and prepared if it is missing.
    """
    root = Path(config.data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    directory = prepared_directory(root, name)
    if directory is None and name == "tiny_shakespeare":
        directory = shakespeare.download_and_prepare(root, say)
    if directory is None:
        raise UserError(
            f'config.data.source: "tfds:{name}" is not prepared in {root}; use --config.data.data_dir=DIR, or prepare '
            f"it (needs TensorFlow): tfds build {name} --file_format=array_record --data_dir={root}"
        )
    splits = check_prepared(directory)
    files = {split: [cache.digest_of(file, cache_dir) for file in shards] for split, (shards, _) in splits.items()}
    digest = cache.key_of("tfds", files, config.splits)

    def read():
        records = {split: Records(directory, split, count) for split, (_, count) in splits.items()}
        if config.splits is None:
            return records
        ordered = [split for split in SPLITS if split in records] + [split for split in records if split not in SPLITS]
        documents = list(chain.from_iterable(records[split] for split in ordered))
        if len(documents) == len(records):  # one record per split, as in tiny_shakespeare: one text cut into splits
            documents = ["".join(documents)]
        return cut(documents, config.splits)

    return Source(name, digest, read)


def prepared_directory(root: Path, name: str) -> Path | None:
    """Return the directory of NAME, NAME/CONFIG or NAME:VERSION below a TFDS root (default: the newest version)."""
    name, _, version = name.partition(":")
    parent = root / name
    if not parent.is_dir():
        return None
    versions = [d for d in parent.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", d.name) and version in ("", d.name)]
    return max(versions, key=lambda d: tuple(map(int, d.name.split("."))), default=None)


def check_prepared(directory: Path) -> dict[str, tuple[list[Path], int]]:
    """Return the files and the number of records of each split of a prepared TFDS directory.

    Raises:
        UserError: the directory is incomplete, has no texts, or can only be read by TensorFlow.
    """
    advice = "delete the directory and prepare it again"
    try:
        info = read_json(directory / "dataset_info.json", INFO, advice)
        features = read_json(directory / "features.json", dict, advice)
    except FileNotFoundError as e:
        raise UserError(f"{directory} is incomplete: {Path(e.filename).name} is missing; {advice}") from None
    dataset, splits = info["name"], {split["name"]: split["shardLengths"] for split in info["splits"]}
    if wrong := [n for lengths in splits.values() for n in lengths if not re.fullmatch(r"[0-9]{1,18}", n)]:
        raise UserError(f"{directory / 'dataset_info.json'} is corrupted: shardLengths has {wrong[0][:80]!r}; {advice}")
    file_format = info.get("fileFormat", "tfrecord")
    if file_format != "array_record":
        raise UserError(
            f"{directory} is stored as {str(file_format)[:80]}, which only TensorFlow can read; "
            "prepare it again with --file_format=array_record"
        )
    names = _feature_names(features)
    if "text" not in names:
        raise UserError(f'{directory} has no feature "text" (it has {", ".join(names)}), so it is not a text dataset')
    prepared = {}
    for split, lengths in splits.items():
        lengths = list(map(int, lengths))
        stem, n_shards = f"{dataset}-{split}.array_record", len(lengths)
        shards = [directory / f"{stem}-{i:05d}-of-{n_shards:05d}" for i in range(n_shards)]
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise UserError(f"{directory} is incomplete: {missing[0]} is missing; delete it and prepare it again")
        prepared[split] = shards, sum(lengths)
    return prepared


def _feature_names(features: dict) -> list[str]:
    """Return the names in features.json; an empty list if the dataset is not a dictionary of features."""
    for key in ("featuresDict", "features"):
        found = features.get(key)
        if not isinstance(found, dict):
            return []
        features = found
    return sorted(features)


# ---- python_docs, markov ---------------------------------------------------------------------------------------------


def find_python_docs(config) -> Source:
    """Return the documentation text inside every CPython (`lm/data/python_docs.py`)."""
    from lm.data import python_docs

    fractions = config.splits or DEFAULT_FRACTIONS
    digest = cache.key_of("python_docs", python_docs.version(), fractions)
    return Source("python_docs", digest, lambda: cut(python_docs.documents(), fractions))


def find_markov(config) -> Source:
    """Return synthetic text with an exactly known entropy rate (`lm/data/markov.py`)."""
    orders = {"markov": 1} | {f"markov:{order}": order for order in ORDERS[1:]}
    if config.source not in orders:
        raise UserError(f'config.data.source: "{config.source}" is not one of {", ".join(orders)}')
    chain, fractions = MarkovChain(orders[config.source]), config.splits or DEFAULT_FRACTIONS
    digest = cache.key_of(config.source, VERSION, fractions)
    return Source(config.source, digest, lambda: cut([chain.text()], fractions), chain)
