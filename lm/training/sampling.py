"""Sample text from a model, by a simple loop that recomputes the full context for every token."""

import dataclasses

from lm.config import Config, ModelConfig, from_dict
from lm.errors import UserError


def generate(
    params: dict,
    c: ModelConfig,
    prompt,
    n_tokens: int,
    *,
    seq_len: int,
    temperature: float = 0.8,
    top_k: int = 0,
    n_ids: int | None = None,
    seed: int = 0,
):
    """Sample token ids that continue a prompt; the same arguments give the same ids.

    Args:
        params: the model's parameters.
        c: the model section of a resolved config.
        prompt: at least one token id; the model sees the last seq_len ids.
        n_tokens: how many ids to sample.
        seq_len: the length of the context.
        temperature: ids are drawn from softmax(logits / temperature); 0 takes the likeliest id.
        top_k: draw among the k likeliest ids; 0: among all.
        n_ids: draw ids below this only: a vocabulary can be larger than its tokenizer's.
        seed: another seed gives another text.

    Returns:
        (n_tokens,) ids.

    Raises:
        ValueError: if the prompt is empty.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    if len(prompt) == 0:
        raise ValueError("generate: the prompt is empty; a model needs at least one token to continue")
    context = np.zeros(seq_len, np.int32)
    seen = np.asarray(prompt, np.int32)[-seq_len:]
    context[: len(seen)] = seen
    run = jax.jit(_generate, static_argnames=("c", "n_tokens", "top_k", "n_ids", "greedy"))
    tokens = run(
        params, jnp.asarray(context), len(seen), jax.random.key(seed), max(temperature, 1e-6),
        c=c, n_tokens=n_tokens, top_k=top_k, n_ids=n_ids, greedy=temperature == 0,
    )  # fmt: skip
    return np.asarray(tokens)


def _generate(params, context_T, length, key, temperature, *, c, n_tokens, top_k, n_ids, greedy):
    import jax
    import jax.numpy as jnp

    from lm.model import logits
    from lm.parallel.sharding import replicate_inside

    def next_token(carry, i):
        context_T, length = carry
        logits_V = logits(params, c, context_T[None])[0, length - 1, :n_ids]
        if top_k:
            logits_V = jnp.where(logits_V < jax.lax.top_k(logits_V, top_k)[0][-1], -jnp.inf, logits_V)
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits_V / temperature)
        token = (jnp.argmax(logits_V) if greedy else drawn).astype(context_T.dtype)
        full = length == len(context_T)
        context_T = jnp.where(full, jnp.roll(context_T, -1), context_T)
        context_T = context_T.at[jnp.where(full, length - 1, length)].set(token)
        return (context_T, jnp.minimum(length + 1, len(context_T))), token

    return replicate_inside(jax.lax.scan(next_token, (context_T, length), jnp.arange(n_tokens))[1])


def sample_text(params: dict, config: Config, tokenizer, *, prompt: str, n_tokens: int, **options) -> str:
    """Return the prompt and its continuation, for a resolved config. Options as for `generate`."""
    limits = {"seq_len": config.train.seq_len, "n_ids": tokenizer.vocab_size}
    ids = generate(params, config.model, tokenizer.encode(prompt), n_tokens, **limits, **options)
    return prompt + tokenizer.decode(ids)


def load_run(workdir: str, step: int | str):
    """Return (step, params, resolved config, tokenizer) of a checkpoint; raises UserError if something is missing."""
    from lm.data import tokenizers
    from lm.training import checkpoints
    from lm.training.workdir import check_meta

    step, params, meta = checkpoints.restore_params(workdir, step)
    check_meta(meta, f"--workdir {workdir}, step {step}")
    if meta["tokenizer"] is None:
        raise UserError(
            f"--workdir {workdir}: this run trained on token ids, and has no tokenizer to turn ids into text"
        )
    config = from_dict(meta["config"])
    # The run's implementation of attention may not exist on this device.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))
    return step, params, config, tokenizers.from_json(meta["tokenizer"])
