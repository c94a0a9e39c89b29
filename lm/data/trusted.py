"""Which text of a run may be read: it may be somebody else's, and name any file or URL.

Training remembers, outside of its run, what it read: a file in the user's cache for each place,
which is a path or a URL. What a run names is read without being asked for if the same user trained
with it before. Names that mean the same everywhere (python_docs, markov, tfds:NAME) are always
read. Folders with task files of lm-evaluation-harness that may run code are remembered alike.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.data import cache
from lm.system.errors import UserError
from lm.system.files import expanded, user_cache, write_text
from lm.system.text_tables import SECRET
from lm.system.urls import is_url

# tfds:NAME, NAME/CONFIG and NAME:VERSION, which stay inside of the folder of data sets.
NAMES = r"python_docs|markov(:\d+)?|tfds:\w[\w+-]*(/\w[\w.+-]*)?(:\d+\.\d+\.\d+)?"
TOKENIZERS = ("char", "byte", "word", "bpe", "none")


def remember(data) -> None:
    """Remember what a `DataConfig`, with which the user trains, names.

    Raises:
        UserError: the user's cache cannot be written.
    """
    for place in [*_read(data), *filter(None, (data.data_dir, data.cache_dir))]:
        _remember(place)


def remember_tasks(folder: str | Path) -> None:
    """Remember that the task files of a folder may run code."""
    _remember(f"tasks:{folder}")


def check_tasks(folder: str | Path) -> None:
    """Raise UserError if a folder, in which a task file runs code, is not remembered."""
    if not _mark(f"tasks:{folder}").exists():
        raise UserError(
            f"{folder}: a task file there has !function, which runs any Python code; if you trust "
            "it, lm.harness --trust-tasks runs it, now and later"
        )


def check(data, workdir: str | Path) -> None:
    """Raise UserError if a run's `DataConfig` names a text with which the user has not trained."""
    if hidden := [place for place in _read(data) if SECRET in place]:
        raise UserError(
            f"--workdir: {workdir} names {', '.join(hidden)}, whose password or query is not "
            "recorded; give the text to lm.evaluate with --data"
        )
    if unknown := [place for place in _read(data) if not _mark(place).exists()]:
        raise UserError(
            f"--workdir: {workdir} names {', '.join(unknown)}, with which you have not trained "
            "here, and a run of somebody else may name any file or URL; --trust-data reads it, now "
            "and later (lm.evaluate: or give a text with --data)"
        )


def local(data):
    """Return a `DataConfig` without folders that are not here or not trained with."""
    left_out: dict[str, Any] = {}
    for name in ("data_dir", "cache_dir"):
        path = getattr(data, name)
        if path and not (_is_folder(path) and _mark(path).exists()):
            left_out[name] = None
    return dataclasses.replace(data, **left_out)


def _read(data) -> Iterator[str]:
    """Yield the paths and URLs that are read for a text."""
    sources = [source for _, source, _ in data.mixture or ((None, data.source, 1.0),)]
    yield from (source for source in sources if not re.fullmatch(NAMES, source))
    if data.tokenizer.partition(":")[0] not in TOKENIZERS:
        yield data.tokenizer
    uses_tfds = any(source.startswith("tfds:") for source in sources)
    if uses_tfds and data.data_dir and _is_folder(data.data_dir):
        yield data.data_dir


def _is_folder(path: str) -> bool:
    return os.path.isdir(expanded(path))


def _remember(place: str) -> None:
    mark = _mark(place)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        write_text(mark, "")
    except OSError as error:
        advice = "set XDG_CACHE_HOME to another folder"
        raise UserError(f"{mark} cannot be written ({error.strerror}); {advice}") from None


def _mark(place: str) -> Path:
    """Return the file that exists if a place, such as text:PATH, is remembered."""
    form = ""
    path = place
    if ":" in place and not is_url(place):
        form, _, path = place.partition(":")
    absolute = path if is_url(path) else os.path.abspath(expanded(path))
    return user_cache(None) / "trusted" / cache.key_of(form, absolute)
