"""Muon: momentum, orthogonalized (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    m <- beta m + (1 - beta) g,   u = (1 - beta) g + beta m (Nesterov) or m,   w <- w - rate s NS(u)

with s = sqrt(max(1, O / I)) as in the author's code, which has neither a bias correction nor, here,
bfloat16. The spectral norm of an update does not depend on the width, as muP requires (Yang et al.
2023, arXiv:2310.17813).
"""

import jax.numpy as jnp

from lm.config import OptimizerConfig
from lm.update_rules.matrices import MatrixRule, Step, norm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalize(x_NIO):
    """Return U S V^T for x = U D V^T, with all S near 1.

    Five Newton-Schulz steps of Jordan's polynomial. Most S are within 0.7 and 1.2; those of small D
    stay smaller.
    """
    a, b, c = COEFFICIENTS
    tall = x_NIO.shape[-2] > x_NIO.shape[-1]
    x = x_NIO.mT if tall else x_NIO  # the products with x x^T are then the smaller ones
    # The steps converge from singular values of at most 1, and these are at most the norm.
    x = (x / (norm(x) + EPS)).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def init(w_NIO) -> dict:
    return {"momentum": jnp.zeros_like(w_NIO)}


def direction(o: OptimizerConfig, g_NIO, state: dict, step: Step):
    """Return the orthogonalized momentum, and the state."""
    beta = o.muon_beta
    m_NIO = beta * state["momentum"] + (1 - beta) * g_NIO
    u_NIO = (1 - beta) * g_NIO + beta * m_NIO if o.nesterov else m_NIO
    return step.whole(orthogonalize)(u_NIO), {"momentum": m_NIO}


def update(o: OptimizerConfig, g_NIO, state: dict, w_NIO, step: Step):
    u_NIO, state = direction(o, g_NIO, state, step)
    n_in, n_out = w_NIO.shape[-2:]
    return -step.rate * max(1, n_out / n_in) ** 0.5 * u_NIO, state


MUON = MatrixRule(init, update)
