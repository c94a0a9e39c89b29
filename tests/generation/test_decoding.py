"""Decoding with a cache of keys and values, compared with the model without a cache."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm import model
from lm.generation import decoding
from lm.generation.decoding import make_decoder
from lm.generation.filters import Sampling
from lm.generation.kv_cache import Prefill, decode
from lm.layers.losses import head_logits
from lm.system.errors import UserError

GREEDY, RANDOM = Sampling(temperature=0.0), Sampling(temperature=1.0)
PROMPTS = [[1, 2, 3], [5], [4, 0, 18, 7, 7, 2]]
LONG = list(range(11))  # longer than the context

# Each pair of values of two keys occurs in one of these configs. "slow" ones are not in the default
# suite.
MODELS = {
    "slow_rope": {},
    "slow_window": {"window_pattern": (3,), "n_kv_heads": 4, "norm_placement": "post", "attn_softcap": 5.0},
    "learned": {"positions": "learned", "n_kv_heads": 1, "norm_placement": "sandwich", "window_pattern": (3, 0)},
    "slow_scan": {"scan_layers": True, "window_pattern": (0, 4), "qk_norm": True, "logit_softcap": 9.0},
    "slow_sinusoidal": {"positions": "sinusoidal", "norm_placement": "parallel", "qk_norm": True, "n_kv_heads": 4},
    "slow_none": {"positions": "none", "norm_placement": "none", "window_pattern": (2,), "tie_embeddings": True},
    "slow_biases": {"norm": "layer", "ffn_bias": True, "attn_bias": True, "rope_pairing": "halves", "n_kv_heads": 1},
    "slow_softcap": {"attn_softcap": 2.0, "n_kv_heads": 2, "window_pattern": (4,), "tie_embeddings": True},
    "slow_mup": {"parametrization": "mup", "mup_base_d_model": 8, "ffn": "mlp", "window_pattern": (5,)},
    "slow_olmo2": {
        "norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads", "attn_bias": True,
        "attn_out_bias": False, "window_pattern": (0, 3), "scan_layers": True,
    },
    "slow_gemma2": {
        "norm_placement": "sandwich", "attn_scale": 0.3, "attn_softcap": 2.0, "logit_softcap": 3.0, "embed_scale": 4.0,
        "tie_embeddings": True, "window_pattern": (3, 0), "d_head": 6, "rope_pairing": "halves",
    },
    "slow_llama3": {
        "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_max_positions": 32, "rope_theta": 4.0,
        "n_kv_heads": 1,
    },
    "slow_rope_width": {"rope_width": 2, "rope_scaling": "linear", "rope_factor": 2.0, "norm": "layer"},
    "slow_recurrence": {"gated_delta": "three_of_four", "n_layers": 4, "n_kv_heads": 4},
    "slow_looks_back": {"token_shift": True, "conv_keys": True, "conv_values": True, "conv_stream": True},
    "slow_remat": {"scan_layers": True, "remat": "block", "dropout": 0.1, "norm_placement": "post", "qk_norm": True},
}  # fmt: skip


def models(*names):
    marks = {name: [pytest.mark.slow] if name.startswith("slow") else [] for name in names}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in names]
    )


@functools.cache
def built(name, **changes):
    config = tiny(model=MODELS[name] | changes)
    params = redrawn(config.model)
    return config, params, make_decoder(params, config.model, seq_len=config.train.seq_len)


def cached_logits(decoder, tokens_BT, lengths_B, n_slots):
    """Return the logits after each token from the prompts' last one on, [(position, logits_V), ...]
    per example.
    """

    @jax.jit
    def prefill(tokens_BT, lengths_B):
        h_BTD, cache = decoding._apply(
            decoder, {}, tokens_BT, Prefill(lengths_B=lengths_B, n_slots=n_slots)
        )
        return head_logits(h_BTD, model.head(decoder.params, decoder.config)), cache

    @jax.jit
    def step(cache, tokens_B, time, starts_B):
        h_B1D, cache = decoding._apply(decoder, cache, tokens_B[:, None], decode(time, starts_B))
        return head_logits(h_B1D[:, 0], model.head(decoder.params, decoder.config)), cache

    prompts_BT = np.where(np.arange(tokens_BT.shape[1]) < lengths_B[:, None], tokens_BT, 0)
    logits_BTV, cache = prefill(prompts_BT, lengths_B)
    found = [
        [(n - 1, logits_TV[n - 1])] for n, logits_TV in zip(lengths_B, logits_BTV, strict=True)
    ]
    starts_B = max(lengths_B) - lengths_B
    for time in range(max(lengths_B), n_slots):
        positions_B = time - starts_B
        logits_BV, cache = step(
            cache, tokens_BT[np.arange(len(tokens_BT)), positions_B], time, starts_B
        )
        for row, logits_V in enumerate(logits_BV):
            found[row].append((positions_B[row], logits_V))
    return found


@models(*MODELS)
def test_cached_logits_equal_those_of_the_full_context(name):
    """At every position, for prompts of different lengths in one batch, in float32."""
    config, params, decoder = built(name)
    T = config.train.seq_len
    tokens_BT = np.random.default_rng(0).integers(0, 19, (3, T)).astype(np.int32)
    expected_BTV = jax.jit(lambda params: model.logits(params, config.model, tokens_BT))(params)
    for row, found in enumerate(cached_logits(decoder, tokens_BT, np.array([1, 2, 4]), n_slots=T)):
        assert len(found) == 1 + T - 4
        for position, logits_V in found:
            np.testing.assert_allclose(logits_V, expected_BTV[row, position], atol=1e-5, rtol=1e-5)


def greedy_ids_of_a_plain_loop(name, prompt, n_tokens):
    """Recompute the full context for every token; the window starts at multiples of half the
    context.
    """
    config, params, _ = built(name)
    T = config.train.seq_len
    logits = jax.jit(lambda tokens: model.logits(params, config.model, tokens[None])[0])
    seen = list(prompt)
    for _ in range(n_tokens):
        first = next(n for n in range(0, len(seen), T // 2) if len(seen) - n <= T)
        window = seen[first:]
        seen.append(
            int(np.argmax(logits(np.array(window + [0] * (T - len(window))))[len(window) - 1]))
        )
    return seen[len(prompt) :]


@pytest.mark.slow
@models("slow_window", "learned", "slow_scan", "slow_sinusoidal", "slow_none")
def test_greedy_ids_equal_those_of_a_plain_loop(name):
    """For a batch of unequal prompts, and beyond the length of the context."""
    *_, decoder = built(name)
    found = decoder.generate([*PROMPTS, LONG], 21, GREEDY).tolist()
    assert found == [greedy_ids_of_a_plain_loop(name, prompt, 21) for prompt in [*PROMPTS, LONG]]
    assert len({i for ids in found for i in ids}) > 1


@pytest.mark.slow
def test_a_prompt_in_a_batch_gets_the_same_text_as_alone():
    *_, decoder = built("learned")
    together = decoder.generate([*PROMPTS, LONG], 20, RANDOM, seed=3)
    for prompt, ids in zip([*PROMPTS, LONG], together, strict=True):
        np.testing.assert_array_equal(decoder.generate([prompt], 20, RANDOM, seed=3)[0], ids)


@pytest.mark.slow
def test_pieces_of_a_stream_join_to_the_whole():
    *_, decoder = built("learned")
    pieces = list(decoder.stream(PROMPTS[:1], 20, RANDOM, every=3))
    assert max(piece.shape[1] for piece in pieces) == 3
    np.testing.assert_array_equal(
        np.concatenate(pieces, axis=1), decoder.generate(PROMPTS[:1], 20, RANDOM)
    )


@pytest.mark.slow
def test_seed_and_sample_number_determine_the_text():
    *_, decoder = built("learned")
    prompts = [PROMPTS[0]] * 3
    first, second, third = decoder.generate(prompts, 20, RANDOM, samples=[0, 1, 0]).tolist()
    assert first == third != second
    assert decoder.generate(prompts[:1], 20, RANDOM, seed=1).tolist()[0] not in (first, second)


@pytest.mark.slow
def test_ids_outside_of_the_tokenizer_are_never_drawn():
    """config.model.vocab_size may exceed that of the tokenizer."""
    config, params, _ = built("learned")
    for n_ids, largest in ((3, 2), (None, 18)):
        decoder = make_decoder(params, config.model, seq_len=config.train.seq_len, n_ids=n_ids)
        assert (
            decoder.generate([[1]] * 8, 40, Sampling(temperature=5.0), samples=range(8)).max()
            == largest
        )


@pytest.mark.slow
def test_texts_of_different_lengths_and_temperatures_share_one_program():
    *_, decoder = built("learned")
    decoder.generate([[1], [2, 3]], 9, Sampling(temperature=1.0, top_p=0.5))
    compiled = [f._cache_size() for f in (decoding._prefill, decoding._decode)]
    decoder.generate([[1, 2, 3, 4], [7]], 5, Sampling(temperature=0.3, top_p=0.9), seed=4)
    assert [f._cache_size() for f in (decoding._prefill, decoding._decode)] == compiled


def test_the_cache_has_the_minimum_size():
    """Key and value heads only, no more slots than the layer's window, in the dtype of computation."""
    for dtype in ("float32", "bfloat16"):
        *_, decoder = built("learned")  # with and without a window of 3; one key head
        decoder = decoder.replace(config=dataclasses.replace(decoder.config, compute_dtype=dtype))

        def prefill(prompts_BT, lengths_B, decoder=decoder):
            return decoding._apply(
                decoder, {}, prompts_BT, Prefill(lengths_B=lengths_B, n_slots=8)
            )[1]

        cache = jax.eval_shape(prefill, np.zeros((2, 8), np.int32), np.array([3, 8]))
        leaves = [cache[f"layers/{i}/attention/{name}"] for i in (0, 1) for name in ("k", "v")]
        assert [leaf.shape for leaf in leaves] == [(2, 3, 4)] * 2 + [(2, 8, 4)] * 2
        assert {leaf.dtype.name for leaf in leaves} == {dtype}


@models("learned", "slow_window", "slow_gemma2", "slow_recurrence", "slow_looks_back")
def test_a_text_that_grows_by_given_and_drawn_tokens_is_read_once(name, monkeypatch):
    """Each drawn token is that of the full context computed anew, also after a drawn token was
    replaced.
    """
    n_prefilled = []
    prefill = decoding._prefill
    monkeypatch.setattr(
        decoding, "_prefill", lambda *a, **more: n_prefilled.append(1) or prefill(*a, **more)
    )
    config, params, decoder = built(name)
    logits = jax.jit(lambda tokens: model.logits(params, config.model, tokens[None])[0])
    text = decoding.CachedText(decoder, [1, 2], GREEDY)

    def draw():
        context = [*text.ids, *[0] * (decoder.seq_len - len(text.ids))]
        expected = int(np.argmax(logits(np.array(context))[len(text.ids) - 1]))
        assert text.draw() == expected == text.ids[-1]

    draw()
    text.ids.append(7)
    draw()
    text.ids[-1] = 5
    text.ids.append(3)
    draw()
    draw()
    assert (len(text.ids), text.is_full, len(n_prefilled)) == (8, False, 1)
    draw()
    assert text.is_full
    with pytest.raises(ValueError, match="has 9 tokens, and the model sees 8"):
        text.draw()


def test_logits_that_are_not_finite_are_an_error():
    """A model with such weights would draw the same token without end."""
    *_, decoder = built("learned")
    decoder = decoder.replace(
        params=jax.tree.map(lambda p: np.full(p.shape, np.nan, p.dtype), decoder.params)
    )
    with pytest.raises(UserError, match=r"logits are not finite.*--step"):
        decoder.generate([[1]], 1, GREEDY)


def test_an_empty_prompt_is_an_error():
    *_, decoder = built("learned")
    with pytest.raises(ValueError, match="prompt is empty"):
        decoder.generate([[1], []], 3, GREEDY)
