"""Diagnostics of a run: magnitudes by layer, a report on an update that is not finite, and profiler traces."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm.config import Resolved
from lm.optimizers import learning_rate_schedule
from lm.parallel import processes, sharding
from lm.step import TrainState, take_batch
from lm.training.batch_source import BatchSource
from lm.training.layer_statistics import layer_statistics
from lm.training.progress import Progress
from lm.training.run import Run


class Diagnostics:
    """Measurements of a run other than its loss.

    Args:
        run: the prepared run.
        source: the training batches.
        workdir: where a profile is written (workdir/profile).
        progress: where the place of a profile is shown.
    """

    def __init__(self, run: Run, source: BatchSource, workdir: Path, progress: Progress):
        self._run, self._source, self._workdir, self._progress = run, source, workdir, progress
        self._program: Any = None  # the compiled `_measure`
        self._profiling = False

    def details(self, state: TrainState) -> dict:
        """Return the statistics of the next step by kind and path, as numbers and lists of one number per layer."""
        return jax.tree.map(lambda x: np.asarray(x).tolist(), self._measure_next_step(state))

    def nonfinite_report(self, state: TrainState) -> list[str]:
        """Return lines on the step after `state`: its learning rate, and norms by group of parameters."""
        found = jax.device_get(self._measure_next_step(state.replace(halted=np.bool_(False))))
        config, table = self._run.config, self._run.table
        n_updates = int(state.step) - int(state.skipped)
        rate = learning_rate_schedule(config.optimizer, config.train.steps)(n_updates)
        lines = [
            f"learning rate {float(rate):.4g}; parameters before the step, and its gradients:",
            f"{'group':<24} {'parameter norm':>15} {'gradient norm':>15}",
        ]
        for group, members in itertools.groupby(table, key=lambda path: path.rpartition("/")[0] or path):
            paths = list(members)
            norms = (
                sum(float(np.mean(np.square(np.asarray(found[kind][p], np.float64)))) * table[p].size for p in paths)
                for kind in ("parameters", "gradients")
            )
            parameter_norm, gradient_norm = (norm**0.5 for norm in norms)
            lines.append(f"{group:<24} {parameter_norm:>15.4g} {gradient_norm:>15.4g}")
        return lines

    def _measure_next_step(self, state: TrainState) -> dict:
        inputs = {name: array[0] for name, array in self._source.train(int(state.step), 1).items()}
        arguments = state, self._source.resident, inputs
        if self._program is None:
            # Compiled ahead: jit would compile once more for the state that the training program returns, because its
            # arrays are committed to a device and those of a new state are not.
            jitted = jax.jit(_measure, static_argnames="config", out_shardings=sharding.replicated_sharding())
            self._program = jitted.lower(*arguments, self._run.config).compile()
        return self._program(*arguments)

    def profile_changes_at(self, step: int) -> bool:
        """Return whether the trace of train.profile starts or stops after `step` steps."""
        profile = self._run.config.train.profile
        return profile is not None and step in (profile[0] - 1, profile[1])

    def start_or_stop_profile(self, state: TrainState, step: int) -> None:
        """Start or stop the trace of train.profile if this is the step for it."""
        if not self._run.config.train.profile or not processes.is_first():
            return
        first, last = self._run.config.train.profile
        if self._profiling and step >= last:
            self.stop_profile(state)
        elif step == first - 1:
            jax.block_until_ready(state.step)
            jax.profiler.start_trace(self._workdir / "profile")
            self._profiling = True

    def stop_profile(self, state: TrainState) -> None:
        """Stop the trace if there is one."""
        if not self._profiling:
            return
        jax.block_until_ready(state.step)
        jax.profiler.stop_trace()
        self._profiling = False
        first, last = self._run.config.train.profile or ()
        self._progress.say(f"profile of steps {first} to {last}: {self._workdir / 'profile'}")


def _measure(state: TrainState, resident: dict | None, inputs: dict, config: Resolved) -> dict:
    """Return the `layer_statistics` of a batch, given as for `take_batch`."""
    return layer_statistics(state, take_batch(resident, inputs, config.train.seq_len), config)
