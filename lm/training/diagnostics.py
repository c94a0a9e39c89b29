"""Diagnostics of a run: magnitudes by layer, and a report on an update that is not finite."""

import jax
import numpy as np

from lm.config import Resolved
from lm.optimizers import learning_rate_schedule
from lm.parallel import sharding
from lm.step import TrainState, take_batch
from lm.training.batch_source import BatchSource
from lm.training.layer_statistics import layer_statistics
from lm.training.run import Run


def details(run: Run, source: BatchSource, state: TrainState) -> dict:
    """Return the statistics of the step after `state` by kind and path; lists have one per layer."""
    return jax.tree.map(lambda x: np.asarray(x).tolist(), _measure_next_step(run, source, state))


def nonfinite_report(run: Run, source: BatchSource, state: TrainState) -> list[str]:
    """Return lines on the step after `state`: its learning rate, and norms by group of parameters."""
    statistics = jax.device_get(_measure_next_step(run, source, state))
    n_updates = int(state.step) - int(state.skipped)
    rate = learning_rate_schedule(run.config.optimizer, run.config.train.steps)(n_updates)
    lines = [
        f"learning rate {float(rate):.4g}; parameters before the step, and its gradients:",
        f"{'group':<24} {'parameter norm':>15} {'gradient norm':>15}",
    ]

    def norm(kind: str, paths: list[str]) -> float:
        square = 0.0
        for path in paths:  # of a stack, a root mean square per layer
            rms = np.asarray(statistics[kind][path], np.float64)
            square += float(np.mean(np.square(rms))) * run.table[path].size
        return square**0.5

    groups: dict[str, list[str]] = {}
    for path in run.table:
        groups.setdefault(path.rpartition("/")[0] or path, []).append(path)
    for group, paths in groups.items():
        norms = f"{norm('parameters', paths):>15.4g} {norm('gradients', paths):>15.4g}"
        lines.append(f"{group:<24} {norms}")
    return lines


def _measure_next_step(run: Run, source: BatchSource, state: TrainState) -> dict:
    inputs = {name: array[0] for name, array in source.train(int(state.step), 1).items()}
    # jit would compile once more for the state that the training program returns, whose arrays are
    # committed to their devices: those of a new state are not.
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
    measure = jax.jit(
        _measure, static_argnames="config", out_shardings=sharding.replicated_sharding()
    )
    return measure(state, source.resident, inputs, run.config)


def _measure(state: TrainState, resident: dict | None, inputs: dict, config: Resolved) -> dict:
    """Return the `layer_statistics` of a batch, given as for `take_batch`."""
    return layer_statistics(state, take_batch(resident, inputs, config.train.seq_len), config)
