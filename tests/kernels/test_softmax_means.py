"""The softmax of attention: its values and gradients equal the plain softmax's up to rounding, also
where peaked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from running import slow

from lm.kernels import cpu_products, softmax_means
from lm.layers.attention import Mask, causal_attention


def inputs(n, d_head):
    """Return queries, keys, values and an upstream gradient: two examples, 4 query heads, 2 key
    heads.
    """
    return [normal(2, n, n_heads, d_head, seed=i) for i, n_heads in enumerate((4, 2, 2, 4))]


def pull_back(q, k, v, g, dtype, implementation, window=None):
    """Return the output of attention and the gradients of q, k and v, computed in a dtype, as
    float64.
    """

    @jax.jit
    def both(q, k, v, g):
        mask = Mask.causal(q.shape[1], window)
        out, vjp = jax.vjp(
            lambda *qkv: causal_attention(*qkv, mask, implementation=implementation), q, k, v
        )
        return out, *vjp(g)

    found = both(*(jnp.asarray(a, dtype) for a in (q, k, v, g)))
    assert all(a.dtype == dtype for a in found)
    return [np.asarray(a, np.float64) for a in found]


@pytest.mark.parametrize("n", [7, 48])
def test_values_and_gradients_equal_the_plain_softmax(n, monkeypatch):
    """The plain softmax is used in float32 on accelerators. The two lengths are below and above the
    width of a head.
    """
    arguments = *inputs(n, d_head=8), jnp.float32, "einsum"
    fast = pull_back(*arguments)
    monkeypatch.setattr(softmax_means, "enabled", lambda v: False)
    monkeypatch.setattr(cpu_products, "enabled", lambda x: False)
    for a, b in zip(fast, pull_back(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_bfloat16_on_other_platforms_equals_float32_up_to_rounding(monkeypatch):
    qkvg = inputs(7, d_head=8)
    exact = pull_back(*qkvg, jnp.float32, "einsum")
    monkeypatch.setattr(cpu_products, "enabled", lambda x: False)
    for a, b in zip(pull_back(*qkvg, jnp.bfloat16, "einsum"), exact, strict=True):
        assert np.linalg.norm(a - b) < 2.0**-7 * np.linalg.norm(b)


@pytest.mark.parametrize(("sharpness", "window"), [slow(1, 100), (32, None)])
@pytest.mark.parametrize("implementation", ["einsum", "chunked"])
def test_bfloat16_equals_float32_up_to_rounding_also_where_attention_is_peaked(
    implementation, sharpness, window
):
    """The bound holds for gradients of scores only if the two terms of the softmax's derivative
    cancel exactly.
    """
    q, *kvg = (jnp.asarray(a, jnp.bfloat16) for a in inputs(160, d_head=64))
    exact = pull_back(q * sharpness, *kvg, jnp.float32, "xla", window)
    found = pull_back(q * sharpness, *kvg, jnp.bfloat16, implementation, window)
    for a, b in zip(found, exact, strict=True):
        assert np.linalg.norm(a - b) < 2.0**-8 * np.linalg.norm(b)


@pytest.mark.parametrize("implementation", ["einsum", "chunked"])
def test_queries_that_see_one_key_pass_no_gradient_to_scores_in_bfloat16(implementation):
    _, d_q, d_k, _ = pull_back(*inputs(160, d_head=64), jnp.bfloat16, implementation, window=1)
    assert max(np.abs(d_q).max(), np.abs(d_k).max()) < 1e-5
