"""Root mean squares of gradients, parameters, updates and activations by layer, for the detailed log."""

import jax.numpy as jnp

from lm import layer_stack, parameters
from lm.config import Config
from lm.parallel import collectives
from lm.step import TrainState, batch_fields, gradients, hidden, optimizer


def inspect(state: TrainState, batch: dict, config: Config) -> dict:
    """Return root mean squares by path: of gradients, parameters and updates of the next step, and of layer outputs."""

    def rms(x, axes=None):
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axes))

    def by_path(tree):  # one number per layer for stacked layers
        leaves = parameters.flat(tree).items()
        return {path: rms(x, tuple(range(1, x.ndim)) if path.startswith("layers/") else None) for path, x in leaves}

    def mean_squares_N(params, fields):
        _, sown = hidden(params, fields, config, mutable=["intermediates"])
        outputs = sown["intermediates"]
        if not config.model.scan_layers:
            outputs = layer_stack.stack_layers(outputs)
        x_NBTD = outputs["layers"]["x_BTD"][0].astype(jnp.float32)
        return collectives.sum_over_batch(jnp.mean(jnp.square(x_NBTD), (1, 2, 3))) / collectives.n_batch_shards()

    table, fields = parameters.parameter_table(config.model), batch_fields(batch)
    activations = {}
    if not config.model.fixed_window:  # else there are no layers
        outputs_N = collectives.map_over_batch(mean_squares_N, table)(state.params, fields)
        activations = {"layers/output": jnp.sqrt(outputs_N)}
    _, grads = gradients(state, batch, config)
    updates, _ = optimizer(config).update(grads, state.opt_state, state.params)
    return {
        "gradients": by_path(grads),
        "parameters": by_path(state.params),
        "updates": by_path(updates),
        "activations": activations,
    }
