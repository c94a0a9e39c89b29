"""PyTorch's models with our parameters compute the same as our models."""

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


def peer_and_ours(shape: shapes.Shape, monkeypatch):
    """Return (the peer with our parameters, our model's config, our parameters)."""
    pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    from benchmarks.peers import Peer

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a GPU would compute in TF32
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape)
    config = load_values(str(shapes.CONFIG), shapes.values_of("tiny", "unread"))
    config = parameters.resolve(config, config.model.vocab_size)
    params = redrawn(config.model)  # no zeros or ones: a forgotten or exchanged parameter changes the logits
    arrays = {path: np.asarray(p) for path, p in parameters.flat(params).items()}
    return Peer(shape, arrays, None), config.model, params


def torch_of(tokens):
    import torch

    return torch.from_numpy(np.ascontiguousarray(tokens))


@pytest.mark.parametrize("family", TINY)
def test_the_peer_computes_the_same_logits_and_loss(family, monkeypatch):
    peer, config, params = peer_and_ours(TINY[family], monkeypatch)
    tokens = np.random.default_rng(0).integers(0, 19, (2, 13))
    ours = model.logits(params, config, jnp.asarray(tokens[:, :-1]))
    theirs = peer.logits(torch_of(tokens[:, :-1])).detach().numpy()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * np.abs(ours).max())
    total = losses.softmax_cross_entropy(ours, jnp.asarray(tokens[:, 1:])).nll
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
