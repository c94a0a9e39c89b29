"""PyTorch's models with our parameters compute the same as our models."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn

from benchmarks import shapes
from lm import model
from lm.layers import losses

TINY = {
    "gpt2": shapes.Shape(
        "", n_layers=2, n_heads=4, d_model=32, d_ff=48, vocab_size=19, seq_len=12, batch_size=2
    ),
    "llama": shapes.Shape("", 2, 4, 32, 48, 19, 12, 2, family="llama", n_kv_heads=2),
}


@pytest.mark.parametrize("family", TINY)
def test_the_peer_computes_the_same_and_torch_compile_sees_no_mask(family, monkeypatch):
    """An explicit mask would disable PyTorch's flash kernels, which its users have."""
    torch = pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    from benchmarks.peers import Peer, built

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a GPU would compute in TF32
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY[family])
    config = shapes.config_of("tiny", "unread", {})
    # no zeros or ones: a forgotten or exchanged parameter changes the logits
    params = redrawn(config.model)
    theirs = built(shapes.transformers_fields(config), shapes.transformers_params(config, params))
    peer = Peer(TINY[family], theirs, None)

    tokens = np.random.default_rng(0).integers(0, 19, (2, 13))
    ours = model.logits(params, config.model, jnp.asarray(tokens[:, :-1]))
    logits = peer.logits(torch.from_numpy(np.ascontiguousarray(tokens[:, :-1]))).detach().numpy()
    np.testing.assert_allclose(logits, ours, rtol=0, atol=2e-5 * np.abs(ours).max())
    total = losses.softmax_cross_entropy(ours, jnp.asarray(tokens[:, 1:])).nll
    np.testing.assert_allclose(peer.losses([tokens])[0], total / 24, rtol=2e-5)

    calls = []

    def record(graph, inputs):
        calls.extend(
            n.kwargs for n in graph.graph.nodes if "scaled_dot_product_attention" in str(n.target)
        )
        return graph.forward

    torch._dynamo.reset()
    torch.compile(peer._loss, backend=record)(torch.zeros((2, 13), dtype=torch.int64))
    assert [(call["is_causal"], call.get("attn_mask")) for call in calls] == [(True, None)] * TINY[
        family
    ].n_layers
