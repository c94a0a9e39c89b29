"""Kimi delta attention: the gated delta rule with a decay of each feature of the keys.

Kimi Team 2025 (arXiv:2510.26692), equation 1 and section 4:

    S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T,   o_t = S_t^T q_t
    y = W_o (sigmoid(W_gate x) * norm(o))

q, k and v are silu(conv(x W)), with a convolution over 4 positions; q and k are divided by their L2
norm. b = sigmoid(x W_write), and a = exp(-exp(A) softplus(x W_decay + d)) with A and d as in
`gated_delta`, d for each feature. W_decay and W_gate are products of two matrices of rank K. The
convolution starts as the identity, from zeros. Kimi Linear has mixers=(kda,kda,kda,latent).
"""

import jax
import jax.numpy as jnp

from lm.declarations import gain, small_weight, weight
from lm.ideas.gated_delta import inverse, unit
from lm.layers.linear import einsum
from lm.layers.norms import rms_norm
from lm.layers.recomputed import recomputed

CHUNK = 16  # positions that are computed together; each pair of them has K decays
KERNEL = 4


def table(c):
    D = c.d_model
    H = c.n_heads
    K = c.d_head
    return {
        "w_q_DHK": weight(c, (D, H, K), "DHK"),
        "w_k_DHK": weight(c, (D, H, K), "DHK"),
        "w_v_DHK": weight(c, (D, H, K), "DHK"),
        "w_conv_JCHK": small_weight((KERNEL, 3, H, K), "JCHK", "J", batch="CHK"),
        "w_write_DH": weight(c, (D, H), "DH"),
        "w_decay_DC": weight(c, (D, K), "DC"),
        "w_decay_CHK": weight(c, (K, H, K), "CHK", contract="C"),
        "decay_log_H": small_weight((H,), "H", init="log_of_uniform_1_16"),
        "decay_step_HK": small_weight((H, K), "HK", init="inverse_softplus_of_step"),
        "w_gate_DC": weight(c, (D, K), "DC"),
        "w_gate_CHK": weight(c, (K, H, K), "CHK", contract="C"),
        "scale_K": gain((K,), "K"),
        "w_o_HKD": weight(c, (H, K, D), "HKD", contract="HK", residual=True),
    }


def cached(c):
    """Return how many numbers of a token later ones see: none, they see the state."""
    return 0


def products(c, n_keys):
    """Three products with the state, four of pairs of positions, and `inverse`; see `chunk`."""
    return c.n_heads * (c.d_head * (3 * c.d_head + 4 * CHUNK) + (CHUNK**2 - 1) / 3)


def activations(c, n_keys):
    """Three vectors before and after the convolution, SiLU and norms; decays, outputs, states."""
    return c.n_heads * c.d_head * (18 + c.d_head / CHUNK)


def apply(here, x_BTD):
    c = here.c
    p = here.p
    with jax.named_scope("queries_keys_values"):
        q_BTHK = einsum("BTD,DHK->BTHK", x_BTD, p["w_q_DHK"])
        k_BTHK = einsum("BTD,DHK->BTHK", x_BTD, p["w_k_DHK"])
        v_BTHK = einsum("BTD,DHK->BTHK", x_BTD, p["w_v_DHK"])
        # side by side: one convolution, and one cache of its last positions
        x_BTCHK = jnp.stack([q_BTHK, k_BTHK, v_BTHK], axis=-3)
        last_BTJX = here.last("conv", x_BTCHK.reshape(*x_BTD.shape[:-1], -1), KERNEL)
        w_JX = p["w_conv_JCHK"].reshape(KERNEL, -1).astype(x_BTD.dtype)
        conv_BTX = jnp.einsum("...JX,JX->...X", last_BTJX, w_JX)
        x_BTCHK = jax.nn.silu(x_BTCHK + conv_BTX.reshape(x_BTCHK.shape)).astype(jnp.float32)
        q_BTHK, k_BTHK, v_BTHK = (x_BTCHK[..., i, :, :] for i in range(3))
    with jax.named_scope("decay_and_write"):
        decay_BTHK = _of_low_rank(x_BTD, p, "w_decay").astype(jnp.float32)
        step_BTHK = jax.nn.softplus(decay_BTHK + p["decay_step_HK"].astype(jnp.float32))
        log_a_BTHK = -jnp.exp(p["decay_log_H"].astype(jnp.float32))[:, None] * step_BTHK
        b_BTH = jax.nn.sigmoid(einsum("BTD,DH->BTH", x_BTD, p["w_write_DH"]).astype(jnp.float32))
    inputs = unit(q_BTHK), unit(k_BTHK), v_BTHK, log_a_BTHK, b_BTH
    # keeps inputs and states only
    chunk_of_heads = recomputed(jax.vmap(chunk, in_axes=(0, 1, None), out_axes=(0, 1)))
    S_HKV = jnp.zeros((c.n_heads, c.d_head, c.d_head))
    o_BTHK = here.recurrence("delta", chunk_of_heads, S_HKV, inputs, CHUNK)
    o_BTHK = rms_norm(o_BTHK, p["scale_K"], eps=c.norm_eps).astype(x_BTD.dtype)
    gate_BTHK = jax.nn.sigmoid(_of_low_rank(x_BTD, p, "w_gate"))
    return einsum("BTHK,HKD->BTD", gate_BTHK * o_BTHK, p["w_o_HKD"])


def _of_low_rank(x_BTD, p, name: str):
    x_BTC = einsum("BTD,DC->BTC", x_BTD, p[f"{name}_DC"])
    return einsum("BTC,CHK->BTHK", x_BTC, p[f"{name}_CHK"])


def chunk(S_KV, inputs, document_T):
    """Return the state after T positions of one head, and the outputs (T, V) of `Here.recurrence`.

    As in `gated_delta.chunk`, position t writes k_t u_t^T. With g, the running sum of log a in a
    document, the T steps are a system of equations for u:

        u_t + sum over s < t of b_t (k_t . exp(g_t - g_s) k_s) u_s = b_t (v_t - S_0^T exp(g_t) k_t)

    Args:
        S_KV: the state before the first position.
        inputs: q, k, log a (T, K), v (T, V), b (T,).
        document_T: the document of each position; 0: that of the state.
    """
    q_TK, k_TK, v_TV, log_a_TK, b_T = inputs
    b_T1 = b_T[:, None]
    seen_TS = jnp.tri(len(b_T), dtype=bool) & (document_T[:, None] == document_T)
    seen_TS1 = seen_TS[..., None]
    g_TK = jnp.sum(jnp.where(seen_TS1, log_a_TK, 0), axis=1)
    # masked before exp, which could overflow
    decay_TSK = jnp.exp(jnp.where(seen_TS1, g_TK[:, None] - g_TK, -jnp.inf))
    decay_TK = jnp.where(document_T[:, None] == 0, jnp.exp(g_TK), 0)  # of the state
    keys_TSK = decay_TSK * k_TK
    system_TS = b_T1 * jnp.einsum("TSK,TK->TS", keys_TSK, k_TK)  # below the diagonal, which is 1
    u_TV = inverse(system_TS) @ (b_T1 * (v_TV - (decay_TK * k_TK) @ S_KV))
    o_TV = (decay_TK * q_TK) @ S_KV + jnp.einsum("TSK,TK->TS", keys_TSK, q_TK) @ u_TV
    return decay_TK[-1][:, None] * S_KV + keys_TSK[-1].T @ u_TV, o_TV
