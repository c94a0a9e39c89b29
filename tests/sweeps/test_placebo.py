"""The placebos of configs/sweeps/ are equal in distribution to their baselines: a permutation of
features relates them.

Initial values are drawn independently and alike over the features that are permuted, so the
permuted initial values are as likely as the others. From them, the placebo trains as the baseline
does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn, state_of, tiny

from lm import parameters
from lm.step import train_step

ROPE = {"w_q_DHK", "w_k_DGK", "b_q_HK", "b_k_GK"}  # RoPE rotates queries and keys only
EVEN_THEN_ODD = np.array([0, 2, 1, 3])  # of the 4 features of a head: adjacent pairs become halves
# Of the residual stream: each sine changes place with its cosine.
SWAPPED = np.arange(16).reshape(8, 2)[:, ::-1].ravel()


def permuted(params: dict, table: dict, letter: str, order: np.ndarray) -> dict:
    """Permute the features of an axis, "K" of queries and keys or "D" of all parameters."""
    found = {}
    for path, x in parameters.flat(params).items():
        axes = [i for i, a in enumerate(table[path].axes) if a == letter]
        if letter == "D" or path.split("/")[-1] in ROPE:
            x = functools.reduce(lambda x, i: jnp.take(x, order, axis=i), axes, x)
        found[path] = x
    return parameters.nest(found)


def losses(config, params, n_steps: int = 3) -> list[float]:
    state, batch, found = (
        state_of(config, params),
        {"tokens": jnp.arange(36).reshape(4, 9) * 5 % 19},
        [],
    )
    step = jax.jit(train_step, static_argnames="config")
    for _ in range(n_steps):
        state, metrics = step(state, batch, config)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "changed", "letter", "order"),
    [
        ("rope", {"rope_pairing": "halves"}, "K", EVEN_THEN_ODD),
        ("sinusoidal", {"sinusoidal_order": "cosine_first"}, "D", SWAPPED),
    ],
)
@pytest.mark.parametrize(
    "of_rule", [{"name": "adamw", "weight_decay": 0.1}, {"name": "sgd", "weight_decay": 0.0}]
)
def test_a_placebo_trains_as_the_baseline_from_permuted_initial_values(
    positions, changed, letter, order, of_rule
):
    model = {"positions": positions, "norm": "layer", "attn_bias": True}
    of_optimizer = {"learning_rate": 0.05, "warmup_steps": 1, "clip_norm": 1.0} | of_rule
    baseline = tiny(model=model, optimizer=of_optimizer)
    placebo = tiny(model=model | changed, optimizer=of_optimizer)
    params, table = redrawn(baseline.model), parameters.parameter_table(baseline.model)
    expected = losses(baseline, params)
    assert losses(placebo, permuted(params, table, letter, order)) == pytest.approx(
        expected, rel=1e-5
    )
    # the same draws give another run
    assert losses(placebo, params) != pytest.approx(expected, rel=1e-4)


def test_another_draw_of_initial_values_has_their_distribution_and_trains_alike():
    """`model.init_draw`: independent values for each number; the step does not depend on it."""
    baseline = tiny(model={"d_model": 64, "n_heads": 4})
    placebo = tiny(model={"d_model": 64, "n_heads": 4, "init_draw": 2})
    ours, theirs = (
        parameters.flat(parameters.init_params(config.model, 3)) for config in (baseline, placebo)
    )
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        x, y = np.ravel(x), np.ravel(theirs[path])
        if x.std() > 0 and x.size > 1000:
            assert abs(np.corrcoef(x, y)[0, 1]) < 0.1
            assert y.std() == pytest.approx(x.std(), rel=0.1)
        elif x.std() == 0:
            np.testing.assert_array_equal(x, y)
    params = parameters.init_params(baseline.model, 3)
    assert losses(placebo, params, 1) == losses(baseline, params, 1)
