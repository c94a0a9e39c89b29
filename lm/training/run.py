"""A run: its config checked against the data and the devices."""

from lm.config import Config
from lm.errors import UserError


def resolve_config(config: Config, corpus) -> Config:
    """Check what needs the data and the device; returns the resolved config. Raises UserError with all problems."""
    from lm import data, parameters

    vocab_size = corpus.tokenizer.vocab_size if corpus.tokenizer else config.model.vocab_size
    if vocab_size is None:
        raise UserError(
            "config.model.vocab_size: none, but these token shards name no tokenizer; give their vocabulary's size"
        )
    resolved = parameters.resolve(config, vocab_size)
    m, t = resolved.model, resolved.train
    problems = data.check_corpus(corpus, t.seq_len, m.vocab_size)
    if config.eval.every and "validation" not in corpus.splits:
        problems.append(f"config.eval.every: {config.eval.every}, but {corpus.name} has no validation split; use 0")
    if config.eval.sample_tokens and corpus.tokenizer:
        try:
            if len(corpus.tokenizer.encode(config.eval.sample_prompt)) == 0:
                problems.append(
                    f"config.eval.sample_prompt: {config.eval.sample_prompt!r} is no token to this tokenizer; "
                    "use a word, for example"
                )
        except UserError as error:
            problems.append(f"config.eval.sample_prompt: {error}")
    try:
        attention_of(resolved, corpus)
    except ValueError as error:
        problems.append(f"config.model.attention: {error}")
    if problems:
        raise UserError(*problems)
    return resolved


def attention_of(config: Config, corpus) -> tuple[str, str]:
    """The attention that training takes, and why; raises ValueError where the one that is asked for cannot be had."""
    import jax

    from lm.layers.attention import choose_implementation

    m = config.model
    return choose_implementation(
        m.attention,
        platform=jax.default_backend(),
        dtype=m.compute_dtype,
        d_head=m.d_head,
        softcap=m.attn_softcap,
        window=m.window_pattern[0] or None,
        segments=corpus.packed,
        contiguous=not corpus.packed,
        n_queries=config.train.seq_len,
    )
