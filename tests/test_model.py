"""The model: the effect of each config key, causality, and agreement with an independent NumPy
implementation.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import numpy_model
from running import slow
from tiny import jit_gradients, redrawn, state_of, tiny, unstack_layers

from lm import ideas, model
from lm.config import ModelConfig
from lm.layers.losses import head_logits

T = 8
# all different: each token has its own row of the embedding table
TOKENS = np.arange(T * T).reshape(T, T)
OTHER = T * T  # an id that is not in TOKENS

# --- Every key of ModelConfig is in exactly one list. Those of ideas are tested in
# tests/test_ideas.py.

LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_theta": 4.0}
YARN = {
    "rope_scaling": "yarn",
    "rope_factor": 8.0,
    "rope_theta": 4.0,
    "rope_original_max_positions": 8,
}
TWO = {"n_layers": 2}  # in place of one
ARCHITECTURE = {  # key: (values that both models share, two values of the key)
    "n_layers": ({}, 2, 3),
    "n_heads": ({"d_head": 4, "n_kv_heads": 2}, 4, 2),
    "norm_eps": ({}, 1e-5, 1e-1),
    "norm_placement": ({}, "pre", "post"),
    "d_ff": ({}, 24, 32),
    "rope_low_freq_factor": (LLAMA3 | {"rope_original_max_positions": 32}, 0.5, 2.0),
    "rope_high_freq_factor": (LLAMA3 | {"rope_original_max_positions": 32}, 4.0, 8.0),
    "max_positions": (
        {"rope_scaling": "dynamic", "rope_factor": 4.0, "rope_original_max_positions": 4},
        4,
        8,
    ),
    "rope_window_theta": (TWO | {"window_pattern": (3, 0)}, None, 2.0),
    "rope_beta_fast": (YARN | {"rope_beta_slow": 0.25}, 0.6, 1.2),
    "rope_beta_slow": (YARN, 0.25, 0.5),
    "rope_amplitude": (YARN, None, 0.5),
    "residual_multiplier": ({}, 1.0, 0.5),
    "logit_divisor": ({}, 1.0, 3.0),
    "rope_pattern": (TWO, (1,), (1, 0)),
    "parametrization": ({}, "standard", "mup"),
    "mup_base_d_model": ({"parametrization": "mup"}, 64, 16),
    "mup_base_d_head": ({"parametrization": "mup"}, 16, 4),
    "param_dtype": ({}, "float32", "bfloat16"),
}
# the counts and shapes of parameters, tests/test_parameters.py
SIZES = {
    "d_model",
    "d_head",
    "vocab_size",
}
# and norm_algorithm, among its exact algorithms
COMPOSED = {"mixers", "latent_width", "branches", "loops", "loop_layers"}  # tests/test_blocks.py
IMPLEMENTATION = {
    "scan_layers",
    "attention",
    "remat",
}
TRAINING_ONLY = {
    "moe_balance",
    "router_z",
    "multi_token_prediction",
    "deep_supervision",
    "init",
    "embed_std",
    "init_draw",
    "zero_init_residual",
}
TRAINING_ONLY |= {"dropout"}


def test_every_model_key_is_in_exactly_one_list():
    compared = {key for factor in FACTORS for level in factor for key in level}
    compared -= {"norm_placement", *SIZES, *IMPLEMENTATION}  # "post" is missing
    compared |= {"compute_dtype"}  # below
    compared |= {"round_logits"}  # tests/layers/test_losses.py
    # with transformers, tests/huggingface
    compared |= {
        "n_experts",
        "experts_per_token",
        "normalize_experts",
    }
    of_ideas = {key for site in ideas.SITES.values() for key in site}  # and others of experts:
    # every parameter has an effect, tests/test_ideas.py
    of_ideas |= {
        "shared_expert",
        "moe_first_layer",
        "residual",
    }
    of_ideas -= {*ARCHITECTURE, *compared, *TRAINING_ONLY}
    lists = [set(ARCHITECTURE), compared, SIZES, of_ideas, COMPOSED, IMPLEMENTATION, TRAINING_ONLY]
    assert sum(map(len, lists)) == len(set.union(*lists))
    assert set.union(*lists) == {field.name for field in dataclasses.fields(ModelConfig)}


BASE = {
    "vocab_size": OTHER + 1,
    "norm": "layer",
    "attn_bias": True,
    "window_pattern": (0, 3),
    "dropout": 0.3,
}
SAME = {
    "scan_welford": ({"scan_layers": True, "norm_algorithm": "welford"}, {}),
    "scan_remat_block_chan": (
        {"scan_layers": True, "remat": "block", "norm_algorithm": "chan"},
        {},
    ),
    "remat_dots_xla_micro_batches_chunk": (
        {"remat": "dots", "attention": "xla"},
        {"micro_batch_size": 2, "loss_chunk": 6},
    ),
}


def loss_and_gradients(model_keys, train_keys):
    config = tiny(
        model=BASE | model_keys,
        train={"batch_size": T, "seq_len": T - 1, "z_loss": 1e-3} | train_keys,
    )
    return jax.device_get(
        jit_gradients(state_of(config, redrawn(config.model)), {"tokens": TOKENS}, config)
    )


@pytest.fixture(scope="module")
def plain():
    return loss_and_gradients({}, {})


@pytest.mark.parametrize("name", [slow(name) if name.startswith("scan") else name for name in SAME])
def test_implementation_switches_change_loss_and_gradients_only_by_rounding(plain, name):
    """Float32 sums in another order differ by at most 1e-5 of the largest entry of each gradient."""
    losses, grads = loss_and_gradients(*SAME[name])
    chex.assert_trees_all_close(losses, plain[0], rtol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, plain[1])
    scale = jax.tree.map(lambda g: np.abs(g).max(), plain[1])
    chex.assert_trees_all_close(
        *(jax.tree.map(np.divide, g, scale) for g in (grads, plain[1])), rtol=0, atol=1e-5
    )


# --- Causality and agreement with NumPy for combinations of all factors.

FACTORS = [
    [
        {"norm_placement": placement}
        for placement in ("pre", "output", "sandwich", "parallel", "none")
    ],
    [
        {"positions": "rope", "rope_width": 2, "embed_scale": 0.5},
        {
            "positions": "rope",
            "rope_pairing": "halves",
            **LLAMA3,
            "rope_original_max_positions": 32,
        },
        {"positions": "sinusoidal", "sinusoidal_order": "cosine_first"},
        {"positions": "learned"},
        {"positions": "none"},
    ],
    [
        {"norm": "rms"},
        {"norm": "layer", "norm_algorithm": "two_pass"},
        {"norm": "layer", "norm_algorithm": "welford", "norm_bias": False},
        {"norm": "layer", "norm_algorithm": "chan", "norm_ddof": 1},
        {"norm": "layer", "norm_algorithm": "running_mean"},
    ],
    [
        {"ffn": "glu", "activation": "silu"},
        {"ffn": "mlp", "activation": "relu"},
        {"ffn": "mlp", "activation": "gelu", "ffn_bias": True},
        {"ffn": "glu", "activation": "gelu_tanh", "ffn_bias": True},
        {"ffn": "mlp", "activation": "relu_squared"},
    ],
    [{"window_pattern": pattern} for pattern in ((0,), (2,), (3, 2), (2, 0), (4,))],
    [
        {"attention": "einsum", "n_kv_heads": 1, "qk_norm": True, "attn_scale": 0.3},
        {"attention": "xla", "tie_embeddings": True, "logit_softcap": 5.0},
        {"scan_layers": True, "qk_norm": True, "qk_norm_over": "all_heads", "head_bias": True},
        {"remat": "block", "attn_softcap": 2.0, "attn_bias": True, "attn_out_bias": False},
        {"scan_layers": True, "remat": "dots", "d_head": 6, "attn_bias": True},
    ],
]


def combination(i):
    """Return combination i of 25, an orthogonal array: every pair of values of two factors occurs
    in one of them.
    """
    a, b = divmod(i, 5)
    levels = [a, b, *((a + k * b) % 5 for k in range(1, 5))]
    keys = {"vocab_size": OTHER + 1}
    for factor, level in zip(FACTORS, levels, strict=True):
        keys |= factor[level]
    return tiny(model=keys).model


def field_of(c):
    """Return which input positions each output position depends on through all windows, bool (T,
    T).
    """
    distance = np.arange(T)[:, None] - np.arange(T)
    reach = np.eye(T, dtype=int)
    for i in range(c.n_layers):
        window = c.window_pattern[i % len(c.window_pattern)] or T
        reach = reach @ ((distance >= 0) & (distance < window))
    return reach > 0


# Fast: five in which every choice of five factors occurs once, and one more with an MLP. The others
# take two minutes.
COMBINATIONS = [i if i in (0, 7, 8, 14, 16, 23) else slow(i) for i in range(25)]


@pytest.mark.parametrize("i", COMBINATIONS)
def test_receptive_field_is_causal_and_logits_equal_numpy(i):
    c = combination(i)
    params = redrawn(c)

    @jax.jit
    def hidden_and_gradient(tokens):
        def diagonal(embedding):  # row i of the batch contributes its hidden state at position i
            h_BTD = model.hidden(params | {"embedding": embedding}, c, tokens)
            return jnp.sum(h_BTD[jnp.arange(T), jnp.arange(T)] * (1 + jnp.arange(c.d_model))), h_BTD

        return jax.grad(diagonal, has_aux=True)(params["embedding"])

    grads, before = hidden_and_gradient(TOKENS)
    grads = np.asarray(grads)[:OTHER].reshape(T, T, -1)
    np.testing.assert_array_equal((grads != 0).any(-1), field_of(c))

    # row i: token i replaced
    _, after = hidden_and_gradient(np.where(np.eye(T, dtype=bool), OTHER, TOKENS))
    changed = (np.asarray(before) != np.asarray(after)).any(-1)
    np.testing.assert_array_equal(changed, field_of(c).T)

    logits = head_logits(before[:2], model.head(params, c))
    wide = jax.tree.map(np.float64, unstack_layers(params))
    expected = np.stack([numpy_model.logits(c, wide, row) for row in TOKENS[:2]])
    # About ten roundings of 2^-24 in each of two layers, amplified by norms.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


# --- The effect of each key that no other test compares with independent code.


def logits_of(**keys):
    return logits_of_config(tiny(model={"vocab_size": OTHER + 1, "n_layers": 1} | keys).model)


@functools.cache
def logits_of_config(c):
    # not jitted: most operations are compiled once for all keys
    return np.asarray(model.logits(redrawn(c), c, TOKENS))


@pytest.mark.parametrize("key", ARCHITECTURE)
def test_each_architecture_switch_changes_the_logits(key):
    common, *values = ARCHITECTURE[key]
    first, second = (logits_of(**common, **{key: value}) for value in values)
    # All rows change, at every position from 3 on: a window of 3 or RoPE may have no effect on the
    # first positions.
    assert (np.abs(first - second)[:, 3:].max(-1) > 1e-4 * np.abs(first).max()).all()


# --- Dropout and dtypes.


def test_dropout_of_an_example_depends_on_its_own_key_only():
    c = tiny(model={"vocab_size": OTHER + 1, "dropout": 0.5, "n_layers": 1}).model
    params, keys = redrawn(c), jax.random.split(jax.random.key(0), T)
    hidden = jax.jit(lambda tokens, keys: model.hidden(params, c, tokens, dropout_keys_B=keys))
    out = hidden(TOKENS, keys)
    np.testing.assert_array_equal(hidden(TOKENS[::-1], keys[::-1]), out[::-1])
    others = hidden(TOKENS, jax.random.split(jax.random.key(1), T).at[0].set(keys[0]))
    np.testing.assert_array_equal(others[0], out[0])
    assert (np.asarray(others != out)[1:].any(-1)).all()


@pytest.mark.slow
def test_each_dropout_site_has_its_own_keys(monkeypatch):
    """Five sites (the embedding and two branches in each of two layers) for each of two examples."""
    keys = []
    monkeypatch.setattr(
        "lm.here.dropout", lambda x, keys_B, rate: keys.append(jax.random.key_data(keys_B)) or x
    )
    c = tiny(model={"vocab_size": OTHER + 1, "dropout": 0.5}).model
    model.hidden(redrawn(c), c, TOKENS[:2], dropout_keys_B=jax.random.split(jax.random.key(0), 2))
    assert len({key.tobytes() for key in np.concatenate(keys)}) == len(keys) * 2 == 10


def test_bfloat16_logits_are_returned_in_float32_and_close():
    exact, rounded = logits_of(), logits_of(compute_dtype="bfloat16")
    assert rounded.dtype == jnp.float32
    # About ten roundings of 2^-9 in each of two layers.
    assert 2.0**-12 < np.abs(rounded - exact).max() / np.abs(exact).max() < 20 * 2.0**-9


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_remat_saves_less_for_the_backward_pass(dtype):
    """Products with weights are saved under "dots", attention scores are not; "block" saves only
    block inputs.
    """

    def saved(remat):
        c = tiny(
            model={
                "vocab_size": OTHER + 1,
                "compute_dtype": dtype,
                "remat": remat,
                "scan_layers": True,
            }
        ).model
        loss = lambda params: model.logits(params, c, TOKENS[:2]).sum()  # noqa: E731
        residuals = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], redrawn(c))
        return [leaf for leaf in jax.tree.leaves(residuals) if hasattr(leaf, "shape")]

    def has_scores(leaves):
        return any(leaf.shape[-2:] == (T, T) and leaf.dtype != bool for leaf in leaves)

    none, dots, block = map(saved, ("none", "dots", "block"))
    assert has_scores(none)
    assert not has_scores(dots)
    sizes = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in (none, dots, block)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize(("n_layers", "unrolled"), [(3, True), (4, False)])
def test_the_compiler_may_not_undo_remat_in_layers_outside_of_a_scan(n_layers, unrolled):
    """Value embeddings are in layers 0 and 2 of 3, which has no period, and in every second one of
    4.
    """
    keys = {"value_embeddings": True, "scan_layers": True, "remat": "block", "n_layers": n_layers}
    c = tiny(model=keys).model
    program = str(
        jax.make_jaxpr(lambda params: model.hidden(params, c, TOKENS[:2] % 19))(redrawn(c))
    )
    assert f"prevent_cse={unrolled}" in program
    assert f"prevent_cse={not unrolled}" not in program
