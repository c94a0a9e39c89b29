"""The model as a Flax module, used as a Flax user would: init, apply and optax."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import meta
from tiny import TRAIN, tiny

from lm import model, parameters
from lm.config import ModelConfig
from lm.linen import Transformer

OPEN = ModelConfig(vocab_size=19, d_model=16, n_layers=2, n_heads=4, d_ff=24)
TOKENS = jnp.arange(16).reshape(2, 8) % 5


def test_a_flax_user_initializes_applies_and_trains_it():
    """With nothing else of this package. The loss of random tokens that repeat falls from that of a
    guess.
    """
    transformer = Transformer(OPEN)
    variables = jax.jit(transformer.init)(jax.random.key(0), TOKENS)
    optimizer = optax.adam(1e-2)

    def loss(variables):
        logits_BTV = transformer.apply(variables, TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, TOKENS[:, 1:]).mean()

    @jax.jit
    def step(variables, state):
        value, grads = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(variables, updates), state, value

    state, values = optimizer.init(variables), []
    for _ in range(10):
        variables, state, value = step(variables, state)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize(
    "keys", [{}, {"scan_layers": True, "ffn": "moe", "n_experts": 4, "moe_first_layer": 1}]
)
def test_init_gives_the_initial_values_of_a_run_with_the_seed_by_the_same_names(keys):
    """The initializers returned zeros: who called init got a model of zeros in silence."""
    c = tiny(model=keys).model
    expected = jax.jit(lambda: parameters.init_params(c, 7))()
    for key in (jax.random.key(7), jax.random.PRNGKey(7)):
        variables = jax.jit(Transformer(c).init)(key, TOKENS)
        chex.assert_trees_all_equal(meta.unbox(variables), {"params": expected})
    ours = Transformer(c).apply({"params": expected}, TOKENS)
    chex.assert_trees_all_equal(ours, model.logits(expected, c, TOKENS))


def test_open_keys_are_those_of_a_run():
    c = parameters.resolve_model(OPEN, seq_len=TRAIN["seq_len"])
    shapes = jax.eval_shape(Transformer(OPEN).init, jax.random.key(0), TOKENS)
    expected = parameters.nest({path: p.shape for path, p in parameters.parameter_table(c).items()})
    assert jax.tree.map(lambda x: x.shape, shapes["params"]) == expected
