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

# Variables that change the bits of a run: a resumption under others is refused; or may change them,
# and is reported.
REFUSED = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_DISABLE_JIT",
    "NVIDIA_TF32_OVERRIDE",
)
REPORTED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "ml-collections")


def describe_start() -> dict:
    """Describe this process: time, host, command, versions, and the code, or what is not known of
    it.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "argv": without_secrets(sys.argv),
        "versions": versions(),
        "environment": {
            name: os.environ[name] for name in (*REFUSED, *REPORTED) if name in os.environ
        },
        **describe_code(PACKAGES),
    }


def compare_starts(before: dict, now: dict) -> list[str]:
    """Return a line for each way in which a start differs from the one before it, as
    `describe_start` returns them.

    Raises:
        UserError: if a variable of the environment differs that changes the bits of a run.
    """
    then = before["environment"]
    here = now["environment"]
    if changed := [name for name in REFUSED if then.get(name) != here.get(name)]:
        raise UserError(*(_refusal(name, then.get(name), here.get(name)) for name in changed))

    def facts(start: dict) -> dict:
        devices = start["devices"] if before["devices"] else {}  # an import has none
        commit = {"commit": start["git"]["commit"][:12]} if start["git"] else {}
        return {**start["versions"], **start["environment"], **devices, **commit}

    old, new = facts(before), facts(now)
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


def _refusal(name: str, then: str | None, here: str | None) -> str:
    advice = f"unset {name}" if then is None else f"set {name}={shlex.quote(then)}"
    return (
        f"--resume: {name} is {here or 'not set'} and was {then or 'not set'}, so its numbers "
        f"would change; {advice}"
    )


def format_command(module: str, arguments: list[str]) -> str:
    """Return a command line without this machine's directories.

    Paths inside the repository are relative to it; other absolute paths are cut to their last
    component.

    >>> format_command("lm.train", ["--config", "configs/shakespeare.py", "--workdir=/somewhere/runs/mine"])
    'python -m lm.train --config configs/shakespeare.py --workdir=mine'
    """

    def shown(path: str) -> str:
        root = Path(__file__).resolve().parents[2]
        return (
            str(Path(path).relative_to(root))
            if Path(path).is_relative_to(root)
            else Path(path).name
        )

    # Alone, in --key=/path, and in --key=text:/path, but not gs://bucket.
    hidden = [
        re.sub(r"(^|[=:])(/(?!/).*)$", lambda found: found[1] + shown(found[2]), a)
        for a in arguments
    ]
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
    """Return the versions of Python and of packages, by default those that decide a run's numbers;
    None: absent.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
