"""Products with weights: the one seam where precision and device tricks live."""

import functools

import jax
import jax.numpy as jnp


def einsum(equation, x, w, b=None, *, dtype=None):
    """Contracts activations `x` with a weight `w`, multiplying in the dtype of `x`, and adds a bias `b` where given.

    The weight is cast to `x.dtype` (mixed precision keeps float32 weights and bfloat16 activations); its gradient
    comes back in its own dtype. Every backend accumulates such a product in float32 and rounds once, at the end.

    dtype: of the result. None means `x.dtype`; float32 keeps the accumulator unrounded, which logits need: a
        bfloat16 logit of 10 is rounded to a multiple of 1/16. The products of the backward pass still multiply in
        `x.dtype`.
    """
    w = w.astype(x.dtype)
    # One leading axis: XLA:CPU makes transposed copies to sum a weight's gradient over two, and half the speed.
    leading = x.shape[: x.ndim - len(equation.split(",")[0].removeprefix("..."))]
    x = x.reshape(-1, *x.shape[len(leading) :]) if leading else x
    wide = dtype is not None and dtype != x.dtype
    y = _wide_einsum(equation, dtype, x, w) if wide else jnp.einsum(equation, x, w)
    y = y.reshape(*leading, *y.shape[1:]) if leading else y
    return y if b is None else y + b.astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_einsum(equation, dtype, x, w):
    return jnp.einsum(equation, x, w, preferred_element_type=dtype)


def _wide_einsum_forward(equation, dtype, x, w):
    return _wide_einsum(equation, dtype, x, w), (x, w)


def _wide_einsum_backward(equation, dtype, saved, g):
    # JAX's own rule would multiply a float32 cotangent with the other operand, at a fraction of the 16-bit speed.
    x, w = saved
    _, vjp = jax.vjp(functools.partial(jnp.einsum, equation), x, w)
    return vjp(g.astype(x.dtype))


_wide_einsum.defvjp(_wide_einsum_forward, _wide_einsum_backward)


def softcap(x, cap):
    """cap * tanh(x / cap): keeps logits within (-cap, cap), almost unchanged near 0 (Gemma 2, arXiv:2408.00118,
    section 2).

    cap: a positive number, or None for no cap.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
