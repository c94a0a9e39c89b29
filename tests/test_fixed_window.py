"""Models of a fixed window: agreement with NumPy, what they see, their counts, and everything around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn, state_of, tiny

from lm import fixed_window, model, parameters, step
from lm.cost import flops
from lm.cost.devices import DEVICES
from lm.cost.estimate import search_meshes
from lm.cost.memory import activation_bytes, moved_activation_bytes
from lm.training.layer_statistics import layer_statistics

W = 3
WINDOW = {"fixed_window": W, "positions": "none", "norm_placement": "none", "head_bias": True, "activation": "relu"}
LINEAR, TWO_LAYERS = WINDOW | {"n_layers": 1}, WINDOW | {"n_layers": 2}
BOTH = pytest.mark.parametrize("keys", [LINEAR, TWO_LAYERS], ids=["linear", "two layers"])
TOKENS = np.random.default_rng(0).integers(0, 19, (2, 8))


def logits_by_hand(params, tokens, n_layers):
    """Compute the logits after the last of some tokens, one embedding after the other."""
    p = {path: np.asarray(x, np.float64) for path, x in parameters.flat(params).items()}
    seen = [p["embedding"][i] for i in tokens[-W:]]
    x = np.concatenate([np.zeros(16)] * (W - len(seen)) + seen)
    if n_layers == 2:
        x = np.maximum(x @ p["window/w_DF"] + p["window/b_F"], 0)
    return x @ p["head/w_DV"] + p["head/b_V"]


@BOTH
def test_logits_equal_those_by_hand(keys):
    c = tiny(model=keys).model
    params = redrawn(c)
    expected = [[logits_by_hand(params, row[: t + 1], c.n_layers) for t in range(len(row))] for row in TOKENS]
    np.testing.assert_allclose(model.logits(params, c, TOKENS), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.logits(params, c, TOKENS[0]), expected[0], rtol=0, atol=1e-5)  # without a batch


def test_the_linear_model_is_softmax_regression_on_one_hot_vectors():
    """With unit vectors as embeddings, the logits are sums of rows of the weight, one per token seen, and a bias."""
    c = tiny(model=LINEAR | {"d_model": 19}).model
    params = redrawn(c) | {"embedding": jnp.eye(19)}
    w_WVV, b_V = np.asarray(params["head"]["w_DV"]).reshape(W, 19, 19), np.asarray(params["head"]["b_V"])
    found = np.asarray(model.logits(params, c, TOKENS))[:, -1]
    expected = [sum(w_WVV[i, row[-W + i]] for i in range(W)) + b_V for row in TOKENS]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@BOTH
def test_a_position_sees_the_last_tokens_of_its_window_only(keys):
    c = tiny(model=keys).model
    params = redrawn(c)

    def of_embeddings(embedding_VD):  # position t reads row t
        return model.logits(params | {"embedding": embedding_VD}, c, np.arange(8)[None])[0]

    jacobian = np.asarray(jax.jacrev(of_embeddings)(params["embedding"]))  # (T, V, S, D)
    depends = np.abs(jacobian[:, :, :8]).max((1, 3)) > 0
    t, s = np.indices((8, 8))
    np.testing.assert_array_equal(depends, (s <= t) & (s > t - W))


def test_vectors_of_other_documents_and_before_the_text_are_zero():
    x_BTD, segments_BT = jnp.arange(1.0, 6).reshape(1, 5, 1), jnp.array([[1, 1, 2, 2, 2]])
    found = fixed_window.last_vectors(x_BTD, 3, segments_BT)[0, :, :, 0].tolist()
    assert found == [[0, 0, 1], [0, 1, 2], [0, 0, 3], [0, 3, 4], [3, 4, 5]]


@pytest.mark.slow
@BOTH
def test_documents_of_a_packed_row_do_not_see_each_other(keys):
    config = tiny(model=keys)
    params = redrawn(config.model)
    row = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 0]])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0]])

    def loss_sum(tokens, segments):
        return np.array(step.loss_sum(params, {"tokens": tokens, "segments": segments}, config))

    packed = loss_sum(row, segments)
    apart = [loss_sum(row[:, part], segments[:, part]) for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(packed, sum(apart), rtol=1e-5)


def test_a_window_may_be_longer_than_a_text():
    assert fixed_window.last_vectors(jnp.ones((1, 2, 1)), 4)[0, :, :, 0].tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


@BOTH
def test_flops_count_every_weight_of_a_product(keys):
    c = tiny(model=keys).model
    weights = {path: p for path, p in parameters.parameter_table(c).items() if p.kind == "weight"}
    assert weights.keys() == ({"head/w_DV"} if c.n_layers == 1 else {"window/w_DF", "head/w_DV"})
    assert flops.matmul_params(c) == sum(p.size for p in weights.values())
    assert flops.flops_per_token(c, 8) == flops.flops_per_token(c, 8, full_square=True) == 6 * flops.matmul_params(c)


def test_activations_by_hand():
    """4 x 8 tokens in float32: an embedding of 16, the window of three, and the hidden layer of 24 twice."""
    for keys, per_token in ((LINEAR, 16 + 3 * 16), (TWO_LAYERS, 16 + 3 * 16 + 2 * 24)):
        config, one = tiny(model=keys), {"replica": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
        assert activation_bytes(config, DEVICES["h100"], one) == per_token * 32 * 4
        assert moved_activation_bytes(config, one) == 32 * (6 * per_token * 4 + 5 * 19 * 4)


def test_plans_use_replica_and_fsdp_only():
    found = search_meshes(tiny(model=TWO_LAYERS | {"compute_dtype": "bfloat16"}), "h100", 4)
    assert {(e.sizes["tensor"], e.sizes["sequence"]) for e in found} == {(1, 1)}
    assert len(found) == 3


@pytest.mark.slow
def test_muon_needs_no_hidden_layer():
    """The linear model has no matrix that Muon would update; AdamW updates the embeddings and the head."""
    config = tiny(model=LINEAR, optimizer={"name": "muon"})
    state = state_of(config)
    updates, _ = step.optimizer(config).update(state.params, state.opt_state, state.params)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(updates))


@pytest.mark.slow
@BOTH
def test_a_step_can_be_inspected(keys):
    config = tiny(model=keys)
    found = layer_statistics(state_of(config), {"tokens": np.resize(TOKENS, (4, 9))}, config)
    assert found["gradients"].keys() >= {"embedding", "head/w_DV"}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
