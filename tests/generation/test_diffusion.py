"""Masked diffusion: its loss is the bound, and its samples are of the distribution that it bounds."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit_eval, jit_gradients, redrawn, state_of, tiny

from lm import model, step
from lm.config import Config, checks
from lm.data import Split
from lm.generation import decoding, diffusion
from lm.generation.diffusion import make_sampler
from lm.generation.filters import Sampling
from lm.huggingface.config_files import export_fields
from lm.ideas import masked_diffusion
from lm.scoring.predictions import score_split
from lm.system.errors import UserError

V, T = 5, 4
KEYS = {"masked_diffusion": True, "vocab_size": V, "n_layers": 1}
CONFIG = tiny(model=KEYS, train={"batch_size": 2, "seq_len": T})
C = CONFIG.model


def params_of():
    """Return random parameters with large logits, so that few texts are likely."""
    params = redrawn(C)
    params["head"]["w_DV"] *= 4
    return params


@jax.jit
def log_p_hidden(params, ids_BT):
    return jax.nn.log_softmax(model.logits(params, C, ids_BT))


def bound(params, text_T) -> float:
    """Return the bound of -ln p of a text: the sum over all sets of hidden tokens."""
    sets = [np.array(s, bool) for s in itertools.product([0, 1], repeat=T) if any(s)]
    ids = np.stack([np.where(hidden, V, text_T) for hidden in sets])
    log_p_BTV = np.asarray(log_p_hidden(params, ids))
    total = 0.0
    for hidden, log_p_TV in zip(sets, log_p_BTV, strict=True):
        n = hidden.sum()
        n_sets = sum(s.sum() == n for s in sets)
        total += -log_p_TV[np.arange(T), text_T][hidden].sum() * T / n / n_sets / T
    return total


def test_the_loss_is_the_bound_in_expectation():
    params = params_of()
    text = np.array([1, 4, 2, 0])
    batch = {"tokens": np.tile(np.concatenate([[3], text]), (512, 1))}
    sums = []
    for seed in range(8):
        fields = step.fields_read(batch, C, jax.random.key(seed))
        log_p = np.asarray(log_p_hidden(params, fields["inputs"]))
        nll = -np.take_along_axis(log_p, text[None, :, None], axis=-1)[..., 0]
        sums.append(float(np.sum(nll * fields["weights"])) / 512)
    assert np.mean(sums) == pytest.approx(bound(params, text), rel=0.02)


def test_hidden_tokens_do_not_reach_the_model_and_weights_add_up_to_the_targets():
    tokens = np.random.default_rng(0).integers(0, V, (64, T + 1))
    is_target = np.tile([0, 1, 0, 1, 0], (64, 1))
    batch = {"tokens": tokens, "is_target": is_target}
    fields = jax.device_get(step.fields_read(batch, C, jax.random.key(0)))
    hidden = fields["weights"] > 0
    assert (fields["inputs"][hidden] == V).all()
    assert (fields["inputs"][:, 1] == tokens[:, 2]).all()  # between answers: read
    assert (fields["inputs"][:, 3] == V).all()  # after the last: neither read nor counted
    assert not fields["weights"][:, [1, 3]].any()
    np.testing.assert_allclose(fields["weights"].sum(1), 2, rtol=1e-6)
    np.testing.assert_array_equal(fields["counts"], np.tile([1, 0, 1, 0], (64, 1)))
    # a half of the texts has one hidden token, and a half two: levels are divided among them
    assert hidden.sum(1).tolist().count(1) == 32


def test_evaluations_draw_masks_from_tokens_alone_and_score_the_same_bound():
    params = redrawn(C)
    ids = np.random.default_rng(0).integers(0, V, 2 * T * 6 + 1).astype(np.uint16)
    split = Split("test", ids, len(ids), None)
    config = dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, batch_size=12))
    scores = score_split(params, config, split, batch_size=12)
    starts = np.arange(12) * T
    batch = {"tokens": ids[starts[:, None] + np.arange(T + 1)].astype(np.int32)}
    batch["weights"] = np.ones((12, T), np.float32)
    total, n = jit_eval(params, None, batch, CONFIG)
    assert (scores.tokens, n) == (12 * T, 12 * T)
    assert scores.loss.value == pytest.approx(float(total / n), rel=1e-5)
    assert [b.last for b in scores.by_context] == [T]
    assert jit_eval(params, None, batch, CONFIG)[0] == total
    other = batch | {"tokens": (batch["tokens"] + 1) % V}
    masks = [step.fields_read(b, C)["weights"] for b in (batch, other)]
    assert not np.array_equal(*masks)


def test_terms_of_the_loss_and_microbatches_count_hidden_tokens_only():
    """Deep supervision and the z-loss of the last layer are the loss, where they read the same."""
    keys = {"deep_supervision": 1.0, "n_layers": 2, "masked_diffusion": True}
    batch = {"tokens": np.random.default_rng(1).integers(0, 19, (4, 9))}
    results = []
    for train in ({}, {"micro_batch_size": 1}, {"loss_chunk": 8}):
        config = tiny(model=keys, train={"batch_size": 4, "seq_len": 8} | train)
        results.append(jax.device_get(jit_gradients(state_of(config), batch, config)))
    for means, grads in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            means,
            results[0][0],
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
            grads,
            results[0][1],
        )
    assert 0.5 < results[0][0]["loss/deep"] / results[0][0]["loss"] < 2


def test_samples_are_of_the_any_order_distribution():
    """Two tokens after a prompt, in both orders with the probability 1/2."""
    params = params_of()
    prompt = [2, 0]
    expected = np.zeros((V, V))
    start = np.array([[*prompt, V, V]])
    first = np.exp(np.asarray(log_p_hidden(params, start)))[0]
    for i, j in ((2, 3), (3, 2)):
        given = np.repeat(start, V, axis=0)
        given[:, i] = np.arange(V)
        second = np.exp(np.asarray(log_p_hidden(params, given)))[:, j]
        joint = first[i][:, None] * second  # (token at i, token at j)
        expected += (joint if i < j else joint.T) / 2
    sampler = make_sampler(params, C, seq_len=T)
    n = 4000
    drawn = sampler.generate([prompt] * n, 2, Sampling(), samples=np.arange(n))
    counts = np.zeros((V, V))
    np.add.at(counts, (drawn[:, 0], drawn[:, 1]), 1)
    error = np.abs(counts / n - expected)
    assert (error < 4.5 * np.sqrt(expected * (1 - expected) / n) + 1e-3).all()


def test_long_texts_are_drawn_in_blocks_and_depend_on_seed_and_sample_only():
    sampler = make_sampler(redrawn(C), C, seq_len=T)
    together = sampler.generate([[1, 2, 3, 4, 0], [1]], 9, Sampling(), seed=3, samples=[0, 5])
    assert together.shape == (2, 9)
    assert ((together >= 0) & (together < V)).all()
    again = sampler.generate([[1, 2, 3, 4, 0], [1]], 9, Sampling(), seed=3, samples=[0, 5])
    np.testing.assert_array_equal(together, again)
    others = sampler.generate([[1]] * 2, 9, Sampling(), seed=3, samples=[5, 6])
    assert not np.array_equal(*others)
    likeliest = sampler.generate([[1]] * 2, 9, Sampling(temperature=0.0), samples=[0, 0])
    np.testing.assert_array_equal(*likeliest)


def test_a_prompt_that_fits_is_read_whole(monkeypatch):
    """Beside the tokens to draw; a longer one is cut to half of the context."""
    sampler = make_sampler(redrawn(C), C, seq_len=8)
    lengths = []

    def recorded(sampler, ids_BT, lengths_B, *arguments):
        lengths.extend(lengths_B.tolist())
        return ids_BT

    monkeypatch.setattr(diffusion, "_reveal", recorded)
    for n_prompt in (1, 6, 7, 8, 20):
        sampler.generate([[1] * n_prompt], 2, Sampling())
    assert lengths == [1, 6, 4, 4, 4]


def test_what_needs_the_next_token_is_refused():
    params = redrawn(C)
    for call in (
        lambda: decoding.make_decoder(params, C, seq_len=T),
        lambda: decoding.abstract_programs(params, CONFIG, 1),
        lambda: masked_diffusion.refuse(C, "a chat"),
        lambda: export_fields(CONFIG),
    ):
        with pytest.raises(UserError, match="masked_diffusion"):
            call()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"token_shift": True}, "model.token_shift"),
        ({"mixers": ("rg_lru", "attention")}, "model.mixers"),
        ({"gated_delta": "all"}, "model.gated_delta"),
        ({"multi_token_prediction": True}, "model.multi_token_prediction"),
        ({"attn_forget": True}, "model.attn_forget"),
        ({"value_embeddings": True}, "model.value_embeddings"),
        ({"ffn": "moe"}, None),
        ({"query_scale": "log_n", "mixers": ("latent", "talking_heads")}, None),
    ],
)
def test_ideas_that_look_back_only_are_refused(keys, named):
    config = Config()
    changed = dataclasses.replace(config.model, masked_diffusion=True, **keys)
    found = list(checks.diffusion(dataclasses.replace(config, model=changed)))
    assert [key.split()[0] for key, _ in found] == ([named] if named else [])


def test_probes_and_tasks_are_refused():
    config = dataclasses.replace(
        Config(),
        model=dataclasses.replace(Config().model, masked_diffusion=True),
        eval=dataclasses.replace(Config().eval, probes=("repeat",), harness_tasks=("hellaswag",)),
    )
    assert len(list(checks.diffusion(config))) == 2


def test_attention_sees_a_window_on_both_sides():
    c = dataclasses.replace(C, window_pattern=(2,))
    ids = np.array([[0, 1, 2, 3]])
    params = redrawn(c)
    embedded = jnp.asarray(params["embedding"])

    def h(embedding):
        return model.hidden(params | {"embedding": embedding}, c, ids)[0, 1].sum()

    read = np.asarray(jax.grad(h)(embedded)).any(axis=1)
    assert read[:4].tolist() == [True, True, True, False]
