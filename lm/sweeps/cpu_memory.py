"""Micro-batches of sweeps on CPUs. A sweep on a CPU trains one run on each core.

This module does not import jax, because it is used before jax is configured.
"""

import os

from lm.config import Config
from lm.config.values import divisors

TOKENS = 512  # of a micro-batch: the activations of more tokens leave the caches of a core
PARAMETERS = 2**22  # of a model whose gradients stay in the caches while micro-batches are summed


def n_cores() -> int:
    """Return the number of cores that this process may use."""
    # not on macOS
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def micro_batch_size(config: Config, n_parameters: int) -> int | None:
    """Return the micro-batch size of a run: the config's, or the largest divisor of the batch with
    at most 512 tokens.

    The config's None, one micro-batch, is kept in three cases: if such a micro-batch has fewer than
    128 tokens; if the model is large, because summing its gradients takes longer than the caches
    save; and if it does not compute in float32, because only float32 was measured.

    >>> from lm.config import default_config, from_dict
    >>> micro_batch_size(from_dict(default_config()), n_parameters=10**6)  # 32 sequences of 256 tokens
    2
    """
    t = config.train
    m = config.model
    size = max((n for n in divisors(t.batch_size) if n * t.seq_len <= TOKENS), default=0)
    too_small = size * t.seq_len < TOKENS // 4
    too_large = n_parameters > PARAMETERS
    if (
        t.micro_batch_size
        or too_small
        or too_large
        or size == t.batch_size
        or m.compute_dtype != "float32"
    ):
        return t.micro_batch_size
    return size
