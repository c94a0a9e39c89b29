"""Damaged files and hostile entries in the directory of a run."""

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.damage import WAYS, damage, files_below
from benchmarks.faults.judge import Outcome, Trial
from benchmarks.faults.runs import Bench, call, remove, shuffled

TOP_LEVEL = (
    ".lock", "config.json", "run.json", "tokenizer.json", "metrics.jsonl", "summary.json", "loss.png",
    "diagnostics.png", "checkpoints", "samples", "tensorboard", "profile", "wandb_id.txt",
)  # fmt: skip


def damaged_files(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of an interrupted run in every way, and resume it."""
    for file, way in shuffled(itertools.product(files_below(bench.interrupted), WAYS), draw):
        name = file.relative_to(bench.interrupted)
        yield bench.trial(f"{name} {way}", name, lambda path, way=way: damage(path, way, draw))


def damaged_directories(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Delete or empty every directory of an interrupted run, and resume it."""

    def empty(path: Path) -> None:
        shutil.rmtree(path)
        path.mkdir()

    for directory in sorted(path for path in bench.interrupted.rglob("*") if path.is_dir()):
        name = directory.relative_to(bench.interrupted)
        yield bench.trial(f"{name}/ deleted", name, shutil.rmtree)
        yield bench.trial(f"{name}/ emptied", name, empty)


def damaged_for_generation(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of a finished run that lm.generate may read, and generate text with it."""
    from lm import generate

    def text_of(workdir: Path) -> tuple[Outcome, list[str]]:
        outcome = call(generate.main, [f"--workdir={workdir}", "--tokens=5", "--prompt=the"])
        return outcome, outcome.output.replace(str(workdir), "WORKDIR").splitlines()[-2:]

    yield from bench.damaged_and_read("text", bench.resumed, draw, text_of, "checkpoint")


def hostile_entries(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Replace every entry of a run's directory by links, pipes and others, and resume it."""
    names = [Path(name) for name in TOP_LEVEL]
    checkpoints = bench.interrupted / "checkpoints"
    below = sorted(path.relative_to(bench.interrupted) for path in checkpoints.rglob("*"))
    names += draw.sample(below, min(8, len(below)))
    for name, (kind, place) in shuffled(itertools.product(names, KINDS.items()), draw):
        outside = bench.base / "outside"
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        (outside / "file").write_text("valuable")
        (outside / "directory").mkdir()
        (outside / "directory" / "file").write_text("valuable")
        before = _listing(outside)

        def injure(path: Path, place=place, outside=outside) -> None:
            remove(path)
            place(path, outside)

        def losses(_, outside=outside, before=before) -> list[str]:
            # a linked directory may get new files
            changed = before.items() - _listing(outside).items()
            return ["a file outside of the workdir was changed"] if changed else []

        yield bench.trial(f"{name} is {kind}", name, injure, losses)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "a link to a directory": lambda path, outside: path.symlink_to(outside / "directory"),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "a link to itself": lambda path, outside: path.symlink_to(path),
    "a file": lambda path, outside: path.write_text("{}"),
    "a directory": lambda path, outside: (path / "inside").mkdir(parents=True),
    "a named pipe": lambda path, outside: os.mkfifo(path),
}


def _listing(directory: Path) -> dict[str, str]:
    listing = {}
    for path in sorted(directory.rglob("*")):
        listing[str(path)] = path.read_text() if path.is_file() else ""
    return listing
