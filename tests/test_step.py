"""The training step: micro-batches, dispatches, steps that are not finite, gradients, packing, and
learning.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import slow
from tiny import jit_eval, jit_gradients, redrawn, state_of, tiny, with_keys

from lm import model, step
from lm.data import Split
from lm.parameters import flat, nest
from lm.training.batch_source import BatchSource

ONE = {"n_layers": 1}
TEXT = np.random.default_rng(0).integers(0, 19, 500).astype(np.uint16)
SPLIT = Split("train", TEXT, len(TEXT), None)
jit_loss_sum = jax.jit(step.loss_sum, static_argnames="config")
jit_steps = jax.jit(step.train_steps, static_argnames="config")


def batch_of(config, seed=0, **arrays):
    shape = (config.train.batch_size, config.train.seq_len + 1)
    tokens = np.random.default_rng(seed).integers(0, 19, shape, np.int32)
    return {"tokens": tokens, "weights": np.ones((shape[0], shape[1] - 1), np.float32)} | arrays


def rolled(config, n_steps, *, resident=True, state=None):
    """Return the state after n_steps, dispatched with the config's steps_per_dispatch, and the
    stacked metrics.
    """
    state = state_of(config) if state is None else state
    source = BatchSource(SPLIT, config if resident else with_keys(config, data_device_bytes=0))
    k, metrics = config.train.steps_per_dispatch, []
    for first in range(0, n_steps, k):
        n = min(k, n_steps - first)
        state, stacked = jit_steps(state, source.resident, source.train(first, n), n, config)
        metrics.append(jax.tree.map(lambda m, n=n: np.asarray(m)[:n], stacked))
    return state, jax.tree.map(lambda *m: np.concatenate(m), *metrics)


def test_the_z_loss_is_a_term_of_its_own():
    """It is minimized and logged, but neither in the loss nor in evaluations; its sums add up."""
    batch = batch_of(
        tiny(), weights=np.random.default_rng(1).uniform(size=(4, 8)).astype(np.float32)
    )
    trains = [{"z_loss": 0.1}, {"z_loss": 0.1, "loss_chunk": 8, "micro_batch_size": 2}, {}]
    (losses, grads), (parts, part_grads), (plain, plain_grads) = (
        jax.device_get(jit_gradients(state_of(config), batch, config))
        for config in (tiny(model=ONE, train=t) for t in trains)
    )
    config = tiny(model=ONE, train=trains[0])
    total, n = jit_eval(redrawn(config.model), None, batch, config)
    assert set(losses) == {"loss", "loss/z_loss"}
    assert set(plain) == {"loss"}
    np.testing.assert_allclose([losses["loss"], plain["loss"]], np.divide(total, n), rtol=1e-6)
    chex.assert_trees_all_close(losses, parts, rtol=1e-6)
    chex.assert_trees_all_close(grads, part_grads, rtol=1e-4, atol=1e-6)
    logits = jax.jit(lambda p: model.logits(p, config.model, batch["tokens"][:, :-1]))(
        redrawn(config.model)
    )
    log_z = np.log(np.exp(np.float64(logits)).sum(-1))
    np.testing.assert_allclose(
        losses["loss/z_loss"], np.sum(batch["weights"] * log_z**2) / n, rtol=1e-5
    )
    assert np.abs(grads["head"]["w_DV"] - plain_grads["head"]["w_DV"]).max() > 1e-4


def test_label_smoothing_is_trained_on_and_not_logged():
    """Gradients are those of the smoothed targets; losses and evaluations are those without."""
    batch = batch_of(tiny())
    smooth = tiny(model=ONE, train={"label_smoothing": 0.2})
    parts = tiny(model=ONE, train={"label_smoothing": 0.2, "loss_chunk": 8, "micro_batch_size": 2})
    plain = tiny(model=ONE)
    (losses, grads), (_, part_grads), (plain_losses, _) = (
        jax.device_get(jit_gradients(state_of(config), batch, config))
        for config in (smooth, parts, plain)
    )

    def loss(params):
        logits = model.logits(params, smooth.model, batch["tokens"][:, :-1])
        p = optax.smooth_labels(jax.nn.one_hot(batch["tokens"][:, 1:], logits.shape[-1]), 0.2)
        return optax.softmax_cross_entropy(logits, p).mean()

    expected = jax.jit(jax.grad(loss))(redrawn(smooth.model))
    chex.assert_trees_all_close(grads, expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(grads, part_grads, rtol=1e-4, atol=1e-6)
    assert losses == plain_losses
    sums = [jit_eval(redrawn(plain.model), None, batch, config)[0] for config in (smooth, plain)]
    assert sums[0] == sums[1]


def test_steps_per_dispatch_and_gathering_on_the_host_do_not_change_a_bit():
    """Compare 3 dispatches of up to 3 steps, gathered on the device, with 7 of one step, gathered
    on the host.
    """
    many, one = (tiny(model=ONE, train={"steps_per_dispatch": k}) for k in (3, 1))
    compiled = jit_steps._cache_size()
    state, metrics = rolled(many, 7)
    # the last dispatch, of one step, reuses the program
    assert jit_steps._cache_size() == compiled + 1
    state_one, metrics_one = rolled(one, 7, resident=False)
    assert int(state.step) == 7
    chex.assert_trees_all_equal(state, state_one)
    chex.assert_trees_all_equal(metrics, metrics_one)
    assert len(set(metrics["loss"].tolist())) == 7
    expected = optax.cosine_decay_schedule(1e-3, 20, 0.1)(np.arange(7))
    np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-6)


@pytest.mark.slow
def test_steps_without_jit_equal_compiled_steps():
    """train.debug disables jit, so that print and a debugger work."""
    config = tiny(model=ONE, train={"steps_per_dispatch": 3})
    state, metrics = rolled(config, 2)
    with jax.disable_jit():
        state_debug, metrics_debug = rolled(config, 2)
    np.testing.assert_allclose(metrics_debug["loss"], metrics["loss"], rtol=1e-5)
    # Adam divides by the root of the second moment: where a gradient is only rounding, so is the
    # first update.
    chex.assert_trees_all_close(state_debug.params, state.params, rtol=1e-4, atol=1e-5)


def batches_with_nan(config, bad_step, k=4):
    batches = [batch_of(config, seed) for seed in range(k)]
    batches[bad_step]["weights"][1, 2] = np.nan
    return batches


def stacked(batches):
    return jax.tree.map(lambda *a: np.stack(a), *batches)


HALTING = {
    "model": ONE,
    "train": {"steps_per_dispatch": 4, "steps": 80},
    "optimizer": {"learning_rate": 0.02},
}


@pytest.mark.slow
def test_on_nonfinite_stop_keeps_the_last_finite_state_and_its_step():
    config = tiny(**HALTING)
    batches = batches_with_nan(config, bad_step=2)
    state, metrics = jit_steps(state_of(config), None, stacked(batches), 4, config)
    before, _ = jit_steps(state_of(config), None, stacked(batches), 2, config)
    assert metrics["finite"].tolist() == [True, True, False, True]
    assert (int(state.step), bool(state.halted), int(state.skipped)) == (2, True, 0)
    chex.assert_trees_all_equal(state.replace(halted=before.halted), before)
    # later dispatches do not change it
    again, _ = jit_steps(state, None, stacked(batches[:2] * 2), 4, config)
    chex.assert_trees_all_equal(again, state)


@pytest.mark.slow
def test_on_nonfinite_skip_counts_the_update_and_continues():
    config = tiny(model=ONE, train={"steps_per_dispatch": 4, "on_nonfinite": "skip"})
    batches = batches_with_nan(config, bad_step=1)
    state, metrics = jit_steps(state_of(config), None, stacked(batches), 4, config)
    assert metrics["finite"].tolist() == [True, False, True, True]
    assert (int(state.step), bool(state.halted), int(state.skipped)) == (4, False, 1)
    without, rates = jit_steps(
        state_of(config), None, stacked([batches[i] for i in (0, 2, 3, 3)]), 3, config
    )
    chex.assert_trees_all_equal(
        (state.params, state.opt_state), (without.params, without.opt_state)
    )
    # The optimizer's counter does not advance at a skipped step, so the learning rate repeats.
    np.testing.assert_array_equal(
        metrics["learning_rate"], rates["learning_rate"][np.array([0, 1, 1, 2])]
    )


@pytest.mark.parametrize("name", ["sgd", slow("adamw")])
def test_finite_gradients_that_overflow_the_update_are_rejected(name, monkeypatch):
    """SGD overflows the parameters. Adam overflows the second moment, the square of a gradient of
    1e20.
    """
    config = tiny(model=ONE, optimizer={"name": name, "learning_rate": 1e38, "clip_norm": None})
    scale = {"sgd": 1e3, "adamw": 1e20}[name]
    mean_gradients = step.losses_and_gradients

    def scaled(*arguments):
        loss, grads = mean_gradients(*arguments)
        return loss, jax.tree.map(lambda g: g * scale, grads)

    monkeypatch.setattr(step, "losses_and_gradients", scaled)
    # the norm would overflow as well
    monkeypatch.setattr(optax.tree, "norm", lambda grads: jnp.float32(1))
    state = state_of(config)
    after, metrics = jax.jit(functools.partial(step.train_step, config=config))(
        state, batch_of(config)
    )
    assert np.isfinite(metrics["loss"])
    assert not metrics["finite"]
    chex.assert_tree_all_finite((after.params, after.opt_state))
    chex.assert_trees_all_equal(after.replace(halted=state.halted), state)


@pytest.mark.slow
def test_gradients_equal_central_differences_in_float64():
    """One random direction for each parameter; the model has every kind of parameter."""
    keys = {
        "norm": "layer",
        "positions": "learned",
        "attn_bias": True,
        "ffn_bias": True,
        "head_bias": True,
    }
    keys |= ONE | {
        "qk_norm": True,
        "attn_softcap": 3.0,
        "logit_softcap": 5.0,
        "window_pattern": (3,),
    }
    config = tiny(model=keys, train={"z_loss": 1e-2})
    config = with_keys(config, model_compute_dtype="float64")
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, redrawn(config.model))
        batch = batch_of(config, weights=np.random.default_rng(1).uniform(size=(4, 8)))
        state = state_of(config, params)
        compiled = jax.jit(
            lambda params: step.losses_and_gradients(state.replace(params=params), batch, config)
        )
        p, grads = flat(params), flat(compiled(params)[1])

        def loss(params):
            losses = compiled(params)[0]
            return losses["loss"] + 1e-2 * losses["loss/z_loss"]

        for i, path in enumerate(p):
            direction = np.random.default_rng(i).standard_normal(p[path].shape)
            ahead, behind = (loss(nest(p | {path: p[path] + h * direction})) for h in (1e-5, -1e-5))
            slope = np.sum(np.float64(grads[path]) * direction)
            # The error of a difference is the third derivative times 1e-10, plus rounding of 1e-16
            # / 1e-5.
            np.testing.assert_allclose(
                (ahead - behind) / 2e-5, slope, rtol=1e-6, atol=1e-6, err_msg=path
            )
            assert slope != 0 or path.endswith("b_k_GK")


@pytest.mark.parametrize(
    "keys", [slow({"positions": "learned"}), {"positions": "rope", "window_pattern": (2,)}]
)
def test_packed_documents_have_the_same_loss_as_in_separate_rows(keys):
    """Each document starts at position 0 and attends to itself only; borders and padding are not
    targets.
    """
    config = tiny(model=ONE | keys)
    params, tokens = redrawn(config.model), batch_of(config)["tokens"]
    packed = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9])
    together, n = jit_loss_sum(
        params, {"tokens": tokens[:2], "segments": packed.astype(np.uint16)}, config
    )
    # The same documents, each in its own row. Later tokens are no targets, and a causal model does
    # not see them.
    documents = np.stack([tokens[0], np.roll(tokens[0], -3), tokens[1]])
    weights = (np.arange(8) < np.array([[2], [3], [8]])).astype(np.float32)
    alone, n_alone = jit_loss_sum(params, {"tokens": documents, "weights": weights}, config)
    assert int(n) == int(n_alone) == 2 + 3 + 8
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    weights = step.target_weights({"tokens": tokens[:2], "segments": packed})
    mixed, _ = jit_loss_sum(params, {"tokens": tokens[:2], "weights": weights}, config)
    assert abs(mixed - together) > 1e-3  # without segments, documents attend to each other


def test_eval_step_has_no_dropout_and_counts_weights():
    config = tiny(model=ONE | {"dropout": 0.5}, train={"z_loss": 0.1})
    params, batch = (
        redrawn(config.model),
        batch_of(config, weights=np.repeat(np.float32([[1, 0]] * 4), [5, 3], axis=1)),
    )
    loss, count = jit_eval(params, None, batch, config)
    # no z-loss, so that validation losses stay comparable
    plain, _ = jit_loss_sum(params, batch, tiny(model=ONE))
    assert float(count) == 20
    np.testing.assert_allclose(loss, plain, rtol=1e-6)


@pytest.mark.slow
def test_dropout_depends_on_example_step_and_seed_only():
    config = tiny(model=ONE | {"dropout": 0.3})
    batch, state = batch_of(config), state_of(config)
    states = [state, state.replace(step=jnp.int32(1)), state.replace(seed=jnp.uint32(1)), state]
    losses = [float(jit_gradients(s, batch, config)[0]["loss"]) for s in states]
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3
    # four copies of one example; the weights select one
    same = np.tile(batch["tokens"][:1], (4, 1))
    rows = np.eye(4, dtype=np.float32)
    chosen = [
        jit_gradients(state, {"tokens": same, "weights": np.tile(row[:, None], 8)}, config)
        for row in rows
    ]
    assert len({float(losses["loss"]) for losses, _ in chosen}) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_step_keeps_dtypes(dtype):
    config = tiny(
        model=ONE | {"param_dtype": dtype, "compute_dtype": "bfloat16"},
        train={"micro_batch_size": 2},
    )
    state = jax.eval_shape(functools.partial(step.init_state, config), 0)
    after, metrics = jax.eval_shape(
        functools.partial(step.train_step, config=config), state, batch_of(config)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after.params)} == {dtype}
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32


def test_a_dispatch_traces_the_step_once_and_stacks_its_metrics(monkeypatch):
    train_step, traced = step.train_step, []

    def with_one_more(state, batch, config):
        traced.append(batch["tokens"].shape)
        state, metrics = train_step(state, batch, config)
        return state, metrics | {"n_tokens": jnp.int32(batch["tokens"].size)}

    monkeypatch.setattr(step, "train_step", with_one_more)
    config = tiny(model=ONE)
    inputs = stacked([batch_of(config)] * 2)
    _, metrics = jax.eval_shape(
        lambda state, n: step.train_steps(state, None, inputs, n, config),
        state_of(config),
        np.int32(1),
    )
    assert len(traced) == 1
    assert metrics["n_tokens"].shape == (2,)
    assert metrics["n_tokens"].dtype == jnp.int32
