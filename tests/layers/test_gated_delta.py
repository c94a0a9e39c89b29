"""The chunked form of Gated DeltaNet against its definition, one position after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm import model
from lm.here import Here
from lm.ideas.gated_delta import CHUNK, chunk
from lm.parallel.collectives import save_all_but_gathered
from lm.past import Past

B, T, K = 2, 150, 8  # not a multiple of 64
RNG = np.random.default_rng(0)
STARTS = np.zeros((B, T), bool)
STARTS[0, [1, 63, 64, 100, 101]] = STARTS[1, 149] = (
    True  # at the borders of chunks, within them, and none in one
)


def by_position(inputs, starts_BT):
    """S <- a (I - b k k^T) S + b k v^T, o = S^T q, from S = 0 at the start of a document."""

    def step(S_KV, here):
        (q_K, k_K, v_V, log_a, b), starts = here
        S_KV = jnp.exp(log_a) * jnp.where(starts, 0, S_KV)
        S_KV += b * jnp.outer(k_K, v_V - k_K @ S_KV)
        return S_KV, q_K @ S_KV

    return jax.vmap(lambda x: jax.lax.scan(step, jnp.zeros((K, K)), x)[1])((inputs, starts_BT))


@pytest.mark.parametrize(
    "decay", [0.05, 300.0]
)  # with the second, exp of an unmasked difference is infinite
def test_chunks_equal_the_recurrence_with_documents_and_gradients(decay):
    """Keys repeat, so that the system of equations is far from the identity."""
    q_BTK, k_BTK, v_BTK = RNG.standard_normal((3, B, T, K))
    k_BTK[:, 20:40] = k_BTK[:, :1]
    q_BTK, k_BTK = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q_BTK, k_BTK))
    log_a_BT, b_BT = -decay * RNG.random((B, T)), RNG.random((B, T))
    inputs = q_BTK, k_BTK, v_BTK, log_a_BT, b_BT

    def chunked(inputs):
        here = Here(STARTS, Past(segments=jnp.asarray(1 + np.cumsum(STARTS, axis=1))))
        return here.recurrence("delta", chunk, jnp.zeros((K, K)), inputs, 64)

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


def test_the_backward_pass_keeps_no_matrix_of_the_pairs_of_a_chunk():
    c, tokens_BT = tiny(model={"gated_delta": "all"}).model, np.zeros((1, 2 * CHUNK), int)
    # as under fsdp
    f = jax.checkpoint(
        lambda params: model.logits(params, c, tokens_BT), policy=save_all_but_gathered
    )
    kept = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(f, params)[1], redrawn(c)))
    assert not [x for x in kept if getattr(x, "shape", ())[-2:] == (CHUNK, CHUNK)]
