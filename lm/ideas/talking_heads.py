"""Talking heads: scores, and then weights, of each head are sums over those of all heads.

Shazeer et al. 2020, arXiv:2003.02436:

    J_h = sum_i (q_i k_i^T / sqrt(K)) A_ih,   W_h = softmax(J_h),   o_h = sum_i W_i B_ih v_h

A = B = I at step 0: the model starts as the one without it. What is stored is the difference from
I. Every score exists at once, as no fused kernel mixes heads.
"""

import jax
import jax.numpy as jnp

from lm.declarations import small_weight, weight
from lm.layers.linear import einsum
from lm.layers.position_encodings import apply_rope


def table(c):
    D = c.d_model
    H = c.n_heads
    G = c.n_kv_heads
    K = c.d_head
    return {
        "w_q_DHK": weight(c, (D, H, K), "DHK"),
        "w_k_DGK": weight(c, (D, G, K), "DGK"),
        "w_v_DGK": weight(c, (D, G, K), "DGK"),
        "w_o_HKD": weight(c, (H, K, D), "HKD", contract="HK", residual=True),
        "w_scores_HC": small_weight((H, H), "HC"),
        "w_weights_HC": small_weight((H, H), "HC"),
    }


def same_at_start(c):
    """Of attention with the same weights."""
    return True


def products(c, n_keys):
    """Scores and means of values, and the two sums over heads."""
    return 2 * c.n_heads * (c.d_head + c.n_heads) * n_keys


def activations(c, n_keys):
    """Scores before and after their mixing, and weights likewise."""
    return 4 * c.n_heads * n_keys


def products_kept(c, n_keys):
    """Mixed scores and weights, as their products have no batch: remat = dots keeps them."""
    return 2 * c.n_heads * n_keys


def apply(here, x_BTD):
    c = here.c
    p = here.p
    q_BTHK = einsum("BTD,DHK->BTHK", x_BTD, p["w_q_DHK"])
    k_BTGK = einsum("BTD,DGK->BTGK", x_BTD, p["w_k_DGK"])
    v_BTGK = einsum("BTD,DGK->BTGK", x_BTD, p["w_v_DGK"])
    rotation = here.rotation_of_layer()
    if rotation is not None:
        q_BTHK = apply_rope(q_BTHK, *rotation, pairing=c.rope_pairing)
        k_BTGK = apply_rope(k_BTGK, *rotation, pairing=c.rope_pairing)
    k_BSGK, mask = here.earlier("k", k_BTGK, window=here.window())
    v_BSGK, _ = here.earlier("v", v_BTGK, window=here.window())
    n_shared = c.n_heads // c.n_kv_heads
    k_BSHK = jnp.repeat(k_BSGK, n_shared, axis=-2)
    v_BSHK = jnp.repeat(v_BSGK, n_shared, axis=-2)

    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    scores_BHTS = jnp.einsum("...THK,...SHK->...HTS", q_BTHK, k_BSHK, preferred_element_type=wide)
    scores_BHTS = _mixed(scores_BHTS * c.d_head**-0.5, p["w_scores_HC"])
    scores_BHTS = here.tap("scores", scores_BHTS)
    visible_BTS = mask.visible()[..., None, :, :]
    # not -inf, which would be NaN where padding sees no key
    weights_BHTS = jax.nn.softmax(jnp.where(visible_BTS, scores_BHTS, jnp.finfo(wide).min))
    weights_BHTS = _mixed(weights_BHTS, p["w_weights_HC"]).astype(v_BSHK.dtype)
    o_BTHK = jnp.einsum("...HTS,...SHK->...THK", weights_BHTS, v_BSHK)
    return einsum("BTHK,HKD->BTD", here.tap("heads", o_BTHK), p["w_o_HKD"])


def _mixed(x_BHTS, w_HC):
    """Return x (I + w) over heads."""
    return x_BHTS + jnp.einsum("...HTS,HC->...CTS", x_BHTS, w_HC.astype(x_BHTS.dtype))
