"""The model as a Flax module: `Transformer(c).init(key, tokens)` and `.apply({"params": params},
tokens)`.
"""

import flax.linen as nn
import jax

from lm import model, parameters
from lm.config import ModelConfig
from lm.declarations import nest


class Transformer(nn.Module):
    """Decoder-only Transformer from token ids (B, T) to next-token logits (B, T, V) in float32.

    Its parameters are those of `parameters.init_params`: with `init(jax.random.key(seed), tokens)`
    they have the names, shapes and values of a run with this seed. A run's parameters can be given
    to `apply`.

    Attributes:
        config: the section config.model, with a size of the vocabulary. Keys that are not set, such
            as d_ff, have the values of a run whose sequences have the length of `tokens`.

    >>> c = ModelConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=2, d_ff=4)
    >>> tokens = jax.numpy.zeros((1, 3), int)
    >>> transformer = Transformer(c)
    >>> transformer.apply(transformer.init(jax.random.key(0), tokens), tokens).shape
    (1, 3, 5)
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, **inputs):
        """Return the logits. `inputs` are those of model.forward, for example dropout_keys_B."""
        c = parameters.resolve_model(self.config, seq_len=tokens_BT.shape[-1])
        table = parameters.parameter_table(c)

        def initial(derived_key, name):
            # The key of the caller, not the one that Linen derives from it: values depend on their
            # path only.
            given = self.scope.rngs.get("params")
            root = derived_key if given is None else as_key(given.as_jax_rng())
            root = parameters.root_of_draw(c, root)
            own = {path: p for path, p in table.items() if path.partition("/")[0] == name}
            return nest(
                {
                    path: parameters.initial_value(root, path, p, c.param_dtype)
                    for path, p in own.items()
                }
            )[name]

        names = dict.fromkeys(path.partition("/")[0] for path in table)
        params = {name: self.param(name, initial, name) for name in names}
        return model.logits(params, c, tokens_BT, **inputs)


def as_key(key):
    """Return a typed key, also of the older kind that jax.random.PRNGKey returns."""
    return (
        key
        if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        else jax.random.wrap_key_data(key)
    )
