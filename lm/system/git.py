"""The code that a process runs: its commit and what was changed since, or why this is not known."""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from lm.system.files import parse_json
from lm.system.text_tables import without_secrets

MOST_FILES, MOST_BYTES = 100, 200_000  # of uncommitted changes that are recorded
SECONDS = 10


class _UnknownError(Exception):
    """The answer of git is not known; the message says why."""


def git_state() -> dict | None:
    """Return {"commit", "dirty"} of the checkout that this code runs from, or None if it is not
    known.
    """
    return describe_code(())["git"]


def describe_code(packages: tuple[str, ...]) -> dict:
    """Describe the code that runs.

    Returns:
        "git": {"commit", "dirty", "branch"}, or None if the commit is not known. An image that
            launch/Dockerfile built has its commit in LM_COMMIT. "changes": names of files with
            uncommitted changes, their diff, and its sha256. "package": the directory of this
            package. "notes": lines that say what is not known or not recorded, and which of
            `packages` are not what their versions say.
    """
    this_file = Path(__file__).resolve()
    here = this_file.parent.parent
    notes = _other_sources(packages)
    changes: dict = {}
    state: dict | None = None
    try:
        if not _git(here, "ls-files", "--", str(this_file)):
            raise _UnknownError(f"{here} is not tracked by the git repository around it")
        state = {"commit": _git(here, "rev-parse", "--verify", "HEAD").strip(), "dirty": True}
        # The name is HEAD where HEAD is detached.
        state["branch"] = _git(here, "rev-parse", "--abbrev-ref", "HEAD").strip()
        changes = _changes(here, notes)
        state["dirty"] = bool(changes)
    except _UnknownError as error:
        commit = os.environ.get("LM_COMMIT")
        if state:
            notes.append(f"uncommitted changes unknown: {error}")
        elif commit:
            state = {"commit": commit, "dirty": False}
        else:
            notes.append(f"commit unknown: {error}")
    return {"git": state, "changes": changes, "package": str(here), "notes": notes}


def _changes(here: Path, notes: list[str]) -> dict:
    """Return what was changed since the commit, {} if nothing was; what is not recorded is added to
    the notes.
    """
    status = _git(
        here, "status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=none"
    )
    if not status.strip():
        return {}
    files = status.splitlines()
    diff = _git(here, "diff", "--binary", "--no-ext-diff", "--no-color", "HEAD")
    changes: dict = {
        "files": files[:MOST_FILES],
        "sha256": hashlib.sha256(diff.encode()).hexdigest(),
        "diff": diff,
    }
    if len(files) > MOST_FILES:
        notes.append(
            f"{len(files):,} files have uncommitted changes; the first {MOST_FILES} are named"
        )
    if len(diff) > MOST_BYTES:
        changes["diff"] = None
        notes.append(
            f"the diff of the uncommitted changes has {len(diff):,} bytes and is not recorded"
        )
    if any(line.startswith("??") for line in files):
        notes.append("what is in files that are not tracked is not recorded")
    return changes


def _git(directory: Path, *arguments: str) -> str:
    """Return the output of git.

    Raises:
        _UnknownError: with the reason.
    """
    # A hook of git sets GIT_DIR for its own repository. Who runs this code trusts the owner of its
    # checkout.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    settings = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "-c",
        "core.quotePath=false",
        "-C",
        str(directory),
        *arguments,
    ]
    try:
        done = subprocess.run(
            command, env=environment | settings, capture_output=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        raise _UnknownError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise _UnknownError(f"git did not answer within {SECONDS} s") from None
    except OSError as error:
        raise _UnknownError(f"git cannot be run ({error.strerror})") from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
    if "not a git repository" in reason:
        reason = (
            f"{directory} is no git checkout but a copy, such as an archive or an installed package"
        )
    elif "dubious ownership" in reason:
        reason = (
            "git refuses a checkout of another owner; run git config --global --add "
            "safe.directory DIR"
        )
    elif "Needed a single revision" in reason:
        reason = "the checkout has no commit"
    raise _UnknownError(reason or f"git failed with exit code {done.returncode}")


def _other_sources(packages: tuple[str, ...]) -> list[str]:
    """Return a line for each package whose version does not say what its code is."""
    notes = []
    for package in packages:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        direct = distribution.read_text("direct_url.json")
        place = without_secrets(parse_json(direct).get("url", "")) if direct else ""
        if place:
            notes.append(f"{package} {distribution.version} was installed from {place}")
        module = sys.modules.get(package.replace("-", "_"))
        file = getattr(module, "__file__", None)
        site = str(Path(str(distribution.locate_file(""))).resolve())
        if file and not place and not str(Path(file).resolve()).startswith(site):
            notes.append(
                f"{package} is imported from {Path(file).parent}; version {distribution.version} "
                f"is in {site}"
            )
    return notes
