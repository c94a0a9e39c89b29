"""Text data sets that TFDS has prepared in a directory, read without TensorFlow."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lm.errors import UserError
from lm.files import read_json

# What is read of the metadata. The lengths are strings, as all int64 in JSON of proto3.
INFO = {"name": str, "splits": [{"name": str, "shardLengths": [str]}]}


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
