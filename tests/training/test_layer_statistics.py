"""Diagnostics by layer: each number equals its definition, for packed, windowed and scanned models
and on any mesh.
"""

import functools
import json

import chex
import jax
import numpy as np
import pytest
from references import numpy_model
from running import python
from tiny import redrawn, state_of, tiny

from lm import model, parameters, step
from lm.config import turns
from lm.declarations import Parameter
from lm.parameters import flat
from lm.training import layer_statistics

T = 8
TOKENS = np.random.default_rng(0).integers(0, 19, (4, T + 1), np.int32)


@functools.partial(jax.jit, static_argnames="config")
def measured(params, batch, config):
    """Return the diagnostics of the forward pass, which compile in a second."""
    return layer_statistics._forward_statistics(params, step.batch_fields(batch), config)


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_attention_is_that_of_the_equations():
    """The logits of one layer, computed from its input in float64, and the entropy of their
    softmax.
    """
    config = tiny(
        model={"n_layers": 1, "positions": "none", "attn_softcap": 1.5, "window_pattern": (3,)}
    )
    params = redrawn(config.model)
    found = measured(params, {"tokens": TOKENS}, config)["attention"]
    p = {path: np.asarray(x, np.float64) for path, x in flat(params).items()}
    x = p["embedding"][np.asarray(TOKENS[:, :-1])]
    x = numpy_model.rms(x, p["layers/attention_norm/scale_D"][0], config.model.norm_eps)
    q = np.einsum("btd,dhk->bthk", x, p["layers/attention/w_q_DHK"][0])
    k = np.einsum("btd,dgk->btgk", x, p["layers/attention/w_k_DGK"][0]).repeat(2, axis=2)
    logits = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(config.model.d_head)
    t, s = np.indices((T, T))
    seen = (s <= t) & (s > t - 3)
    weights = np.where(seen, np.exp(1.5 * np.tanh(logits / 1.5)), 0)
    weights /= weights.sum(-1, keepdims=True)
    entropy = -np.where(seen, weights * np.log(np.where(seen, weights, 1)), 0).sum(-1)
    np.testing.assert_allclose(found["layers/max_logit"], [logits[:, :, seen].max()], rtol=1e-5)
    np.testing.assert_allclose(found["layers/entropy"], [entropy.mean()], rtol=1e-5)
    np.testing.assert_allclose(
        found["layers/max_entropy"], [np.log([1, 2, 3, 3, 3, 3, 3, 3]).mean()], rtol=1e-6
    )


@pytest.mark.parametrize("layers", [(1,), ()])
def test_attention_of_some_layers_only_is_left_out(layers, monkeypatch):
    """A user's layer may have another mixer. The first value of the others would stand for layer 0."""

    def mixed(here, x_BTD):
        return model.attention(here, x_BTD) if here.prototype in layers else x_BTD

    mixer = model.MIXERS["attention"]._replace(apply=mixed)
    monkeypatch.setitem(model.MIXERS, "attention", mixer)
    # of no other test, whose compiled programs would lack the mixer
    config = tiny(model={"d_ff": 20 + len(layers)})
    found = measured(redrawn(config.model), {"tokens": TOKENS}, config)
    assert found["attention"] == {}
    assert found["activations"]["layers/attention"].shape == (2,)


@pytest.mark.parametrize("loop_layers", [None, (1, 3)])
def test_a_looped_layer_has_the_statistics_of_its_last_turn(loop_layers):
    """And a second branch of attention has no names among the activations."""
    keys = {"n_layers": 4, "branches": ("attention", "attention", "ffn")}
    config = tiny(model=keys | {"loops": 2, "loop_layers": loop_layers})
    order = [layer for layers in turns(config.model) for layer in layers]
    params = redrawn(config.model)
    deeper = params | {"layers": jax.tree.map(lambda x: x[np.array(order)], params["layers"])}
    deep = tiny(model=keys | {"n_layers": len(order)})
    found = measured(params, {"tokens": TOKENS}, config)
    expected = measured(deeper, {"tokens": TOKENS}, deep)
    last = [len(order) - 1 - order[::-1].index(layer) for layer in range(4)]
    assert found["activations"].keys() == {"layers/output", "layers/attention", "layers/ffn"}
    assert found["attention"]
    chex.assert_trees_all_close(
        found, jax.tree.map(lambda x: x[np.array(last)], expected), rtol=1e-5
    )


@pytest.mark.slow
def test_activations_are_those_of_the_residual_stream():
    """Without norms the last layer's output is the model's, and a layer without branches passes its
    input on.
    """
    config = tiny(model={"norm_placement": "none"})
    params = redrawn(config.model)
    found = measured(params, {"tokens": TOKENS}, config)["activations"]
    output = model.hidden(params, config.model, TOKENS[:, :-1])
    np.testing.assert_allclose(found["layers/output"][-1], rms(output), rtol=1e-5)
    ends = ("w_o_HKD", "w_down_FD")  # of the branches
    silenced = {
        path: x.at[0].set(0) if path.endswith(ends) else x for path, x in flat(params).items()
    }
    silenced = measured(parameters.nest(silenced), {"tokens": TOKENS}, config)["activations"]
    np.testing.assert_allclose(
        silenced["layers/output"][0], rms(params["embedding"][TOKENS[:, :-1]]), rtol=1e-5
    )
    assert silenced["layers/attention"][0] == silenced["layers/ffn"][0] == 0


def test_padding_and_sequences_beyond_the_first_are_not_measured(monkeypatch):
    config = tiny(model={"n_layers": 1})
    params = redrawn(config.model)
    monkeypatch.setattr(layer_statistics, "N_EXAMPLES", 3)
    segments = np.array([[1, 1, 1, 2, 2, 2, 0, 0, 0]] * 4)
    other = np.where(segments > 0, TOKENS, (TOKENS + 5) % 19)
    other[3] = 0
    first, second = (
        measured(params, {"tokens": tokens, "segments": segments}, config)
        for tokens in (TOKENS, other)
    )
    chex.assert_trees_all_close(first, second, rtol=1e-6)
    np.testing.assert_allclose(
        first["attention"]["layers/max_entropy"], [np.log([1, 2, 3]).mean()], rtol=1e-6
    )
    changed = TOKENS + np.eye(4, T + 1, k=-2, dtype=np.int32)  # the first of the third example
    third = measured(params, {"tokens": changed, "segments": segments}, config)
    assert third["activations"]["layers/output"] != first["activations"]["layers/output"]


@pytest.mark.slow
def test_magnitudes_are_root_mean_squares_by_path_and_scanned_layers_have_the_same():
    config, scanned = (
        tiny(model=keys, optimizer={"name": "sgd"}) for keys in ({}, {"scan_layers": True})
    )
    state, batch = state_of(config), {"tokens": TOKENS}
    jit_statistics = jax.jit(layer_statistics.layer_statistics, static_argnames="config")
    found = jit_statistics(state, batch, config)
    _, grads = jax.jit(step.losses_and_gradients, static_argnames="config")(state, batch, config)
    updates, _ = jax.jit(step.optimizer(config).update)(grads, state.opt_state, state.params)
    for name, tree in (("gradients", grads), ("updates", updates), ("parameters", state.params)):
        layers = {path: x for path, x in flat(tree).items() if path.startswith("layers/")}
        assert found[name].keys() == flat(tree).keys() | {"layers"}
        for path, x in flat(tree).items():
            expected = [rms(layer) for layer in x] if path in layers else rms(x)
            np.testing.assert_allclose(found[name][path], expected, rtol=1e-4, err_msg=path)
        weights = [
            np.concatenate([np.ravel(x[i]) for path, x in layers.items() if "/w_" in path])
            for i in range(2)
        ]
        np.testing.assert_allclose(found[name]["layers"], [rms(x) for x in weights], rtol=1e-4)
    assert found["update_ratio"].keys() == {"layers", "embedding", "head/w_DV"}
    for path, ratio in found["update_ratio"].items():
        np.testing.assert_allclose(
            ratio, found["updates"][path] / found["parameters"][path], rtol=1e-5
        )
    chex.assert_trees_all_close(
        jit_statistics(state_of(scanned), batch, scanned), found, rtol=1e-4, atol=1e-7
    )


def test_weights_that_different_layers_have_belong_to_their_layers():
    """Layers 0 and 2 have one weight, and layer 1 another."""
    weight = Parameter((4,), "D", kind="weight", init="zeros")
    table = {"layers/a": weight.stacked((0, 2)), "layers/b": weight.stacked((1,))}
    values = {"layers/a": np.float32([[1] * 4, [3] * 4]), "layers/b": np.float32([[2] * 4])}
    found = layer_statistics._root_mean_squares(parameters.nest(values), table)
    np.testing.assert_allclose(found["layers"], [1, 2, 3])


# All examples are measured on any mesh, because no device has more than N_EXAMPLES of them.
ON_MESHES = """
import json
import sys

import jax
import numpy as np
from on_devices import batch, config_of, initial_state

from lm.config import MESH_AXES
from lm.parallel.mesh import use_mesh
from lm.training import layer_statistics

jax.config.update("jax_num_cpu_devices", 8)
layer_statistics.N_EXAMPLES = 16
for case in json.loads(sys.argv[1]):
    config = config_of(case)
    with use_mesh(dict(zip(MESH_AXES, case["mesh"])) if case["mesh"] else {}):
        state, _ = initial_state(config)
        packed = config.data.packing == "documents"
        measure = jax.jit(layer_statistics.layer_statistics, static_argnames="config")
        found = measure(state, batch(0, packed=packed), config)
    print(json.dumps(jax.tree.map(lambda x: np.asarray(x).tolist(), jax.device_get(found))), flush=True)
"""


@pytest.mark.slow
def test_every_mesh_measures_the_same():
    """Packed documents, scanned layers, one of them with a window, and examples, heads or positions
    over devices.
    """
    sections = {
        "model": {"scan_layers": True, "window_pattern": [0, 3]},
        "data": {"packing": "documents"},
    }
    cases = [{"mesh": mesh, "sections": sections} for mesh in (None, [2, 2, 2, 1], [2, 1, 1, 4])]
    one, *meshes = map(json.loads, python(ON_MESHES, json.dumps(cases)).splitlines())
    assert len(meshes) == 2
    for found in meshes:
        chex.assert_trees_all_close(found, one, rtol=2e-3, atol=1e-7)
