"""Latent attention: keys and values of all heads are made of one narrow vector of each token.

DeepSeek-V2, arXiv:2405.04434, section 2.1:

    c = RMSNorm(x W_down),   k_h = [c W_k,h ; k_r],   v_h = c W_v,h,   q_h = x W_q,h

A cache holds c and k_r, one rotated key that all heads share: R + P numbers of a token, where
attention holds 2 H K. Queries end in P features for k_r, rotated, too. Queries have no narrow
vector, as in DeepSeek-V2-Lite.

In decoding, W_k is applied to the query and W_v to the weighted mean of c ("absorbed"). So no key
or value of an earlier token is made again.
"""

import math

import jax.numpy as jnp

from lm.declarations import gain, weight
from lm.layers.attention import causal_attention
from lm.layers.linear import einsum
from lm.layers.norms import rms_norm
from lm.layers.position_encodings import apply_rope, rope_table


def widths(c) -> tuple[int, int]:
    """Return R, the width of c, and P, that of the rotated features: half of a head."""
    R = c.latent_width or 4 * c.d_head
    P = 2 * max(1, c.d_head // 4)  # even: features are rotated in pairs
    return R, P


def table(c):
    D = c.d_model
    H = c.n_heads
    K = c.d_head
    R, P = widths(c)
    return {
        "w_q_DHC": weight(c, (D, H, K + P), "DHC"),
        "w_down_DC": weight(c, (D, R + P), "DC"),
        "latent_scale_R": gain((R,), "R"),
        "w_k_RHK": weight(c, (R, H, K), "RHK", contract="R"),
        "w_v_RHK": weight(c, (R, H, K), "RHK", contract="R"),
        "w_o_HKD": weight(c, (H, K, D), "HKD", contract="HK", residual=True),
    }


def cached(c):
    """Return how many numbers of a token a cache holds, which devices of a sequence exchange."""
    return sum(widths(c))


def query_width(c):
    return c.d_head + widths(c)[1]


def activations(c, n_keys):
    """Keys and values of all heads, and what the cache holds, in the dtype of products.

    The outputs of products with weights are counted where all are.
    """
    R, P = widths(c)
    return (2 * c.n_heads * query_width(c) + R + P) * jnp.dtype(c.compute_dtype).itemsize / 4


def products(c, n_keys):
    """Values are padded to the width of keys, for kernels that need equal widths."""
    return 2 * c.n_heads * query_width(c) * n_keys


def apply(here, x_BTD):
    c = here.c
    p = here.p
    R, P = widths(c)
    q_BTHC = einsum("BTD,DHC->BTHC", x_BTD, p["w_q_DHC"])
    down_BTC = einsum("BTD,DC->BTC", x_BTD, p["w_down_DC"])
    c_BTR = rms_norm(down_BTC[..., :R], p["latent_scale_R"], eps=c.norm_eps)
    q_BTHK = q_BTHC[..., : c.d_head]
    q_BTHP = q_BTHC[..., c.d_head :]
    k_BTP = down_BTC[..., R:]
    if c.positions == "rope":
        rotation = rope_table(here.positions, P, theta=c.rope_theta)
        q_BTHP = apply_rope(q_BTHP, *rotation, pairing=c.rope_pairing)
        k_BTP = apply_rope(k_BTP[..., None, :], *rotation, pairing=c.rope_pairing)[..., 0, :]

    kept_BTC = jnp.concatenate([c_BTR, k_BTP], axis=-1)
    kept_BSC, mask = here.earlier("latent", kept_BTC, window=here.window())
    c_BSR = kept_BSC[..., :R]
    k_BSP = kept_BSC[..., R:]
    options = {"scale": 1 / math.sqrt(query_width(c)), "implementation": c.attention}
    if x_BTD.shape[-2] == 1:  # decoding
        q_BTHR = jnp.einsum("...HK,RHK->...HR", q_BTHK, p["w_k_RHK"].astype(q_BTHK.dtype))
        q_BTHC = jnp.concatenate([q_BTHR, q_BTHP], axis=-1)
        k_BS1C = kept_BSC[..., None, :]
        v_BS1C = _padded(c_BSR[..., None, :], P)
        mean_BTHR = causal_attention(q_BTHC, k_BS1C, v_BS1C, mask, **options)[..., :R]
        o_BTHK = jnp.einsum("...HR,RHK->...HK", mean_BTHR, p["w_v_RHK"].astype(x_BTD.dtype))
    else:
        q_BTHC = jnp.concatenate([q_BTHK, q_BTHP], axis=-1)
        k_BSHK = einsum("BTR,RHK->BTHK", c_BSR, p["w_k_RHK"])
        k_BSHP = jnp.broadcast_to(k_BSP[..., None, :], (*k_BSHK.shape[:-1], P))
        k_BSHC = jnp.concatenate([k_BSHK, k_BSHP], axis=-1)
        v_BSHC = _padded(einsum("BTR,RHK->BTHK", c_BSR, p["w_v_RHK"]), P)
        o_BTHK = causal_attention(q_BTHC, k_BSHC, v_BSHC, mask, **options)[..., : c.d_head]
    return einsum("BTHK,HKD->BTD", here.tap("heads", o_BTHK), p["w_o_HKD"])


def _padded(x, n: int):
    """Return x with n zeros after its last features."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n)])
