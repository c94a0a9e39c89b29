"""Damaged files and hostile entries in the directory of a run."""

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.damage import WAYS, damage, files_below
from benchmarks.faults.judge import Outcome, Trial
from benchmarks.faults.runs import Bench, call, shuffled

TOP_LEVEL = (
    ".lock", "config.json", "run.json", "tokenizer.json", "metrics.jsonl", "summary.json", "loss.png",
    "diagnostics.png", "checkpoints", "samples", "tensorboard", "profile", "wandb_id.txt",
)  # fmt: skip


def damaged_files(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of an interrupted run in every way, and resume it."""
    for file, way in shuffled(itertools.product(files_below(bench.interrupted), WAYS), draw):
        name = file.relative_to(bench.interrupted)
        yield bench.trial(
            f"{name} {way}",
            lambda workdir, name=name, way=way: damage(workdir / name, way, draw),
            lambda workdir, name=name, file=file: shutil.copyfile(file, workdir / name),
            names=(file.name, "checkpoints"),
        )


def damaged_directories(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Delete or empty every directory of an interrupted run, and resume it."""
    for directory in sorted(path for path in bench.interrupted.rglob("*") if path.is_dir()):
        name = directory.relative_to(bench.interrupted)
        for way in ("deleted", "emptied"):

            def injure(workdir: Path, name=name, way=way) -> None:
                shutil.rmtree(workdir / name)
                if way == "emptied":
                    (workdir / name).mkdir()

            def undo(workdir: Path, name=name, directory=directory) -> None:
                shutil.copytree(directory, workdir / name, dirs_exist_ok=True)

            yield bench.trial(f"{name}/ {way}", injure, undo, names=(directory.name, "checkpoints"))


def damaged_for_generation(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of a finished run that lm.generate may read, and generate text with it."""
    from lm import generate

    def text_of(workdir: Path) -> tuple[Outcome, list[str]]:
        outcome = call(generate.main, [f"--workdir={workdir}", "--tokens=5", "--prompt=the"])
        return outcome, outcome.output.replace(str(workdir), "WORKDIR").splitlines()[-2:]

    yield from bench.damaged_and_read("text", bench.resumed, draw, text_of, "checkpoint")


def hostile_entries(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Replace every entry of a run's directory by links, pipes, and entries of another kind, and resume it."""
    names = [Path(name) for name in TOP_LEVEL]
    below = sorted(path.relative_to(bench.interrupted) for path in (bench.interrupted / "checkpoints").rglob("*"))
    names += draw.sample(below, min(8, len(below)))
    for name, (kind, place) in shuffled(itertools.product(names, KINDS.items()), draw):
        outside = bench.base / "outside"
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        (outside / "file").write_text("valuable")
        (outside / "directory").mkdir()
        (outside / "directory" / "file").write_text("valuable")
        before = _listing(outside)

        def injure(workdir: Path, name=name, place=place, outside=outside) -> None:
            _remove(workdir / name)
            place(workdir / name, outside)

        def undo(workdir: Path, name=name) -> None:
            _remove(workdir / name)
            original = bench.interrupted / name
            if original.exists():
                (shutil.copytree if original.is_dir() else shutil.copy2)(original, workdir / name)

        def losses(_, outside=outside, before=before) -> list[str]:
            changed = before.items() - _listing(outside).items()  # a linked directory may get new files
            return ["a file outside of the workdir was changed"] if changed else []

        yield bench.trial(f"{name} is {kind}", injure, undo, (name.name, "checkpoints"), losses)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "a link to a directory": lambda path, outside: path.symlink_to(outside / "directory"),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "a link to itself": lambda path, outside: path.symlink_to(path),
    "a file": lambda path, outside: path.write_text("{}"),
    "a directory": lambda path, outside: (path / "inside").mkdir(parents=True),
    "a named pipe": lambda path, outside: os.mkfifo(path),
}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _listing(directory: Path) -> dict[str, str]:
    return {str(path): path.read_text() if path.is_file() else "" for path in sorted(directory.rglob("*"))}
