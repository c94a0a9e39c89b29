"""Notice weights in 16 bits that stand still: an update smaller than 1/256 of a weight is lost to
rounding.
"""

import jax
import jax.numpy as jnp

from lm import parameters
from lm.config import Resolved

MIN_STEPS = 10  # fewer say little
MANY = 0.5  # the share of weights that stand still from which it is reported


class Standstill:
    """Compares a sample of the bfloat16 weights of a run with those some steps before; reports a
    standstill once.
    """

    def __init__(self, config: Resolved, table: parameters.Table):
        weights = [
            path
            for path, p in table.items()
            if p.kind == "weight" and p.matrix and len(p.shape) > 1
        ]
        self._paths = weights if config.model.param_dtype == "bfloat16" else []
        self._warmup_steps = config.optimizer.warmup_steps
        self._step = 0
        self._before = None

    def warning(self, step: int, params: dict) -> str | None:
        """Return a warning if most weights are what they were at least MIN_STEPS before; None the
        other times.
        """
        if (
            not self._paths
            or step < self._warmup_steps
            or (self._before and step < self._step + MIN_STEPS)
        ):
            return None
        flat = parameters.flat(params)
        now = jax.device_get(_sample({path: flat[path] for path in self._paths}))
        before = self._before or now
        n_steps = step - self._step
        first = self._before is None
        self._before = now
        self._step = step
        still = sum(int((x == before[path]).sum()) for path, x in now.items()) / sum(
            x.size for x in now.values()
        )
        if first or still < MANY:
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
