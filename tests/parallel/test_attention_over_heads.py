"""cuDNN's attention under a mesh whose other axes are mapped, with another implementation in its
place on CPUs.
"""

import pytest
from running import python

SCRIPT = """
import functools, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_default_matmul_precision", "highest")
from lm.layers import attention
from lm.layers.attention import Mask, Scoring
from lm.parallel.mesh import make_mesh

calls, library = [], jax.nn.dot_product_attention

def stand_in(q, k, v, *, implementation, **options):
    assert implementation == "cudnn"
    calls.append((q.shape, k.shape))
    return library(q, k, v, **options)

jax.nn.dot_product_attention = stand_in
shapes = [(4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8)]  # queries, keys, values (B, T, heads, K)
qkv = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]
mask = Mask.causal(16, window=5)

def gradients(attend):
    return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2)))(*qkv)

expected = gradients(lambda q, k, v: attention.IMPLEMENTATIONS["einsum"](q, k, v, mask, Scoring(0.3)))
mesh = make_mesh({"replica": 1, "fsdp": 2, "tensor": 2, "sequence": 1})
rows, heads = jax.P("fsdp"), jax.NamedSharding(mesh, jax.P("fsdp", None, "tensor"))
qkv = [jax.device_put(x, heads) for x in qkv]
with jax.set_mesh(mesh):
    # As in a training step: the examples are mapped, the heads are left to the partitioner.
    found = gradients(jax.shard_map(
        lambda q, k, v: attention.IMPLEMENTATIONS["cudnn"](q, k, v, mask, Scoring(0.3)),
        in_specs=(rows,) * 3, out_specs=rows, axis_names={"replica", "fsdp", "sequence"}, check_vma=False,
    ))
assert set(calls) == {((2, 16, 4, 8), (2, 16, 2, 8))}, calls  # each device has its own heads
jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)
"""


@pytest.mark.slow
def test_each_device_attends_with_its_own_heads_to_the_same_values_and_gradients():
    python(SCRIPT)
