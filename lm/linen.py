"""Declare the parameters of a Linen module from a table."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.declarations import Table
from lm.parallel import collectives


def declare(module: nn.Module, table: Table) -> Table:
    """Return the module's parameters by name, gathered; parameters.init_params computes their initial values."""
    c = module.config

    def declared(path, p):
        w = module.param(path, lambda _: jnp.zeros(collectives.local_shape(p), c.param_dtype))
        # The backward pass sums the gradients of rows of embeddings, which would lose precision in 16 bits.
        dtype = c.param_dtype if p.kind == "embedding" else c.compute_dtype
        with jax.named_scope(path):  # names the communication in profiles
            return collectives.gather_parameter(w, p, dtype)

    return Table(type(module).__name__, {path: declared(path, p) for path, p in table.items()})
