"""Matrix products of the model. All choices about the precision of a product are made here."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lm.kernels import cpu_products, platform

# marks products for jax.checkpoint policies that cannot recognize them by their primitive
PRODUCT = "product"


def einsum(equation, x, w, b=None):
    """Return the product of activations with a weight, plus a bias.

    The equation is that of jnp.einsum, as in einsum("BTD,DHK->BTHK", x, w). B stands for any
    leading axes, also for none. The axes that the weight begins with and the result lacks are
    summed, and are the last of x. The sum is accumulated in float32 or wider, and rounded to the
    dtype of x. This is the only function that multiplies with weights in a layer, in the form that
    is fast on the platform.

    Args:
        equation: the letters of x, w and the result.
        x: activations.
        w: weight, cast to the dtype of x (mixed precision keeps float32 weights). Its gradient has
            the weight's own dtype.
        b: bias, of the axes that w adds; or None.

    Raises:
        ValueError: the equation is of another kind, or the axes of x and w differ.

    >>> einsum("BTD,DHK->BTHK", jnp.ones((5, 4)), jnp.ones((4, 2, 3))).shape
    (5, 2, 3)
    """
    n_in = _n_summed(equation)
    leading = x.shape[: x.ndim - n_in]
    inputs = x.shape[x.ndim - n_in :]
    if inputs != w.shape[:n_in]:
        raise ValueError(
            f"einsum: {equation}: x {x.shape} does not end in the first axes of the weight "
            f"{w.shape}"
        )
    # One leading axis: with two, XLA:CPU copies and transposes to sum the weight's gradient, at
    # half the speed.
    x = x.reshape(-1, *inputs)
    w = w.astype(x.dtype)
    outputs = w.shape[n_in:]
    if cpu_products.enabled(x):
        y = cpu_products.project(x, w, n_in)
        y = y if b is None else y + b  # in float32: rounded once
        y = checkpoint_name(y.astype(x.dtype), PRODUCT)
    else:
        if platform.target() == "gpu":
            # One last axis: cuBLAS adds a bias in the product only if it is a vector.
            w = w.reshape(*inputs, -1)
            b = b if b is None else b.reshape(-1)
        y = jnp.tensordot(x, w, n_in)
        y = y if b is None else y + b.astype(y.dtype)
    return y.reshape(*leading, *outputs)


@functools.cache
def _n_summed(equation: str) -> int:
    """Return the number of axes that a product sums.

    >>> _n_summed("BTHK,HKD->BTD")
    2
    """
    of_x, of_w, out = equation.replace("->", ",").split(",")
    n = sum(letter not in out for letter in of_w)
    if not n or of_x[-n:] != of_w[:n] or of_x[:-n] + of_w[n:] != out:
        raise ValueError(
            f"einsum: {equation}: the weight must begin with the last axes of x, as in "
            "BTHK,HKD->BTD"
        )
    return n


def project_to_float32(x, w, b=None, *, transposed=False, rounded=False):
    """Multiply like `einsum`, but return the unrounded accumulator, float32 or wider.

    Logits need this: in bfloat16 a logit of 10 would be rounded to a multiple of 1/16. The products
    of the backward pass still multiply in the dtype of `x`.

    Args:
        x: activations (..., D).
        w: weight (D, V), or (V, D) if `transposed`.
        b: bias (V,), or None.
        transposed: whether the contracted axis of `w` is its last.
        rounded: whether the product is rounded to the dtype of `x` all the same, and then widened.

    Returns:
        (..., V).

    >>> project_to_float32(jnp.full((2,), 3, jnp.bfloat16), jnp.eye(2))
    Array([3., 3.], dtype=float32)
    """
    leading = x.shape[:-1]
    x = x.reshape(-1, x.shape[-1])
    w = w.astype(x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if cpu_products.enabled(x):
        y = cpu_products.matmul(x, w, transposed)
        if rounded:
            y = y.astype(x.dtype)
    elif rounded:
        y = jnp.einsum(_equation(transposed), x, w)
    else:
        y = _matmul_to_float32(x, w, transposed)
    y = y.astype(wide)
    y = y if b is None else y + b.astype(y.dtype)
    return y.reshape(*leading, -1)


def _equation(transposed):
    return "RD,VD->RV" if transposed else "RD,DV->RV"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul_to_float32(x, w, transposed):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(_equation(transposed), x, w, preferred_element_type=wide)


def _matmul_to_float32_forward(x, w, transposed):
    return _matmul_to_float32(x, w, transposed), (x, w)


def _matmul_to_float32_backward(transposed, saved, g):
    # JAX's own rule multiplies the float32 cotangent with the 16-bit factor, at a fraction of the
    # 16-bit speed.
    x, w = saved
    _, vjp = jax.vjp(functools.partial(jnp.einsum, _equation(transposed)), x, w)
    return vjp(g.astype(x.dtype))


_matmul_to_float32.defvjp(_matmul_to_float32_forward, _matmul_to_float32_backward)


def scores(q_XTK, k_XSK, *, decoding=False):
    """Return q k^T for each X, such as each example and head: (X, T, S), in float32 or wider.

    `decoding`: T are few rows. The products of CPUs for training would copy the cache of keys.

    >>> scores(jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4))).shape  # 2 heads, 3 queries and 5 keys
    (2, 3, 5)
    """
    if cpu_products.enabled(q_XTK) and not decoding:
        return cpu_products.matmul(q_XTK, k_XSK, True)
    wide = jnp.promote_types(q_XTK.dtype, jnp.float32)
    product = _over_one_axis if decoding else jnp.einsum
    return product("...TK,...SK->...TS", q_XTK, k_XSK, preferred_element_type=wide)


def weighted_sums(weights_XTS, v_XSK, *, decoding=False):
    """Return the sums of values over S with the given weights, (X, T, K).

    They are multiplied in the dtype of the values. On a CPU bfloat16 values give a float32 result,
    which is not rounded yet. `decoding`: see `scores`.

    >>> weighted_sums(jnp.array([[0.5, 0.5]]), jnp.array([[1.0], [3.0]]))  # the mean of two values
    Array([[2.]], dtype=float32)
    """
    weights_XTS = weights_XTS.astype(v_XSK.dtype)
    if cpu_products.enabled(v_XSK) and not decoding:
        return cpu_products.matmul(weights_XTS, v_XSK, False)
    product = _over_one_axis if decoding else jnp.einsum
    return product("...TS,...SK->...TK", weights_XTS, v_XSK)


def _over_one_axis(equation, a, b, **options):
    """Return the einsum with one axis for all leading ones.

    With more, XLA:CPU copies a cache in each step. In training the axes stay apart: heads may be
    sharded, and would be gathered to be joined with examples.
    """
    x, y = (array.reshape(-1, *array.shape[-2:]) for array in (a, b))
    out = jnp.einsum(equation, x, y, **options)
    return out.reshape(*a.shape[:-2], *out.shape[1:])


def softcap(x, cap):
    """Return cap * tanh(x / cap), in (-cap, cap) and almost x near 0 (Gemma 2, arXiv:2408.00118).

    Args:
        x: logits or attention scores.
        cap: a positive number, or None to return `x`.

    >>> softcap(jnp.array([-1000.0, 0.0, 1000.0]), 10.0)
    Array([-10.,   0.,  10.], dtype=float32)
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
