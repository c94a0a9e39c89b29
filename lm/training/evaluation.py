"""Evaluate parameters on a split."""

import math
from collections.abc import Callable

import jax

from lm.data.entropy_floor import check_loss
from lm.step import eval_step
from lm.training.batch_source import BatchSource

_eval_step = jax.jit(eval_step, static_argnames="config")


def evaluate(
    params: dict, source: BatchSource, *, max_batches: int = 0, stop: Callable[[], bool] = lambda: False
) -> dict | None:
    """Compute the mean loss over a split, without dropout.

    Every token but the first is predicted once, in consecutive windows at the context length of training.

    Args:
        params: the model's parameters.
        source: the split's batches.
        max_batches: evaluate only the first max_batches batches; 0 for all.
        stop: called before each batch; True ends the evaluation.

    Returns:
        {"loss": nats per token, "perplexity": exp(loss), "bits_per_byte": None if the text's bytes are not known,
        "tokens": number of predicted tokens}, and "best_loss", that of the best possible model of these tokens, where
        it is known (`lm/data/entropy_floor.py`); None if `stop` ended the evaluation.

    Raises:
        BelowEntropy: the loss is below that of the best possible model.
    """
    sums = []
    for inputs in source.evaluation(max_batches):
        if stop():
            return None
        sums.append(_eval_step(params, source.resident, inputs, source.config))
    # Summed on the host in float64: a float32 sum over a full split would lose digits.
    total, count = (math.fsum(float(s[i]) for s in sums) for i in (0, 1))
    loss, split = total / count, source.split
    best, bytes_per_token = check_loss(split, loss, int(count)), split.bytes_per_token
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None,
        "tokens": int(count),
    } | ({} if best is None else {"best_loss": best})
