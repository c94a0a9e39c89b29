"""Evaluate parameters on a split."""

import math
from collections.abc import Callable
from typing import Any

import jax

from lm.config import Resolved
from lm.data import Split, batches
from lm.data.entropy_floor import check_loss
from lm.step import eval_step
from lm.training.batch_source import BatchSource

jit_eval_step = jax.jit(eval_step, static_argnames="config")


def evaluate(
    params: dict,
    source: BatchSource,
    *,
    max_batches: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> dict | None:
    """Compute the mean loss over a split, without dropout.

    Every token but the first is predicted once, in consecutive windows of train.seq_len tokens.

    Args:
        max_batches: evaluate only the first max_batches batches of each source; 0 for all.
        stop: called before each batch; True ends the evaluation.

    Returns:
        {"loss": nats per token, "perplexity": exp(loss), "bits_per_byte": None if the text's bytes
        are not known, "tokens": number of predicted tokens}; "losses" by source of a mixture, whose
        weighted mean is "loss"; and "best_loss", that of the best possible model of these tokens,
        where it is known (`lm/data/entropy_floor.py`). None if `stop` ended the evaluation.

    Raises:
        BelowEntropy: the loss is below that of the best possible model.
    """
    sums = []
    for inputs in source.evaluation(max_batches):
        if stop():
            return None
        sums.append(jit_eval_step(params, source.resident, inputs, source.config))
    split = source.split
    loss, losses, n_predicted = mean_losses(split, source.config, sums, max_batches)
    is_estimate = source.config.model.masked_diffusion
    best = check_loss(split, loss, n_predicted, is_estimate=is_estimate)
    metrics: dict[str, Any] = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": None,
        "tokens": n_predicted,
    }
    n_bytes = [
        part.weight * part.bytes_per_token for part in split.all_parts if part.bytes_per_token
    ]
    if len(n_bytes) == len(split.all_parts):
        metrics["bits_per_byte"] = loss / math.log(2) / math.fsum(n_bytes)
    if split.parts:
        metrics["losses"] = losses
    if best is not None:
        metrics["best_loss"] = best
    return metrics


def compile_evaluation(params: dict, source: BatchSource) -> jax.stages.Compiled:
    """Compile the program of an evaluation, to learn how much memory it needs."""
    inputs = next(source.evaluation(1))
    return jit_eval_step.lower(params, source.resident, inputs, source.config).compile()


def mean_losses(
    split: Split, config: Resolved, sums: list, max_batches: int = 0
) -> tuple[float, dict, int]:
    """Return the weighted mean loss of all sources, that of each by name, and how many predictions.

    `sums` are, for each batch of an evaluation with this max_batches, or of a whole one, the sum of
    the losses and the number of targets.
    """
    losses = {}
    n_predicted = 0
    position = 0
    is_whole = len(sums) == batches.n_eval_batches(split, config)
    for part, numbers in batches.eval_batches(split, config, max_batches):
        first = numbers.start if is_whole else position
        position += len(numbers)
        losses[part.name], count = mean_of_sums(sums[first : first + len(numbers)])
        n_predicted += count
    mean = math.fsum(part.weight * losses[part.name] for part in split.all_parts)
    return mean, losses, n_predicted


def mean_of_sums(sums: list) -> tuple[float, int]:
    """Return the mean loss over batches, given the sum of losses and the count of each, and the count.

    Summed on the host in float64: a float32 sum over a full split would lose digits.
    """
    count = math.fsum(float(n) for _, n in sums)
    return math.fsum(float(total) for total, _ in sums) / count, int(count)
