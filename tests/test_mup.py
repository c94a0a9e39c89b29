"""muP (Yang et al. 2022): no effect at the base width, and width-independent changes of
activations.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import state_of, tiny

from lm import model, parameters
from lm.config import OptimizerConfig
from lm.optimizers import width_scales
from lm.step import train_step
from lm.system.errors import UserError

MUP = {"parametrization": "mup", "mup_base_d_model": 16, "mup_base_d_head": 4}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (4, 9)))


def wide(factor: int, **more):
    """Return the tiny config with every width multiplied by factor and the same numbers of heads."""
    return tiny(model={"d_model": 16 * factor, "d_ff": 24 * factor, "n_kv_heads": 4} | more)


@pytest.mark.slow
def test_mup_equals_the_standard_parametrization_at_the_base_width():
    states = [jax.jit(train_step, static_argnames="config")(state_of(c), {"tokens": TOKENS}, c)[0] for c in
              (wide(1), wide(1, **MUP))]  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, *(s.params for s in states))


@pytest.mark.parametrize("init", ["glorot", "he", "gpt2"])
def test_initial_variances_follow_the_table(init):
    """The variance of hidden weights is proportional to 1/width; head and embeddings keep that of
    the base width.
    """
    base, ours = (
        parameters.parameter_table(wide(f, init=init, value_embeddings=True, **MUP).model)
        for f in (1, 4)
    )
    for path, p in ours.items():
        if p.kind in ("weight", "embedding"):
            hidden = path.startswith("layers/") and p.kind == "weight"
            assert p.std == pytest.approx(base[path].std * (0.5 if hidden else 1.0)), path


def test_learning_rates_follow_the_table():
    """As in the mup package, a parameter without an axis of the width, such as the head's bias,
    keeps its rate.
    """
    table = parameters.parameter_table(wide(4, head_bias=True, **MUP).model)
    table |= {"alpha": parameters.Parameter((), "", "weight", decay=False, matrix=False)}
    # they sum over 3 numbers at any width
    low_rank = {
        "up_RD": ((3, 64), "RD"),
        "mix_RC": ((3, 3), "RC"),
    }
    table |= {path: parameters.Parameter(*shape, "weight", "R") for path, shape in low_rank.items()}
    for name, hidden, others in (
        ("adamw", 0.25, 1.0),
        ("lion", 0.25, 1.0),
        ("ademamix", 0.25, 1.0),
        ("sgd", 1.0, 4.0),
        ("muon", 1.0, 1.0),
        ("normuon", 0.5, 1.0),
    ):
        scales = parameters.flat(width_scales(OptimizerConfig(name=name), table, 4.0))
        assert scales["layers/ffn/w_gate_DF"] == scales["layers/attention/w_o_HKD"] == hidden
        assert scales["embedding"] == scales["head/w_DV"] == scales["final_norm/scale_D"] == others
        assert scales["up_RD"] == others
        assert scales["head/b_V"] == scales["alpha"] == scales["mix_RC"] == 1.0
    zeros = parameters.parameter_table(wide(4, zero_init_residual=True, **MUP).model)
    scales = parameters.flat(width_scales(OptimizerConfig(name="muonh"), zeros, 4.0))
    # Adam updates the first
    assert (scales["layers/ffn/w_down_FD"], scales["layers/ffn/w_gate_DF"]) == (
        0.25,
        1.0,
    )
    with pytest.raises(UserError, match="soap, but muP here has no rates for it; use adamw"):
        width_scales(OptimizerConfig(name="soap"), table, 4.0)


@pytest.mark.parametrize(
    ("idea", "path"),
    [
        ({"attn_gate": "head"}, "attention/w_gate_DH"),
        ({"attn_differential": True}, "attention/w_lambda_DH"),
        ({"attn_forget": True, "positions": "none"}, "attention/w_forget_DH"),
        ({"gated_delta": "all"}, "attention/w_decay_DH"),
        ({"ffn": "moe", "n_experts": 4}, "ffn/w_router_DE"),
    ],
)
def test_weights_with_few_outputs_have_adams_rate_only(idea, path):
    table = parameters.parameter_table(wide(4, **idea, **MUP).model)
    for name in ("adamw", "lion", "schedule_free", "ademamix"):
        assert (
            parameters.flat(width_scales(OptimizerConfig(name=name), table, 4.0))[f"layers/{path}"]
            == 0.25
        )
    for name in ("sgd", "muon", "normuon", "muonh"):
        with pytest.raises(
            UserError, match=rf"no rate of {name} for layers/{path}, which has few outputs"
        ):
            width_scales(OptimizerConfig(name=name), table, 4.0)


def moved(factor: int, rule: str = "adamw", tokens=TOKENS, **more) -> dict[str, float]:
    """Return the RMS change of the last hidden states and of the logits over five steps."""
    o = OptimizerConfig(name=rule, learning_rate=1e-2, schedule="constant")
    c = dataclasses.replace(wide(factor, **more), optimizer=o)
    state = jax.jit(parameters.init_params, static_argnums=0)(c.model, 0)
    state = first = state_of(c, state)
    step = jax.jit(train_step, static_argnames="config")
    for _ in range(5):
        state, _ = step(state, {"tokens": tokens}, c)

    def outputs(params):
        residuals = []

        def tap(here, name, x):
            residuals.extend([x] if name == "residual" else [])
            return x

        logits = model.logits(params, c.model, tokens, tap=tap)
        return {"hidden": residuals[-1], "logits": logits}

    before, after = outputs(first.params), outputs(state.params)
    return {name: float(jnp.sqrt(jnp.mean((after[name] - before[name]) ** 2))) for name in before}


@pytest.mark.slow
def test_activation_changes_are_independent_of_width_under_mup_only():
    """Coordinate check at 1, 4 and 16 times the base width: under the standard parametrization the
    changes grow.
    """
    for name in ("hidden", "logits"):
        flat = [moved(f, **MUP)[name] for f in (1, 4, 16)]
        growing = [moved(f)[name] for f in (1, 4, 16)]
        assert max(flat) < 2 * min(flat), (name, flat)
        assert growing[2] > 2 * max(flat), (name, growing)
        assert growing[0] < growing[1] < growing[2], (name, growing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "factors", "bound"),
    [("muon", (4, 32), 1.25), *((name, (2, 8), 1.35) for name in ("normuon", "muonh"))],
)
def test_activation_changes_by_orthogonalized_updates_are_independent_of_width_under_mup(
    rule, factors, bound
):
    """Muon at widths 64 and 512, where with Adam's factor for hidden weights the changes would
    shrink.

    The others fix the Frobenius norm of an update, so its spectral norm only scales as in theory if
    the gradient has full rank: widths 32 and 128, and 1,024 tokens a step.
    """
    tokens = (
        TOKENS
        if rule == "muon"
        else jnp.asarray(np.random.default_rng(0).integers(0, 19, (64, 17)))
    )
    changes = [moved(f, rule, tokens, n_layers=1, **MUP) for f in factors]
    for name in ("hidden", "logits"):
        low, high = sorted(change[name] for change in changes)
        assert high < bound * low, (name, changes)
