"""The loss on a split: a function of the parameters alone."""

import math
from collections.abc import Callable

import jax

from lm.config import Config
from lm.data import Split
from lm.parallel.mesh import current_mesh
from lm.step import eval_step
from lm.training.feeds import eval_feeds, to_device

_eval_step = jax.jit(eval_step, static_argnames="config")


def evaluate(
    params: dict, split: Split, config: Config, *, max_batches: int = 0, stop: Callable[[], bool] = lambda: False
) -> dict | None:
    """Mean loss in nats per token over the split, its perplexity, bits per byte (None if unknown) and token count.

    Every token but the first is predicted once, in consecutive windows at the trained context length, or as many as
    max_batches hold. Returns None if `stop` says so between two batches.
    """
    mesh = current_mesh()
    corpus = to_device(split, config.data.device_bytes, mesh)
    sums = []
    for feed in eval_feeds(split, corpus is not None, config, max_batches, mesh):
        if stop():
            return None
        sums.append(_eval_step(params, corpus, feed, config))
    # Added up on the host in float64: a float32 sum over a whole split would lose digits.
    total, count = (math.fsum(float(s[i]) for s in sums) for i in (0, 1))
    loss = total / count
    bytes_per_token = split.n_bytes / split.n_tokens if split.n_bytes else None
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None,
        "tokens": int(count),
    }
