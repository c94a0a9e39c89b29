"""Scores beside the losses of the splits: of generated probes, and of tasks of lm-evaluation-harness."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from lm.config import MESH_AXES
from lm.errors import UserError
from lm.parallel.mesh import current_mesh, make_mesh
from lm.parallel.sharding import shard_examples
from lm.trained_model import TrainedModel
from lm.training import probes
from lm.training.evaluation import jit_eval_step
from lm.training.run import Run

Scorer = Callable[[dict], dict[str, float]]  # parameters -> scores by name


def scorers(run: Run, workdir) -> dict[str, Scorer]:
    """Return the scorers that the config asks for, by the kind of their scores: "probe", "task".

    Raises:
        UserError: the harness cannot load a task, or a task cannot be computed in this run.
    """
    found: dict[str, Scorer] = {}
    if run.config.eval.probes:
        found["probe"] = functools.partial(probe_losses, run)
    if run.config.eval.harness_every:
        found["task"] = _task_scorer(run, workdir)
    return found


def probe_losses(run: Run, params: dict) -> dict[str, float]:
    """Return the mean loss of the answers of each probe of the config, in nats."""
    mesh, found = current_mesh(), {}
    for name in run.config.eval.probes or ():
        sums = []
        for batch in probes.batches(name, run.config, run.corpus):
            inputs = {key: shard_examples(mesh, x.shape, 0, x.__getitem__) for key, x in batch.items()}
            sums.append(jit_eval_step(params, None, inputs, run.config))
        total, count = (math.fsum(float(pair[i]) for pair in sums) for i in (0, 1))
        found[name] = total / count
    return found


def _task_scorer(run: Run, workdir) -> Scorer:
    """Load the tasks of the config, with their data, and return what scores them on the first device."""
    c, tokenizer = run.config, run.corpus.tokenizer
    if jax.process_count() > 1:
        raise UserError(
            "config.eval.harness_every: a run of several processes has no tasks; use 0, and lm.harness later"
        )
    if tokenizer is None:
        raise UserError("config.eval.harness_every: tasks are texts, and this data has no tokenizer; use 0")
    from lm import evaluation_harness  # imports lm_eval, which takes seconds

    tasks = evaluation_harness.load_tasks(c.eval.harness_tasks or ())
    config = dataclasses.replace(c, model=dataclasses.replace(c.model, attention="auto"))

    def scores(params: dict) -> dict[str, float]:
        first = jax.devices()[:1]
        alone = make_mesh(dict.fromkeys(MESH_AXES, 1), first)
        with jax.set_mesh(alone) if current_mesh() else contextlib.nullcontext():
            model = TrainedModel(workdir, 0, config, jax.device_put(jax.device_get(params), first[0]), tokenizer)
            return evaluation_harness.task_scores(model, tasks, c.eval.harness_limit or None)

    return scores
