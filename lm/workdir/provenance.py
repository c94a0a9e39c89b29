"""Where a result comes from: time, host, command, versions and commit."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path

from lm.system.errors import UserError
from lm.system.git import describe_code
from lm.system.text_tables import without_secrets

# Variables that change the bits of a run: a resumption under others is refused.
REFUSED = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_DISABLE_JIT",
    "NVIDIA_TF32_OVERRIDE",
)
REPORTED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # these may change them
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "ml-collections")


def describe_start() -> dict:
    """Describe this process: time, host, command, versions, and the code as far as it is known."""
    environment = [name for name in (*REFUSED, *REPORTED) if name in os.environ]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "argv": without_secrets(sys.argv),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in environment},
        **describe_code(PACKAGES),
    }


def compare_starts(before: dict, now: dict) -> list[str]:
    """Return a line for each difference between two results of `describe_start`.

    Raises:
        UserError: if a variable of the environment differs that changes the bits of a run.
    """
    refusals = []
    for name in REFUSED:
        then = before["environment"].get(name)
        here = now["environment"].get(name)
        if then != here:
            advice = f"unset {name}" if then is None else f"set {name}={shlex.quote(then)}"
            refusals.append(
                f"--resume: {name} is {here or 'not set'} and was {then or 'not set'}, so its "
                f"numbers would change; {advice}"
            )
    if refusals:
        raise UserError(*refusals)

    def facts(start: dict) -> dict:
        known = start["versions"] | start["environment"]
        if before["devices"]:  # an import has none
            known |= start["devices"]
        if start["git"]:
            known["commit"] = start["git"]["commit"][:12]
        return known

    old = facts(before)
    new = facts(now)
    lines = [
        f"{name} {old.get(name)} -> {new.get(name)} since the last start: the resumed run may not "
        "be bit-identical"
        for name in new | old
        if new.get(name) != old.get(name)
    ]
    lines += [note for note in now.get("notes", ()) if note not in before.get("notes", ())]
    if now["git"] and now["git"]["dirty"]:
        lines.append(
            "the checkout has uncommitted changes: its commit does not say what this start computes"
        )
    return lines


def format_command(module: str, arguments: list[str]) -> str:
    """Return a command line without this machine's directories.

    Paths inside the repository are relative to it; other absolute paths are cut to their last
    component.

    >>> format_command("lm.train", ["--config", "configs/shakespeare.py", "--workdir=/somewhere/runs/mine"])
    'python -m lm.train --config configs/shakespeare.py --workdir=mine'
    """

    root = Path(__file__).resolve().parents[2]

    def shown(match: re.Match) -> str:
        path = Path(match[2])
        return match[1] + (str(path.relative_to(root)) if path.is_relative_to(root) else path.name)

    # Alone, in --key=/path, and in --key=text:/path, but not gs://bucket.
    hidden = [re.sub(r"(^|[=:])(/(?!/).*)$", shown, argument) for argument in arguments]
    return shlex.join(["python", "-m", module, *without_secrets(hidden)])


def processor() -> str:
    """Return the CPU model, else the architecture.

    On x86 it includes family, model and stepping: clouds give different processors the same name.
    """
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        if name := re.search(r"^model name\s*:\s*(.*)", first, re.MULTILINE):
            numbers = re.findall(
                r"^(?:cpu )?(family|model|stepping)\s*: (\d+)$", first, re.MULTILINE
            )
            details = ", ".join(f"{key} {number}" for key, number in numbers)
            return f"{name[1]} ({details})" if details else name[1]
    return platform.processor() or platform.machine()


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of Python and of packages that decide a run's numbers; None: absent."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        versions[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
