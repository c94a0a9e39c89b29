"""The chunked forms of Gated DeltaNet and of Kimi delta attention against their definitions, one
position after the other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm import model
from lm.here import Here
from lm.ideas import gated_delta, kimi_delta
from lm.parallel.collectives import save_all_but_gathered
from lm.past import Past

B, T, K = 2, 150, 8  # not a multiple of 64
RNG = np.random.default_rng(0)
STARTS = np.zeros((B, T), bool)
STARTS[0, [1, 63, 64, 100, 101]] = STARTS[1, 149] = (
    True  # at the borders of chunks, within them, and none in one
)


def by_position(inputs, starts_BT):
    """S <- (I - b k k^T) a S + b k v^T, o = S^T q, from S = 0 at the start of a document.

    a is a number, or has one for each feature of the keys.
    """

    def step(S_KV, here):
        (q_K, k_K, v_V, log_a, b), starts = here
        S_KV = jnp.exp(log_a)[..., None] * jnp.where(starts, 0, S_KV)
        S_KV += b * jnp.outer(k_K, v_V - k_K @ S_KV)
        return S_KV, q_K @ S_KV

    return jax.vmap(lambda x: jax.lax.scan(step, jnp.zeros((K, K)), x)[1])((inputs, starts_BT))


# with the larger decay, exp of an unmasked difference is infinite
@pytest.mark.parametrize("decay", [0.05, 300.0])
@pytest.mark.parametrize(("rule", "of_decays"), [(gated_delta, ()), (kimi_delta, (K,))])
def test_chunks_equal_the_recurrence_with_documents_and_gradients(decay, rule, of_decays):
    """Keys repeat, so that the system of equations is far from the identity."""
    q_BTK, k_BTK, v_BTK = RNG.standard_normal((3, B, T, K))
    k_BTK[:, 20:40] = k_BTK[:, :1]
    q_BTK, k_BTK = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q_BTK, k_BTK))
    log_a = -decay * RNG.random((B, T, *of_decays))
    inputs = q_BTK, k_BTK, v_BTK, log_a, RNG.random((B, T))

    def chunked(inputs):
        here = Here(STARTS, Past(segments=jnp.asarray(1 + np.cumsum(STARTS, axis=1))))
        return here.recurrence("delta", rule.chunk, jnp.zeros((K, K)), inputs, rule.CHUNK)

    def value_and_gradients(f):
        return jax.jit(
            jax.value_and_grad(lambda x: (jnp.sum(jnp.sin(o := f(x))), o), has_aux=True)
        )(inputs)

    with jax.enable_x64(True):
        (_, expected), gradients = value_and_gradients(
            lambda x: by_position(x, jnp.asarray(STARTS))
        )
        (_, found), ours = value_and_gradients(chunked)
    for x, y in zip((found, *ours), (expected, *gradients), strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("keys", "n"),
    [
        ({"gated_delta": "all"}, gated_delta.CHUNK),
        ({"mixers": ("kda",), "d_model": 24}, kimi_delta.CHUNK),
    ],
)
def test_the_backward_pass_keeps_no_matrix_of_the_pairs_of_a_chunk(keys, n):
    c = tiny(model=keys).model
    tokens_BT = np.zeros((1, 2 * n), int)
    # as under fsdp
    f = jax.checkpoint(
        lambda params: model.logits(params, c, tokens_BT), policy=save_all_but_gathered
    )
    kept = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(f, params)[1], redrawn(c)))
    shapes = [getattr(x, "shape", ()) for x in kept]
    assert not [shape for shape in shapes if shape[-2:] == (n, n) or shape[-3:-1] == (n, n)]
