"""Programs are traced for the platform that they are compiled for."""

import jax
import jax.numpy as jnp
from tiny import redrawn, tiny

from lm import model
from lm.kernels.platform import compiling_for


def test_a_program_for_another_platform_takes_its_paths():
    """Traced for a TPU on a CPU, a model has neither the layouts nor the casts that only CPUs need."""
    c = tiny(model={"compute_dtype": "bfloat16"}).model
    params, tokens = redrawn(c), jnp.arange(8)[None]

    def traced() -> str:
        return str(jax.make_jaxpr(lambda params: model.hidden(params, c, tokens))(params))

    with compiling_for("cpu"):
        assert "layout_constraint" in traced()
    with compiling_for("tpu"):
        assert "layout_constraint" not in traced()
