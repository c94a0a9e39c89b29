"""Text data sets that TFDS has prepared in a directory, read without TensorFlow."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from lm.system.errors import UserError
from lm.system.files import open_regular, read_json

AGAIN = "delete the directory and prepare it again"
# What is read of the metadata. The lengths are strings, as all int64 in JSON of proto3.
INFO = {"name": str, "splits": [{"name": str, "shardLengths": [str]}]}
FEATURES = {"featuresDict": {"features": dict}}


def read_records(directory: Path, split: str, start: int, end: int) -> Iterator[str]:
    """Yield the texts of the records [start, end) of a split, without TensorFlow."""
    import tensorflow_datasets as tfds

    n_records = check_prepared(directory)[split][1]
    try:
        records = tfds.builder_from_directory(directory).as_data_source(split=split)
        if len(records) != n_records:
            raise ValueError(f"{len(records)} records instead of {n_records}")
        for i in range(start, end):
            yield records[i]["text"].decode()
    except Exception as e:  # ArrayRecord raises many types
        reason = " ".join(str(e).split())[:300]
        raise UserError(f"{directory}: cannot read the {split} split ({reason}); {AGAIN}") from e


def prepared_directory(root: Path, name: str) -> Path | None:
    """Return the newest directory of NAME, NAME/CONFIG or NAME:VERSION below a TFDS root."""
    name, _, version = name.partition(":")
    parent = root / name
    if not parent.is_dir():
        return None
    versions = {}
    for folder in parent.iterdir():
        if re.fullmatch(r"\d+\.\d+\.\d+", folder.name) and version in ("", folder.name):
            versions[tuple(map(int, folder.name.split(".")))] = folder
    return versions[max(versions)] if versions else None


def check_prepared(directory: Path) -> dict[str, tuple[list[Path], int]]:
    """Return the files and the number of records of each split of a prepared TFDS directory.

    Raises UserError if the directory is incomplete, has no texts, or can only be read by
    TensorFlow.
    """
    try:
        info = read_json(directory / "dataset_info.json", INFO, AGAIN)
        features = read_json(directory / "features.json", FEATURES, AGAIN)["featuresDict"][
            "features"
        ]
    except FileNotFoundError as e:
        raise UserError(
            f"{directory} is incomplete: {Path(e.filename).name} is missing; {AGAIN}"
        ) from None
    splits = {split["name"]: split["shardLengths"] for split in info["splits"]}
    for length in itertools.chain.from_iterable(splits.values()):
        if not re.fullmatch(r"[0-9]{1,18}", length):
            raise UserError(
                f"{directory / 'dataset_info.json'} is corrupted: shardLengths has "
                f"{length[:80]!r}; {AGAIN}"
            )
    file_format = info.get("fileFormat", "tfrecord")
    if file_format != "array_record":
        raise UserError(
            f"{directory} is stored as {str(file_format)[:80]}, which only TensorFlow can read; "
            "prepare it again with --file_format=array_record"
        )
    if "text" not in features:
        names = ", ".join(sorted(features))
        raise UserError(
            f'{directory} has no feature "text" (it has {names}), so it is not a text dataset'
        )
    prepared = {}
    for split, lengths in splits.items():
        shards = []
        for i in range(len(lengths)):
            name = f"{info['name']}-{split}.array_record-{i:05d}-of-{len(lengths):05d}"
            shards.append(directory / name)
            if not shards[i].is_file():
                raise UserError(f"{directory} is incomplete: {name} is missing; {AGAIN}")
            open_regular(shards[i]).close()  # raises PointerError
        prepared[split] = shards, sum(map(int, lengths))
    return prepared
