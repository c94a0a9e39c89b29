"""Helpers for tests of checkpoints: make states, save them, and list the files on disk."""

from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lm.workdir.checkpoints import Checkpoints
from lm.workdir.metrics import to_line, validation_losses


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    seed: jax.Array


def make_state(step=0, *, width=3, dtype=jnp.float32):
    """Return a state like those of training: nested dicts, masked leaves, scalars. Its values
    depend on the step.
    """
    rng = np.random.default_rng(step)
    params = {
        "embed": jnp.asarray(rng.standard_normal((10, width)), dtype),
        "blocks": {
            "w": jnp.asarray(rng.standard_normal((2, 3, width)), dtype),
            "scale": jnp.ones((2, 3)),
        },
    }
    mask = {"embed": False, "blocks": {"w": True, "scale": False}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), mask))
    return State(jnp.int32(step), params, optimizer.init(params), jnp.uint32(7))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(workdir, steps, val_losses=None, **options):
    """Save a state for each step, and write metrics.jsonl with these validation losses."""
    lines = [
        {"step": s, "split": "validation", "windows": 8, "loss": x}
        for s, x in (val_losses or {}).items()
    ]
    checkpoints = Checkpoints(workdir, **options)
    for step in steps:
        checkpoints.val_losses = validation_losses(line for line in lines if line["step"] <= step)
        checkpoints.save(step, make_state(step), {"data": f"position {step}"})
    checkpoints.close()
    if lines:
        (Path(workdir) / "metrics.jsonl").write_text(
            "".join(f"{to_line(line)}\n" for line in lines)
        )


def directories(workdir) -> set[str]:
    return {path.name for path in (workdir / "checkpoints").iterdir()}


def data_file(step_directory: Path) -> Path:
    """Return the file with the arrays: the largest file, if an array takes most of the checkpoint.

    In a checkpoint of small arrays only, the largest file may be an index that a later one has
    replaced.
    """
    return max(step_directory.glob("state/**/d/*"), key=lambda path: path.stat().st_size)
