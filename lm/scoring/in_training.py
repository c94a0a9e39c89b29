"""What a run does with its model beside training it: a sample of text, and scores of tasks.

lm/train.py passes these functions to lm/training, which does not import generation or the harness.
"""

import contextlib
import dataclasses
from pathlib import Path

import jax

from lm.config import MESH_AXES
from lm.data.tokenizers import known_prompt
from lm.parallel.mesh import current_mesh, make_mesh
from lm.system.errors import UserError
from lm.trained_model import TrainedModel
from lm.training.run import Run
from lm.training.scores import Scorer


def sample(run: Run, params: dict, step: int, directory: Path) -> str | None:
    """Return the config's prompt with a continuation; None if the run makes no sample.

    Raises:
        UserError: if the tokenizer cannot encode the prompt.
    """
    c = run.config
    tokenizer = run.corpus.tokenizer
    if tokenizer is None or not c.eval.sample_tokens:
        return None
    model = TrainedModel(directory, step, c, params, tokenizer)
    prompt = known_prompt(c.eval.sample_prompt, tokenizer)
    return f"{prompt}{model.generate(prompt, c.eval.sample_tokens, seed=c.train.seed)}"


def task_scorer(run: Run, directory: Path) -> Scorer:
    """Load the tasks of the config, and return what scores them on the first device.

    Raises:
        UserError: the harness cannot load a task, or a task cannot be computed in this run.
    """
    c = run.config
    tokenizer = run.corpus.tokenizer
    if jax.process_count() > 1:
        raise UserError(
            "config.eval.harness_every: a run of several processes has no tasks; use 0, and "
            "lm.harness later"
        )
    if tokenizer is None:
        raise UserError(
            "config.eval.harness_every: tasks are texts, and this data has no tokenizer; use 0"
        )
    from lm.scoring import evaluation_harness  # imports lm_eval, which takes seconds

    tasks = evaluation_harness.load_tasks(c.eval.harness_tasks or ())
    config = dataclasses.replace(c, model=dataclasses.replace(c.model, attention="auto"))

    def scores(params: dict) -> dict[str, float]:
        first = jax.devices()[:1]
        alone = make_mesh(dict.fromkeys(MESH_AXES, 1), first)
        with jax.set_mesh(alone) if current_mesh() else contextlib.nullcontext():
            on_first = jax.device_put(jax.device_get(params), first[0])
            model = TrainedModel(directory, 0, config, on_first, tokenizer)
            return evaluation_harness.task_scores(model, tasks, c.eval.harness_limit or None)

    return scores
