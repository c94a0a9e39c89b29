"""Over all chips of a TPU slice parameters are gathered and gradients scattered in two stages, with
equal results.
"""

import pytest
from running import python

SCRIPT = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 16)
from lm.declarations import Parameter
from lm.parallel import collectives
from lm.parallel.mesh import make_mesh

found = {}
for fsdp, tensor in ((16, 1), (8, 2)):
    mesh = make_mesh({"replica": 1, "fsdp": fsdp, "tensor": tensor, "sequence": 1})
    p = Parameter((32, 3, 48), "HKD", "weight")
    w, g = (np.random.default_rng(i).standard_normal(p.shape, np.float32) for i in range(2))
    for target in ("cpu", "tpu"):
        collectives.platform.target = lambda: target
        collectives.SMALLEST_SQUARE = 8

        def gathered(w, g):
            out, vjp = jax.vjp(lambda w: collectives.gather_parameter(w, p, "float32"), w)
            index = jax.lax.axis_index("fsdp")
            return out, vjp(g * (1 + index))[0]

        with jax.set_mesh(mesh):
            spec = jax.P(None, None, "fsdp")
            axes = {"replica", "fsdp", "sequence"} | ({"tensor"} if tensor == 1 else set())
            mapped = jax.jit(jax.shard_map(
                gathered, in_specs=(spec, jax.P()), out_specs=(jax.P(), spec), axis_names=axes, check_vma=False
            ))
            assert str(mapped.lower(w, g).as_text()).count("reduce_scatter") == {"cpu": 1, "tpu": 2}[target]
            found[target] = mapped(w, g)
    np.testing.assert_array_equal(found["tpu"][0], w)
    np.testing.assert_allclose(found["cpu"][1], g * sum(range(1, fsdp + 1)), rtol=1e-5)
    np.testing.assert_allclose(found["tpu"][1], found["cpu"][1], rtol=1e-5, atol=1e-5)
"""


@pytest.mark.slow
def test_two_stages_gather_and_scatter_what_one_does():
    python(SCRIPT)
