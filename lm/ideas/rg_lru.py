"""Griffin's recurrent block, a real-gated linear recurrent unit (De et al. 2024, arXiv:2402.19427).

Sections 2.3 and 2.4:

    u = conv(x W_in),   r_t = sigmoid(u_t W_a + b_a),   i_t = sigmoid(u_t W_x + b_x)
    a_t = exp(-8 softplus(L) r_t),   h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t)
    y = (h gelu(x W_gate)) W_out

W_a and W_x are block-diagonal, with a block for each head; the convolution sees 4 positions. The
width is H K, where Griffin's is 4/3 D. L starts such that a_t is uniform in (0.9, 0.999) at r = 1,
in steps of a head's features.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.declarations import bias, small_weight, weight
from lm.layers.feed_forward import gelu
from lm.layers.linear import einsum

KERNEL = 4
SHARPNESS = 8.0
SMALLEST = 1e-12  # of 1 - a^2, whose root has no derivative at 0
SLOWEST = 0.999  # decay at r = 1 of step 0
FASTEST = 0.9


def table(c):
    D = c.d_model
    H = c.n_heads
    K = c.d_head
    return {
        "w_in_DHK": weight(c, (D, H, K), "DHK"),
        "w_gate_DHK": weight(c, (D, H, K), "DHK"),
        "w_conv_JHK": small_weight((KERNEL, H, K), "JHK", "J", batch="HK"),
        "w_a_HKC": weight(c, (H, K, K), "HKC", contract="K", batch="H"),
        "b_a_HK": bias((H, K), "HK"),
        "w_x_HKC": weight(c, (H, K, K), "HKC", contract="K", batch="H"),
        "b_x_HK": bias((H, K), "HK"),
        "decay_K": small_weight((K,), "K"),
        "w_out_HKD": weight(c, (H, K, D), "HKD", contract="HK", residual=True),
    }


def cached(c):
    """Return how many numbers of a token later ones see: none, they see the state."""
    return 0


def products(c, n_keys):
    return 0


def activations(c, n_keys):
    """Eight vectors of the convolution and the gates, and four of the scan, at all its levels."""
    return 12 * c.n_heads * c.d_head


def apply(here, x_BTD):
    p = here.p
    u_BTHK = einsum("BTD,DHK->BTHK", x_BTD, p["w_in_DHK"])
    shape = u_BTHK.shape
    flat_BTC = u_BTHK.reshape(*shape[:-2], -1)
    w_JC = p["w_conv_JHK"].reshape(KERNEL, -1).astype(x_BTD.dtype)
    last_BTJC = here.last("conv", flat_BTC, KERNEL)
    u_BTHK = u_BTHK + jnp.einsum("...JC,JC->...C", last_BTJC, w_JC).reshape(shape)

    r_BTHK = _gate(u_BTHK, p["w_a_HKC"], p["b_a_HK"])
    i_BTHK = _gate(u_BTHK, p["w_x_HKC"], p["b_x_HK"])
    log_a_BTHK = -SHARPNESS * _rates(p["decay_K"]) * r_BTHK
    # expm1 keeps the digits of 1 - a^2 where a is near 1
    scale_BTHK = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a_BTHK), SMALLEST))
    inputs_BTHK = scale_BTHK * i_BTHK * u_BTHK.astype(jnp.float32)
    state_HK = jnp.zeros(shape[-2:], jnp.float32)
    h_BTHK = here.recurrence("state", chunk, state_HK, (log_a_BTHK, inputs_BTHK), shape[-3])
    gate_BTHK = gelu(einsum("BTD,DHK->BTHK", x_BTD, p["w_gate_DHK"]))
    return einsum("BTHK,HKD->BTD", h_BTHK.astype(x_BTD.dtype) * gate_BTHK, p["w_out_HKD"])


def _gate(u_BTHK, w_HKC, b_HK):
    logits_BTHK = jnp.einsum("...HK,HKC->...HC", u_BTHK, w_HKC.astype(u_BTHK.dtype))
    # float32: decays are near 1, where bfloat16 has steps of 1/256
    return jax.nn.sigmoid(logits_BTHK.astype(jnp.float32) + b_HK.astype(jnp.float32))


def _rates(decay_K):
    """Return softplus(L), with L stored as the difference from its values of step 0."""
    decays = np.linspace(FASTEST, SLOWEST, len(decay_K))
    start_K = np.log(np.expm1(-np.log(decays) / SHARPNESS))
    return jax.nn.softplus(decay_K.astype(jnp.float32) + start_K.astype(np.float32))


def chunk(h_HK, inputs, document_T):
    """Return the last state of one text, and the states (T, H, K): a chunk of `Here.recurrence`."""
    log_a_THK, x_THK = inputs
    document_T11 = document_T[:, None, None]

    def join(earlier, later):  # two ranges of positions
        a, x, document = earlier
        b, y, later_document = later
        # a + b is read where both are of one document only.
        x_later = jnp.where(document == later_document, jnp.exp(b) * x, 0)
        return a + b, x_later + y, later_document

    log_THK, h_THK, _ = jax.lax.associative_scan(join, (log_a_THK, x_THK, document_T11))
    # the state before the chunk is of the document of number 0
    h_THK += jnp.where(document_T11 == 0, jnp.exp(log_THK) * h_HK, 0)
    return h_THK[-1], h_THK
