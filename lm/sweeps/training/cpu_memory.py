"""Memory of a step of a sweep on CPUs, which train a run on each core. Imports no jax, so it can be used before it."""

from lm.config import Config
from lm.config.values import divisors

TOKENS = 512  # of a micro-batch: the activations of more tokens leave the caches of a core
PARAMETERS = 2**22  # of a model whose gradients stay in the caches while micro-batches are summed


def micro_batch_size(config: Config) -> int | None:
    """Return the micro-batch size of a run in a sweep on CPUs: that of the config, or one for at most 512 tokens.

    It is None, one micro-batch, for large models, because summing their gradients takes longer than the caches save,
    and if the batch size has no divisor for at least 128 tokens.

    >>> from lm.config import default_config, from_dict
    >>> micro_batch_size(from_dict(default_config()))  # 32 sequences of 256 tokens
    2
    """
    t, m = config.train, config.model
    size = max((n for n in divisors(t.batch_size) if n * t.seq_len <= TOKENS), default=1)
    too_small, too_large = size * t.seq_len < TOKENS // 4, 12 * m.n_layers * m.d_model**2 > PARAMETERS
    if t.micro_batch_size or too_small or too_large or size == t.batch_size:
        return t.micro_batch_size
    return size


def step_bytes(config: Config) -> int:
    """Estimate the memory that a step of such a run allocates: 30 float32 numbers per token, layer and feature."""
    tokens = (micro_batch_size(config) or config.train.batch_size) * config.train.seq_len
    return 120 * tokens * config.model.n_layers * config.model.d_model
