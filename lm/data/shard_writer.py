"""Write token shards: the work behind `python -m lm.data.prepare`. `lm/data/shards.py` reads them.

The output directory holds

    train_000000.npy ...   one shard per unit and split
    tokenizer.json         unless the tokenizer is "byte"
    manifest.json          the record of what was prepared, see `lm.data.shards.MANIFEST_SHAPE`

The manifest is written first and updated when units finish, so that a rerun skips them.
"""

import dataclasses
import hashlib
import io
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lm.config import SPLITS
from lm.data import cache, hf_tokenizer, tokenizers
from lm.data.shards import MANIFEST, MANIFEST_SHAPE, SPLIT_IN_FILE_NAME
from lm.data.units import Unit, find_units, read_documents
from lm.errors import UserError
from lm.files import lock, read_json, to_json, write_bytes, write_text

FORMAT = 4  # of the shards; a directory of another format is not resumed
TOKENIZER_SAMPLE = 2**27  # characters that bpe:SIZE is trained on, from evenly spaced units
PIECE = 2**20  # characters encoded at once, and the rest of a line


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


def write_shards(o: Options, commit: str | None = None, say: Callable[[str], None] = print) -> None:
    """Tokenize the input into shards, and resume where an interrupted call stopped.

    Args:
        o: the options.
        commit: of this code, for the manifest; None if unknown.
        say: receives lines of information and warnings.

    Raises:
        UserError: the input cannot be read, or the output directory belongs to something else.
        OSError: a file cannot be read or written at the moment.
    """
    files, units = find_units(o.input, o.unit_bytes, say)
    if not units:
        raise UserError(f"--input: {o.input!r} contains no text")
    if not any(unit.split in ("", "train") for unit in units):
        raise UserError(f"--input: {o.input!r} has no train split; give a dataset that has one")
    if (o.output.exists() and not o.output.is_dir()) or (not (o.output / MANIFEST).exists() and _visible(o.output)):
        raise UserError(f"--output: {o.output} contains other files; use an empty or new directory")
    _check_arguments(o, units[0])  # before the directory is marked, so that a corrected command can use it
    o.output.mkdir(parents=True, exist_ok=True)
    with lock(o.output, "--output"):
        for partial in o.output.glob(".*.partial"):  # of a call that was killed
            partial.unlink()
        manifest = _open_manifest(o, files, len(units)) | {"commit": commit}
        tokenizer = _prepare_tokenizer(o, units, manifest, say)
        _write_missing(o, units, manifest, say)
    _report(o, manifest, tokenizer, say)


def _visible(directory: Path) -> bool:
    return directory.is_dir() and any(not path.name.startswith(".") for path in directory.iterdir())


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
    except ValueError as error:
        raise UserError(f"{first.path}: {error}") from None


def _open_manifest(o: Options, files: list[Path], n_units: int) -> dict:
    """Return the manifest of an interrupted call with the same input and options, else a new one."""
    options = dataclasses.asdict(o)
    job = {"format": FORMAT} | {name: options[name] for name in options if name not in ("output", "workers")}
    with ThreadPoolExecutor() as pool:
        hashing = pool.map(lambda file: cache.digest_of(file, cache.user_cache(None)), files)
        digests = list(tqdm(hashing, "hashing the input", len(files), disable=None))
    found = [
        {"file": str(file), "size": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    ]
    try:
        manifest = read_json(o.output / MANIFEST, MANIFEST_SHAPE, f"delete {o.output} and prepare the corpus again")
    except FileNotFoundError:
        return {"job": job, "input": found, "tokenizer": None, "units": [None] * n_units}
    if (manifest["job"], manifest["input"]) != (job, found):
        raise UserError(
            f"--output: {o.output} was written from other input or with other options; use another directory, or "
            "delete it"
        )
    return manifest


def _save(o: Options, manifest: dict) -> None:
    write_text(o.output / MANIFEST, to_json(manifest, indent=1) + "\n")


def _prepare_tokenizer(o: Options, units: list[Unit], manifest: dict, say) -> tokenizers.Tokenizer:
    """Load or train the tokenizer, save it as the output's tokenizer.json, and record it."""
    kind, _, size = o.tokenizer.partition(":")
    path, recorded = o.output / "tokenizer.json", manifest["tokenizer"]
    _save(o, manifest)  # the mark of the directory
    if kind == "byte":
        tokenizer = tokenizers.make("byte", ())
    elif kind == "hf" or recorded:
        spec = o.tokenizer if kind == "hf" else f"hf:{path}"
        tokenizer = tokenizers.make(spec, (), special_tokens=o.special_tokens)
        for line in tokenizers.warnings_about(tokenizer, o.tokenizer):
            say(line)
    else:
        train = [unit for unit in units if unit.split in ("", "train")]
        sample = train[:: max(1, len(train) // 64)]
        say(f"training the tokenizer {o.tokenizer} on up to {TOKENIZER_SAMPLE >> 20} MiB of the text")
        share = TOKENIZER_SAMPLE // len(sample)
        texts = (text for unit in sample for text in _first_characters(read_documents(unit, o.field), share))
        tokenizer = hf_tokenizer.train_bpe(texts, int(size), o.special_tokens)
    if recorded not in (None, tokenizer.fingerprint):
        raise UserError(
            f"--output: {path if kind == 'bpe' else o.tokenizer} is not the tokenizer of the finished shards; restore "
            f"it, or delete {o.output}"
        )
    if isinstance(tokenizer, hf_tokenizer.HFTokenizer):
        write_text(path, tokenizer.json)
    manifest["tokenizer"] = tokenizer.fingerprint
    _save(o, manifest)
    return tokenizer


def _first_characters(texts: Iterator[str], n: int) -> Iterator[str]:
    """Yield the first n characters of the texts."""
    for text in texts:
        yield text[:n]
        n -= len(text)
        if n <= 0:
            return


def _write_missing(o: Options, units: list[Unit], manifest: dict, say) -> None:
    """Write the shards of every unit that is not finished, in parallel, and record them."""
    missing = [i for i, shards in enumerate(manifest["units"]) if shards is None or not _are_there(o.output, shards)]
    say(f"{len(units)} units, {len(units) - len(missing)} already finished")
    next_save = 0.0
    for i, shards in tqdm(_in_parallel(o, units, missing), "units", len(missing), disable=None):
        manifest["units"][i] = shards
        now = time.monotonic()
        if now >= next_save:  # saving a long manifest takes at most 5 % of the time
            _save(o, manifest)
            next_save = now + 20 * (time.monotonic() - now)
    _save(o, manifest)


def _are_there(output: Path, shards: list[dict]) -> bool:
    """Return whether all shards exist with their recorded sizes."""
    paths = [(output / shard["file"], shard["size"]) for shard in shards]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _in_parallel(o: Options, units: list[Unit], missing: list[int]) -> Iterator[tuple[int, list[dict]]]:
    """Yield the number of each unit and the records of its shards, in the order in which they are finished."""
    if min(o.workers, len(missing)) < 2:
        yield from ((i, _write_unit(i, units[i], o)) for i in missing)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(o.workers, len(missing)), context, _start_worker) as pool:
        numbers = {pool.submit(_write_unit, i, units[i], o): i for i in missing}
        try:
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BrokenProcessPool:
            raise UserError("a worker process was killed, perhaps out of memory; try fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _report(o: Options, manifest: dict, tokenizer: tokenizers.Tokenizer, say) -> None:
    """Say how many tokens each split has, and how to train on them."""
    shards = [shard for unit in manifest["units"] for shard in unit]
    n_tokens = {split: sum(s["tokens"] for s in shards if s["split"] == split) for split in SPLITS}
    if not n_tokens["train"]:
        raise UserError(f"--input: {o.input!r} has no text for the train split; use more text or a lower --validation")
    for split, n in n_tokens.items():
        if n:
            say(f"{split}: {n:,} tokens")
    if o.validation and not n_tokens["validation"]:
        say("WARNING: the validation split is empty; use more text or a higher --validation")
    spec = "byte" if tokenizer.kind == "byte" else f"hf:{o.output / 'tokenizer.json'}"
    spec += " --config.data.special_tokens=true" if o.special_tokens else ""
    say(f"train with --config.data.source=tokens:{o.output} --config.data.tokenizer={spec}")


# ---- One unit, in a worker process -----------------------------------------------------------------------------------


def _start_worker() -> None:
    """End this worker when its parent has ended, also if that was killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the units run in parallel already

    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def _write_unit(i: int, unit: Unit, o: Options) -> list[dict]:
    """Write the shards of unit i and return their records.

    Raises:
        UserError: the unit cannot be read or encoded.
        OSError: a file cannot be read or written at the moment.
    """
    path = o.output / "tokenizer.json"
    spec = "byte" if o.tokenizer == "byte" else f"hf:{path}"
    tokenizer = tokenizers.make(spec, (), special_tokens=o.special_tokens)
    try:
        splits = split_documents(unit, list(read_documents(unit, o.field)), o.validation)
        return [_write_shard(o.output, split, i, texts, tokenizer) for split, texts in splits.items() if any(texts)]
    except (ValueError, UserError) as error:
        raise UserError(f"{unit.path}, bytes or records {unit.start} to {unit.end}: {error}") from None


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
    splits: dict[str, list[str]] = {"train": [], "validation": []}
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


def cut_pieces(text: str, size: int) -> Iterator[str]:
    r"""Cut a text after the first line that ends beyond each `size` characters; encoding takes memory.

    >>> list(cut_pieces("ab|cd|ef|".replace("|", chr(10)), 4))
    ['ab\ncd\n', 'ef\n']
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def _write_shard(output: Path, split: str, i: int, texts: list[str], tokenizer) -> dict:
    """Write one shard and return its record. The end of text, or a newline if there is none, ends each document."""
    end = tokenizer.end_of_text
    ending = tokenizer.encode("\n") if end is None else np.array([end], tokenizer.dtype)
    ids = []
    for text in texts:
        first, *others = cut_pieces(text, PIECE) if text else [""]
        ids += [tokenizer.encode_prompt(first), *(tokenizer.encode(piece) for piece in others), ending]
    tokens, buffer = np.concatenate(ids), io.BytesIO()
    np.save(buffer, tokens)
    content = buffer.getvalue()
    path = output / f"{SPLIT_IN_FILE_NAME[split]}_{i:06}.npy"
    write_bytes(path, content)
    return {
        "file": path.name,
        "split": split,
        "tokens": len(tokens),
        "text_bytes": sum(len(text.encode()) + (end is None) for text in texts),
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
