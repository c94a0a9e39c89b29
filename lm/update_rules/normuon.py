"""NorMuon: Muon with an adaptive rate for each output (Li et al. 2025, arXiv:2510.05491).

Algorithm 1:

    m <- beta m + (1 - beta) g,   u = NS(m)
    v <- b2 v + (1 - b2) mean of u^2 over the inputs of an output
    d = u / (sqrt(v) + eps),   w <- w - 0.2 rate sqrt(I O) d / |d|

So an update has a root mean square of 0.2, like Adam's. The authors' code differs from the paper:
it uses Nesterov's momentum, and gives d the norm of u. The paper is followed.
"""

import jax.numpy as jnp

from lm.config import OptimizerConfig
from lm.update_rules.matrices import MatrixRule, Step, norm
from lm.update_rules.muon import orthogonalize


def init(w_NIO) -> dict:
    return {"momentum": jnp.zeros_like(w_NIO), "mean_square": jnp.zeros_like(w_NIO[:, :1])}


def update(o: OptimizerConfig, g_NIO, state: dict, w_NIO, step: Step):
    m_NIO = o.muon_beta * state["momentum"] + (1 - o.muon_beta) * g_NIO
    u_NIO = step.whole(orthogonalize)(m_NIO)
    mean_square_N1O = jnp.mean(u_NIO**2, axis=1, keepdims=True)
    v_N1O = o.b2 * state["mean_square"] + (1 - o.b2) * mean_square_N1O
    d_NIO = u_NIO / (jnp.sqrt(v_N1O) + o.eps)
    n_in, n_out = w_NIO.shape[1:]
    scale_N11 = 0.2 * (n_in * n_out) ** 0.5 / (norm(d_NIO) + o.eps)
    return -step.rate * scale_N11 * d_NIO, {"momentum": m_NIO, "mean_square": v_N1O}


NORMUON = MatrixRule(init, update)
