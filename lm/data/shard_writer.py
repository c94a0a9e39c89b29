"""Write token shards: the work behind `python -m lm.data.prepare`. `lm/data/shards.py` reads them.

The output directory holds

    train_000000.npy ...   one shard per unit and split, or more of a large unit (train_000000_001.npy)
    tokenizer.json         unless the tokenizer is "byte"
    manifest.json          the record of what was prepared, see `lm.data.shards.MANIFEST_SHAPE`

The manifest is written first and updated when units finish, so that a rerun skips them.
"""

import argparse
import itertools
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from tqdm import tqdm

from lm.config import SPLITS
from lm.config.values import short
from lm.data import chats, hf_tokenizer, storage, tokenizers
from lm.data.readers import Span, find_spans, read_documents
from lm.data.shards import MANIFEST, MANIFEST_SHAPE, MARKS, shard_records
from lm.data.tokenizer_base import Tokenizer
from lm.data.unit_shards import documents_of, hash_unit, spec_of_shards, write_unit
from lm.system.errors import UserError
from lm.system.files import read_json, to_json, user_cache, write_text
from lm.system.locks import lock
from lm.system.text_tables import plural, say, without_secrets

FORMAT = 6  # of the shards; a directory of another format is not resumed
TOKENIZER_SAMPLE = 2**27  # characters that bpe:SIZE is trained on, from evenly spaced units


def write_shards(o: argparse.Namespace, commit: str | None) -> None:
    """Tokenize the input into shards, and resume where an interrupted call stopped.

    `o` are the arguments of `lm.data.prepare`, and `commit` is that of this code, for the manifest;
    None if unknown. Raises UserError if the input cannot be read or the output directory belongs to
    something else, and OSError if a file cannot be read or written at the moment.
    """
    unit_bytes = int(o.unit_mb * 2**20)
    files, spans = _find_inputs(o, unit_bytes)
    units = join_spans(spans, unit_bytes)
    if not any(span.split in ("", "train") for span in spans):
        raise UserError(
            f"--input: {' and '.join(o.input)} has no train split; give a dataset that has one"
        )
    if o.output.exists() and not o.output.is_dir():
        raise UserError(f"--output: {o.output} is not a directory; use an empty or new one")
    if not (o.output / MANIFEST).exists() and any(o.output.glob("[!.]*")):
        raise UserError(f"--output: {o.output} contains other files; use an empty or new directory")
    # before the directory is marked, so that a corrected command can use it
    _check_arguments(o, spans)
    o.output.mkdir(parents=True, exist_ok=True)
    with lock(o.output, "--output"):
        for partial in o.output.glob(".*.partial"):  # of a call that was killed
            partial.unlink()
        manifest = _open_manifest(o, files, len(units)) | {"commit": commit}
        _prepare_tokenizer(o, units, manifest)
        _write_missing(o, units, manifest)
    _report(o, {span.split for span in spans}, manifest)


def _find_inputs(o: argparse.Namespace, unit_bytes: int) -> tuple[list[str], list[Span]]:
    """Return the files of all inputs and their spans.

    Raises UserError if an input has no text, its first document cannot be read, or two inputs have
    the same file.
    """
    files: list[str] = []
    spans: list[Span] = []
    for source in o.input:
        of_source, parts = find_spans(source, unit_bytes, o.field)
        if not parts:
            raise UserError(f"--input: {source!r} contains no text")
        before = set(map(os.path.realpath, files))
        if twice := [file for file in of_source if os.path.realpath(file) in before]:
            raise UserError(
                f"--input: {source} has {twice[0]}, which another input has, too; give each file "
                "once"
            )
        next(read_documents(parts[0], o.field), None)  # a wrong field is known before any work
        files += of_source
        spans += parts
    return files, spans


def join_spans(spans: list[Span], unit_bytes: int) -> list[list[Span]]:
    """Join consecutive spans to units of at most unit_bytes, or of one span of more or unknown."""
    units: list[list[Span]] = []
    left = 0
    for span in spans:
        size = span.size or unit_bytes
        if size > left:
            units.append([])
            left = unit_bytes
        units[-1].append(span)
        left -= size
    return units


def _check_arguments(o: argparse.Namespace, spans: list[Span]) -> None:
    """Raise UserError if an option does not fit or the tokenizer is unknown."""
    kind, _, size = o.tokenizer.partition(":")
    if o.special_tokens and o.tokenizer == "byte":
        raise UserError(
            "--special_tokens: the byte tokenizer has no special tokens; use hf:PATH or bpe:SIZE"
        )
    if o.field != "text" and all(span.kind.startswith(("text", "tfds")) for span in spans):
        raise UserError(
            f"--field: {' and '.join(o.input)} is read without a field; leave the option out"
        )
    if kind == "hf":
        tokenizers.make(o.tokenizer, ())
        return
    is_bpe = kind == "bpe" and re.fullmatch(r"[0-9]{3,7}", size) and int(size) > 256
    if o.tokenizer != "byte" and not is_bpe:
        raise UserError(
            f"--tokenizer: {short(o.tokenizer)} is not one of byte, hf:PATH, bpe:SIZE with SIZE "
            "above 256 and below 10000000"
        )


def _open_manifest(o: argparse.Namespace, files: list[str], n_units: int) -> dict:
    """Return the manifest of an interrupted call with the same input and options, else a new one."""
    job = {"format": FORMAT} | vars(o)
    for name in ("output", "workers", "verify"):  # they do not change the shards
        del job[name]
    job["input"] = without_secrets(o.input)
    if len(o.input) == 1:  # as it was recorded before there could be more
        job["input"] = job["input"][0]
    with ThreadPoolExecutor() as pool:
        hashing = pool.map(lambda file: storage.describe(file, user_cache(None)), files)
        described = list(tqdm(hashing, "hashing the input", len(files), disable=None))
    try:
        manifest = read_json(
            o.output / MANIFEST, MANIFEST_SHAPE, f"delete {o.output} and prepare the corpus again"
        )
    except FileNotFoundError:
        return {"job": job, "input": described, "tokenizer": None, "units": [None] * n_units}
    if (manifest["job"], manifest["input"]) != (job, described):
        raise UserError(
            f"--output: {o.output} was written from other input, with other options or by another "
            "version; use another directory, or delete it"
        )
    return manifest


def _save(o: argparse.Namespace, manifest: dict) -> None:
    write_text(o.output / MANIFEST, to_json(manifest, indent=1) + "\n")


def _prepare_tokenizer(o: argparse.Namespace, units: list[list[Span]], manifest: dict) -> None:
    """Load or train the tokenizer, save it as the output's tokenizer.json, and record it."""
    path = o.output / "tokenizer.json"
    recorded = manifest["tokenizer"]
    is_trained = o.tokenizer.startswith("bpe:")
    _save(o, manifest)  # the mark of the directory
    tokenizer: Tokenizer
    if is_trained and not recorded:
        tokenizer = _train_tokenizer(o, units)
    else:
        spec = f"hf:{path}" if is_trained else o.tokenizer
        tokenizer = tokenizers.load(spec, o.special_tokens, say)
    if _has_chats(units[0], o.field) and (warning := chats.notice(tokenizer, o.tokenizer)):
        say(warning)
    if recorded not in (None, tokenizer.fingerprint):
        raise UserError(
            f"--output: {path if is_trained else o.tokenizer} is not the tokenizer of the "
            f"finished shards; restore it, or delete {o.output}"
        )
    if isinstance(tokenizer, hf_tokenizer.HFTokenizer):
        write_text(path, tokenizer.json)
    manifest["tokenizer"] = tokenizer.fingerprint
    _save(o, manifest)


def _train_tokenizer(o: argparse.Namespace, units: list[list[Span]]) -> hf_tokenizer.HFTokenizer:
    """Train a BPE on the first characters of evenly spaced units."""
    of_train = [[span for span in unit if span.split in ("", "train")] for unit in units]
    train = [unit for unit in of_train if unit]
    sample = train[:: max(1, len(train) // 64)]
    say(f"training the tokenizer {o.tokenizer} on up to {TOKENIZER_SAMPLE >> 20} MiB of the text")

    def texts() -> Iterator[str]:
        for unit in sample:
            left = TOKENIZER_SAMPLE // len(sample)
            for text in documents_of(unit, o.field):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break

    markers = chats.MARKERS if _has_chats(sample[0], o.field) else ()
    size = int(o.tokenizer.partition(":")[2])
    return hf_tokenizer.train_bpe(texts(), size, o.special_tokens, markers)


def _has_chats(spans: list[Span], field: str) -> bool:
    """Return whether one of the first documents is a chat."""
    first = itertools.islice(documents_of(spans, field), 100)
    return any(isinstance(document, chats.Chat) for document in first)


def _write_missing(o: argparse.Namespace, units: list[list[Span]], manifest: dict) -> None:
    """Write the shards of every unit that is not finished, in parallel, and record them."""

    def is_there(shard: dict) -> bool:
        path = o.output / shard["file"]
        marks = o.output / (shard["file"] + MARKS)
        has_marks = "answers_sha256" not in shard or marks.is_file()
        return path.is_file() and path.stat().st_size == shard["size"] and has_marks

    records = manifest["units"]
    missing = [
        i
        for i, record in enumerate(records)
        if record is None or not all(map(is_there, record["shards"]))
    ]
    say(f"{plural(len(units), 'unit')}, {len(units) - len(missing)} already finished")
    if not missing:
        return
    sizes = [sum(span.size for span in unit) for unit in units]
    kept = _first_copies(o, units, sizes) if o.deduplicate else [None] * len(units)
    jobs = {i: (i, units[i], o, kept[i]) for i in missing}
    began = time.monotonic()
    next_save = 0.0
    for i, record in _in_parallel("tokenizing", o.workers, sizes, write_unit, jobs):
        records[i] = record
        now = time.monotonic()
        if now >= next_save:  # saving a long manifest takes at most 5 % of the time
            _save(o, manifest)
            next_save = now + 20 * (time.monotonic() - now)
    _save(o, manifest)
    seconds = time.monotonic() - began
    size = sum(sizes[i] for i in missing) / 1e6
    say(f"tokenized {size:,.1f} MB in {seconds:,.1f} s, {size / seconds:,.1f} MB/s")


def _first_copies(
    o: argparse.Namespace, units: list[list[Span]], sizes: list[int]
) -> list[np.ndarray]:
    """Return for each unit which of its documents are the first of their text, by 64-bit hashes.

    This reads the input once more, and takes 16 bytes of memory per document.
    """
    jobs = {i: (unit, o.field) for i, unit in enumerate(units)}
    by_unit = dict(_in_parallel("hashing documents", o.workers, sizes, hash_unit, jobs))
    hashes = [by_unit[i] for i in range(len(units))]
    ends = np.cumsum([len(of_unit) for of_unit in hashes])
    _, first = np.unique(np.concatenate(hashes), return_index=True)
    kept = np.zeros(ends[-1], bool)
    kept[first] = True
    return np.split(kept, ends[:-1])


def _in_parallel(
    title: str, workers: int, sizes: list[int], function: Callable, jobs: dict[int, tuple]
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each unit and the function's result, as they finish."""
    n_workers = min(workers, len(jobs))
    total = sum(sizes[i] for i in jobs)
    with tqdm(None, title, total, unit="B", unit_scale=True, disable=None) as bar:
        if n_workers < 2:
            for i, job in jobs.items():
                yield i, function(*job)
                bar.update(sizes[i])
            return
        context = multiprocessing.get_context("spawn")
        n_threads = workers // n_workers
        with ProcessPoolExecutor(n_workers, context, _start_worker, (n_threads,)) as pool:
            numbers = {pool.submit(function, *job): i for i, job in jobs.items()}
            try:
                for future in as_completed(numbers):
                    i = numbers.pop(future)
                    yield i, future.result()
                    bar.update(sizes[i])
            except BrokenProcessPool:
                raise UserError(
                    "a worker process was killed, perhaps out of memory; try fewer --workers"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)


def _report(o: argparse.Namespace, expected: set[str], manifest: dict) -> None:
    """Print the tokens of each split and how to train on them; refuse an empty split."""
    for split in SPLITS:
        shards = [shard for shard in shard_records(manifest).values() if shard["split"] == split]
        n_tokens = sum(shard["tokens"] for shard in shards)
        if n_tokens:
            n_documents = sum(shard["documents"] for shard in shards)
            say(f"{split}: {n_tokens:,} tokens, {n_documents:,} documents")
        elif split in expected or split == "train":
            raise UserError(
                f"--input: {' and '.join(o.input)} has no documents in the {split} split; use more "
                f"text or a lower --validation, and delete {o.output}"
            )
        elif split == "validation" and o.validation:
            say("WARNING: the validation split is empty; use more text or a higher --validation")
    for reason in ("length", "repeated"):
        if left_out := sum(unit[reason] for unit in manifest["units"]):
            say(f"{left_out:,} documents left out: {reason}")
    spec = spec_of_shards(o) + " --config.data.special_tokens=true" * o.special_tokens
    say(f"train with --config.data.source=tokens:{o.output} --config.data.tokenizer={spec}")


def _start_worker(n_threads: int) -> None:
    """End this worker when its parent has ended, also if that was killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(n_threads > 1).lower()
    os.environ["RAYON_NUM_THREADS"] = str(n_threads)

    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
