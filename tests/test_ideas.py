"""Every idea of lm/ideas keeps the promises of the model: one row of VARIANTS per idea, one test
per promise.

A new idea adds a row, and its keys to some of the configs of PAIRS, in which each two ideas meet.
Fast tests run each promise for half of these configs; the slow ones for all, for each idea alone,
and on meshes of 8 devices.
"""

import dataclasses
import functools
import itertools
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from products import forward_flops
from running import on_devices
from tiny import jit_gradients, redrawn, state_of, tiny

from lm import ideas, layer_stack, model, optimizers, parameters, past, step
from lm.checking.card import PROPERTIES
from lm.checking.subject import Subject
from lm.config import MESH_AXES, Config, ModelConfig, checks, present_mixers
from lm.cost import flops
from lm.declarations import Parameter, small_weight
from lm.generation import decoding
from lm.generation.kv_cache import Prefill, decode
from lm.here import Here
from lm.huggingface.config_files import export_fields
from lm.ideas import attention_gate, is_on
from lm.layers.losses import Sums
from lm.parallel import sharding
from lm.step import _sums, batch_fields, init_state, train_steps
from lm.system.errors import UserError
from lm.training.layer_statistics import layer_statistics
from lm.training.unused import unused_parameters


@dataclasses.dataclass(frozen=True)
class Row:
    """How an idea is tested.

    Attributes:
        keys: the keys of config.model that turn it on.
        identity: the model of step 0 is the one without it.
        exports: a family of Hugging Face has it.
        sequence: it works with config.mesh.sequence > 1; otherwise it is refused.
    """

    keys: dict
    identity: bool = False
    exports: bool = False
    sequence: bool = True


VARIANTS = {
    "head gate": Row({"attn_gate": "head"}),
    "head gate from identity": Row({"attn_gate": "head_identity"}, identity=True),
    "element gate": Row({"attn_gate": "element"}),
    "element gate from identity": Row({"attn_gate": "element_identity"}, identity=True),
    "exclusive attention": Row({"attn_exclusive": "full"}),
    "exclusive attention, learned": Row({"attn_exclusive": "learned"}, identity=True),
    "sink": Row({"attn_sink": True}),
    "forgetting gate": Row({"attn_forget": True, "positions": "none"}),
    "gated delta": Row({"gated_delta": "all"}),
    "gated delta in three of four layers": Row({"gated_delta": "three_of_four"}),
    "differential attention": Row({"attn_differential": True}),
    "value embeddings": Row({"value_embeddings": True}),
    "residual scalars": Row({"residual_scalars": True}, identity=True),
    "depth attention": Row({"residual": "depth_attention"}),
    "hyper-connections": Row({"residual": "hyper_connections"}, identity=True),
    "DyT": Row({"norm": "dyt"}),
    "no rotation in every second layer": Row({"rope_pattern": (1, 0)}, exports=True),
    "YaRN, another base in layers with a window": Row(
        {
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_max_positions": 8,
            "rope_window_theta": 50.0,
            "window_pattern": (0, 3),
        }
    ),
    "parallel branches, multipliers": Row(
        {"residual": "parallel", "residual_multiplier": 0.5, "logit_divisor": 3.0}
    ),
    "convolution of keys": Row({"conv_keys": True}, identity=True),
    "convolution of values": Row({"conv_values": True}, identity=True),
    "convolution of the stream": Row({"conv_stream": True}, identity=True),
    "token shift": Row({"token_shift": True}, identity=True),
    "query scale": Row({"query_scale": "learned"}, identity=True),
    "query scale, log n": Row({"query_scale": "log_n"}),
    "latent attention": Row({"mixers": ("latent",)}),
    "talking heads in every second layer": Row({"mixers": ("talking_heads", "attention")}),
    "RG-LRU in two of three layers": Row({"mixers": ("rg_lru", "rg_lru", "attention")}),
    "Kimi delta attention in three of four layers": Row(
        {"mixers": ("kda", "kda", "kda", "attention")}
    ),
    "experts": Row({"ffn": "moe", "n_experts": 4}, sequence=False),
    "experts after the first layer, one shared": Row(
        {
            "ffn": "moe",
            "n_experts": 4,
            "moe_first_layer": 1,
            "shared_expert": True,
            "normalize_experts": False,
        },
        sequence=False,
    ),
    "value residual, half": Row({"value_residual": "half"}),
    "value residual, learned": Row({"value_residual": "learned"}, identity=True),
}
MIXED = dict.fromkeys(
    ["conv_keys", "conv_values", "token_shift", "value_embeddings", "multi_token_prediction"], True
)
MIXED |= {"norm": "dyt", "ffn": "moe", "n_experts": 4}
MIXED |= {"deep_supervision": 0.3}
ALL = MIXED | {"attn_differential": True, "query_scale": "learned"}
DEPTH, HYPER = ALL | {"residual": "depth_attention"}, ALL | {"residual": "hyper_connections"}
SUM = {"residual_scalars": True, "conv_stream": True}
FORGET, PATTERN = (
    {"attn_forget": True, "positions": "none"},
    {"rope_pattern": (1, 0), "attn_sink": True},
)
LATER = {"moe_first_layer": 1, "shared_expert": True, "normalize_experts": False, "n_layers": 5}
MIXED |= {"attn_gate": "element", "value_residual": "learned", "rope_pattern": (1, 0)}
# Each two ideas that go together meet in one of these; every second one is fast, and these have all
# ideas.
PAIRS = [
    # After the first layer a scan over periods of the pattern.
    DEPTH
    | PATTERN
    | LATER
    | {"attn_gate": "element", "attn_exclusive": "learned", "value_residual": "learned"},
    DEPTH
    | FORGET
    | LATER
    | {"attn_gate": "head", "attn_exclusive": "learned", "value_residual": "half"},
    HYPER
    | FORGET
    | {
        "attn_gate": "head_identity",
        "attn_exclusive": "full",
        "value_residual": "half",
        "n_layers": 2,
    },
    HYPER
    | PATTERN
    | LATER
    | {"attn_gate": "element_identity", "attn_exclusive": "full", "value_residual": "learned"},
    SUM | FORGET | {"n_layers": 2},
    ALL
    | SUM
    | PATTERN
    | LATER
    | {"attn_gate": "element", "attn_exclusive": "full", "value_residual": "learned"},
    MIXED | SUM | LATER | {"gated_delta": "three_of_four"},
    MIXED | LATER | {"gated_delta": "all", "residual": "depth_attention"},
    MIXED
    | {
        "gated_delta": "all",
        "attn_exclusive": "full",
        "residual": "hyper_connections",
        "n_layers": 2,
    },
]
APART = [  # these do not go together
    {("attn_forget", True), ("rope_pattern", (1, 0))},
    {("attn_forget", True), ("attn_sink", True)},
    {("gated_delta", True), ("attn_sink", True)},
    {("gated_delta", True), ("attn_forget", True)},
    {("gated_delta", True), ("attn_differential", True)},
    {("gated_delta", True), ("query_scale", True)},
    {("residual", "hyper_connections"), ("residual_scalars", True)},
    {("residual", "hyper_connections"), ("conv_stream", True)},
    {("residual", "depth_attention"), ("residual_scalars", True)},
    {("residual", "depth_attention"), ("conv_stream", True)},
]
# Keys that turn no idea on: sizes, choices within a part (tests/layers, tests/test_choices.py),
# blocks (tests/test_blocks.py), initial values, and how it is computed.
PLAIN = {
    *("d_model", "n_heads", "n_kv_heads", "d_head", "vocab_size", "d_ff", "max_positions"),
    *("norm_eps", "norm_bias", "norm_algorithm", "norm_ddof", "norm_placement", "activation"),
    *("experts_per_token", "moe_balance", "router_z", "ffn_bias", "attn_bias", "attn_out_bias"),
    *("head_bias", "rope_theta", "rope_pairing", "rope_width", "rope_low_freq_factor"),
    *("rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow", "rope_amplitude"),
    *("sinusoidal_order", "qk_norm", "qk_norm_over", "latent_width", "branches", "loops"),
    *("loop_layers", "attn_scale", "attn_softcap", "logit_softcap", "round_logits", "embed_scale"),
    *("tie_embeddings", "dropout", "init", "embed_std", "init_draw", "zero_init_residual"),
    *("parametrization", "mup_base_d_model", "mup_base_d_head", "param_dtype", "compute_dtype"),
    *("scan_layers", "attention", "remat"),
}
BASE = {"n_layers": 4, "scan_layers": True}
B, T = 2, 8
# all different: each token has its own row of the embedding table
TOKENS = np.arange(B * T).reshape(B, T)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3]] * B)


def config_of(row: Row, **keys):
    return tiny(model=BASE | smooth(row) | row.keys | keys)


def smooth(row: Row) -> dict:
    """Return keys against rounding, which the norm of a recurrence's near-zero outputs multiplies
    by norm_eps^-0.5.
    """
    has_it = "gated_delta" in row.keys or "kda" in row.keys.get("mixers", ())
    return {"norm_eps": 0.1} if has_it else {}


def with_many_tokens(row: Row):
    return config_of(row, vocab_size=T * T).model


SLOW = pytest.mark.slow
# of lm/checking/card.py: what looks at the equations, not at the time
WORDS = ("order", "independent", "leave the stream", "step 0", "wide", "carried", "plan's", "width")
CARD = {name: f for name, f in PROPERTIES.items() if any(word in name for word in WORDS)}
TOGETHER = [
    pytest.param(Row(keys), id=f"pairs {i}", marks=[SLOW] * (i % 2 or i > 7))
    for i, keys in enumerate(PAIRS)
]
ALONE = [pytest.param(row, id=name, marks=SLOW) for name, row in VARIANTS.items()]
ROWS = pytest.mark.parametrize("row", TOGETHER + ALONE)
IDENTITY = {
    key: value for row in VARIANTS.values() if row.identity for key, value in row.keys.items()
}
IDENTITY |= {"residual": "sum"}  # hyper-connections replace the stream of some of them


@functools.cache
def jitted(c):
    """Return the hidden states of a model as a compiled function of (params, tokens, segments)."""
    return jax.jit(
        lambda params, tokens, segments: model.hidden(params, c, tokens, segments=segments)
    )


@functools.cache
def of_own_documents(c):
    """Return the hidden states of T rows in the scanned model, and their derivatives by the
    parameters.

    Row i contributes its output at position i, and each token of each row has its own row of the
    embedding table.
    """

    def diagonal(params):
        tokens, segments = jnp.arange(T * T).reshape(T, T), jnp.tile(SEGMENTS[:1], (T, 1))
        h_BTD = model.hidden(params, c, tokens, segments=segments)
        return jnp.sum(h_BTD[jnp.arange(T), jnp.arange(T)] @ (1.0 + jnp.arange(c.d_model))), h_BTD

    params = redrawn(c)
    return params, *jax.jit(jax.grad(diagonal, has_aux=True))(params)


def test_every_idea_has_a_row_and_each_two_meet_in_a_config():
    keys = {key for site in ideas.SITES.values() for key in site}
    tested = {key for row in VARIANTS.values() for key in row.keys}
    tested |= {"multi_token_prediction", "deep_supervision"}  # below; neither changes evaluation
    tested |= {"loop_input"}  # tests/test_blocks.py
    tested |= {"masked_diffusion"}  # tests/generation/test_diffusion.py: it looks ahead
    assert keys <= tested
    tested |= {key for on in PAIRS for key in on}
    every = {field.name for field in dataclasses.fields(ModelConfig)}
    assert every == tested | PLAIN, "a new key needs a row, a pair, or a place among plain ones"
    assert not keys & PLAIN
    default = tiny().model
    assert not any(is_on(getattr(default, key)) for key in keys)
    missing = {
        name
        for name, row in VARIANTS.items()
        if not any(row.keys.items() <= on.items() for on in PAIRS)
    }
    # of others
    assert missing == {
        "YaRN, another base in layers with a window",
        "parallel branches, multipliers",
        # a choice beside a pair's, and mixers, which most ideas are not a part of
        "query scale, log n",
        "latent attention",
        "talking heads in every second layer",
        "RG-LRU in two of three layers",
        "Kimi delta attention in three of four layers",
    }
    on = [
        {(key, value if key in ("residual", "rope_pattern") else True) for key, value in c.items()}
        for c in PAIRS
    ]
    both = set().union(*on) - {(key, True) for key in ("positions", "n_experts", "n_layers")}
    for a, b in itertools.combinations(both, 2):
        assert a[0] == b[0] or {a, b} in APART or any({a, b} <= found for found in on), (a, b)
    assert not [problem for c in PAIRS for problem in checks.problems(config_of(Row(c)))]
    assert all(list(checks.problems(config_of(Row(dict(pair))))) for pair in APART[1:])


@ROWS
def test_it_sees_earlier_tokens_of_its_own_document_only(row):
    """The derivatives of outputs by the embedding of each token show which tokens they depend on."""
    _, grads, _ = of_own_documents(with_many_tokens(row))
    depends = (np.asarray(grads["embedding"]).reshape(T, T, -1) != 0).any(-1)
    same_document = SEGMENTS[0][:, None] == SEGMENTS[0]
    np.testing.assert_array_equal(depends, np.tri(T, dtype=bool) & same_document)


@ROWS
def test_it_is_the_same_unrolled_and_scanned_and_all_its_parameters_have_an_effect(row):
    c = with_many_tokens(row)
    params, grads, scanned = of_own_documents(c)
    unrolled = jitted(dataclasses.replace(c, scan_layers=False))
    for rows in np.split(np.arange(T * T).reshape(T, T), T // B):
        h_BTD = unrolled(params, rows, SEGMENTS)
        np.testing.assert_allclose(h_BTD, scanned[rows[:, 0] // T], rtol=0, atol=1e-5)
    flat = parameters.flat(grads)
    without = [path for path, g in flat.items() if not np.abs(g).max() > 0 and path != "head/w_DV"]
    assert not without


def unused(fsdp: int, micro_batch_size=None, **model):
    """Return what a run over fsdp devices says of parameters that the loss does not read."""
    config = tiny(model=model, train={"micro_batch_size": micro_batch_size})
    types = (AxisType.Auto,) * len(MESH_AXES)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, fsdp, 1, 1), MESH_AXES, axis_types=types)):
        state = jax.eval_shape(functools.partial(init_state, config), 0)
        inputs = {"tokens": jax.ShapeDtypeStruct((2, 4, T + 1), "int32")}
        # of its own: JAX keeps traces of functions
        steps = jax.jit(lambda *inputs: train_steps(*inputs, config))
        return unused_parameters(steps.trace(state, None, inputs, np.int32(1)), state)


@SLOW
@pytest.mark.parametrize("name", CARD)
@pytest.mark.parametrize("row", VARIANTS.values(), ids=VARIANTS)
def test_it_keeps_the_properties_of_lm_check(row, name):
    """Those that no other test here has."""
    config = Config()
    assert CARD[name](Subject(dataclasses.replace(config, model=replaced(config, row))))


def replaced(config, row: Row):
    return dataclasses.replace(config.model, **smooth(row) | row.keys)


@ROWS
def test_the_loss_reads_all_its_parameters(row):
    """In a scan over rematerialized layers, with gathered parameters."""
    assert unused(2, **BASE | row.keys, remat="block") is None


@pytest.mark.parametrize(
    ("fsdp", "keys"), [(1, {"scan_layers": True, "remat": "block", "micro_batch_size": 1}), (2, {})]
)
def test_parameters_that_the_loss_does_not_read_are_named(fsdp, keys, monkeypatch):
    """An attention that takes keys and values from elsewhere leaves their weights."""

    class Keys:
        def apply(here, qk):
            return (qk[0], jnp.zeros_like(qk[1]) + here.x_BTD[..., None, :4])

    class Values:
        def apply(here, v_BTGK):
            return jnp.zeros_like(v_BTGK) + here.x_BTD[..., None, :4]

    monkeypatch.setitem(ideas.SITES["queries_keys"], "norm_bias", Keys)  # any key that is true
    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", Values)
    found = unused(fsdp, qk_norm=False, **keys)
    assert re.findall(r"layers/\S*?(?=[,:])", found) == [
        "layers/attention/w_k_DGK",
        "layers/attention/w_v_DGK",
    ]


def test_letters_that_decide_sharding_and_mup_mean_the_same_in_all_parameters(
    monkeypatch, fresh_tables
):
    """The key of lm/layers/__init__.py. Names end in the axes of one layer."""
    plain = {
        "positions": "learned",
        "attn_bias": True,
        "ffn_bias": True,
        "qk_norm": True,
        "norm": "layer",
    }
    for row in (*VARIANTS.values(), *map(Row, PAIRS), Row(plain)):
        table = parameters.parameter_table(config_of(row).model)
        if row.keys is plain:
            assert all(
                p.rpartition("_")[2] in (x.axes.removeprefix("N"), p) for p, x in table.items()
            )
    for letter in optimizers.WIDTHS | sharding.RULES.keys():
        table = {f"mine_{letter}": small_weight((7,), letter)}
        idea = types.SimpleNamespace(table=lambda c, table=table: table)
        monkeypatch.setitem(ideas.SITES["values"], "norm_bias", idea)
        fresh_tables()
        with pytest.raises(
            ValueError, match=f"mine_{letter}: an axis {letter} has .* elements, but this one 7"
        ):
            parameters.parameter_table(tiny().model)


@pytest.mark.slow
@pytest.mark.parametrize("row", VARIANTS.values(), ids=VARIANTS)
def test_it_changes_the_model(row):
    c, plain = config_of(row).model, config_of(Row({})).model
    params = redrawn(c)
    fresh, theirs = parameters.flat(redrawn(plain)), parameters.flat(params)
    both = {path for path, x in fresh.items() if path in theirs and theirs[path].shape == x.shape}
    shared = parameters.nest(
        {path: theirs[path] if path in both else x for path, x in fresh.items()}
    )
    args = TOKENS, SEGMENTS
    assert np.abs(jitted(c)(params, *args) - jitted(plain)(shared, *args)).max() > 1e-3


@pytest.mark.parametrize("row", [pytest.param(Row(IDENTITY, identity=True), id="all"), *ALONE])
def test_it_starts_as_the_model_without_it_or_says_that_it_does_not(row):
    c, plain = config_of(row).model, config_of(Row({})).model
    first = jitted(c)(parameters.init_params(c, 0), TOKENS, SEGMENTS)
    baseline = jitted(plain)(parameters.init_params(plain, 0), TOKENS, SEGMENTS)
    assert (np.abs(first - baseline).max() < 1e-5) == row.identity


@ROWS
def test_cached_decoding_equals_the_full_forward_pass(row):
    """For prompts of different lengths, with a window in every second layer."""
    c = config_of(row, n_layers=2, window_pattern=(0, 3), scan_layers=False).model
    params = redrawn(c)
    decoder = decoding.make_decoder(params, c, seq_len=T)
    expected = jitted(c)(params, TOKENS, np.ones((B, T), int))
    # as in lm.interpret
    without_batch = jax.eval_shape(lambda params: model.hidden(params, c, TOKENS[0]), params)
    assert without_batch.shape == expected.shape[1:]
    lengths_B, starts_B = np.array([3, 2]), np.array([0, 1])
    h_BTD, cache = jax.jit(
        lambda tokens: decoding._apply(decoder, {}, tokens, Prefill(lengths_B=lengths_B, n_slots=T))
    )(np.where(np.arange(T) < lengths_B[:, None], TOKENS, 0)[:, :4])
    step = jax.jit(
        lambda cache, tokens, time: decoding._apply(decoder, cache, tokens, decode(time, starts_B))
    )
    for row_, n in enumerate(lengths_B):
        np.testing.assert_allclose(h_BTD[row_, n - 1], expected[row_, n - 1], rtol=0, atol=1e-5)
    for time in range(max(lengths_B), T):
        at = time - starts_B
        h_B1D, cache = step(cache, np.take_along_axis(TOKENS, at[:, None], 1), time)
        np.testing.assert_allclose(h_B1D[:, 0], expected[np.arange(B), at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_activations_and_products_stay_in_the_compute_dtype(scan_layers, monkeypatch):
    """Parameters are float32, activations bfloat16; a scan also refuses a stream that changes its
    dtype.
    """
    attend = model.causal_attention
    for name, row in VARIANTS.items():
        c = config_of(row, compute_dtype="bfloat16", scan_layers=scan_layers, n_layers=2).model
        params = {
            path: jax.ShapeDtypeStruct(p.shape, "float32")
            for path, p in parameters.parameter_table(c).items()
        }
        found = {}

        def attention(*args, found=found, **options):
            out = attend(*args, **options)
            found |= {
                "q": args[0].dtype,
                "k": args[1].dtype,
                "v": args[2].dtype,
            }
            return out

        def tap(here, name, x, found=found):
            found[here.named(name)] = x.dtype
            return x

        monkeypatch.setattr(model, "causal_attention", attention)
        jax.eval_shape(
            lambda p, c=c, tap=tap: model.hidden(p, c, TOKENS, tap=tap), parameters.nest(params)
        )
        assert "final_norm/output" in found
        attends = "attention" in present_mixers(c) and "gated_delta" not in row.keys
        assert ("k" in found) == attends
        wide = {key for key in found if key.endswith("/scores")}  # before a softmax in float32
        assert {found[key] for key in wide} <= {jnp.dtype("float32")}
        dtypes = {found[key] for key in found.keys() - wide}
        assert dtypes == {jnp.dtype("bfloat16")}, (name, found)


@ROWS
def test_its_flops_are_those_of_the_traced_program(row):
    c, T = config_of(row, attention="einsum").model, 64  # one chunk of a recurrence
    of_loss = 6 * ideas.loss_products(c)
    counted = (flops.flops_per_token(c, T, full_square=True) - of_loss) / 3 * B * T
    assert forward_flops(c, B, T) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("site", "layers"),
    [("heads", 4), ("block_input", 4), ("ffn_hidden", 4), ("embedding", 1), ("ffn", 2)],
)
def test_products_of_activations_are_counted_where_they_are(site, layers, monkeypatch):
    c = config_of(Row({"ffn": "moe", "n_experts": 4, "moe_first_layer": 2})).model
    plain = flops.flops_per_token(c, T)
    if site == "ffn":
        monkeypatch.setattr(
            ideas.FEED_FORWARDS["moe"], "products", lambda c, n_keys: 100, raising=False
        )
    else:  # any key that is true
        monkeypatch.setitem(
            ideas.SITES[site], "norm_bias", types.SimpleNamespace(products=lambda c, n_keys: 100)
        )
    assert flops.flops_per_token(c, T) - plain == 6 * 100 * layers


def test_all_are_exported_as_they_are_or_refused():
    # change no function
    others = [
        {"multi_token_prediction": True},
        {"ffn": "moe", "qk_norm": True, "ffn_bias": True},
    ]
    for row in (*VARIANTS.values(), *(Row(keys, exports=True) for keys in others)):
        if row.exports:
            export_fields(config_of(row))
        else:
            with pytest.raises(UserError, match="no supported family"):
                export_fields(config_of(row))


@pytest.mark.parametrize(("key", "value"), [("experts_per_token", 5), ("moe_first_layer", 4)])
def test_experts_that_do_not_exist_are_refused(key, value):
    with pytest.raises(UserError, match=f"config.model.{key}"):
        config_of(VARIANTS["experts"], **{key: value})


def test_loss_terms_of_packed_rows_add_up_over_micro_batches():
    config = tiny(
        model={"n_layers": 1, "ffn": "moe", "n_experts": 4, "multi_token_prediction": True}
    )
    halves = dataclasses.replace(
        config, train=dataclasses.replace(config.train, micro_batch_size=2)
    )
    tokens = np.random.default_rng(0).integers(0, 19, (4, T + 1))
    batch = {"tokens": tokens, "segments": np.cumsum(tokens < 5, axis=1) + 1}
    whole, parts = (jit_gradients(state_of(config), batch, c) for c in (config, halves))
    assert whole[0].keys() == {
        "loss",
        "loss/mtp_2",
        "loss/mtp_3",
        "loss/moe_balance",
        "loss/router_z",
    }
    chex.assert_trees_all_close(whole, parts, rtol=1e-4, atol=1e-6)


# Adam divides gradients near 0 by their size, and with its usual eps multiplies their rounding.
LARGE_EPS = {"eps": 1e-6}


@pytest.mark.slow
def test_all_train_alike_on_8_devices(tmp_path):
    """Losses, gradients and updates on a mesh are those of one device."""

    def case(row, mesh):
        model = BASE | smooth(row) | row.keys | {"n_heads": 4}
        return {"mesh": mesh, "sections": {"model": model, "optimizer": LARGE_EPS}}

    rows = list(VARIANTS.values())
    one = on_devices(tmp_path, 1, [case(row, None) for row in rows])[0]
    meshes = ([1, 2, 2, 2] if row.sequence else [2, 2, 2, 1] for row in rows)
    eight = on_devices(
        tmp_path, 8, [case(row, mesh) for row, mesh in zip(rows, meshes, strict=True)]
    )[0]
    differ = {}
    for name, expected, found in zip(VARIANTS, one, eight, strict=True):
        worst = max(np.abs(found[key] - x).max() for key, x in expected.items())
        if not worst < 2e-4:
            differ[name] = worst
    assert not differ


@pytest.mark.slow
def test_what_crosses_the_devices_of_a_packed_sequence(tmp_path):
    """States of recurrences and later targets, with parts of two positions: a convolution reaches
    back over two devices, and documents begin and end on all of them.
    """
    kinds = (
        {"conv_keys": True, "token_shift": True, "multi_token_prediction": True},
        {"mixers": ("rg_lru", "kda"), "norm_eps": 0.1},  # as in `smooth`
        {"attn_forget": True, "positions": "none"},
    )
    shared = {"data": {"packing": "documents"}, "optimizer": LARGE_EPS}
    cases = [{"sections": {"model": BASE | keys} | shared} for keys in kinds]
    one = on_devices(tmp_path, 1, [case | {"mesh": None} for case in cases])[0]
    eight = on_devices(tmp_path, 8, [case | {"mesh": [1, 2, 1, 4]} for case in cases])[0]
    for keys, expected, found in zip(kinds, one, eight, strict=True):
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, atol=2e-4, rtol=0, err_msg=f"{keys} {name}")


def test_multi_token_prediction_sums_the_losses_of_later_targets_in_the_same_document():
    config = tiny(model={"multi_token_prediction": True})
    params, tokens = redrawn(config.model), np.pad(TOKENS, ((0, 0), (0, 1))) % 19
    batch = {"tokens": tokens, "segments": np.pad(SEGMENTS, ((0, 0), (0, 1)), constant_values=3)}
    fields = batch_fields(batch)
    inputs = {name: fields[name] for name in ("segments", "positions")}
    chunked = dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk=5))
    (_, terms), (_, in_chunks) = (
        jax.jit(lambda p, c=c: _sums(p, fields, c, 0.25))(params) for c in (config, chunked)
    )
    log_p = jax.jit(
        lambda p: jax.nn.log_softmax(model.logits(p, config.model, fields["inputs"], **inputs))
    )(params)
    log_p = np.asarray(log_p)
    for distance, weight in ((2, 0.5 * 0.75), (3, 0.25 * 0.75)):
        found = [
            -log_p[b, t, tokens[b, t + distance]]
            for b in range(B)
            for t in range(T)
            if t + distance <= T and batch["segments"][b, t] == batch["segments"][b, t + distance]
        ]
        assert terms[f"mtp_{distance}"] == pytest.approx((float(sum(found)), weight), rel=1e-5)
        assert in_chunks[f"mtp_{distance}"] == pytest.approx((float(sum(found)), weight), rel=1e-5)
    assert [*terms] == ["mtp_2", "mtp_3"]


def test_deep_supervision_is_the_loss_of_the_stream_at_half_of_the_depth():
    """By the same head, also under a divisor of the logits, in chunks and in micro-batches."""
    config = tiny(model={"n_layers": 4, "deep_supervision": 0.3, "logit_divisor": 2.0})
    params, c = redrawn(config.model), config.model
    batch = {"tokens": np.pad(TOKENS, ((0, 0), (0, 1))) % 19}
    fields = batch_fields(batch)
    residuals = {}

    def tap(here, name, x):
        if name == "residual":
            residuals[here.layer] = x
        return x

    model.forward(params, c, fields["inputs"], tap=tap)
    x_BTD = np.asarray(residuals[1], np.float64)  # the input of layer 2
    x_BTD /= np.sqrt(np.mean(x_BTD**2, axis=-1, keepdims=True) + c.norm_eps)
    logits_BTV = jnp.asarray(x_BTD @ params["head"]["w_DV"] / 2)
    log_p_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    expected = -np.take_along_axis(log_p_BTV, fields["targets"][..., None], axis=-1).sum()
    for changes in ({}, {"loss_chunk": 5}):
        train = dataclasses.replace(config.train, **changes)
        _, terms = _sums(params, fields, dataclasses.replace(config, train=train), 0.5)
        assert terms == {"deep": (pytest.approx(expected, rel=1e-5), 0.3)}
    assert flops.flops_per_token(c, T) - flops.flops_per_token(
        dataclasses.replace(c, deep_supervision=None), T
    ) == pytest.approx(6 * c.d_model * c.vocab_size)


@pytest.mark.parametrize("shift", [1, 6, -6])
def test_generation_refuses_positions_that_mix_without_a_cache(shift, monkeypatch):
    """A convolution written as a shift of the values would generate wrong text in silence, or see
    later tokens.
    """

    class Shifted:
        def apply(here, v_BTGK):
            before, after = max(shift, 0), max(-shift, 0)
            padded = jnp.pad(
                v_BTGK, [*[(0, 0)] * (v_BTGK.ndim - 3), (before, after), (0, 0), (0, 0)]
            )
            return v_BTGK + padded[..., after : after + v_BTGK.shape[-3], :, :]

    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", Shifted)  # any key that is true
    # of no other test, whose compiled programs would lack the idea
    c = tiny(model={"d_ff": 20 + shift}).model
    with pytest.raises(UserError, match=r"here\.last"):
        decoding.make_decoder(redrawn(c), c, seq_len=T)


def test_generation_refuses_positions_that_are_counted_in_the_array(monkeypatch):
    """In decoding the array has one token. A factor of log(2 + position) is one of many ideas."""

    def scaled(positions, qk):
        factor = jnp.log(2.0 + positions)[..., None, None].astype(qk[0].dtype)
        return qk[0] * factor, qk[1] + factor

    class Counted:
        def apply(here, qk):
            return scaled(jnp.arange(qk[0].shape[-3]), qk)

    class Given:
        def apply(here, qk):
            return scaled(here.positions, qk)

    def decoder(idea, d_ff):
        monkeypatch.setitem(ideas.SITES["values"], "norm_bias", types.SimpleNamespace())
        monkeypatch.setitem(
            ideas.SITES["values"],
            "norm_bias",
            types.SimpleNamespace(apply=lambda here, v: idea.apply(here, (v, v))[0]),
        )
        c = tiny(model={"d_ff": d_ff}).model
        return decoding.make_decoder(redrawn(c), c, seq_len=T)

    with pytest.raises(UserError, match=r"place in the array of tokens.*here\.positions"):
        decoder(Counted, 36)
    decoder(Given, 40)


def test_an_option_of_scores_that_attention_does_not_know_is_an_error(monkeypatch):
    """Decoding dropped it. The equation stands once, so all refuse it."""
    idea = types.SimpleNamespace(apply=lambda here, options: options | {"temperature": 2.0})
    monkeypatch.setitem(ideas.SITES["scores"], "norm_bias", idea)  # any key that is true
    c = tiny(model={"d_ff": 44}).model
    params = redrawn(c)
    prompts = Prefill(lengths_B=jnp.array([3, 2]), n_slots=T)
    for seen in (past.Past(), prompts):
        with pytest.raises(TypeError, match="temperature"):
            model.hidden(params, c, TOKENS, past=seen)


def test_zero_turns_an_idea_on():
    """It may be the number of a layer. Off is a value of its own."""
    assert [is_on(value) for value in (0, 0.0, (), "0")] == [True] * 4
    assert [is_on(value) for value in (None, False, "none")] == [False] * 3


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(
    ("site", "found", "said"),
    [
        (
            "heads",
            lambda stream, o_BTHK: o_BTHK.astype(jnp.float32),
            "some_idea: .* heads gave bfloat16 .* float32",
        ),
        (
            "embedding",
            lambda stream, x_BTD: x_BTD + jnp.zeros(16),
            "some_idea: .* embedding gave bfloat16 .* float32",
        ),
        (
            "ffn_hidden",
            lambda stream, h_BTF: h_BTF + jnp.zeros(24),
            "some_idea: .* ffn_hidden gave bfloat16",
        ),
        (
            "last_residual",
            lambda stream, x_BTD: x_BTD + jnp.zeros(16),
            "some_idea: .* gave bfloat16 .* float32",
        ),
        (
            "queries_keys",
            lambda stream, qk: (qk[0] * jnp.ones(4), qk[1]),
            "some_idea: .* 'bfloat16'.* got .*'float32'",
        ),
        ("heads", lambda stream, o_BTHK: (stream, o_BTHK), "some_idea: .* return the value alone"),
        (
            "heads",
            lambda stream, o_BTHK: stream.update(mine=o_BTHK) or o_BTHK,
            r"'mine' .* nothing into .*`carry`",
        ),
        (
            "ffn",
            lambda stream, x_BTD: x_BTD.astype(jnp.float32),
            r"'x' .* bfloat16\[2, 8, 16\] into float32",
        ),
    ],
)
def test_an_idea_that_changes_dtypes_or_the_names_of_the_stream_is_refused(
    site, found, said, scan_layers, monkeypatch
):
    """A scan would refuse some of them, but unrolled layers would go on in float32 in silence."""
    idea = types.SimpleNamespace(
        __name__="some_idea", apply=lambda here, x, *others: found(here.stream, x)
    )
    if site == "ffn":
        monkeypatch.setattr(model, "feed_forward", idea.apply)
    else:
        monkeypatch.setitem(ideas.SITES[site], "norm_bias", idea)  # any key that is true
    c = tiny(model={"compute_dtype": "bfloat16", "scan_layers": scan_layers}).model
    with pytest.raises(TypeError, match=said):
        jax.eval_shape(lambda params: model.hidden(params, c, TOKENS), redrawn(c))


SUMS = Sums(*[jnp.float32(0)] * 4)


@pytest.mark.parametrize(
    ("idea", "said"),
    [
        (
            {"carry": lambda c, x_BTD: {"loss/mine": jnp.float32(0)}},
            "loss term 'mine' needs .* a weight",
        ),
        (
            {"losses": lambda fields, cross_entropy: {"mine": SUMS}},
            "loss term 'mine' needs .* a weight",
        ),
        (  # a mean, for example, would depend on the number of micro-batches
            {
                "losses": lambda fields, cross_entropy: {"mine": jnp.float32(0)},
                "loss_weights": lambda c, fraction: {"mine": 1.0},
            },
            "some_idea: losses gave mine as float32; return what cross_entropy gives",
        ),
        ({"loss_weights": lambda c, fraction: {"mine": 1.0}}, "loss term 'mine' needs a sum"),
        (
            {"loss_weights": lambda c, fraction: {"mtp_2": 1.0}},
            "prediction and some_idea both declare mtp_2",
        ),
        (
            {"carry": lambda c, x_BTD: {"x0_BTD": x_BTD}},
            "scalars and some_idea both declare x0_BTD",
        ),
        ({"carry": lambda c, x_BTD: {"x": x_BTD}}, "some_idea: carry has x"),
        (
            {
                "loss_weights": lambda c, fraction: {"z_loss": 1.0},
                "losses": lambda fields, cross_entropy: {"z_loss": SUMS},
            },
            "has the name z_loss",
        ),
    ],
)
def test_terms_of_the_loss_without_a_sum_or_a_weight_and_names_of_two_ideas_are_refused(
    idea, said, monkeypatch
):
    """They would be left out, or be one, in silence."""
    idea = types.SimpleNamespace(__name__="some_idea", apply=lambda here, x_BTD: x_BTD, **idea)
    monkeypatch.setitem(ideas.SITES["last_residual"], "norm_bias", idea)  # any key that is true
    config = tiny(model={"multi_token_prediction": True, "residual_scalars": True})
    fields = batch_fields({"tokens": TOKENS % 19})
    with pytest.raises((TypeError, ValueError), match=said):
        jax.eval_shape(lambda params: _sums(params, fields, config, 0.0), redrawn(config.model))


@pytest.mark.parametrize(
    ("name", "layers", "said"),
    [
        ("some", (0, -1), r"some_idea: layers \(0, -1\) must be ascending numbers from 0 to 1"),
        ("some", (0, 7), "from 0 to 1"),
        ("some", (1, 0), "ascending"),
        ("w_k_DGK", (0, 1), "w_k_DGK is declared twice"),
    ],
)
def test_layers_that_do_not_exist_and_names_of_other_parameters_are_refused(
    name, layers, said, monkeypatch, fresh_tables
):
    idea = types.SimpleNamespace(
        __name__="some_idea",
        table=lambda c: {name: small_weight((), "")},
        layers=lambda c: layers,
    )
    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", idea)
    fresh_tables()
    with pytest.raises(ValueError, match=said):
        parameters.parameter_table(tiny(model={"d_ff": 28}).model)


def test_a_closed_gate_of_a_recurrence_has_finite_gradients():
    """The input's factor is a root, whose derivative at 0 is not finite."""
    config = tiny(model={"mixers": ("rg_lru",)})
    state = state_of(config)
    flat = parameters.flat(state.params)
    closed = flat | {"layers/rg_lru/b_a_HK": flat["layers/rg_lru/b_a_HK"] - 200}
    state = state.replace(params=parameters.nest(closed))
    _, grads = jit_gradients(state, {"tokens": TOKENS % 19}, config)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_kinds_of_feed_forward_layers_do_not_share_names(monkeypatch):
    """The layers of the second kind would take the place of those of the first."""
    first = types.SimpleNamespace(table=model.glu_table, layers=lambda c: (0,), OTHERS="glu")
    monkeypatch.setitem(ideas.FEED_FORWARDS, "moe", first)
    with pytest.raises(ValueError, match="w_down_FD is declared twice"):
        model.ffn_table(tiny(model={"ffn": "moe", "d_ff": 24}).model)


def test_one_idea_takes_the_place_of_attention_in_a_layer(monkeypatch):
    """And the checks of configs know the keys of such ideas, and of those of its scores."""
    kinds = {f.name: f.metadata["attention"] for f in dataclasses.fields(ModelConfig)}
    assert {name for name, kind in kinds.items() if kind == "replaced"} == ideas.SITES[
        "softmax"
    ].keys()
    assert {name for name, kind in kinds.items() if kind == "scores"} >= ideas.SITES[
        "scores"
    ].keys()
    monkeypatch.setitem(
        ideas.SITES["softmax"], "norm_bias", types.SimpleNamespace(__name__="some_idea")
    )
    with pytest.raises(
        ValueError, match="gated_delta and some_idea replace attention in layer 1; use one"
    ):
        ideas.in_place_of_softmax(tiny(model={"gated_delta": "all"}).model, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((1, 3, 5), ((0, 2, 3),)),  # every second layer: a scan over the periods
        (range(1, 6), ((0, 1, 1), (1, 1, 5))),  # all but the first
        ((0, 1, 4), ((0, 1, 2), (2, 1, 2), (4, 1, 1), (5, 1, 1))),
    ],
)
def test_layers_may_differ(layers, groups, monkeypatch, fresh_tables):
    """Scanned equals unrolled, with gradients; parameters that are in all layers have their usual
    initial values.
    """

    class Some:
        def table(c):
            return {
                "some_scale_GK": Parameter(
                    (c.n_kv_heads, c.d_head), "GK", "norm", init="normal", std=1.0
                )
            }

        def apply(here, v_BTGK):
            return v_BTGK * (1 + here.p["some_scale_GK"])

    scanned = tiny(model={"n_layers": 6, "scan_layers": True}).model
    unrolled = dataclasses.replace(scanned, scan_layers=False)
    plain = parameters.flat(parameters.init_params(scanned, 0))
    Some.layers = lambda c: layers
    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", Some)
    fresh_tables()
    assert layer_stack.groups(scanned, model.block_table(scanned)) == groups
    params = parameters.init_params(scanned, 0)
    ours = parameters.flat(params)
    assert ours["layers/attention/some_scale_GK"].shape == (len(layers), 2, 4)
    chex.assert_trees_all_equal({path: ours[path] for path in plain}, plain)
    found = [
        jax.jit(jax.value_and_grad(lambda p, c=c: jnp.sum(jnp.sin(model.hidden(p, c, TOKENS)))))(
            params
        )
        for c in (scanned, unrolled)
    ]
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-4)
    assert np.abs(found[0][1]["layers"]["attention"]["some_scale_GK"]).min(axis=(1, 2)).min() > 0


def test_layers_may_differ_without_parameters(monkeypatch, fresh_tables):
    """A scan over all layers would apply the idea in all of them, or in none, in silence."""
    idea = types.SimpleNamespace(layers=lambda c: (1, 3), products=lambda c, n_keys: 0)
    monkeypatch.setitem(ideas.SITES["softmax"], "norm_bias", idea)  # any key that is true
    fresh_tables()
    c = tiny(model={"n_layers": 4, "scan_layers": True}).model
    assert layer_stack.groups(c, model.block_table(c)) == ((0, 2, 2),)


@pytest.mark.slow
def test_statistics_of_a_weight_that_some_layers_have(fresh_tables, monkeypatch):
    """The root mean square of all weights of a layer counts those that it has."""
    monkeypatch.setattr(attention_gate, "layers", lambda c: (1,), raising=False)
    config = tiny(model={"attn_gate": "head"})
    fresh_tables()
    state = state_of(config)
    found = jax.jit(layer_statistics, static_argnames="config")(state, {"tokens": TOKENS}, config)[
        "parameters"
    ]
    flat, table = parameters.flat(state.params), parameters.parameter_table(config.model)
    for layer in (0, 1):
        own = [
            p
            for p in table
            if p.startswith("layers/") and table[p].kind == "weight" and layer in table[p].layers
        ]
        assert ("layers/attention/w_gate_DH" in own) == (layer == 1)
        values = np.concatenate(
            [np.ravel(flat[path][table[path].layers.index(layer)]) for path in own]
        )
        np.testing.assert_allclose(found["layers"][layer], np.sqrt(np.mean(values**2)), rtol=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_an_idea_at_sites_of_two_modules_declares_its_parameters_once(
    scan_layers, fresh_tables, monkeypatch
):
    """nanochat's backout: x - a x_mid before the final norm. Declared twice, the second a would
    have the gradient 0.
    """

    class Backout:
        def table(c):
            return {"backout": small_weight((), "", init="ones", std=0.2)}

        def carry(c, x_BTD):
            return {"middle_BTD": x_BTD}

        def block_input(here, x_BTD):
            here.stream["middle_BTD"] = jnp.where(here.layer == 1, x_BTD, here.stream["middle_BTD"])
            return x_BTD * (1 + here.p["backout"])

        def last_residual(here, x_BTD):
            return x_BTD - here.p["backout"] * here.stream["middle_BTD"]

    c = tiny(model={"norm_placement": "none", "scan_layers": scan_layers}).model
    plain = redrawn(c)
    monkeypatch.setitem(ideas.SITES["block_input"], "norm_bias", Backout)  # any key that is true
    monkeypatch.setitem(ideas.SITES["last_residual"], "norm_bias", Backout)
    fresh_tables()
    assert [path for path in parameters.parameter_table(c) if path.endswith("backout")] == [
        "backout"
    ]
    a, h = 0.3, 1e-3
    with_idea = jax.jit(
        lambda a: jnp.sum(jnp.sin(model.hidden(plain | {"backout": a}, c, TOKENS % 19)))
    )
    found = jax.grad(with_idea)(a)
    assert float(found) == pytest.approx(
        float(with_idea(a + h) - with_idea(a - h)) / (2 * h), rel=1e-2
    )
    seen = {}

    def tap(here, name, x):
        return seen.setdefault(here.named(name), x)

    if not scan_layers:
        h_BTD = model.hidden(plain | {"backout": a}, c, TOKENS % 19, tap=tap)
        np.testing.assert_allclose(
            h_BTD, seen["layers/1/residual"] - a * seen["layers/0/residual"], rtol=1e-5
        )


def test_an_idea_changes_hidden_features_and_logits(fresh_tables, monkeypatch):
    """A scale of each hidden feature, and a temperature of the logits, in the loss of whole logits
    and of chunks.
    """
    scale = types.SimpleNamespace(
        table=lambda c: {"own_scale_F": Parameter((c.d_ff,), "F", "norm")},
        apply=lambda here, h_BTF: h_BTF * here.p["own_scale_F"],
    )
    temperature = types.SimpleNamespace(
        table=lambda c: {"log_temperature": small_weight((), "")},
        apply=lambda here, logits_BTV: logits_BTV * jnp.exp(here.p["log_temperature"]),
    )
    config = tiny()
    params, batch = redrawn(config.model), {"tokens": np.arange(36).reshape(4, 9) % 19}
    monkeypatch.setitem(ideas.SITES["ffn_hidden"], "norm_bias", scale)  # any key that is true
    monkeypatch.setitem(ideas.SITES["logits"], "norm_bias", temperature)
    fresh_tables()
    factors_NF = jnp.linspace(0.5, 2, 48).reshape(2, 24)
    changed = params | {"log_temperature": jnp.float32(0.5), "layers": dict(params["layers"])}
    changed["layers"]["ffn"] = params["layers"]["ffn"] | {"own_scale_F": factors_NF}
    folded = params | {
        "head": {"w_DV": params["head"]["w_DV"] * np.exp(0.5)},
        "layers": dict(params["layers"]),
    }
    w_NFD = params["layers"]["ffn"]["w_down_FD"] * factors_NF[..., None]
    folded["layers"]["ffn"] = params["layers"]["ffn"] | {
        "w_down_FD": w_NFD,
        "own_scale_F": jnp.ones((2, 24)),
    }
    expected = model.logits(folded | {"log_temperature": jnp.float32(0)}, config.model, TOKENS % 19)
    np.testing.assert_allclose(
        model.logits(changed, config.model, TOKENS % 19), expected, rtol=1e-4, atol=1e-5
    )
    chunked = dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk=8))
    found = [step.losses_and_gradients(state_of(c, changed), batch, c) for c in (config, chunked)]
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-6)
    assert abs(found[0][1]["log_temperature"]) > 1e-3
    assert np.abs(found[0][1]["layers"]["ffn"]["own_scale_F"]).min() > 0


def test_experts_refuse_ideas_of_hidden_features(monkeypatch):
    """They would be ignored in silence."""
    monkeypatch.setitem(
        ideas.SITES["ffn_hidden"], "norm_bias", types.SimpleNamespace(apply=lambda here, h: h)
    )
    c = tiny(model={"ffn": "moe", "n_experts": 4, "d_ff": 12}).model
    with pytest.raises(ValueError, match=r"ffn_hidden.*moe"):
        jax.eval_shape(lambda params: model.hidden(params, c, TOKENS), redrawn(c))


def test_a_look_back_has_a_cache_and_stops_at_documents(monkeypatch):
    """here.last and here.running_sum decode as in the full forward pass, and see their own document
    only.
    """

    class LookBack:
        def apply(here, v_BTGK):
            flat_BTC = v_BTGK.reshape(*v_BTGK.shape[:-2], -1)
            last_BTnC = here.last("v_last", flat_BTC, 3)
            sum_BTC = here.running_sum("v_sum", flat_BTC)
            own_BTC = sum_BTC - here.last("v_sums", sum_BTC, 2)[..., 0, :]  # a difference of sums
            weighted_BTC = jnp.einsum("...nC,n->...C", last_BTnC, jnp.array([0.5, -1, 2.0]))
            return (weighted_BTC + own_BTC).reshape(v_BTGK.shape)

    class Forget:
        def apply(here, options):
            shape = (*here.x_BTD.shape[:-1], here.c.n_heads)
            f_BTH = jnp.log(jax.nn.sigmoid(here.x_BTD[..., : here.c.n_heads])).reshape(shape)
            sink_H = jnp.arange(here.c.n_heads, dtype=jnp.float32)
            sum_BTH = here.running_sum("f_sum", f_BTH)
            bias_BSH, _ = here.earlier("bias", -sum_BTH, window=here.window())
            return options | {"bias_BSH": bias_BSH, "sink_H": sink_H}

    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", LookBack)
    monkeypatch.setitem(ideas.SITES["scores"], "norm_bias", Forget)
    test_cached_decoding_equals_the_full_forward_pass(Row({}))
    x_BTC = jnp.arange(1.0, B * T + 1).reshape(B, T, 1)
    last = Here(TOKENS, past.Past(segments=jnp.asarray(SEGMENTS))).last("x", x_BTC, 2)[0, :, :, 0]
    np.testing.assert_array_equal(
        last, [[0, 1], [1, 2], [2, 3], [0, 4], [4, 5], [5, 6], [6, 7], [0, 8]]
    )


@pytest.mark.parametrize("size", [2, 3, T])  # 3 divides neither the context nor the prompts
def test_padding_does_not_reach_the_state_of_a_recurrence(size, monkeypatch):
    """The state is not 0 before a document, and decays at every position, whatever the input is."""
    first = 2.0

    def decaying(state_GK, v_CGK, document_C):
        seen_CC = jnp.tri(len(v_CGK), dtype=bool) & (document_C[:, None] == document_C)
        n_C = jnp.sum(seen_CC, axis=1)
        weights_CC = jnp.where(seen_CC, 0.7 ** (n_C[:, None] - n_C), 0)
        before_CGK = jnp.where(document_C[:, None, None] == 0, state_GK, first)
        states_CGK = 0.7 ** n_C[:, None, None] * before_CGK
        states_CGK += jnp.einsum("cs,sgk->cgk", weights_CC, v_CGK)
        return states_CGK[-1], states_CGK

    def apply(here, v_BTGK):
        state_GK = jnp.full(v_BTGK.shape[-2:], first)
        return here.recurrence("decaying", decaying, state_GK, v_BTGK, size)

    # any key that is true
    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", types.SimpleNamespace(apply=apply))
    # of no other test, whose compiled programs would lack the idea
    row = Row({"d_ff": 28 + size})
    test_cached_decoding_equals_the_full_forward_pass(row)
    test_it_sees_earlier_tokens_of_its_own_document_only(row)


@pytest.mark.parametrize("name", ["own", "k"])
def test_two_caches_of_one_name_in_a_module_are_refused(name, monkeypatch):
    """Decoding would read one in place of the other in silence. Attention's own are k, v and bias."""

    def apply(here, v_BTGK):
        flat_BTC = v_BTGK.reshape(*v_BTGK.shape[:-2], -1)
        sums = [
            here.running_sum(name, x_BTC)
            for x_BTC in ([flat_BTC] if name == "k" else [flat_BTC, 2 * flat_BTC])
        ]
        return sum(sums).reshape(v_BTGK.shape)

    # any key that is true
    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", types.SimpleNamespace(apply=apply))
    c = tiny().model
    decoder = decoding.Decoder(
        layer_stack.split_layers(redrawn(c), c, model.block_table(c)), c, T, c.vocab_size
    )
    with pytest.raises(
        ValueError, match=f"layers/0/attention has two caches with the name '{name}'; rename one"
    ):
        jax.eval_shape(
            lambda: decoding._apply(
                decoder, {}, TOKENS, Prefill(lengths_B=np.array([3, 2]), n_slots=T)
            )
        )
