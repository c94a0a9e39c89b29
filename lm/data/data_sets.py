"""What the folder of a data set says of itself: its files, their splits, their rows.

Indices of Hugging Face's datasets (state.json, dataset_dict.json, dataset_info.json, the header of
README.md) and the numbers in the names of files are followed; where the files contradict them, they
are refused.
"""

import fnmatch
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

from lm.config import SPLITS
from lm.data import columns, storage
from lm.data.text_files import shorten
from lm.system.errors import UserError
from lm.system.files import COUNT, check_shape, parse_json

# of Hugging Face's datasets
METADATA = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
WORDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
}
NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)")
# Formats of tables, and what the paths of their logs end with.
TABLES = {
    "Delta": r"/_delta_log/[^/]*$",
    "Iceberg": r"/metadata/[^/]*\.metadata\.json$",
    "Hudi": r"/\.hoodie/[^/]*$",
    "Lance": r"/_versions/[^/]*\.manifest$",
}
UNCOMMITTED = "/_temporary/"  # the folder of Hadoop and Spark for files of a job that has not ended
STATE = {"_data_files": [{"filename": str}]}
MAX_BYTES = 2**24  # of an index
DEFAULT = "default"  # the configuration of README.md that is read


def splits_in(name: str) -> list[str]:
    """Return the splits that the whole words of a name stand for.

    >>> splits_in("medieval-train.npy"), splits_in("contest")
    (['train'], [])
    """
    words = re.findall("[a-z]+", name.lower())
    return list(dict.fromkeys(WORDS[word] for word in words if word in WORDS))


def choose_files(
    path: str, listed: list[str], files: list[str], say: Callable[[str], None]
) -> list[str]:
    """Return those of the data files of a folder that its indices list.

    Args:
        path: the folder.
        listed: all files below it.
        files: those of a kind that is read.
        say: receives a line about files that are not used.

    Raises:
        UserError: an index lists other files than there are, or means something that is not read.
    """
    if not _is_folder(path, listed):
        return files  # a pattern names its files
    _refuse_tables(path, listed)
    kept = [file for file in files if UNCOMMITTED not in file.removeprefix(path)]
    if unfinished := [file for file in files if file not in kept]:
        say(f"not used, because the job that wrote it did not end: {shorten(unfinished, path)}")
    written = list(kept)
    for index in (file for file in listed if _name(file) == "state.json"):
        state = _parse(index, _read_text(index), (dict, list))
        if "_data_files" not in state:  # of another program
            continue
        _parse(index, state, STATE)
        folder = _folder(index)
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise UserError(
                f"{index}: the data set is a selection of rows by indices; save it again with new "
                "`datasets`"
            )
        wanted = {f"{folder}/{file['filename']}" for file in state["_data_files"]}
        if missing := sorted(wanted - {*listed}):
            raise UserError(
                f"{index} lists {_name(missing[0])}, which is missing; save or download the data "
                "set again"
            )
        kept = [file for file in kept if _folder(file) != folder or file in wanted]
    if unused := [file for file in written if file not in kept]:
        say(f"not used, because state.json does not list it: {shorten(unused, path)}")
    _check_numbers(kept)
    return kept


def _refuse_tables(path: str, listed: list[str]) -> None:
    """Raise UserError for a folder whose log says which of its files count."""
    hidden = os.path.join(path, ".hoodie")  # hidden files are not listed
    for format, pattern in TABLES.items():
        logs = [file for file in listed if re.search(pattern, file)]
        if format == "Hudi" and os.path.exists(hidden):
            logs = [hidden + "/"]
        if logs:
            table = re.sub(pattern, "", logs[0])
            raise UserError(
                f"{table} is a table of {format}, whose log says which files count; write its rows "
                "to new Parquet files, or give the files that count by a pattern"
            )


def _check_numbers(files: list[str]) -> None:
    """Raise UserError unless files named N-of-M are complete, each once."""
    groups: dict[str, list[tuple[int, int, str]]] = {}
    for file in files:
        if numbered := NUMBERED.match(_name(file)):
            beginning, number, total = numbered.groups()
            part = (int(number), int(total), file)
            groups.setdefault(f"{_folder(file)}/{beginning}", []).append(part)
    for parts in groups.values():
        parts.sort()
        first, total, name = parts[0]
        if others := [file for _, n, file in parts if n != total]:
            raise UserError(
                f"{name} and {others[0]} are parts of two versions of a data set; remove the older "
                "one"
            )
        numbers = [number for number, *_ in parts]
        if len({*numbers}) < len(numbers):
            raise UserError(
                f"{name}: another file beside it has the same number of {total:,}; remove the "
                "older one"
            )
        if first not in (0, 1) or numbers != list(range(first, first + total)):
            raise UserError(
                f"{_folder(name)} has {len(numbers):,} of the {total:,} files that {_name(name)} "
                f"names; download the others, or give these by a pattern: {_folder(name)}/*"
            )


def refuse_copies(files: list[str]) -> None:
    """Raise UserError if a file is beside its compressed copy: its text would be read twice."""
    plain: dict[str, str] = {}
    for file in files:
        other = plain.setdefault(storage.without_compression(file), file)
        if other != file:
            raise UserError(
                f"config.data.source: {other} and {file} are copies of one file; remove one of them"
            )


def find_splits(
    path: str,
    listed: list[str],
    files: list[str],
    kinds: dict[str, str],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Return the split of each file of a data set: "train", "validation", "test", "" if unknown.

    An index of its folder says to which split a file belongs; without one, words of its path do.

    Args:
        path: a folder, file or pattern; the others as in `choose_files`.
        kinds: the kind of each file.

    Raises:
        UserError: there are several data sets or kinds, or the files contradict an index.
    """
    is_folder = _is_folder(path, listed)  # else a pattern, which names its files
    named = _splits_of_index(path, listed, files) if is_folder else None
    if named is None:
        reason = "no split is in the name"
        splits, data_sets = _splits_by_name(path, files)
        if is_folder and len(data_sets) > 1:
            raise UserError(
                f"config.data.source: {path} has several data sets; give one of them, such as "
                f"hf:{path}/{max(data_sets)}"
            )
        if is_folder:
            _refuse_two_words(path, splits)
    else:
        reason = "it is of no split that is read"
        splits = _choose_splits(path, named)
    sizes: dict[str, int] = {}
    for file in splits:
        sizes[kinds[file]] = sizes.get(kinds[file], 0) + _size(file)
    if len(sizes) > 1:
        largest = max(sizes, key=lambda kind: sizes[kind])
        raise UserError(
            f"config.data.source: {path} has files of several kinds ({', '.join(sorted(sizes))}); "
            f"give one of them, such as {largest}:{path}"
        )
    if unused := [file for file in files if file not in splits]:
        say(f"not used, because {reason}: {shorten(unused, path)}")
    return splits


def warn_of_splits(
    path: str, listed: list[str], files: list[str], kind: str, say: Callable[[str], None]
) -> None:
    """Warn of splits that a data set brings, where all of its files are read as one text.

    Raises UserError if the files contradict an index.
    """
    if not _is_folder(path, listed):
        return
    named = _splits_of_index(path, listed, files) or {}
    of_splits = {*itertools.chain.from_iterable(named.values())}
    if named and (others := [file for file in files if file not in of_splits]):
        say(
            f"WARNING: {path} says that {shorten(others, path)} is of no split, which {kind}: "
            f"reads, too; hf:{path} does not"
        )
    names = [*(named or _splits_by_name(path, files)[0].values())]
    splits = {split for name in names for split in splits_in(name)}
    if len(splits) > 1:
        say(
            f"WARNING: {path} has files of the splits {', '.join(sorted(splits))}, which {kind}: "
            f"reads as one text and cuts again; hf:{path} keeps the splits"
        )


def _splits_by_name(path: str, files: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the split in the name of each file that has one, else all files, and the data sets.

    The folders of a file, but for "data" and those named after a split, are its data set.
    """
    splits = {}
    data_sets = {}
    for file in files:
        *folders, name = file.removeprefix(path.rstrip("/") + "/").split("/")
        named = [i for i, part in enumerate([*folders, name]) if splits_in(part)]
        last = max(named, default=len(folders))
        splits[file] = "".join(splits_in([*folders, name][last])[:1])
        own = [part for part in folders if not splits_in(part) and part != "data"]
        data_sets["/".join(own)] = "/".join(folders[:last] or folders)
    with_split = {file: split for file, split in splits.items() if split}
    return with_split or splits, list(data_sets.values())


def _refuse_two_words(path: str, splits: dict[str, str]) -> None:
    """Raise UserError if file names have two words for one held-out split: dev and valid."""
    words: dict[str, dict[str, str]] = {"validation": {}, "test": {}}
    for file, split in splits.items():
        for word in re.findall("[a-z]+", file.removeprefix(path).lower())[::-1]:
            if split in words and WORDS.get(word) == split:
                words[split][word] = file
                break
    for split, of_split in words.items():
        if len(of_split) > 1:
            raise UserError(
                f"config.data.source: {path} has several splits that may be {split} "
                f"({', '.join(sorted(of_split))}); remove or rename one, or give one as the text: "
                f"hf:{min(of_split.values())}"
            )


def _choose_splits(path: str, named: dict[str, list[str]]) -> dict[str, str]:
    """Return the split of each file in the splits of an index; other splits are left out."""
    splits: dict[str, str] = {}
    for split in SPLITS:
        names = [name for name in named if split in splits_in(name)]
        names = [name for name in names if name in WORDS] or names
        if len(names) > 1:
            raise UserError(
                f"config.data.source: {path} has several splits that may be {split} "
                f"({', '.join(names)}); give the files of one, such as "
                f"{_pattern_of(named[names[0]][0])}"
            )
        splits |= {file: split for name in names for file in named[name]}
    if not splits and len(named) > 1:
        first = next(iter(named.values()))[0]
        raise UserError(
            f"config.data.source: {path} has the splits {', '.join(named)}, none of which is "
            f"train; give the files of one, such as {_pattern_of(first)}"
        )
    return splits or {file: "" for files in named.values() for file in files}


def _pattern_of(file: str) -> str:
    """Return the source of a file and of the other parts of its split."""
    numbered = NUMBERED.match(_name(file))
    return f"hf:{_folder(file)}/{numbered[1]}*" if numbered else f"hf:{file}"


def _splits_of_index(path: str, listed: list[str], files: list[str]) -> dict[str, list[str]] | None:
    """Return the files of each split that an index of this folder names; None if it has none."""
    folder = path.rstrip("/")
    indices = {_name(file): file for file in listed if _folder(file) == folder}
    named: dict[str, list[str]] = {}
    if index := indices.get("dataset_dict.json"):
        for name in _parse(index, _read_text(index), {"splits": [str]})["splits"]:
            named[name] = [file for file in files if file.startswith(f"{folder}/{name}/")]
    elif "state.json" not in indices and (index := indices.get("dataset_info.json")):
        splits = _parse(index, _read_text(index), dict).get("splits")
        if not isinstance(splits, dict):
            return None
        for name in splits:
            named[name] = [file for file in files if _is_of_split(file, name)]
        if any(named.values()):
            _check_rows(index, splits, named)
    elif index := indices.get("README.md"):
        named = _splits_of_readme(index, files)
    if not any(named.values()):  # no index, or the files are of another layout
        return None
    if missing := [name for name, of_split in named.items() if not of_split]:
        raise UserError(
            f"{index} lists the split {missing[0]}, which has no files; download it, or give the "
            "files of the others by a pattern"
        )
    return named


def _is_of_split(file: str, split: str) -> bool:
    """Return whether a file of the cache of `load_dataset` (NAME-SPLIT.arrow) is of a split."""
    stem = _name(file).split(".")[0]
    if numbered := NUMBERED.match(stem):
        stem = numbered[1].rstrip("-")
    return f"-{stem}".endswith(f"-{split}")


def _check_rows(index: str, splits: dict[str, Any], named: dict[str, list[str]]) -> None:
    _parse(index, splits, {str: {"num_examples": COUNT}})
    for name, files in named.items():
        if name not in splits:
            continue
        expected = splits[name]["num_examples"]
        # The rows of other files are not known before they are read.
        if not files or not all(file.endswith((".arrow", ".parquet")) for file in files):
            continue
        if (n_rows := sum(map(columns.count_rows, files))) != expected:
            raise UserError(
                f"{index} lists {expected:,} rows of the split {name}, but its files have "
                f"{n_rows:,}; prepare or download the data set again"
            )


def _splits_of_readme(readme: str, files: list[str]) -> dict[str, list[str]]:
    """Return the files of each split in README.md's default configuration, or its only one here.

    Raises UserError if there are files of several configurations, and none is the default.
    """
    folder = _folder(readme)
    data_sets = {}
    for name, patterns_of in _configurations(readme).items():
        named = {
            split: [file for file in files if _matches(file, folder, patterns)]
            for split, patterns in patterns_of.items()
        }
        if any(named.values()):
            _check_rows(readme, _rows_in_readme(readme, name), named)
        if name == DEFAULT:
            return named
        if any(named.values()):
            data_sets[name] = named
    first: dict[str, list[str]] = next(iter(data_sets.values()), {})
    if len(data_sets) > 1:
        file = next(itertools.chain.from_iterable(first.values()))
        raise UserError(
            f"config.data.source: {folder} has several data sets ({', '.join(data_sets)} in "
            f"README.md); give the files of one, such as {_pattern_of(file)}"
        )
    return first


def _configurations(readme: str) -> dict[str, dict[str, list[str]]]:
    """Return the patterns of each split of README.md's configurations, the default one first."""
    header = _header(readme)
    try:
        configs = [config for config in header.get("configs", []) if "data_files" in config]
        patterns = {}
        for number, config in enumerate(configs):
            name = str(config.get("config_name", number))
            patterns[DEFAULT if config.get("default") else name] = _patterns(config["data_files"])
        return dict(sorted(patterns.items(), key=lambda item: item[0] != DEFAULT))
    except (AttributeError, KeyError, TypeError):
        return {}  # a page for people, which may have any header


def _rows_in_readme(readme: str, name: str) -> dict[str, Any]:
    """Return {"num_examples": rows} of each split of a configuration, as far as README.md has it."""
    infos = _header(readme).get("dataset_info", [])
    try:
        infos = infos if isinstance(infos, list) else [infos]
        chosen = [
            info for info in infos if info.get("config_name", name) == name or len(infos) == 1
        ]
        splits = chosen[0].get("splits", []) if chosen else []
        return {
            str(split["name"]): {"num_examples": split["num_examples"]}
            for split in splits
            if isinstance(split["num_examples"], int)
        }
    except (AttributeError, KeyError, TypeError):
        return {}


def _header(readme: str) -> dict:
    """Return the header of README.md, {} if it has none that can be read."""
    import yaml

    lines = _read_text(readme).splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    try:
        header = yaml.safe_load("\n".join(lines[1 : lines.index("---", 1)]))
    except (yaml.YAMLError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _patterns(data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split; `datasets` reads patterns alone as train.

    >>> _patterns("*.csv"), _patterns({"test": "b.csv"}), _patterns([{"split": "test", "path": ["b.csv"]}])
    ({'train': ['*.csv']}, {'test': ['b.csv']}, {'test': ['b.csv']})
    """
    if isinstance(data_files, dict):
        pairs = list(data_files.items())
    elif isinstance(data_files, list) and all(isinstance(part, dict) for part in data_files):
        pairs = [(part["split"], part["path"]) for part in data_files]
    else:
        pairs = [("train", data_files)]
    patterns = {}
    for split, path in pairs:
        paths = path if isinstance(path, list) else [path]
        patterns[str(split)] = [str(path) for path in paths]
    return patterns


def _matches(file: str, folder: str, patterns: list[str]) -> bool:
    relative = file.removeprefix(f"{folder}/")
    return any(fnmatch.fnmatchcase(relative, pattern.replace("**/", "*")) for pattern in patterns)


def _parse(index: str, value: Any, shape: Any) -> Any:
    """Return the value of an index, parsed if it is text; UserError if it has another shape."""
    try:
        if isinstance(value, str):
            return parse_json(value, shape)
        check_shape(value, shape)
        return value
    except ValueError as error:
        raise UserError(
            f"{index} is corrupted: {error}; download or save the data set again"
        ) from None


def _read_text(path: str) -> str:
    with storage.readable(path), storage.open_file(path) as file:
        return file.read(MAX_BYTES).decode("utf-8-sig")


def _is_folder(path: str, listed: list[str]) -> bool:
    """Return whether a path is a folder, and not a file or a pattern; `listed` are its files."""
    if storage.is_url(path):
        return listed != [path] and not storage.is_pattern(path)
    return os.path.isdir(path)


def _size(file: str) -> int:
    return 0 if storage.is_url(file) else os.path.getsize(file)


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _name(file: str) -> str:
    return file.rpartition("/")[2]
