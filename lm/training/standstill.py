"""Notice weights in 16 bits that stand still: rounding loses updates below 1/256 of a weight."""

import jax
import jax.numpy as jnp
import numpy as np

from lm import parameters
from lm.config import Resolved

MIN_STEPS = 10  # fewer say little
MANY = 0.5  # the share of weights that stand still from which it is reported


class Standstill:
    """Compares a sample of the bfloat16 weights with those some steps before; reports once."""

    def __init__(self, config: Resolved, table: parameters.Table):
        self._paths: list[str] = []
        for path, p in table.items():
            if p.kind == "weight" and p.matrix and len(p.shape) > 1:
                self._paths.append(path)
        if config.model.param_dtype != "bfloat16":
            self._paths = []
        self._next_step = config.optimizer.warmup_steps
        self._step = 0
        self._before: dict[str, np.ndarray] = {}

    def warning(self, step: int, params: dict) -> str | None:
        """Return a warning if most weights are what they were at least MIN_STEPS before."""
        if not self._paths or step < self._next_step:
            return None
        flat = parameters.flat(params)
        now = jax.device_get(_sample({path: flat[path] for path in self._paths}))
        before = self._before
        n_steps = step - self._step
        self._before = now
        self._step = step
        self._next_step = step + MIN_STEPS
        if not before:
            return None
        still = np.mean(np.concatenate([(x == before[path]).ravel() for path, x in now.items()]))
        if still < MANY:
            return None
        self._paths = []
        return (
            f"WARNING: {100 * still:.0f} % of the weights did not change in {n_steps} steps: in "
            "bfloat16 an update smaller than 1/256 of a weight is lost; use a larger "
            "config.optimizer.learning_rate, or config.model.param_dtype = float32"
        )


@jax.jit
def _sample(weights: dict) -> dict:
    """Return one row of each weight, of all layers if they are stacked."""
    return {path: jnp.copy(x[:, 0]) for path, x in weights.items()}
