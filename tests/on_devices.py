"""Run training steps on simulated devices: main([JSON, OUT]), see `running.on_devices`

JSON: {"devices": 8, "cases": [{"mesh": [2, 2, 2, 1], "sections": {...}, "hlo": false}]}; mesh null:
a single device. For case i, OUT.npz contains

    i/losses, i/grad_norms    of all steps
    i/first/PATH              the optimizer state after the first step
    i/params/PATH             the parameters after the last step
    i/eval                    the result of eval_step

With "hlo" the step is compiled but not run, and its text is written to OUT.i.hlo. The optimizer
state replaces the first gradients, which it determines up to their clipped norm: another program
for the gradients would double the time.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from tiny import tiny

from lm import parameters
from lm.config import MESH_AXES
from lm.parallel import sharding
from lm.parallel.mesh import current_mesh, use_mesh
from lm.step import eval_step, init_state, train_step
from lm.workdir.checksums import leaves_by_path

N_STEPS, B, T, V = 10, 16, 8, 19


def batch(step: int, T: int = T, packed: bool = False) -> dict:
    draw = np.random.default_rng(step)
    arrays = {
        "tokens": draw.integers(0, V, (B, T + 1)).astype(np.int32),
        "weights": draw.random((B, T), np.float32),
    }
    if packed:
        arrays["segments"] = np.cumsum(draw.random((B, T + 1)) < 0.3, axis=1).astype(np.int32)
    mesh = current_mesh()
    return {
        name: sharding.shard_examples(mesh, a.shape, 0, a.__getitem__) for name, a in arrays.items()
    }


def config_of(case: dict):
    sections = {  # JSON has no tuples, and a config must be hashable
        name: {key: tuple(v) if isinstance(v, list) else v for key, v in keys.items()}
        for name, keys in case["sections"].items()
    }
    return tiny(**sections | {"train": {"batch_size": B, "seq_len": T} | sections.get("train", {})})


def initial_state(config):
    """Return the state of step 0 and its shardings."""
    init = functools.partial(init_state, config)
    abstract = sharding.shard_state(
        jax.eval_shape(init, 0), parameters.parameter_table(config.model)
    )
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)(0), shardings


def run(case: dict, hlo: Path) -> dict:
    config = config_of(case)
    state, shardings = initial_state(config)
    step = jax.jit(train_step, static_argnames="config", out_shardings=(shardings, None))
    if case.get("hlo"):
        hlo.write_text(
            step.lower(state, batch(0, config.train.seq_len), config).compile().as_text()
        )
        return {}
    outs, packed = [], config.data.packing == "documents"
    for i in range(N_STEPS):
        state, out = step(state, batch(i, packed=packed), config)
        outs.append(out)
        if i == 0:
            found = {f"first/{path}": x for path, x in leaves_by_path(state.opt_state).items()}
    found |= {f"params/{path}": p for path, p in parameters.flat(state.params).items()}
    evaluate = jax.jit(eval_step, static_argnames="config")
    found["eval"] = np.array(evaluate(state.params, None, batch(0, packed=packed), config))
    return found | {
        "losses": np.array([out["loss"] for out in outs]),
        "grad_norms": np.array([out["grad_norm"] for out in outs]),
    }


def main(arguments: list[str]) -> None:
    job, out = json.loads(arguments[0]), Path(arguments[1])
    jax.config.update("jax_num_cpu_devices", job["devices"])
    results = {}
    for i, case in enumerate(job["cases"]):
        sizes = case["mesh"] and dict(zip(MESH_AXES, case["mesh"], strict=True))
        with use_mesh(sizes or {}):
            found = jax.device_get(run(case, out.with_suffix(f".{i}.hlo")))
        results |= {f"{i}/{name}": array for name, array in found.items()}
    np.savez(out, **results)
