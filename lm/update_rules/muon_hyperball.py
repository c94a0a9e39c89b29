"""MuonH: Muon on a sphere (Wen et al. 2026, "Hyperball", arXiv:2606.16899).

    w <- R n(w - rate R n(u)),   n(x) = x / |x|,   R = |w_0|

with Muon's orthogonalized momentum u and the Frobenius norm of each matrix. So the rate is the
relative size of an update, at any width, and weight decay would have no effect: there is none. A
matrix that starts at 0 has no sphere, and is updated by AdamW.
"""

from lm.config import OptimizerConfig
from lm.update_rules import muon
from lm.update_rules.matrices import MatrixRule, Step, norm


def init(w_NIO) -> dict:
    return muon.init(w_NIO) | {"radius": norm(w_NIO)}


def update(o: OptimizerConfig, g_NIO, state: dict, w_NIO, step: Step):
    u_NIO, momentum = muon.direction(o, g_NIO, state, step)
    radius_N11 = state["radius"]
    moved_NIO = w_NIO - step.rate * radius_N11 * u_NIO / (norm(u_NIO) + muon.EPS)
    return radius_N11 * moved_NIO / norm(moved_NIO) - w_NIO, state | momentum


MUON_HYPERBALL = MatrixRule(init, update, from_zeros=False)
