"""The cheap half of `lm check`, which a run of training with an idea of one's own begins with."""

import jax

from lm import ideas
from lm.config import Config, mixer_of
from lm.system.errors import UserError

# Files of lm/ideas that pass `python -m lm.check`, which tests/test_check.py runs for each.
BUILT_IN = {
    "attention_gate", "attention_sink", "deep_supervision", "depth_attention",
    "differential_attention", "exclusive_attention", "forgetting_gate", "gated_delta",
    "hyper_connections", "kimi_delta", "latent_attention", "loop_input", "masked_diffusion",
    "moe", "multi_token_prediction", "parallel_branches", "query_scale", "residual_scalars",
    "rg_lru", "short_convolution", "talking_heads", "token_shift", "value_embedding",
    "value_residual",
}  # fmt: skip


def new_ideas(c) -> list[str]:
    """Return the files of the ideas that are on and not of this package."""
    present = list(ideas.everywhere(c))
    kinds = {mixer_of(c, layer) for layer in range(min(c.n_layers, len(c.mixers)))}
    present += [ideas.MIXERS[kind] for kind in kinds if kind in ideas.MIXERS]
    names = [getattr(idea, "__name__", type(idea).__module__) for idea in present]
    return [name for name in names if name.removeprefix("lm.ideas.") not in BUILT_IN]


def check_new_ideas(config: Config) -> str | None:
    """Return a line on new ideas, which look back only and read their parameters; None: none is new.

    Raises:
        UserError: they do not.
    """
    added = new_ideas(config.model)
    if not added:
        return None
    from lm.checking import properties
    from lm.checking.subject import Broken, Subject

    names = ", ".join(dict.fromkeys(added))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        subject = Subject(config)
        try:
            properties.sees_earlier_tokens_of_its_document(subject)
            properties.layers_read_all_their_parameters(subject)
        except Broken as error:
            raise UserError(
                f"{names}: {error}; python -m lm.check with this config says more"
            ) from None
    return f"{names}: looks back only and reads its parameters; python -m lm.check checks more"
