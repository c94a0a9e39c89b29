"""Copies of a run behind a URL (--mirror), made in the background and fetched at the start.

A mirror holds files/SHA256, contents by their hashes, and manifest-NUMBER-START.json. A manifest
describes the run and its writer, and names each file of the workdir with its size and hash. It is
written after the contents that it names, and nothing is overwritten: a copy that is killed leaves
the one before. Who wrote the newest manifest owns the mirror.
"""

import contextlib
import hashlib
import os
import platform
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from lm.config import to_dict
from lm.system.errors import TemporaryError, UserError, first_line
from lm.system.files import (
    COUNT,
    MAX_NAME,
    expanded,
    files_below,
    open_regular,
    parse_json,
    read_bytes,
    to_json,
    with_checksum,
    without_checksum,
)
from lm.system.urls import file_system, is_url, local_path
from lm.workdir.config_changes import compare_configs
from lm.workdir.directory import fill
from lm.workdir.saved_run import checkpoint_steps, holds_run

# What is copied beside the checkpoints. The folders of W&B and of profiles are not: a resumption
# does not need them.
_RECORDS = [
    "config.json",
    "run.json",
    "tokenizer.json",
    "metrics.jsonl",
    "summary.json",
    "wandb_id.txt",
]
# Nothing is computed from these, so a damaged one is left out.
_SHOWN = ["loss.png", "diagnostics.png", "scores.png", "samples", "tensorboard"]
_MANIFEST = {
    "config": {"train": {"steps": COUNT}}, "writer": str, "steps": [COUNT],
    "files": {str: {"size": COUNT, "sha256": str}},
}  # fmt: skip
# until the next look for a new checkpoint; after a copy that failed
POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0


_FORMS = "give s3://BUCKET/RUN, gs://BUCKET/RUN or file:///DIR"


def check_url(url: str, workdir: str | Path) -> None:
    """Raise UserError if a URL is no place for a mirror: none, or where it would be lost, too."""
    if not is_url(url):
        raise UserError(f"--mirror {url}: it is not a URL; {_FORMS}")
    scheme, _, path = url.partition("://")
    problem = ""
    if scheme == "memory":
        problem = "a copy in the memory of this process ends with it"
    elif not path.strip("/"):
        problem = "it names no folder"
    elif local := local_path(url):
        mirror, run = (Path(os.path.realpath(expanded(name))) for name in (local, workdir))
        if not local.startswith("/"):
            problem = f"it has no absolute path; give file://{mirror}"
        elif mirror.parent == mirror:
            problem = "it names no folder"
        elif mirror.is_relative_to(run) or run.is_relative_to(mirror):
            problem = f"it is, contains or lies in --workdir {workdir}, with which it would be lost"
        elif holds_run(mirror):
            problem = "it holds a run; a mirror has a folder of its own"
    if problem:
        raise UserError(f"--mirror {url}: {problem}; {_FORMS}")


class Mirror:
    """The mirror of a workdir at a URL; one process of a run uses it.

    Raises:
        UserError: the URL has no driver, or a copy there would not outlive the workdir.
        TemporaryError: its server does not answer.
    """

    def __init__(self, url: str, workdir: str | Path):
        check_url(url, workdir)
        self.url = url
        self._workdir = Path(workdir)
        with self._named():
            self._system, root = file_system(url)
        self._root = root.rstrip("/")
        self._start = secrets.token_hex(4)  # part of the names of this process's manifests
        self._manifest: dict = {"steps": [], "files": {}}  # the newest one
        self._copied: list[int] | None = None  # the steps of the last copy
        # sizes and hashes of files of checkpoints, which do not change
        self._described: dict[str, dict] = {}
        self._say: Callable[[str], None] = print
        self._hold: Callable[[list[int]], None] = lambda steps: None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- At the start ----------------------------------------------------------------------------

    def fetch(self, config, say: Callable[[str], None]) -> bool:
        """Start a workdir that holds no run from the mirror; return whether that has a copy.

        Raises:
            UserError: if the copy is damaged, or of another experiment than `config`.
            TemporaryError: if the mirror cannot be read at the moment.
        """
        if holds_run(self._workdir):
            return False
        with self._named():
            manifest = self._newest(config)
            if not manifest["files"]:
                return False
            fill(self._workdir, lambda folder: self._download(manifest["files"], folder, say))
        say(f"starting from the copy in {self.url}, of step {max(manifest['steps'], default=0)}")
        return True

    def claim(self, config) -> None:
        """Become the owner of the mirror.

        Raises:
            UserError: if the mirror holds another run than that of `config`, or cannot be written
                to.
            TemporaryError: if it cannot be reached at the moment.
        """
        writer = f"process {os.getpid()} on {platform.node()}"
        with self._named():
            self._manifest = self._newest(config) | {"config": to_dict(config), "writer": writer}
            self._make_folders()
            self._write_manifest(self._manifest["steps"], self._manifest["files"])
            self._check_owner()  # two runs may have started together

    def _download(self, files: dict[str, dict], folder: Path, say: Callable[[str], None]) -> None:
        """Write files to a folder; damaged ones of checkpoints are left out: an older one is used."""
        sizes = self._sizes("files")
        for path, described in files.items():
            target = folder / path
            stored = f"{self._root}/files/{described['sha256']}"
            target.parent.mkdir(parents=True, exist_ok=True)
            if sizes.get(described["sha256"]) == described["size"]:
                self._system.get_file(stored, str(target))
            if not target.exists() or _describe(target) != described:
                reason = f"{path} is missing or damaged ({stored})"
                if path.partition("/")[0] not in ("checkpoints", *_SHOWN):
                    raise UserError(f"--mirror {self.url}: {reason}; give another URL")
                say(f"WARNING: {self.url}: {reason}; it is left out")
                target.unlink(missing_ok=True)

    # ---- While the run trains --------------------------------------------------------------------

    def start(self, hold: Callable[[list[int]], None], say: Callable[[str], None]) -> None:
        """Copy each complete checkpoint in the background.

        `hold` is called with the steps of checkpoints that must not be deleted until it is called
        again.
        """
        self._hold = hold
        self._say = say
        self._thread = threading.Thread(target=self._watch, name="lm-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the copy that it is making."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def finish(self) -> bool:
        """Copy the rest of a workdir that no longer changes; return whether that succeeded."""
        self.close()
        self._copied = None
        failure = self._try()
        copied = self._manifest["steps"]
        if not failure:
            self._say(f"{self.url} has a copy of step {max(copied, default=0)}")
            return True
        lacking = [str(step) for step in checkpoint_steps(self._workdir) if step not in copied]
        what = f"the checkpoints of steps {', '.join(lacking)}" if lacking else "the newest files"
        self._say(
            f"WARNING: {self.url}: {failure}. It lacks {what}, which are in {self._workdir}; the "
            "same command with --resume copies them"
        )
        return False

    def _watch(self) -> None:
        failure = ""
        while not self._stop.wait(RETRY_SECONDS if failure else POLL_SECONDS):
            before = failure
            failure = self._try()
            if failure and not before:
                self._say(
                    f"WARNING: {self.url}: {failure}; training continues, and the run is copied "
                    "again later"
                )
            if before and not failure:
                self._say(f"{self.url} has a copy again")

    def _try(self) -> str:
        """Copy the run if its checkpoints changed; return why this failed, "" if it did not."""
        try:
            steps = checkpoint_steps(self._workdir)
            if steps and steps != self._copied:
                self._hold(steps)
                contents = self._contents(steps)
                # Otherwise summary.json may be copied without the last checkpoint.
                if steps == checkpoint_steps(self._workdir):
                    self._copy(steps, contents)
                    self._copied = steps
            return ""
        except Exception as error:  # file systems raise many types
            file = os.path.abspath(str(getattr(error, "filename", "")))
            of_checkpoint = file.startswith(os.path.abspath(self._workdir / "checkpoints"))
            if isinstance(error, FileNotFoundError) and of_checkpoint and not self._stop.is_set():
                return ""  # the run has just deleted it
            return _reason(error)
        finally:
            self._hold([])

    def _contents(self, steps: list[int]) -> dict[str, bytes | Path]:
        """Return what to copy by its path: the content of a file that may change, or its place."""
        contents: dict[str, bytes | Path] = {}
        for path in (self._workdir / name for name in (*_RECORDS, *_SHOWN)):
            files = files_below(path) if path.is_dir() else [path]
            for file in filter(Path.is_file, files):
                contents[str(file.relative_to(self._workdir))] = read_bytes(file, at_most=2**32)
        for step in steps:
            for file in files_below(self._workdir / "checkpoints" / str(step)):
                contents[str(file.relative_to(self._workdir))] = file
        return contents

    def _copy(self, steps: list[int], contents: dict[str, bytes | Path]) -> None:
        self._check_owner()
        files = {
            path: self._described.get(path) or _describe(content)
            for path, content in contents.items()
        }
        self._described = {path: x for path, x in files.items() if isinstance(contents[path], Path)}
        # A workdir that is behind, such as an old copy of it, catches up first.
        is_behind = steps[-1] < max(self._manifest["steps"], default=0)
        if not self._manifests():
            self._say(f"WARNING: {self.url} was emptied; copying everything again")
            self._make_folders()
            self._write_manifest([], {})  # so that a start after a kill finds one
        elif is_behind or files == self._manifest["files"]:
            return
        sizes = self._sizes("files")
        for path, content in contents.items():
            if sizes.get(files[path]["sha256"]) != files[path]["size"]:
                self._put(content, f"files/{files[path]['sha256']}")
        self._check_owner()
        self._write_manifest(steps, files)
        for unused in sizes.keys() - {described["sha256"] for described in files.values()}:
            self._remove(f"files/{unused}")

    # ---- What the mirror holds -------------------------------------------------------------------

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files in a folder of the mirror, by name."""
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        files = [entry for entry in entries if entry["type"] == "file"]
        return {file["name"].rstrip("/").rpartition("/")[2]: file["size"] for file in files}

    def _manifests(self) -> list[str]:
        """Return the names of all manifests, the newest last."""
        form = re.compile(r"manifest-\d{8}-[0-9a-f]{8}\.json")
        return sorted(filter(form.fullmatch, self._sizes("")))

    def _newest(self, config) -> dict:
        """Return the newest intact manifest; without steps and files if nothing was copied yet.

        Raises:
            UserError: if all manifests are damaged, or the newest one is of another run than that
                of `config`.
        """
        reasons = []
        for name in reversed(self._manifests()):
            try:
                content = self._system.cat_file(f"{self._root}/{name}")
                manifest = without_checksum(parse_json(content, _MANIFEST))
                check_paths(manifest["files"])
                newest = max(manifest["steps"], default=0)
                problems, _ = compare_configs(manifest["config"], config, newest)
            except FileNotFoundError:  # replaced by a newer one
                continue
            except ValueError as error:  # torn, or not one
                reasons.append(f"{name}: {error}")
                continue
            if problems:
                raise UserError(
                    f"--mirror {self.url} belongs to another run, of {manifest['writer']}; give "
                    "another URL, or set these back:",
                    *(f"  {problem}" for problem in problems),
                )
            return manifest
        if self._sizes("files"):
            why = f" ({'; '.join(reasons)})" if reasons else ""
            raise UserError(f"--mirror {self.url} has no intact manifest{why}; give another URL")
        return {"steps": [], "files": {}}

    def _write_manifest(self, steps: list[int], files: dict[str, dict]) -> None:
        names = self._manifests()
        number = 1
        if names:
            number += int(names[-1].split("-")[1])
        manifest = self._manifest | {"steps": steps, "files": files}
        content = to_json(with_checksum(manifest)).encode()
        self._put(content, f"manifest-{number:08}-{self._start}.json")
        self._manifest = manifest
        for name in names:
            self._remove(name)

    def _check_owner(self) -> None:
        """Raise UserError if the newest manifest is of another process."""
        names = self._manifests()
        if names and not names[-1].endswith(f"-{self._start}.json"):
            raise UserError(f"another start of a run owns it now ({names[-1]})")

    def _put(self, content: bytes | Path, name: str) -> None:
        if isinstance(content, bytes):
            self._system.pipe_file(f"{self._root}/{name}", content)
        else:
            self._system.put_file(str(content), f"{self._root}/{name}")

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def _make_folders(self) -> None:
        """Make the folders of a file system that has any, but not the first, maybe a bucket."""
        parts = f"{self._root}/files".split("/")
        for n in range(2, len(parts) + 1):
            with contextlib.suppress(FileExistsError):
                self._system.mkdir("/".join(parts[:n]), create_parents=False)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the mirror in the errors of its file system, which raises many types."""
        try:
            yield
        except UserError:
            raise
        except NotImplementedError:
            raise UserError(
                f"--mirror {self.url}: nothing can be written there; {_FORMS}"
            ) from None
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise UserError(f"--mirror {self.url}: {_reason(error)}") from None
        except Exception as error:
            raise TemporaryError(f"--mirror {self.url}: {_reason(error)}") from None


def _describe(content: bytes | Path) -> dict:
    """Return the size and hash of a content or of a file."""
    if isinstance(content, bytes):
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with open_regular(content) as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def check_paths(paths: Collection[str]) -> None:
    """Raise ValueError if a path in a manifest, which may be a stranger's, leads elsewhere."""
    for path in paths:
        parts = path.split("/")
        is_too_long = len(path) > 1000 or any(len(part.encode()) > MAX_NAME for part in parts)
        if {"", ".", ".."} & set(parts) or "\0" in path or is_too_long:
            raise ValueError(f"files has {path[:80]!r}, which is no path in a run")
        for n in range(1, len(parts)):
            above = "/".join(parts[:n])
            if above in paths:
                raise ValueError(f"files has {path[:80]!r} below the file {above[:80]!r}")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else " ".join(first_line(error).split())
