"""The directory of a run: who may write to it, and what it records.

Files: config.json, run.json (per start: versions, git commit, host, command), tokenizer.json,
metrics.jsonl, checkpoints/, summary.json, and .lock.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from lm.config import to_dict
from lm.system.errors import UserError
from lm.system.files import check_in_place, check_replaceable, to_json, write_bytes
from lm.system.locks import lock
from lm.workdir.config_changes import experiment_digest
from lm.workdir.provenance import compare_starts, describe_start
from lm.workdir.saved_run import ARRIVING, check_workdir


def default_workdir(name: str) -> Path:
    """Return a path runs/NAME-YYYYMMDD-HHMMSS that does not exist, with -2 ... in one second."""
    first = path = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    n = 1
    while path.exists():
        n += 1
        path = first.with_name(f"{first.name}-{n}")
    return path


def fill(workdir: Path, write: Callable[[Path], None]) -> None:
    """Put the files of a run, which `write` puts into a new folder, into a directory without one.

    Until all are there, `holds_run` is false.

    Raises:
        TemporaryError: if another process uses the directory.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    files = workdir / ARRIVING / "files"
    with lock(workdir):
        was_begun = files.parent.exists()  # by a killed process, which may have moved some files
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True)
        try:
            write(files)
        except Exception:
            if not was_begun:
                shutil.rmtree(files.parent, ignore_errors=True)
            raise
        for path in list(files.iterdir()):
            target = workdir / path.name
            if target.is_dir() and not target.is_symlink():  # of a start that left no run
                shutil.rmtree(target)
            else:
                check_replaceable(target)
            path.replace(target)
        shutil.rmtree(files.parent)


class Workdir:
    """The directory of a run. `start` locks it for this process, and `close` releases it.

    Processes of a run other than the first have the same path and no lock: for them the write
    methods do nothing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.experiment_digest: str | None = None  # of the config, once the directory is started
        self._lock: contextlib.ExitStack | None = None

    def start(
        self, config, *, data: dict | None = None, resume: bool = False, devices: dict | None = None
    ) -> list[str]:
        """Lock the directory for this process, and record the config and this start in it.

        Args:
            config: as the user gave it.
            data: {"name", "fingerprint"} of the tokens.
            resume: continue the run that the directory holds, if any.
            devices: facts about devices and processes, which are recorded and compared with those
                of the last start.

        Returns lines to show. Raises UserError as `check_workdir` does, or if another process has
        the directory.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--workdir {self.path} cannot be created: {error.strerror}") from None
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(lock(self.path))
        self._lock_file = os.open(self.path / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
        self._lock.callback(os.close, self._lock_file)
        try:
            return self._record_start(config, data, resume, devices or {})
        except BaseException:
            self.close()
            raise

    def _record_start(self, config, data: dict | None, resume: bool, devices: dict) -> list[str]:
        if (self.path / ARRIVING).exists():
            raise UserError(
                f"--workdir {self.path} holds a part of a run: a copy was interrupted; repeat the "
                "command with its --mirror or --branch_from, or give another --workdir"
            )
        this_start = describe_start() | {"devices": devices}
        starts = []
        notices = []
        if saved := check_workdir(self.path, config, resume=resume):
            starts = saved.starts
            notices = saved.changed_settings(config)
        if starts:
            notices += compare_starts(starts[-1], this_start)
        self.write_json("config.json", to_dict(config))
        self.experiment_digest = experiment_digest(config)
        record = {"experiment_digest": self.experiment_digest, "data": data}
        self.write_json("run.json", record | {"starts": [*starts, this_start]})
        return notices

    def write_text(self, name: str, text: str) -> None:
        """Write path/name atomically."""
        self.write_bytes(name, text.encode)

    def write_bytes(self, name: str, content: Callable[[], bytes]) -> None:
        """Write path/name atomically; `content` is called only by the process that writes.

        Raises:
            TemporaryError: if the directory was deleted or moved.
        """
        if self._lock:
            check_in_place(self._lock_file, self.path / ".lock")
            (self.path / name).parent.mkdir(exist_ok=True)
            write_bytes(self.path / name, content())

    def write_json(self, name: str, value) -> None:
        """Write path/name atomically, as strict JSON."""
        self.write_text(name, to_json(value, indent=2) + "\n")

    def close(self) -> None:
        """Release the lock."""
        if self._lock:
            self._lock.close()
            self._lock = None
