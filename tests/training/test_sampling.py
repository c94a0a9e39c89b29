"""Sampling: greedy and random continuations against the model's logits."""

import jax
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm import model
from lm.data import tokenizers
from lm.training.sampling import generate, sample_text

CONFIG = tiny(model={"n_layers": 1, "positions": "learned"})
PARAMS = redrawn(CONFIG.model)
SEQ_LEN = CONFIG.train.seq_len


def text(prompt=(1, 2, 3), n_tokens=12, **options):
    return generate(PARAMS, CONFIG.model, list(prompt), n_tokens, seq_len=SEQ_LEN, **options).tolist()


@pytest.mark.parametrize("prompt", [[1, 2, 3], list(range(11))], ids=["short", "longer_than_the_context"])
def test_greedy_text_equals_that_of_a_plain_loop(prompt):
    """Also beyond the length of the context: the model sees the last seq_len tokens, at positions from 0."""
    logits = jax.jit(lambda tokens: model.logits(PARAMS, CONFIG.model, tokens[None])[0])
    seen, expected = list(prompt), []
    for _ in range(12):
        window = seen[-SEQ_LEN:]
        padded = np.array(window + [0] * (SEQ_LEN - len(window)))
        best = int(np.argmax(logits(padded)[len(window) - 1]))
        seen.append(best)
        expected.append(best)
    assert text(prompt, temperature=0) == expected
    assert len(set(expected)) > 1


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn():
    """A vocabulary may be padded beyond its tokenizer's ids."""
    drawn = [text(n_tokens=40, temperature=3.0, seed=seed, n_ids=n_ids) for seed in range(3) for n_ids in (3, None)]
    assert max(map(max, drawn[::2])) == 2
    assert max(map(max, drawn[1::2])) > 2


def test_top_1_is_greedy_and_a_seed_determines_the_text():
    greedy = text(temperature=0)
    assert text(top_k=1, temperature=1.0, seed=3) == greedy
    drawn = [text(temperature=1.0, seed=seed) for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert greedy != drawn[0]


def test_draws_follow_the_softmax_of_the_top_k():
    """Compare the first tokens of 200 texts with softmax(logits / temperature) over the 3 likeliest tokens."""
    n, temperature = 200, 1.5
    first = np.array([text(n_tokens=1, temperature=temperature, top_k=3, seed=seed)[0] for seed in range(n)])
    logits = np.float64(model.logits(PARAMS, CONFIG.model, np.array([[1, 2, 3]]))[0, -1])
    likeliest = np.argsort(logits)[-3:]
    p = np.exp((logits[likeliest] - logits.max()) / temperature)
    p /= p.sum()
    assert set(first) <= set(likeliest.tolist())
    for token, probability in zip(likeliest, p, strict=True):
        sigma = np.sqrt(probability * (1 - probability) / n)
        assert abs((first == token).mean() - probability) < 5 * sigma


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        text(prompt=[])


def test_sample_text_continues_the_prompt():
    tokenizer = tokenizers.make("char", ["abcdefghijklmnopqrs"])
    out = sample_text(PARAMS, CONFIG, tokenizer, prompt="bcd", n_tokens=12, temperature=0)
    assert out.startswith("bcd")
    assert tokenizer.encode(out[3:]).tolist() == text(tokenizer.encode("bcd"), temperature=0)
