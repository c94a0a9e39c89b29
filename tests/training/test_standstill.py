"""bfloat16 weights that an update does not change are reported once."""

import jax.numpy as jnp
import numpy as np
from tiny import tiny

from lm import parameters
from lm.training.standstill import Standstill


def warnings(dtype: str, update: float, warmup_steps: int = 0) -> list[int]:
    """Return the steps with a warning, if every step adds this update to weights of 1."""
    config = tiny(model={"param_dtype": dtype}, optimizer={"warmup_steps": warmup_steps})
    table = parameters.parameter_table(config.model)
    still, params = (
        Standstill(config, table),
        {path: np.ones(p.shape, jnp.dtype(dtype)) for path, p in table.items()},
    )
    found = []
    for step in range(0, 60, 4):
        if still.warning(step, parameters.nest(params)):
            found.append(step)
        params = {path: x + np.asarray(4 * update, x.dtype) for path, x in params.items()}
    return found


def test_an_update_below_the_spacing_of_numbers_is_reported_once():
    spacing = 2**-7  # of bfloat16 at 1
    assert warnings("bfloat16", spacing / 4) == []
    assert warnings("bfloat16", spacing / 16) == [12]
    assert warnings("bfloat16", spacing / 16, warmup_steps=20) == [32]
    assert warnings("float32", spacing / 16) == []
