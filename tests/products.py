"""Floating-point operations of the matrix products in a traced program."""

import jax
import jax.numpy as jnp

from lm import model, parameters
from lm.checking.programs import product_flops


def forward_flops(c, B: int, T: int) -> int:
    """Return the operations of the products that compute logits (B, T, V)."""
    table = parameters.parameter_table(c)
    params = parameters.nest(
        {path: jax.ShapeDtypeStruct(p.shape, c.param_dtype) for path, p in table.items()}
    )
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    traced = jax.make_jaxpr(lambda params, tokens: model.logits(params, c, tokens))(params, tokens)
    return product_flops(traced.jaxpr)
