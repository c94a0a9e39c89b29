"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321).

Algorithm 3:

    g' = q_l^T g q_r,   m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g'^2
    w <- w - rate q_l [(q_l^T m q_r) / (sqrt(v) + eps)] q_r^T,   with Adam's bias corrections
    l <- b2 l + (1 - b2) g g^T,   r <- b2 r + (1 - b2) g^T g
    every soap_every steps: q_l <- QR(l q_l), q_r <- QR(r q_r)

As in the authors' code, the first step has no update: q_l and q_r become the eigenvectors of the
first l and r. Weight decay, which all rules here share, applies in that step, too; their code skips
all of it. Their code also sorts the columns of q before QR; the paper does not, and this file
follows the paper. The paper rotates one side of the embeddings and of the head; here AdamW updates
both.

The basis of directions without any gradient is arbitrary, so results depend on rounding where the
first gradient of a matrix does not have full rank. A matrix has 2 I^2 + 2 O^2 numbers of state
beside Adam's 2 I O, which all devices hold.
"""

import functools

import jax
import jax.numpy as jnp

from lm.config import OptimizerConfig
from lm.update_rules.matrices import MatrixRule, Step


def init(w_NIO) -> dict:
    n, n_in, n_out = w_NIO.shape
    dtype = jnp.promote_types(w_NIO.dtype, jnp.float32)  # LAPACK has no 16 bits
    return {
        "momentum": jnp.zeros_like(w_NIO, dtype),
        "mean_square": jnp.zeros_like(w_NIO, dtype),
        "left": jnp.zeros((n, n_in, n_in), dtype),
        "right": jnp.zeros((n, n_out, n_out), dtype),
        "q_left": jnp.zeros((n, n_in, n_in), dtype),
        "q_right": jnp.zeros((n, n_out, n_out), dtype),
    }


def update(o: OptimizerConfig, g_NIO, state: dict, w_NIO, step: Step):
    return step.whole(functools.partial(_update, o))(g_NIO, state, step.rate, step.count)


def _update(o: OptimizerConfig, g_NIO, state: dict, rate, count):
    g_NIO = g_NIO.astype(state["momentum"].dtype)
    q_l = state["q_left"]
    q_r = state["q_right"]
    first = count == 0
    m_NIO = o.b1 * state["momentum"] + (1 - o.b1) * g_NIO
    v_NIO = o.b2 * state["mean_square"] + (1 - o.b2) * (q_l.mT @ g_NIO @ q_r) ** 2
    n_before = jnp.maximum(count, 1)  # updates of the moments; the first step is not counted
    m_hat = (q_l.mT @ m_NIO @ q_r) / (1 - o.b1**n_before)
    v_hat = v_NIO / (1 - o.b2**n_before)
    u_NIO = q_l @ (m_hat / (jnp.sqrt(v_hat) + o.eps)) @ q_r.mT
    new = {"momentum": m_NIO, "mean_square": v_NIO}
    # Moments start in the second step, whose basis the first one finds.
    new = jax.tree.map(lambda x: jnp.where(first, 0, x), new)
    grams = {"left": g_NIO @ g_NIO.mT, "right": g_NIO.mT @ g_NIO}
    due = count % o.soap_every == 0
    for name, gram in grams.items():
        new[name] = o.b2 * state[name] + (1 - o.b2) * gram
        new[f"q_{name}"] = rotated(new[name], state[f"q_{name}"], first, due)
    return jnp.where(first, 0, -rate * u_NIO), new


def rotated(l_NII, q_NII, first, due):
    """Return the eigenvectors of l, after the first step by one step of power iteration.

    The first step sorts them by descending eigenvalue. One matrix at a time: on CPUs, LAPACK's
    calls for a batch wait for each other for ever if every thread makes one.
    """

    def eigenvectors():
        # eigh sorts them by ascending eigenvalue
        return jax.lax.map(lambda l_II: jnp.linalg.eigh(l_II)[1][:, ::-1], l_NII)

    def power_step():
        return jax.lax.map(lambda x_II: jnp.linalg.qr(x_II)[0], l_NII @ q_NII)

    def later():
        return jax.lax.cond(due, power_step, lambda: q_NII)

    return jax.lax.cond(first, eigenvectors, later)


SOAP = MatrixRule(init, update)
