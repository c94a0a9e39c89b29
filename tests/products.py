"""Floating-point operations of the matrix products in a traced program."""

import math

import jax
import jax.numpy as jnp

from lm import model, parameters


def _is_jaxpr(x) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def product_flops(jaxpr) -> int:
    """Return the operations of all products in a jaxpr, with the trip counts of its scans."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            a, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * out.size * math.prod(a.shape[i] for i in contracted)
        if equation.primitive.name.startswith(
            "ragged_dot"
        ):  # every row with the matrix of one group
            a, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * out.size * a.shape[-1]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = [v for v in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr) if _is_jaxpr(v)]
        total += times * sum(product_flops(getattr(v, "jaxpr", v)) for v in inner)
    return total


def forward_flops(c, B: int, T: int) -> int:
    """Return the operations of the products that compute logits (B, T, V)."""
    table = parameters.parameter_table(c)
    params = parameters.nest(
        {path: jax.ShapeDtypeStruct(p.shape, c.param_dtype) for path, p in table.items()}
    )
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    traced = jax.make_jaxpr(lambda params, tokens: model.logits(params, c, tokens))(params, tokens)
    return product_flops(traced.jaxpr)
