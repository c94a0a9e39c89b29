"""Hyper-connections (Zhu et al. 2024, arXiv:2409.19606) with doubly stochastic mixing (mHC).

The residual stream is n = 4 streams X (n, D). A branch F has its own mappings of them, which depend
on the token (mHC: Xie et al. 2025, arXiv:2512.24880):

    X <- R X + post F(pre X)
    pre = sigmoid(a x W_pre + b_pre),   post = 2 sigmoid(a x W_post + b_post)
    R = Sinkhorn(exp(a x W_res + b_res)),   x = RMSNorm of X as one vector

Two things differ from mHC. It has a scale a for each of pre, post and R; here they share one. Its
Sinkhorn ends with the rows of R, so that each new stream is a mean of the old ones. Here it ends
with the columns, which keeps the sum of the streams. The sums of rows missed 1 by up to 0.006, 0.04
and 0.07 for logits with a standard deviation of 0.5, 2 and 5.

At step 0, W = 0, a = 0.01, and b gives pre = 1/n, post = 1 and R near the identity. All streams
then equal the plain residual stream, which makes the model of step 0 the one without them. The
final norm reads their mean.
"""

import jax
import jax.numpy as jnp

from lm.config import branches_of
from lm.declarations import small_weight
from lm.layers.norms import rms_norm
from lm.layers.recomputed import recomputed

OWN_STREAM = True  # branches do not read x
N_STREAMS = 4
N_ITERATIONS = 20  # of Sinkhorn's algorithm, as in the paper
OFF_DIAGONAL = -8.0  # of b_res at step 0


def table(c):
    n = N_STREAMS
    n_maps = n + n + n * n  # pre, post and R
    maps = {}
    for branch in branches_of(c):
        name = branch.name
        maps[f"w_{name}_maps_CDM"] = small_weight((n, c.d_model, n_maps), "CDM", "CD")
        maps[f"{name}_maps_M"] = small_weight((n_maps,), "M")
        maps[f"{name}_maps_scale"] = small_weight((), "", init="ones", std=0.01)
    return maps


def same_at_start(c):
    return True


def carry(c, x_BTD):
    return {"streams_BTCD": jnp.repeat(x_BTD[..., None, :], N_STREAMS, axis=-2)}


def block(here, x_BTD, branches):
    streams_BTCD = here.stream["streams_BTCD"]
    for name, branch in branches.items():
        y_BTD = branch(_read(here, streams_BTCD, name))
        streams_BTCD = _add(here, streams_BTCD, name, y_BTD)
    here.stream["streams_BTCD"] = streams_BTCD
    return jnp.mean(streams_BTCD, axis=-2)


def _read(here, streams_BTCD, branch: str):
    """Return pre X, the input (B, T, D) of a branch."""

    def weighted(streams_BTCD, *maps):
        logits_BTC = _logits(streams_BTCD, *maps, here.c.norm_eps)
        # Biases are stored as differences from their values of step 0, here for pre = 1/n.
        pre_BTC = jax.nn.sigmoid(logits_BTC - jnp.log(N_STREAMS - 1.0))
        return jnp.sum(pre_BTC.astype(streams_BTCD.dtype)[..., None] * streams_BTCD, axis=-2)

    return recomputed(weighted)(streams_BTCD, *_maps(here, branch, slice(0, N_STREAMS)))


def _add(here, streams_BTCD, branch: str, y_BTD):
    """Return R X + post y."""
    n = N_STREAMS

    def mixed(streams_BTCD, y_BTD, *maps):
        logits_BTM = _logits(streams_BTCD, *maps, here.c.norm_eps)
        post_BTC = 2 * jax.nn.sigmoid(logits_BTM[..., :n])
        logits_BTCE = logits_BTM[..., n:].reshape(*logits_BTM.shape[:-1], n, n)
        mix_BTCE = sinkhorn(logits_BTCE + OFF_DIAGONAL * (1 - jnp.eye(n)))
        post_BTC = post_BTC.astype(streams_BTCD.dtype)
        mix_BTCE = mix_BTCE.astype(streams_BTCD.dtype)
        streams_BTCD = jnp.sum(mix_BTCE[..., None] * streams_BTCD[..., None, :, :], axis=-2)
        return streams_BTCD + post_BTC[..., None] * y_BTD[..., None, :]

    # The backward pass computes both functions again from the streams, which are narrower than what
    # lies in between.
    return recomputed(mixed)(streams_BTCD, y_BTD, *_maps(here, branch, slice(n, None)))


def _maps(here, branch: str, columns: slice):
    """Return W (C, D, M), b (M,) and a of some of the mappings."""
    w_CDM = here.p[f"w_{branch}_maps_CDM"]
    b_M = here.p[f"{branch}_maps_M"]
    a = here.p[f"{branch}_maps_scale"]
    return w_CDM[..., columns], b_M[columns], a


def _logits(streams_BTCD, w_CDM, b_M, a, eps):
    """Return a x W + b (B, T, M), in float32."""
    flat_BTX = rms_norm(streams_BTCD.reshape(*streams_BTCD.shape[:-2], -1), None, eps=eps)
    w_XM = w_CDM.reshape(-1, w_CDM.shape[-1])
    products_BTM = jnp.einsum("...X,XM->...M", flat_BTX, w_XM, preferred_element_type=jnp.float32)
    return a * products_BTM + b_M


def sinkhorn(logits):
    """Return exp(logits) with rows and columns normalized in turn (Sinkhorn 1967).

    Columns sum to 1, rows nearly.

    >>> sinkhorn(jnp.array([[0.0, 1.0], [2.0, 3.0]])).sum(axis=0)
    Array([1., 1.], dtype=float32)
    """

    # in logarithms, where large logits do not overflow
    def normalize(_, logits):
        logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return logits - jax.nn.logsumexp(logits, axis=-2, keepdims=True)

    return jnp.exp(jax.lax.fori_loop(0, N_ITERATIONS, normalize, logits))
