"""Diagnostics of a training step by layer: attention, activations, gradients, updates."""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp

from lm import layer_stack, model, parameters
from lm.config import Resolved
from lm.parallel import collectives
from lm.past import Past
from lm.step import TrainState, fields_read, losses_and_gradients, optimizer
from lm.training.attention_statistics import attention_statistics

N_EXAMPLES = 4  # of each device's share of a batch, on which activations are measured

# The intermediates whose root mean square is measured (lm/model.py), and their names here.
ACTIVATIONS = {
    "residual": "layers/output",
    "attention/output": "layers/attention",
    "ffn/output": "layers/ffn",
}


def layer_statistics(state: TrainState, batch: dict, config: Resolved) -> dict:
    """Return diagnostics of the next step, float32 by kind and path; layers are stacked to (N,).

    The kinds are

        attention       layers/max_logit: largest logit of all heads, scaled, before the softcap;
                        layers/entropy: mean entropy of the weights of a query, in nats;
                        layers/max_entropy: the same if each query weighed all keys that it sees equally
        activations     root mean squares: layers/output is the residual stream after a layer, layers/attention and
                        layers/ffn are the outputs of its attention and feed-forward layer, before dropout
        gradients, parameters, updates    root mean squares by path, and of all weights of a layer together ("layers")
        update_ratio    root mean square of the update over that of the parameters: of the weights of a layer
                        ("layers"), the embeddings and the head

    Attention and activations are measured without dropout on the first N_EXAMPLES sequences of each
    device's share of the batch, without padding; a model without layers has neither. They are those
    of the first branch of its kind in a block, and of the last turn of a loop. A model with a layer
    that does not call `Past.observed` has no attention here. Gradients are those of the full batch,
    before clipping.
    """
    means, grads = losses_and_gradients(state, batch, config)
    updates, _ = optimizer(config).update(grads, state.opt_state, state.params, value=means["loss"])
    table = parameters.parameter_table(config.model)
    of_updates = _root_mean_squares(updates, table)
    of_parameters = _root_mean_squares(state.params, table)
    ratios = {}
    for path in ("layers", "embedding", "positions", "head/w_DV"):
        if path in of_updates:
            ratios[path] = of_updates[path] / of_parameters[path]
    statistics = {
        "gradients": _root_mean_squares(grads, table),
        "parameters": of_parameters,
        "updates": of_updates,
        "update_ratio": ratios,
    }
    if "layers" in ratios:

        def forward(params: dict, fields: dict) -> dict:
            return _forward_statistics(params, fields, config)

        measure = collectives.map_over_batch(forward, table)
        statistics |= measure(state.params, fields_read(batch, config.model))
    return statistics


def _root_mean_squares(tree: dict, table: parameters.Table) -> dict:
    """Return the root mean square of each parameter, and of all weights of each layer."""
    magnitudes: dict = {}
    weights = []
    for path, x in parameters.flat(tree).items():
        p = table[path]
        axes = None if p.layers is None else tuple(range(1, x.ndim))  # per layer if stacked
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axes)
        magnitudes[path] = jnp.sqrt(mean_square)
        if p.layers is not None and p.kind == "weight" and p.matrix:
            weights.append((p.layers, p.size / len(p.layers), mean_square))
    if weights:
        n_layers = 1 + max(max(layers) for layers, _, _ in weights)
        sizes = [_by_layer(layers, size, n_layers) for layers, size, _ in weights]
        mean = 0.0
        for size, (layers, _, mean_square) in zip(sizes, weights, strict=True):
            mean = mean + size / sum(sizes) * _by_layer(layers, mean_square, n_layers)
        magnitudes["layers"] = jnp.sqrt(mean)
    return magnitudes


def _by_layer(layers: Sequence[int], values, n_layers: int):
    """Return the values of these layers, and 0 for all other layers."""
    if len(layers) == n_layers:
        return values
    return jnp.zeros(n_layers).at[jnp.asarray(layers)].set(values)


def _forward_statistics(params: dict, fields: dict, config: Resolved) -> dict:
    """Return the kinds "attention" and "activations", over the devices that share the batch."""
    fields = {name: x[:N_EXAMPLES] for name, x in fields.items()}
    segments = fields.get("segments")
    is_token_BT = jnp.ones_like(fields["inputs"], bool) if segments is None else segments > 0
    n_tokens = collectives.sum_over_batch(jnp.sum(is_token_BT, dtype=jnp.float32))

    def mean(x_BT):
        return collectives.sum_over_batch(jnp.sum(jnp.where(is_token_BT, x_BT, 0))) / n_tokens

    def tap(here, name, x_BTD):
        if name in ACTIVATIONS:
            mean_square = mean(jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1))
            here.keep(ACTIVATIONS[name], jnp.sqrt(mean_square))
        return x_BTD

    @flax.struct.dataclass
    class Measured(Past):
        def observed(self, here, q_BTHK, k_BSGK, mask, options):
            if not here.path.endswith("/attention"):  # of a later branch
                return options
            max_logit_BTH, entropy_BTH, max_entropy_BT = attention_statistics(
                q_BTHK, k_BSGK, mask, **options
            )
            max_logit = jnp.max(jnp.where(is_token_BT[..., None], max_logit_BTH, -jnp.inf))
            here.keep("layers/max_logit", collectives.max_over_batch(max_logit))
            here.keep("layers/entropy", mean(jnp.mean(entropy_BTH, axis=-1)))
            here.keep("layers/max_entropy", mean(max_entropy_BT))
            return options

    past = Measured(fields.get("positions"), segments)
    c = config.model
    measured: dict = {}
    model.forward(params, c, fields["inputs"], past=past, tap=tap, memory=measured)
    layers = layer_stack.by_layer(measured, c, model.block_table(c))
    of_attention = [name for name in layers if name.startswith("attention/")]
    attention = {name.removeprefix("attention/"): layers.pop(name) for name in of_attention}
    if any(len(values_N) < c.n_layers for values_N in attention.values()):
        attention = {}  # a layer with another mixer: values without it would stand for other layers
    return {"attention": attention, "activations": layers}
