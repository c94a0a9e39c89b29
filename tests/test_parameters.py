"""Parameters: exact counts of published models, and initial values that depend on (seed, path,
layer) only.
"""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import slow
from tiny import tiny, unstack_layers

from lm import layer_stack, model, parameters
from lm.declarations import Parameter, bias
from lm.parameters import count, flat, init_params, parameter_table

jit_init = jax.jit(init_params, static_argnums=0)


def initial(seed=7, **model):
    """Return initial values by path and layer. Not jitted, because compiling takes seconds for each
    config.
    """
    return initial_of(tiny(model=model).model, seed)


@functools.cache
def initial_of(c, seed):
    return flat(unstack_layers(init_params(c, seed)))


def test_a_dispatch_takes_about_20_gflops_and_1_to_10_steps():
    def steps(**train):
        return tiny(
            model={"d_model": 128, "d_ff": 512, "n_kv_heads": 4}, train=train
        ).train.steps_per_dispatch

    n = count(parameter_table(tiny(model={"d_model": 128, "d_ff": 512, "n_kv_heads": 4}).model))
    per_sequence = 6 * n * 8  # FLOPs of 8 tokens
    assert steps() == 10
    batch_size = 20 * 10**9 // (3 * per_sequence)  # slightly more than 3 steps
    assert steps(batch_size=batch_size) == 3
    assert steps(batch_size=100 * batch_size) == 1
    assert steps(batch_size=100 * batch_size, steps_per_dispatch=7) == 7
    assert steps(debug=True) == 1


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ({"shape": (4, 3, 2)}, "axes 'DC' must have one letter for each length"),
        ({"contract": "F"}, r"contract='F' is not in the axes 'DC'; give contract="),
        ({"batch": "E"}, "batch='E'"),
        ({"axes": "NC", "contract": "N"}, "use another letter"),
        ({"kind": "matrix"}, "no kind 'matrix'; use one of weight, embedding"),
    ],
)
def test_a_declaration_that_consumers_would_misread_is_refused(declaration, said):
    """Without weight decay nothing but the optimizer reads the kind; letters and lengths would be
    paired in silence.
    """
    with pytest.raises(ValueError, match=said):
        Parameter(
            **{"shape": (4, 3), "axes": "DC", "kind": "weight", "contract": "D"} | declaration
        )


OTHERS = [
    {"attn_bias": True, "ffn_bias": True, "head_bias": True},
    {"qk_norm": True},
    {"qk_norm": True, "qk_norm_over": "all_heads"},
    {"attn_out_bias": True},
    {"norm_placement": "output"},
    {"tie_embeddings": True},
    {"norm": "layer"},
    {"norm_placement": "none"},
    {"norm_placement": "sandwich"},
    {"norm_placement": "parallel"},
    {"positions": "learned"},
    {"ffn": "mlp"},
    {"n_kv_heads": 4},
    {"n_layers": 3},
    {"zero_init_residual": True},
]


@pytest.mark.parametrize(
    "other", [*OTHERS[::2], *map(slow, OTHERS[1::2])], ids=lambda other: "-".join(map(str, other))
)
def test_variants_share_the_initial_values_of_common_parameters(other):
    """Parameters of the same path are bit-identical, so that paired comparisons start from the same
    point.
    """
    base, changed = initial(), initial(**other)
    differ = {
        path
        for path in base.keys() & changed.keys()
        if not np.array_equal(base[path], changed[path])
    }
    meant = {"n_kv_heads": ("w_k_DGK", "w_v_DGK"), "zero_init_residual": ("w_o_HKD", "w_down_FD")}
    allowed = meant.get(next(iter(other)), ())
    assert {path.rpartition("/")[2] for path in differ} == set(allowed)
    assert len(base.keys() & changed.keys()) >= 11  # enough parameters are compared
    if not allowed:
        assert base.keys() != changed.keys()


def test_names_layers_and_seeds_have_uncorrelated_values():
    values = initial(ffn="glu", n_kv_heads=4)
    same_shape = ["attention/w_k_DGK", "attention/w_v_DGK", "attention/w_q_DHK"]
    chosen = [values[f"layers_{i}/{path}"] for i in (0, 1) for path in same_shape]
    chosen += [
        values[f"layers_{i}/ffn/{name}"] for i in (0, 1) for name in ("w_gate_DF", "w_up_DF")
    ]
    chosen.append(initial(seed=8, n_kv_heads=4)["layers_0/attention/w_k_DGK"])
    correlations = np.corrcoef([np.ravel(x)[:256] for x in chosen]) - np.eye(len(chosen))
    assert np.abs(correlations).max() < 5 / math.sqrt(256)


def test_scanned_and_unrolled_models_have_bit_identical_initial_values():
    unrolled, scanned = (
        init_params(tiny(model={"scan_layers": scan}).model, 3) for scan in (False, True)
    )
    chex.assert_trees_all_equal(unrolled, scanned)


@pytest.mark.slow
def test_initial_values_are_the_same_under_jit():
    seed = jnp.uint32(2**32 - 1)  # the largest seed
    base = jit_init(tiny().model, seed)
    other = {"attn_bias": True, "head_bias": True, "qk_norm": True, "norm": "layer", "n_layers": 3}
    changed = flat(unstack_layers(jit_init(tiny(model=other).model, seed)))
    layers = flat(unstack_layers(base))
    chex.assert_trees_all_equal({path: changed[path] for path in layers}, layers)
    # With and without jit, the compiler may round a product differently, by one unit in the last
    # place.
    chex.assert_trees_all_close(init_params(tiny().model, 2**32 - 1), base, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_layers_are_split_by_number(scan_layers):
    """layers_10 follows layers_9, not layers_1; a scan over equal layers gets their stack."""
    c = tiny(model={"n_layers": 11, "scan_layers": scan_layers}).model
    params = {
        "embedding": np.zeros(3),
        "layers": {"ffn": {"w_up_DF": np.arange(44.0).reshape(11, 2, 2)}},
    }
    split = layer_stack.split_layers(params, c, model.block_table(c))
    if scan_layers:
        chex.assert_trees_all_equal(split["layers_0"]["0"], params["layers"])
    else:
        np.testing.assert_array_equal(split["layers_10"]["ffn"]["w_up_DF"], [[40, 41], [42, 43]])


def test_the_derivative_of_split_layers_equals_that_of_indexing():
    c = tiny(model={"n_layers": 3}).model
    params = {"layers": {"ffn": {"w_up_DF": jnp.arange(6.0).reshape(3, 2)}}, "head": jnp.ones(2)}

    def loss(rows, head):
        return sum((i + 1) * jnp.sum(jnp.sin(rows[i]) * head) for i in range(3))

    def split(p):
        return [
            layer_stack.split_layers(p, c, model.block_table(c))[f"layers_{i}"]["ffn"]["w_up_DF"]
            for i in range(3)
        ]

    ours = jax.grad(lambda p: loss(split(p), p["head"]))(params)
    plain = jax.grad(lambda p: loss(p["layers"]["ffn"]["w_up_DF"], p["head"]))(params)
    chex.assert_trees_all_close(ours, plain, rtol=1e-6)


# (d_in, d_out) by path, for the published standard deviations: Glorot and Bengio 2010, He et al.
# 2015, GPT-2's code.
FANS = {
    "attention/w_q_DHK": (64, 128),
    "attention/w_k_DGK": (64, 64),
    "attention/w_v_DGK": (64, 64),
    "attention/w_o_HKD": (128, 64),
    "ffn/w_gate_DF": (64, 96),
    "ffn/w_up_DF": (64, 96),
    "ffn/w_down_FD": (96, 64),
    "head/w_DV": (64, 100),
}
CUT = 0.98658  # the std of a standard normal cut at +-3: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1))


def documented_std(init, path, n_layers):
    d_in, d_out = FANS[path]
    if init == "glorot":
        return CUT * math.sqrt(2 / (d_in + d_out))
    if init == "he":
        return math.sqrt(2 / d_in)
    return 0.02 / (math.sqrt(2 * n_layers) if path.endswith(("w_o_HKD", "w_down_FD")) else 1)


@pytest.mark.parametrize("init", ["glorot", "he", "gpt2"])
def test_initializers_have_their_documented_standard_deviation_and_cut(init):
    sizes = {
        "d_model": 64,
        "n_heads": 8,
        "n_kv_heads": 4,
        "d_head": 16,
        "d_ff": 96,
        "vocab_size": 100,
    }
    values = initial(init=init, **sizes)
    for path in FANS:
        x = np.float64(values[path if path.startswith("head") else f"layers_1/{path}"])
        expected = documented_std(init, path, n_layers=2)
        # The standard errors of mean and std of n normal draws are 1/sqrt(n) and 1/sqrt(2n) sigma;
        # 5 of them allow one failure in a million.
        assert abs(x.mean()) < 5 * expected / math.sqrt(x.size), path
        assert abs(x.std() / expected - 1) < 5 / math.sqrt(2 * x.size), path
        largest = np.abs(x).max() / expected
        assert largest <= 3 / CUT * (1 + 1e-6) if init == "glorot" else largest > 3, path
    assert abs(np.std(values["embedding"]) / (0.02 if init == "gpt2" else 1) - 1) < 5 / math.sqrt(
        2 * 6400
    )


def test_embed_std_scales_the_initial_embeddings():
    np.testing.assert_allclose(
        initial(embed_std=0.5)["embedding"], 0.5 * initial()["embedding"], rtol=1e-6
    )


def test_an_initializer_of_the_config_is_not_a_distribution():
    with pytest.raises(ValueError, match="no init 'he'; use one of normal"):
        parameters._draw(jax.random.key(0), Parameter((2,), "D", "bias", init="he"))


def test_gains_start_at_one_and_biases_at_zero():
    values = initial(
        norm="layer",
        qk_norm=True,
        attn_bias=True,
        ffn_bias=True,
        head_bias=True,
        zero_init_residual=True,
    )
    table = parameter_table(
        tiny(
            model={
                "norm": "layer",
                "qk_norm": True,
                "attn_bias": True,
                "ffn_bias": True,
                "head_bias": True,
            }
        ).model
    )
    table = {
        path.replace("layers/", f"layers_{i}/"): p for path, p in table.items() for i in range(2)
    }
    assert values.keys() == table.keys()
    for path, p in table.items():
        if p.kind in ("norm", "bias"):
            assert (values[path] == (p.kind == "norm")).all(), path
        elif path.endswith(("w_o_HKD", "w_down_FD")):
            assert (values[path] == 0).all(), path
        else:
            assert (values[path] != 0).all(), path


GOLDEN = {
    ("glorot", "embedding"): [0.23818332, -0.99204147, 0.04491008],
    ("glorot", "layers_1/attention/w_o_HKD"): [0.04164286, 0.00823385, 0.02120458],
    ("he", "layers_1/attention/w_o_HKD"): [0.05905283, 0.01167598, 0.0300692],
    ("gpt2", "head/w_DV"): [-0.0130141, -0.00333021, -0.00747085],
}


@pytest.mark.parametrize(("init", "path"), GOLDEN)
def test_initial_values_do_not_change_between_versions(init, path):
    """GOLDEN holds the values of seed 7 in November 2026, on jax 0.10.2 and 0.12.0."""
    np.testing.assert_allclose(
        np.ravel(initial(init=init)[path])[:3], GOLDEN[init, path], rtol=1e-6
    )


def test_bfloat16_parameters_are_the_rounded_float32_ones():
    wide, narrow = initial(), initial(param_dtype="bfloat16")
    chex.assert_trees_all_equal(narrow, jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide))


def test_attention_may_declare_a_parameter_for_some_layers(monkeypatch):
    """As docs/changing-the-model.md says of a layer in place of attention."""
    monkeypatch.setattr(model, "bias", lambda *args: dataclasses.replace(bias(*args), layers=(0,)))
    c = tiny(model={"attn_bias": True}).model
    assert ["b_q_HK" in model.mixer_table(c, "attention", layer) for layer in (0, 1, None)] == [
        True,
        False,
        True,
    ]
