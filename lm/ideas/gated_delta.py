"""Gated DeltaNet in place of the softmax of attention (Yang et al. 2024, arXiv:2412.06464).

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,   o_t = norm(S_t^T q_t)

Queries and keys are those of attention, divided by their L2 norm. Each head and token has a decay
and a strength of writing, a = exp(-exp(A) softplus(x W_a + d)) and b = sigmoid(x W_b), in (0, 1). A
and d start as in Mamba-2. Short convolutions are conv_keys and conv_values, and the gate after the
norm is attn_gate. Unlike the paper's layer, this one has no convolution of queries and no SiLU
after the convolutions, and its gate is a sigmoid. Other code (fla, Qwen3-Next) divides queries by
sqrt(K), too, which the norm of the output undoes but for its eps.

all            in every layer
three_of_four  every fourth layer has softmax attention (Qwen3-Next; Kimi Linear, arXiv:2510.26692)
"""

import jax
import jax.numpy as jnp

from lm.declarations import gain, small_weight, weight
from lm.layers.linear import einsum
from lm.layers.norms import rms_norm
from lm.layers.recomputed import recomputed

CHUNK = 64  # positions that are computed together


def layers(c):
    if c.gated_delta == "all":
        return range(c.n_layers)
    return tuple(layer for layer in range(c.n_layers) if layer % 4 != 3)


def table(c):
    H = c.n_heads
    K = c.d_head
    return {
        "w_decay_DH": weight(c, (c.d_model, H), "DH"),
        "w_write_DH": weight(c, (c.d_model, H), "DH"),
        "decay_log_H": small_weight((H,), "H", init="log_of_uniform_1_16"),
        "decay_step_H": small_weight((H,), "H", init="inverse_softplus_of_step"),
        "delta_scale_K": gain((K,), "K"),
    }


def cached(c):
    """Return how many numbers of a token later ones see: none, they see the state."""
    return 0


def products(c, n_keys):
    """Three products with the state, four of pairs of positions, and `inverse`; see `chunk`."""
    return c.n_heads * (c.d_head * (3 * c.d_head + 4 * CHUNK) + (CHUNK**2 - 1) / 3)


def activations(c, n_keys):
    """Queries, keys and outputs before and after their norms, values, and a state per chunk."""
    return c.n_heads * c.d_head * (7 + c.d_head / CHUNK)


def apply(here, qkv):
    c = here.c
    p = here.p
    # The state is a sum over the text, so the whole recurrence is in float32.
    q_BTHK, k_BTHK, v_BTHK = (
        jnp.repeat(x.astype(jnp.float32), c.n_heads // x.shape[-2], axis=-2) for x in qkv
    )
    decay_BTH = einsum("BTD,DH->BTH", here.x_BTD, p["w_decay_DH"]).astype(jnp.float32)
    write_BTH = einsum("BTD,DH->BTH", here.x_BTD, p["w_write_DH"]).astype(jnp.float32)
    step_BTH = jax.nn.softplus(decay_BTH + p["decay_step_H"].astype(jnp.float32))
    log_a_BTH = -jnp.exp(p["decay_log_H"].astype(jnp.float32)) * step_BTH
    inputs = unit(q_BTHK), unit(k_BTHK), v_BTHK, log_a_BTH, jax.nn.sigmoid(write_BTH)
    # keeps inputs and states only
    chunk_of_heads = recomputed(jax.vmap(chunk, in_axes=(0, 1, None), out_axes=(0, 1)))
    S_HKV = jnp.zeros((c.n_heads, c.d_head, c.d_head))
    o_BTHK = here.recurrence("delta", chunk_of_heads, S_HKV, inputs, CHUNK)
    return rms_norm(o_BTHK, p["delta_scale_K"], eps=c.norm_eps).astype(qkv[0].dtype)


def unit(x_BTHK):
    """Return vectors divided by their L2 norm; a vector of 0 stays 0."""
    return x_BTHK * jax.lax.rsqrt(jnp.sum(x_BTHK * x_BTHK, axis=-1, keepdims=True) + 1e-6)


def chunk(S_KV, inputs, document_T):
    """Return the state after T positions of one head, and the outputs (T, V) of `Here.recurrence`.

    Position t writes k_t u_t^T. With g, the running sum of log a in a document, the T steps are a
    system of equations for u:

        u_t + sum over s < t of b_t exp(g_t - g_s) (k_t . k_s) u_s = b_t (v_t - exp(g_t) S_0^T k_t)

    Args:
        S_KV: the state before the first position.
        inputs: q, k (T, K), v (T, V), log a and b (T,).
        document_T: the document of each position; 0: that of the state.
    """
    q_TK, k_TK, v_TV, log_a_T, b_T = inputs
    seen_TS = jnp.tri(len(b_T), dtype=bool) & (document_T[:, None] == document_T)
    g_T = jnp.sum(jnp.where(seen_TS, log_a_T, 0), axis=1)
    b_T1 = b_T[:, None]
    # masked before exp, which could overflow
    decay_TS = jnp.exp(jnp.where(seen_TS, g_T[:, None] - g_T, -jnp.inf))
    decay_T1 = jnp.where(document_T == 0, jnp.exp(g_T), 0)[:, None]
    system_TS = b_T1 * decay_TS * (k_TK @ k_TK.T)  # below the diagonal, which is 1
    u_TV = inverse(system_TS) @ (b_T1 * (v_TV - decay_T1 * (k_TK @ S_KV)))
    o_TV = decay_T1 * (q_TK @ S_KV) + (decay_TS * (q_TK @ k_TK.T)) @ u_TV
    return decay_T1[-1] * S_KV + (decay_TS[-1][:, None] * k_TK).T @ u_TV, o_TV


def inverse(L_TS):
    """Return (I + L)^-1 of the part of L below its diagonal; the rest is not read.

    Pairs of diagonal blocks are joined: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    This is as exact as substitution, which takes T steps one after the other, and is slow on all
    platforms for many small matrices.

    >>> inverse(jnp.array([[9.0, 9, 9], [2, 9, 9], [0, 3, 9]])).astype(int)
    Array([[ 1,  0,  0],
           [-2,  1,  0],
           [ 6, -3,  1]], dtype=int32)
    """
    T = len(L_TS)
    n_rows = 1 << (T - 1).bit_length()  # a power of 2, so that all blocks have partners
    L_TS = jnp.pad(L_TS, (0, n_rows - T))
    blocks_NIO = jnp.ones((n_rows, 1, 1), L_TS.dtype)
    size = 1
    while size < n_rows:
        a_NIO = blocks_NIO[0::2]
        b_NIO = blocks_NIO[1::2]
        n = len(a_NIO)
        # rows and columns of the same pair of blocks
        own = jnp.eye(n, dtype=bool)[:, None, :, None]
        pairs = L_TS.reshape(n, 2 * size, n, 2 * size)
        c_NIO = jnp.sum(jnp.where(own, pairs[:, size:, :, :size], 0), axis=2)
        # Results are factors of the next size, so these may not be rounded to bfloat16 or TF32.
        c_NIO = jnp.matmul(b_NIO, c_NIO, precision="highest")
        c_NIO = jnp.matmul(c_NIO, a_NIO, precision="highest")
        above_NIO = jnp.concatenate([a_NIO, 0 * a_NIO], axis=2)
        below_NIO = jnp.concatenate([-c_NIO, b_NIO], axis=2)
        blocks_NIO = jnp.concatenate([above_NIO, below_NIO], axis=1)
        size *= 2
    return blocks_NIO[0, :T, :T]
