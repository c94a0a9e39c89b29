"""The platform that a program is compiled for, which may not be the one it is compiled on."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def target() -> str:
    """Return the platform of the program that is traced: "cpu", "gpu" or "tpu".

    All choices between forms of a computation ask here, while they are traced.
    """
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Return a context in which programs are traced for another platform than the one of this process.

    JAX reuses traces of the same function: jit a function of its own within the context.

    >>> with compiling_for("tpu"):
    ...     target()
    'tpu'
    """
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)
