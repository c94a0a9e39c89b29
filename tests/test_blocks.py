"""Blocks are lists of branches, applied once or several times; a branch has the mixer of its layer.

tests/test_model.py has the placements of norms, tests/test_ideas.py what every idea must keep.
"""

import dataclasses
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import forward_flops
from tiny import redrawn, tiny

from lm import ideas, model, parameters
from lm.config import MESH_AXES, Config, ModelConfig, checks, n_applied_layers, turns
from lm.cost import communication, flops
from lm.declarations import weight
from lm.generation.kv_cache import Prefill, decode
from lm.layers.linear import einsum
from lm.parameters import default_steps_per_dispatch
from lm.system.errors import UserError

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
    "looped, with their input": LOOPED | {"loop_input": "mix"},
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


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"value_residual": "half"},
        {"deep_supervision": 0.3},
        {"residual": "depth_attention"},
        {"residual": "hyper_connections", "residual_multiplier": 0.5},
        {"ffn": "moe", "n_experts": 4, "conv_stream": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("loop_layers", [(1, 3), (0, 2)], ids=str)
def test_a_loop_is_a_deeper_model_with_equal_layers(keys, loop_layers):
    """In all that the stream has, and in what a step costs: ideas count the layers that are applied."""
    config = tiny(model=LOOPED | keys | {"loop_layers": loop_layers})
    c = config.model
    order = [layer for layers in turns(c) for layer in layers]
    first, end = loop_layers
    looped = [*range(first, end)]
    assert order == [*range(first), *looped * 3, *range(end, 4)]
    assert n_applied_layers(c) == len(order)
    deep = dataclasses.replace(c, loops=1, loop_layers=None, n_layers=len(order))
    params = redrawn(c)
    layers = jax.tree.map(lambda x: x[np.array(order)], params["layers"])
    ours, theirs = (
        model.forward(params, c, TOKENS),
        model.forward(params | {"layers": layers}, deep, TOKENS),
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert flops.flops_per_token(c, T) == flops.flops_per_token(deep, T)
    deeper = dataclasses.replace(config, model=deep)
    for axis in MESH_AXES[1:]:
        sizes = dict.fromkeys(MESH_AXES, 1) | {axis: 2}
        sent, of_deeper = (
            {t.what: t.sent for t in communication.transfers(x, sizes)} for x in (config, deeper)
        )
        for what in sent:
            # gradients are summed once per parameter, not once per turn
            assert sent[what] == of_deeper[what] or "once per step" in what, what


@pytest.mark.parametrize("branches", [("attention", "ffn"), ("attention", "attention", "ffn")])
def test_the_first_values_are_those_of_the_first_layer_with_attention(branches):
    keys = {"n_layers": 3, "mixers": ("latent", "attention", "attention"), "branches": branches}
    found: dict = {}
    for value_residual in ("none", "half"):
        c = tiny(model=keys | {"value_residual": value_residual}).model
        values = found[value_residual] = {}

        def tap(here, name, x, values=values):
            values[here.named(name)] = x
            return x

        model.hidden(redrawn(c), c, TOKENS, tap=tap)
    first, second, *_ = (name for name in found["none"] if name.endswith("/v"))
    assert first == "layers/1/attention/v"
    np.testing.assert_array_equal(found["half"][first], found["none"][first])
    mean = (found["none"][second] + found["none"][first]) / 2
    np.testing.assert_allclose(found["half"][second], mean, rtol=1e-5, atol=1e-6)


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
        ({"loops": 2, "loop_layers": (1, 2, 0)}, "must be .first, end."),
        ({"loops": 200, "n_layers": 6}, "turns, compiled one by one, .*or scan_layers = true$"),
        ({"loops": 2**31, "scan_layers": True}, "turns, compiled one by one, .*use fewer$"),
    ],
)
def test_mistakes_in_blocks_are_named(keys, said):
    config = Config(model=ModelConfig(**keys))
    ((_, text),) = checks.problems(config, (checks.blocks,))
    assert re.search(said, text), text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"mixers": ("latent",), "attn_gate": "head"},
            "attn_gate: head .* no layer has attention;",
        ),
        ({"mixers": ("rg_lru",), "window_pattern": (4,)}, "window_pattern: .* has no effect"),
        ({"mixers": ("attention", "latent"), "n_layers": 1, "attn_softcap": 2.0}, None),
        ({"branches": ("ffn",), "n_kv_heads": 1}, "n_kv_heads: 1 .* attention or talking_heads;"),
        ({"branches": ("attention",), "d_ff": 8}, "d_ff: 8 has no effect, as no layer has ffn;"),
        ({"query_scale": "log_n", "max_positions": 512}, None),
        # an idea between layers, with one layer that has it
        ({"value_residual": "learned", "n_layers": 1}, "value_residual: .* one layer of attention"),
        (
            {"value_residual": "half", "mixers": ("kda", "attention"), "n_layers": 3},
            "value_residual",
        ),
        ({"value_residual": "half", "mixers": ("kda", "attention"), "n_layers": 4}, None),
        ({"value_residual": "learned", "n_layers": 1, "loops": 2}, None),
        (
            {
                "value_residual": "learned",
                "n_layers": 1,
                "branches": ("attention", "attention", "ffn"),
            },
            None,
        ),
    ],
)
def test_keys_that_no_layer_reads_have_no_effect(keys, said):
    texts = [
        text for _, text in checks.problems(Config(model=ModelConfig(**keys)), (checks.unused,))
    ]
    assert [said is not None and bool(re.search(said, text)) for text in texts] == [True] * (
        said is not None
    )


def test_each_idea_of_a_module_is_read_where_the_module_is():
    """Or the key would be ignored in silence."""
    read_by = {f.name: f.metadata["read_by"] for f in dataclasses.fields(ModelConfig)}
    for module in ("attention", "ffn"):
        for site in ideas.MODULES[module]:
            assert {read_by[key] for key in ideas.SITES[site]} <= {(module,)}
    readers = {name for names in read_by.values() for name in names}
    assert readers <= {*model.MIXERS, "ffn"}


@pytest.mark.parametrize("mixer", sorted(ideas.MIXERS))
def test_a_mixer_does_not_read_the_keys_that_are_not_its_own(mixer):
    """Neither in its parameters nor in its outputs."""
    other = {"qk_norm": True, "attn_bias": True, "attn_scale": 0.3, "attn_softcap": 0.5}
    other |= {"n_kv_heads": 1, "window_pattern": (3,), "rope_theta": 5.0, "rope_pattern": (0,)}
    read_by = {f.name: f.metadata["read_by"] for f in dataclasses.fields(ModelConfig)}
    plain = tiny(model={"mixers": (mixer,), "d_head": 8}).model
    params = redrawn(plain)
    h_BTD = model.hidden(params, plain, TOKENS)
    for key, value in other.items():
        c = dataclasses.replace(plain, **{key: value})
        same = parameters.parameter_table(c) == parameters.parameter_table(plain)
        same = same and np.array_equal(model.hidden(params, c, TOKENS), h_BTD)
        assert same == (mixer not in read_by[key]), key


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mixers": ("latent", "attention"), "rope_scaling": "linear"}, "rotates by rope_theta"),
        ({"mixers": ("talking_heads",), "parametrization": "mup"}, "no factor of the scores"),
    ],
)
def test_mixers_refuse_what_they_would_do_in_another_way(keys, said):
    ((_, text),) = checks.problems(Config(model=ModelConfig(**keys)), (checks.ideas,))
    assert said in text


@pytest.mark.parametrize(("loop_input", "a", "b"), [("add", 1, 1), ("mix", 0.5, 2), ("mix", 1, 0)])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_later_turns_read_the_input_of_the_looped_layers(loop_input, a, b, scan_layers):
    """Turns one by one: layers 0 1 2, then 1 2, then 1 2 3, each from what the one before gave."""
    c = tiny(model=LOOPED | {"loop_input": loop_input, "scan_layers": scan_layers}).model
    params = redrawn(c)
    if loop_input == "mix":
        params |= {"loop_scale_D": a * jnp.ones(c.d_model)}
        params |= {"loop_input_scale_D": b * jnp.ones(c.d_model)}
    plain = dataclasses.replace(c, loops=1, loop_layers=None, loop_input="none", scan_layers=False)

    def run(x_BTD, layers):
        """Return the stream after some layers."""
        seen = {}

        def tap(here, name, x):
            if name == "embedding":
                return x if x_BTD is None else x_BTD
            seen[name] = x
            return x

        some = dataclasses.replace(plain, n_layers=len(layers))
        kept = {name: x for name, x in params.items() if not name.startswith("loop")}
        kept["layers"] = jax.tree.map(lambda p: p[np.array(layers)], params["layers"])
        h_BTD = model.hidden(kept, some, TOKENS, tap=tap)
        return seen["residual"], h_BTD

    e_BTD, _ = run(None, [0])
    x_BTD, _ = run(e_BTD, [1, 2])
    x_BTD, _ = run(a * x_BTD + b * e_BTD, [1, 2])
    _, expected = run(a * x_BTD + b * e_BTD, [1, 2, 3])
    np.testing.assert_allclose(hidden(c, params), expected, rtol=0, atol=1e-5)


def test_an_idea_between_turns_knows_the_turn_and_has_a_cache_in_each(monkeypatch, fresh_tables):
    turns_seen = []

    def apply(here, x_BTD):
        turns_seen.append(here.turn)
        return x_BTD + here.turn * here.last("before", x_BTD, 2)[..., 0, :]

    idea = types.SimpleNamespace(apply=apply)
    monkeypatch.setitem(ideas.SITES["turn_input"], "norm_bias", idea)  # any key that is true
    fresh_tables()
    c = tiny(model=LOOPED | {"d_ff": 52}).model
    model.hidden(redrawn(c), c, TOKENS)
    assert turns_seen == [0, 1, 2]
    test_scanned_unrolled_and_cached_are_the_same(LOOPED | {"d_ff": 52})


def test_factors_that_add_nothing_are_refused():
    for branch, placement, advice in (
        ("ffn*0", "pre", "leave it out"),
        ("ffn*0.5", "sandwich", "use pre"),
    ):
        keys = {"branches": (branch, "attention"), "norm_placement": placement}
        config = Config(model=ModelConfig(**keys))
        ((names, text),) = checks.problems(config, (checks.blocks,))
        assert names[0] == "model.branches"
        assert advice in text


def test_initial_values_and_dispatches_count_each_turn_of_a_loop():
    shape, axes = (8, 4), "FD"
    std = {}
    steps = {}
    for loops in (1, 4):
        c = ModelConfig(init="gpt2", loops=loops, d_model=256)
        std[loops] = weight(c, shape, axes, contract="F", residual=True).std
        config = parameters.resolve(Config(model=c), 256)
        steps[loops] = default_steps_per_dispatch(
            dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=1))
        )
    assert std[1] == pytest.approx(2 * std[4])
    assert steps[1] > steps[4]


@pytest.mark.parametrize(
    ("site", "keys", "message"),
    [
        ("logits", {}, "last_residual"),
        ("block_input", {"residual": "hyper_connections"}, "residual = sum"),
        ("turn_input", {"residual": "depth_attention"}, "residual = sum"),
    ],
)
def test_an_idea_where_it_has_no_effect_or_no_texts_is_refused(site, keys, message, monkeypatch):
    def apply(here, x):
        return x + here.last("mine", x, 2)[..., 0, :]

    monkeypatch.setitem(ideas.SITES[site], "norm_bias", types.SimpleNamespace(apply=apply))
    c = parameters.resolve(Config(model=ModelConfig(d_model=32, d_ff=37, **keys)), 19).model
    table = parameters.parameter_table(c)
    shapes = {path: jax.ShapeDtypeStruct(p.shape, "float32") for path, p in table.items()}
    tokens_BT = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda p: model.logits(p, c, tokens_BT), parameters.nest(shapes))


def test_devices_of_a_sequence_exchange_what_a_cache_of_latents_holds():
    sizes = {"replica": 1, "fsdp": 1, "tensor": 1, "sequence": 2}
    sent = {}
    for mixers in (("attention",), ("latent",)):
        c = ModelConfig(d_model=512, n_heads=8, mixers=mixers)
        config = parameters.resolve(Config(model=c), 256)
        found = [t for t in communication.transfers(config, sizes) if t.kind == "reduce-scatter"]
        sent[mixers[0]] = sum(t.payload * t.times for t in found if t.axes == ("sequence",))
    assert sent["latent"] / sent["attention"] == pytest.approx((4 * 64 + 32) / (2 * 8 * 64))
