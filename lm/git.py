"""The commit that this code runs from."""

import os
import subprocess
from pathlib import Path


def git_state() -> dict | None:
    """Return {"commit", "dirty"} of the checkout that this code runs from, or None if it is not a checkout.

    An image that launch/Dockerfile built has its commit in LM_COMMIT.
    """
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", here.name):  # installed, possibly inside another checkout
        commit = os.environ.get("LM_COMMIT")
        return {"commit": commit, "dirty": False} if commit else None
    commit = _git(here.parent, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git(here.parent, "status", "--porcelain"))} if commit else None


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
