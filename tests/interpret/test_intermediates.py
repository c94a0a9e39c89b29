"""Captured intermediates equal NumPy's, patches have the derived effect, and without hooks nothing
changes.
"""

import dataclasses
import types

import jax
import numpy as np
import pytest
from references import numpy_model
from running import slow
from tiny import redrawn, tiny, unstack_layers

from lm import ideas, model
from lm.config import n_applied_layers
from lm.interpret import capture, logit_lens, names, patch
from lm.system.errors import UserError
from lm.trained_model import TrainedModel

HEADS = {"attn_gate": "element", "attn_differential": True, "attn_exclusive": "full"}
IDS = np.array([3, 14, 15, 9, 2, 6, 5, 8])
T = len(IDS)


def run_of(**keys) -> TrainedModel:
    config = tiny(model=keys)
    return TrainedModel(None, 0, config, redrawn(config.model), None)


@pytest.fixture(scope="module")
def run():
    """A scanned model with grouped heads, a window, a softcap and norms of q and k."""
    return run_of(scan_layers=True, window_pattern=(0, 3), attn_softcap=2.0, qk_norm=True)


@pytest.fixture(scope="module")
def captured(run):
    return capture(run, IDS, "*")


# --- Capture.


def in_numpy(run) -> dict:
    """Return the intermediates by name from tests/references/numpy_model.py, float64."""
    c, p = run.config.model, jax.tree.map(np.float64, unstack_layers(run.params))
    found = {"embedding": p["embedding"][IDS]}
    x = found["embedding"]
    for i in range(c.n_layers):
        window, layer = c.window_pattern[i % len(c.window_pattern)], p[f"layers_{i}"]
        if c.norm_placement == "pre":
            y = numpy_model.norm(c, layer["attention_norm"], x)
            seen = numpy_model.attend(c, layer["attention"], y, window)
            here = {"attention_norm/output": y} | {
                f"attention/{name}": value for name, value in seen.items()
            }
            here["attention/output"] = numpy_model.attention(c, layer["attention"], y, window)
            y = numpy_model.norm(c, layer["ffn_norm"], x + here["attention/output"])
            silu = numpy_model.ACTIVATIONS["silu"]
            hidden = silu(y @ layer["ffn"]["w_gate_DF"]) * (y @ layer["ffn"]["w_up_DF"])
            here |= {
                "ffn_norm/output": y,
                "ffn/hidden": hidden,
                "ffn/output": hidden @ layer["ffn"]["w_down_FD"],
            }
            found |= {f"layers/{i}/{name}": value for name, value in here.items()}
        x = found[f"layers/{i}/residual"] = numpy_model.block(c, layer, x, window)
    if "final_norm" in p:
        found["final_norm/output"] = numpy_model.norm(c, p["final_norm"], x)
    return found | {"logits": numpy_model.logits(c, p, IDS)}


def test_every_intermediate_equals_numpy_and_has_the_axes_of_its_letters(run, captured):
    expected = in_numpy(run)
    logits, acts = captured
    assert list(acts) == list(names(run)) == list(expected)
    np.testing.assert_array_equal(acts["logits"], logits)
    for name, value in expected.items():
        np.testing.assert_allclose(
            acts[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name
        )
    sizes = {"T": T, "S": T, "D": 16, "H": 4, "G": 2, "K": 4, "F": 24, "V": 19}
    for name, letters in names(run).items():
        assert acts[name].shape == tuple(sizes[letter] for letter in letters)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["post", "sandwich", "output", "parallel", "none"])
def test_residual_streams_equal_numpy_for_each_placement(placement):
    run = run_of(norm_placement=placement, positions="none", n_kv_heads=4, ffn="mlp")
    _, acts = capture(run, IDS, ["*/residual", "logits"])
    for name, value in acts.items():
        np.testing.assert_allclose(
            value, in_numpy(run)[name], rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name
        )


@pytest.mark.slow
def test_a_batch_gives_what_each_text_gives(run, captured):
    batch = np.stack([IDS[::-1], IDS])
    logits, acts = capture(run, batch, ["layers/1/attention/*"])
    np.testing.assert_allclose(logits[1], captured[0], atol=1e-5)
    for name, value in acts.items():
        np.testing.assert_allclose(value[1], captured[1][name], atol=1e-5)


def test_attention_materializes_scores_in_the_layers_that_need_them_only(run, monkeypatch):
    fast = []
    attention = model.causal_attention

    def counted(*args, tap=None, **options):
        fast.extend([1] * (tap is None))
        return attention(*args, tap=tap, **options)

    monkeypatch.setattr(model, "causal_attention", counted)

    def calls(*wanted, **patches):
        fast.clear()
        jax.eval_shape(lambda: capture(run, IDS[:5], wanted, patches))
        return len(fast)

    assert calls("layers/1/residual", "*/q") == 2
    assert calls("layers/1/attention/weights") == 1
    assert calls(**{"layers/*/attention/scores": lambda x: x}) == 0


# --- Patches.


def test_patching_everything_with_its_own_value_changes_nothing(run, captured):
    logits, acts = captured
    np.testing.assert_allclose(patch(run, IDS, acts | {"logits": lambda x: x}), logits, atol=1e-6)


@pytest.mark.parametrize(
    "idea",
    [
        {"scan_layers": True} | HEADS,
        *(slow({key: value}) for key, value in ({"qk_norm": True} | HEADS).items()),
    ],
)
def test_ablating_a_head_equals_zeroing_its_rows_of_the_output_projection(idea):
    """Also with ideas that change the output of the heads, alone and together."""
    run = run_of(**idea)
    ablated = patch(
        run, IDS, {"layers/1/attention/heads": lambda heads_THK: heads_THK.at[:, 2].set(0)}
    )
    params = jax.tree.map(lambda x: x, run.params)
    w_NHKD = params["layers"]["attention"]["w_o_HKD"]
    params["layers"]["attention"]["w_o_HKD"] = w_NHKD.at[1, 2].set(0)
    expected, acts = capture(
        dataclasses.replace(run, params=params), IDS, "layers/1/attention/heads"
    )
    assert acts["layers/1/attention/heads"].shape == (T, 4, 4)
    np.testing.assert_allclose(ablated, expected, atol=1e-5)
    assert np.abs(ablated - run.logits(IDS)).max() > 0.01


def test_a_vector_added_to_the_last_residual_passes_through_norm_and_head_as_in_the_logit_lens(
    run, captured
):
    v = np.linspace(-1, 1, run.config.model.d_model)
    x = np.float64(captured[1]["layers/1/residual"]) + v
    x = (
        x
        / np.sqrt((x**2).mean(-1, keepdims=True) + run.config.model.norm_eps)
        * run.params["final_norm"]["scale_D"]
    )
    added = captured[1]["layers/1/residual"] + v
    for logits in (patch(run, IDS, {"layers/1/residual": added}), logit_lens(run, added)):
        np.testing.assert_allclose(logits, x @ np.float64(run.params["head"]["w_DV"]), atol=2e-5)


def test_patches_are_jitted_and_differentiated_by_their_values(run, captured):
    """Weights of attention are linear in the output of their head, so the derivative is exact."""
    weights_HTS = captured[1]["layers/0/attention/weights"]

    @jax.jit
    def head_output(weights_HTS):
        _, acts = capture(
            run, IDS, "layers/0/attention/heads", {"layers/0/attention/weights": weights_HTS}
        )
        return acts["layers/0/attention/heads"][5, 3].sum()

    gradient_HTS = np.asarray(jax.grad(head_output)(weights_HTS))
    expected_HTS = np.zeros_like(gradient_HTS)
    # heads 2 and 3 share key head 1
    expected_HTS[3, 5] = captured[1]["layers/0/attention/v"][:, 1].sum(-1)
    np.testing.assert_allclose(gradient_HTS, expected_HTS, atol=1e-5)


def test_second_derivatives_are_those_of_reverse_mode(run, captured):
    """The gradient of <gradient, v> is the change of the gradient along v; there is no forward
    mode.
    """
    x_TD = captured[1]["layers/0/residual"]
    v_TD = jax.numpy.asarray(np.random.default_rng(0).standard_normal(x_TD.shape), x_TD.dtype)
    gradient = jax.jit(
        jax.grad(lambda x_TD: patch(run, IDS, {"layers/0/residual": x_TD})[-1].max())
    )
    product_TD = jax.jit(jax.grad(lambda x_TD: jax.numpy.vdot(gradient(x_TD), v_TD)))(x_TD)
    change_TD = (gradient(x_TD + 1e-3 * v_TD) - gradient(x_TD - 1e-3 * v_TD)) / 2e-3
    np.testing.assert_allclose(product_TD, change_TD, atol=2e-3 * np.abs(product_TD).max())
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(gradient, (x_TD,), (v_TD,))


@pytest.mark.parametrize("residual", ["hyper_connections", "own"])
def test_a_patch_that_no_layer_reads_is_refused(residual, monkeypatch):
    """Branches of a user's own residual kind, like those of hyper-connections, may read another
    array than x.
    """

    def block(here, x, branches):
        for branch in branches.values():
            here.stream["own_BTD"] += branch(here.stream["own_BTD"])
        return here.stream["own_BTD"]

    own = types.SimpleNamespace(carry=lambda c, x_BTD: {"own_BTD": x_BTD}, block=block)
    monkeypatch.setitem(ideas.RESIDUALS, "own", own)
    run = run_of(residual=residual)
    read = ["layers/0/ffn/output", "layers/1/residual"]
    jax.eval_shape(lambda: patch(run, IDS, dict.fromkeys(read, 0)))
    with pytest.raises(
        UserError, match=f"^layers/0/residual: a patch has no effect, .*{' or '.join(read)}$"
    ):
        patch(run, IDS, {"*/residual": 0})


def test_a_function_among_the_patches_is_traced_on_every_call(run):
    """It may depend on a variable that has changed."""
    factor, seen = 1.0, []

    def scaled(x):
        seen.append(factor)
        return factor * x

    for factor in (1.0, 2.0):  # noqa: B007
        jax.eval_shape(lambda: patch(run, IDS, {"logits": scaled}))
    assert seen == [1.0, 2.0]


# --- The hooks.


@pytest.mark.parametrize(
    "keys", [slow({}), {"scan_layers": True, "remat": "block", "dropout": 0.5}]
)
def test_hooks_that_change_nothing_leave_the_training_program_unchanged(keys):
    """The lowered program of the gradient is the same text with taps that return their argument and
    without taps.
    """
    c, tapped = tiny(model=keys).model, set()

    def program(**hooks):
        def loss(params):
            return model.logits(
                params, c, IDS[None], dropout_keys_B=jax.random.split(jax.random.key(0), 1), **hooks
            ).sum()

        return jax.jit(jax.grad(loss)).lower(redrawn(c)).as_text()

    def tap(here, name, x):
        tapped.add(name)
        return x

    plain = program()
    assert program(tap=tap) == plain
    assert tapped == {"embedding", "attention_norm/output", "attention/output", "ffn_norm/output", "hidden",
                      "q", "k", "v", "heads", "ffn/output", "residual", "final_norm/output"}  # fmt: skip


def test_two_intermediates_of_one_name_are_refused(monkeypatch):
    """A patch would replace both, and only one be captured."""
    tapped = types.SimpleNamespace(apply=lambda here, v: here.tap("v", v))
    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", tapped)  # any key that is true
    with pytest.raises(
        ValueError, match="two intermediates have the name layers/0/attention/v; rename one"
    ):
        names(run_of(d_ff=28))


MISTAKES = {
    r"did you mean layers/1/attention/weights.*\n.*0 to 1\): embedding, layers/\*/attention_norm/output, ": (
        lambda run: capture(run, IDS, ["layers/1/atention/weight"])
    ),
    "layers/7/residual: the model has no intermediate": lambda run: patch(
        run, IDS, {"layers/7/residual": 0}
    ),
    r"shape \(3, 16\); expected \(8, 16\)": lambda run: patch(
        run, IDS, {"layers/0/residual": np.zeros((3, 16))}
    ),
    "integers from 0 to 18": lambda run: capture(run, [1, 99], []),
    r"shape \(0,\).*T from 1 to 8": lambda run: capture(run, [], []),
    r"shape \(9,\).*T from 1 to 8": lambda run: capture(run, range(9), []),
}


def test_mistakes_are_user_errors(run):
    for message, call in MISTAKES.items():
        with pytest.raises(UserError, match=message):
            call(run)


@pytest.mark.parametrize(
    "keys",
    [{"loops": 2}, {"loops": 3, "loop_layers": (0, 1)}, {"branches": ("attention*2",)}],
)
def test_the_logit_lens_of_looped_layers_reads_the_last_turn(keys):
    """And a page can be measured, whatever the branches are."""
    run = run_of(**keys)
    residuals = [name for name in names(run) if name.endswith("/residual")]
    logits_TV, acts = capture(run, IDS, residuals)
    last = list(acts.values())[-1]
    np.testing.assert_allclose(logit_lens(run, last), logits_TV, rtol=1e-4, atol=1e-4)
    assert len(residuals) == n_applied_layers(run.config.model)
