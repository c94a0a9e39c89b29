"""Blocks are lists of branches, applied once or several times; a branch has the mixer of its layer.

tests/test_model.py has the placements of norms, tests/test_ideas.py what every idea must keep.
"""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import forward_flops
from tiny import redrawn, tiny

from lm import ideas, model, parameters
from lm.config import Config, ModelConfig, checks, n_applied_layers, turns
from lm.cost import flops
from lm.declarations import weight
from lm.generation.kv_cache import Prefill, decode
from lm.layers.linear import einsum

T = 8
TOKENS = np.arange(2 * T).reshape(2, T)
MACARON = {"branches": ("ffn*0.5", "attention", "ffn*0.5")}
LOOPED = {"n_layers": 4, "loops": 3, "loop_layers": (1, 3)}
KINDS = {
    "macaron": MACARON,
    "two feed-forward layers": {"branches": ("attention", "ffn", "ffn"), "norm_placement": "post"},
    "one branch": {"branches": ("attention*2",)},
    "attention twice": {"branches": ("attention", "attention", "ffn"), "residual": "parallel"},
    "looped": LOOPED,
    "all looped": {"loops": 2, "window_pattern": (0, 3), "residual": "depth_attention"},
    "looped macaron": LOOPED | MACARON | {"residual": "hyper_connections", "attn_gate": "head"},
}
ROWS = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS.keys())


def hidden(c, params, **inputs):
    return jax.jit(lambda params: model.hidden(params, c, TOKENS, **inputs))(params)


def test_macaron_is_its_equation():
    """Lu et al. 2019, arXiv:1906.02762: half of a feed-forward layer before and after attention."""
    c = tiny(model=MACARON | {"n_layers": 1}).model
    outputs = {}

    def tap(here, name, x):
        outputs[name] = x
        return x

    h_BTD = model.hidden(redrawn(c), c, TOKENS, tap=tap)
    x_BTD = outputs["embedding"]
    for name in ("ffn", "attention", "ffn_2"):
        x_BTD = x_BTD + outputs[f"{name}/output"]
    np.testing.assert_allclose(outputs["residual"], x_BTD, rtol=1e-6)
    doubled = dataclasses.replace(c, branches=("ffn", "attention", "ffn"))
    whole = {}
    model.hidden(redrawn(c), doubled, TOKENS, tap=lambda here, name, x: whole.setdefault(name, x))
    np.testing.assert_allclose(2 * outputs["ffn/output"], whole["ffn/output"], rtol=1e-6)
    assert h_BTD.shape == (*TOKENS.shape, c.d_model)


def test_a_loop_is_a_deeper_model_with_equal_layers(fresh_tables):
    fresh_tables()
    c = tiny(model=LOOPED).model
    order = [layer for layers in turns(c) for layer in layers]
    assert order == [0, 1, 2, 1, 2, 1, 2, 3]
    assert n_applied_layers(c) == len(order)
    deep = dataclasses.replace(c, loops=1, loop_layers=None, n_layers=len(order))
    params = redrawn(c)
    layers = jax.tree.map(lambda x: x[np.array(order)], params["layers"])
    ours, theirs = hidden(c, params), hidden(deep, params | {"layers": layers})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert flops.flops_per_token(c, T) == flops.flops_per_token(deep, T)


@ROWS
def test_scanned_unrolled_and_cached_are_the_same(keys):
    c = tiny(model={"n_layers": 4} | keys).model
    params = redrawn(c)
    h_BTD = hidden(c, params)
    scanned = dataclasses.replace(c, scan_layers=True, remat="block")
    np.testing.assert_allclose(hidden(scanned, params), h_BTD, rtol=1e-4, atol=1e-5)
    memory: dict = {}
    lengths_B = jnp.array([T - 1, T - 3])
    model.hidden(
        params, c, TOKENS[:, : T - 1], past=Prefill(lengths_B=lengths_B, n_slots=T), memory=memory
    )
    new_B1 = np.stack([TOKENS[0, T - 1 :], TOKENS[1, T - 3 : T - 2]])
    seen = decode(jnp.int32(T - 1), T - 1 - lengths_B)
    new_B1D = model.hidden(params, c, new_B1, past=seen, memory=memory)
    expected = np.stack([h_BTD[0, T - 1], h_BTD[1, T - 3]])
    np.testing.assert_allclose(new_B1D[:, 0], expected, rtol=1e-4, atol=1e-4)


@ROWS
def test_flops_are_those_of_the_traced_program(keys):
    c = tiny(model={"n_layers": 4, "attention": "einsum"} | keys).model
    ours = flops.flops_per_token(c, T, full_square=True) / 3
    assert ours == pytest.approx(forward_flops(c, 1, T) / T, rel=1e-6)


def test_each_turn_and_branch_has_its_own_dropout():
    c = tiny(model=LOOPED | MACARON | {"dropout": 0.5}).model
    masks = []

    def tap(here, name, x):
        return jnp.ones_like(x) if name.endswith("/output") and here.layer is not None else x

    class Seen(model.Here):
        def dropout(self, x_BTD, place):
            masks.append(place)
            return super().dropout(x_BTD, place)

    here, model.Here = model.Here, Seen
    try:
        keys_B = jax.random.split(jax.random.key(0), len(TOKENS))
        model.hidden(redrawn(c), c, TOKENS, dropout_keys_B=keys_B, tap=tap)
    finally:
        model.Here = here
    assert len(masks) == len(set(masks)) == 1 + 3 * n_applied_layers(c)


def test_a_mixer_owns_its_projections(monkeypatch, fresh_tables):
    """In some layers, beside attention with ideas in the others, and twice in a block."""
    mean = types.SimpleNamespace(
        table=lambda c: {"w_mean_DC": weight(c, (c.d_model, c.d_model), "DC")},
        products=lambda c, n_keys: c.d_model * n_keys,
    )

    def apply(here, x_BTD):
        x_BSD, mask = here.earlier("x", x_BTD)
        seen_BTS = mask.visible().astype(x_BTD.dtype)
        weights_BTS = seen_BTS / jnp.sum(seen_BTS, axis=-1, keepdims=True)
        mean_BTD = jnp.einsum("...TS,...SD->...TD", weights_BTS, x_BSD)
        return einsum("BTD,DC->BTC", mean_BTD, here.p["w_mean_DC"])

    mean.apply = apply
    monkeypatch.setitem(model.MIXERS, "mean", mean)
    fresh_tables()
    keys = {"n_layers": 4, "mixers": ("mean", "attention"), "attn_gate": "head"}
    keys |= {"branches": ("attention", "attention", "ffn")}
    c = tiny(model=keys).model
    shapes = {path: p.shape for path, p in parameters.parameter_table(c).items()}
    assert shapes["layers/mean/w_mean_DC"][0] == shapes["layers/mean_2/w_mean_DC"][0] == 2
    assert shapes["layers/attention/w_gate_DH"][0] == 2
    assert "layers/attention_2/w_gate_DH" in shapes
    test_scanned_unrolled_and_cached_are_the_same(keys)
    ours = flops.flops_per_token(dataclasses.replace(c, attention="einsum"), T, full_square=True)
    traced = forward_flops(dataclasses.replace(c, attention="einsum"), 1, T) / T
    assert ours / 3 == pytest.approx(traced, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"branches": ("attention", "mlp")}, "has the branch 'mlp'; use attention or ffn"),
        ({"branches": ("ffn*half",)}, "has the branch 'ffn\\*half'"),
        ({"loops": 2, "loop_layers": (1, 9)}, "must be .first, end."),
        ({"loops": 2, "loop_layers": (1,)}, "must be .first, end."),
    ],
)
def test_mistakes_in_blocks_are_named(keys, said):
    config = Config(model=ModelConfig(**keys))
    ((_, text),) = checks.problems(config, (checks.blocks,))
    assert re.search(said, text), text


def test_an_idea_between_turns_knows_the_turn(monkeypatch):
    turns_seen = []

    def apply(here, x_BTD):
        turns_seen.append(here.turn)
        return x_BTD + here.turn

    idea = types.SimpleNamespace(apply=apply)
    monkeypatch.setitem(ideas.SITES["turn_input"], "norm_bias", idea)  # any key that is true
    c = tiny(model=LOOPED | {"d_ff": 52}).model
    model.hidden(redrawn(c), c, TOKENS)
    assert turns_seen == [0, 1, 2]
