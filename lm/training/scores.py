"""Scores beside the losses of the splits: of generated probes, and of tasks of the harness."""

import functools
from collections.abc import Callable
from pathlib import Path

from lm.parallel.mesh import current_mesh
from lm.parallel.sharding import shard_examples
from lm.training import probes
from lm.training.evaluation import jit_eval_step, mean_of_sums
from lm.training.run import Run

Scorer = Callable[[dict], dict[str, float]]  # parameters -> scores by name


def scorers(
    run: Run, directory: Path, task_scorer: Callable[[Run, Path], Scorer]
) -> dict[str, Scorer]:
    """Return the scorers that the config asks for, by the kind of their scores: "probe", "task".

    Raises:
        UserError: the harness cannot load a task, or a task cannot be computed in this run.
    """
    by_kind: dict[str, Scorer] = {}
    if run.config.eval.probes:
        by_kind["probe"] = functools.partial(probe_losses, run)
    if run.config.eval.harness_every:
        by_kind["task"] = task_scorer(run, directory)
    return by_kind


def probe_losses(run: Run, params: dict) -> dict[str, float]:
    """Return the mean loss of the answers of each probe of the config, in nats."""
    mesh = current_mesh()
    losses = {}
    for name in run.config.eval.probes or ():
        sums = []
        for batch in probes.batches(name, run.config, run.corpus):
            inputs = {
                key: shard_examples(mesh, x.shape, 0, x.__getitem__) for key, x in batch.items()
            }
            sums.append(jit_eval_step(params, None, inputs, run.config))
        losses[name], _ = mean_of_sums(sums)
    return losses
