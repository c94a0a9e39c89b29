"""Where a result comes from: time, host, command, versions and commit."""

import contextlib
import importlib.metadata
import platform
import re
import shlex
import sys
import time
from pathlib import Path

from lm.git import git_state

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "ml-collections")


def describe_start() -> dict:
    """Describe this process: time, host, command, versions and git commit."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "argv": sys.argv,
        "versions": versions(),
        "git": git_state(),
    }


def format_command(module: str, arguments: list[str]) -> str:
    """Return a command line without this machine's directories.

    Paths inside the repository are relative to it; other absolute paths are cut to their last component.

    >>> format_command("lm.train", ["--config", "configs/shakespeare.py", "--workdir=/somewhere/runs/mine"])
    'python -m lm.train --config configs/shakespeare.py --workdir=mine'
    """

    def shown(path: str) -> str:
        root = Path(__file__).resolve().parents[2]
        return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else Path(path).name

    # Alone, in --key=/path, and in --key=text:/path, but not gs://bucket.
    hidden = [re.sub(r"(^|[=:])(/(?!/).*)$", lambda found: found[1] + shown(found[2]), a) for a in arguments]
    return shlex.join(["python", "-m", module, *hidden])


def processor() -> str:
    """Return the CPU model, else the architecture.

    On x86 it includes family, model and stepping: clouds give different processors the same name.
    """
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        if name := re.search(r"^model name\s*:\s*(.*)", first, re.MULTILINE):
            numbers = re.findall(r"^(?:cpu )?(family|model|stepping)\s*: (\d+)$", first, re.MULTILINE)
            details = ", ".join(f"{key} {number}" for key, number in numbers)
            return f"{name[1]} ({details})" if details else name[1]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that decide a run's numbers; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
