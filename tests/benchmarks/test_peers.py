"""PyTorch's models with our parameters compute the same as our models."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn

from benchmarks import shapes
from lm import model, parameters
from lm.command_line.loading import load_values
from lm.layers import losses

TINY = {
    "gpt2": shapes.Shape("", n_layers=2, n_heads=4, d_model=32, d_ff=48, vocab_size=19, seq_len=12, batch_size=2),
    "llama": shapes.Shape("", 2, 4, 32, 48, 19, 12, 2, family="llama", n_kv_heads=2),
}
NANOGPT = Path(__file__).parents[1] / "references" / "nanogpt"


def peer_and_ours(shape: shapes.Shape, monkeypatch, **options):
    """Return (the peer with our parameters, our model's config, our parameters)."""
    pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    from benchmarks.peers import Peer

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a GPU would compute in TF32
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape)
    values = shapes.values_of("tiny", "unread") | ({"model.activation": "gelu"} if options.get("nanogpt") else {})
    config = load_values(str(shapes.CONFIG), values)
    config = parameters.resolve(config, config.model.vocab_size)
    params = redrawn(config.model)  # no zeros or ones: a forgotten or exchanged parameter changes the logits
    arrays = {path: np.asarray(p) for path, p in parameters.flat(params).items()}
    return Peer(shape, arrays, None, **options), config.model, params


def torch_of(tokens):
    import torch

    return torch.from_numpy(np.ascontiguousarray(tokens))


@pytest.mark.parametrize(
    ("shape", "nanogpt"),
    [(TINY["gpt2"], None), (TINY["llama"], None), (dataclasses.replace(TINY["gpt2"], d_ff=128), NANOGPT)],
    ids=["gpt2", "llama", "nanogpt"],
)
def test_the_peer_computes_the_same_logits_and_loss(shape, nanogpt, monkeypatch):
    peer, config, params = peer_and_ours(shape, monkeypatch, nanogpt=nanogpt)
    tokens = np.random.default_rng(0).integers(0, 19, (2, 13))
    ours = model.logits(params, config, jnp.asarray(tokens[:, :-1]))
    theirs = peer.logits(torch_of(tokens[:, :-1])).detach().numpy()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * np.abs(ours).max())
    total, _ = losses.softmax_cross_entropy(ours, jnp.asarray(tokens[:, 1:]))
    np.testing.assert_allclose(peer.losses([tokens])[0], total / 24, rtol=2e-5)


@pytest.mark.parametrize("family", TINY)
def test_torch_compile_uses_causal_attention_without_a_mask(family, monkeypatch):
    """An explicit mask would disable PyTorch's flash kernels, which its users have."""
    peer, _, _ = peer_and_ours(TINY[family], monkeypatch)
    import torch

    calls = []

    def record(graph, inputs):
        calls.extend(n for n in graph.graph.nodes if "scaled_dot_product_attention" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(peer._loss, backend=record)(torch_of(np.zeros((2, 13), np.int64)))
    assert len(calls) == TINY[family].n_layers
    for call in calls:
        assert call.kwargs["is_causal"] is True
        assert call.kwargs.get("attn_mask") is None


@pytest.mark.parametrize("n", [5, 37, 48])
def test_the_score_is_the_mean_over_all_tokens(n, monkeypatch):
    """Consecutive windows of 12, the last one shorter; a mean over windows would weigh it too much."""
    peer, config, params = peer_and_ours(TINY["gpt2"], monkeypatch)
    from benchmarks.peers import score

    tokens, total = np.random.default_rng(n).integers(0, 19, n + 1).astype(np.uint16), 0.0
    for i in range(0, n, 12):
        end = min(i + 12, n)
        logits = model.logits(params, config, jnp.asarray(tokens[None, i:end]))
        total += losses.softmax_cross_entropy(logits, jnp.asarray(tokens[None, i + 1 : end + 1]))[0]
    np.testing.assert_allclose(score(peer, tokens, 12), total / n, rtol=1e-5)
