"""Feed-forward layers: activations, the MLP, and the gated linear units."""

import functools

import jax
import jax.numpy as jnp

from lm.layers.linear import einsum


def relu(x):
    """max(x, 0), with gradient 0 at 0 (that of jnp.maximum is 1/2 there)."""
    return jax.nn.relu(x)


def silu(x):
    """x sigmoid(x), also called swish (Elfwing et al. 2017, arXiv:1702.03118)."""
    return jax.nn.silu(x)


def gelu(x, *, approximate=False):
    """x Phi(x), Phi the normal distribution function (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    approximate: the paper's tanh form, which GPT-2 uses. The exact erf form is the default here and in PyTorch;
    JAX's own default is the tanh form.
    """
    return jax.nn.gelu(x, approximate=approximate)


def relu_squared(x):
    """max(x, 0)^2 (So et al. 2021, Primer, arXiv:2109.08668)."""
    return jnp.square(relu(x))


ACTIVATIONS = {
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate=True),
    "relu_squared": relu_squared,
}


def mlp(x, w_in, w_out, *, activation, b_in=None, b_out=None):
    """activation(x w_in + b_in) w_out + b_out.

    x: (..., D); w_in: (D, F); w_out: (F, D); b_in: (F,) or None; b_out: (D,) or None. Returns (..., D).
    activation: a name in ACTIVATIONS, or a function.
    """
    hidden = _activate(activation, einsum("...D,DF->...F", x, w_in, b_in))
    return einsum("...F,FD->...D", hidden, w_out, b_out)


def glu(x, w_gate, w_up, w_down, *, activation, b_gate=None, b_up=None, b_down=None):
    """(activation(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down (Shazeer 2020, arXiv:2002.05202, section 2).

    x: (..., D); w_gate, w_up: (D, F); w_down: (F, D); b_gate, b_up: (F,) or None; b_down: (D,) or None.
    Returns (..., D).
    activation: a name in ACTIVATIONS, or a function.
    """
    gate = _activate(activation, einsum("...D,DF->...F", x, w_gate, b_gate))
    return einsum("...F,FD->...D", gate * einsum("...D,DF->...F", x, w_up, b_up), w_down, b_down)


swiglu = functools.partial(glu, activation=silu)
geglu = functools.partial(glu, activation=gelu)


def default_d_ff(d_model, kind):
    """The usual hidden width: 4 d_model for an "mlp"; for a "glu" 8/3 d_model, the same number of weights in three
    matrices instead of two, rounded to the nearest multiple of 64 and at least 64 (1344 at d_model 512)."""
    if kind == "mlp":
        return 4 * d_model
    if kind == "glu":
        return max(64, (8 * d_model + 96) // 192 * 64)  # floor(8 d / 3 / 64 + 1/2) * 64 in integers
    raise ValueError(f"default_d_ff: kind is {kind!r}; expected 'mlp' or 'glu'")


def _activate(activation, x):
    function = activation if callable(activation) else ACTIVATIONS.get(activation)
    if function is None:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    if jax.default_backend() == "cpu":  # XLA:CPU rounds 16 bits after every operation, which takes twice as long
        return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
    return function(x)
