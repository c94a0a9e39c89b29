"""The other side of the benchmarks is the same model: its logits from our parameters are ours."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn

from benchmarks import shapes
from lm import model, parameters
from lm.config_file import load_values

TINY = {
    "gpt2": shapes.Shape("", n_layers=2, n_heads=4, d_model=32, d_ff=48, vocab_size=19, seq_len=12, batch_size=2),
    "llama": shapes.Shape("", 2, 4, 32, 48, 19, 12, 2, family="llama", n_kv_heads=2),
}


@pytest.mark.parametrize("family", TINY)
def test_the_peer_computes_the_same_logits(family, monkeypatch):
    torch = pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    from benchmarks.peers import Peer

    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY[family])
    config = load_values(str(shapes.CONFIG), shapes.values_of("tiny", "unread"))
    config = parameters.resolve(config, config.model.vocab_size)
    params = redrawn(config.model)  # none zero or one: an exchanged or forgotten one would show
    tokens = np.random.default_rng(0).integers(0, 19, (2, 12))
    ours = model.logits(params, config.model, jnp.asarray(tokens))
    peer = Peer(TINY[family], {path: np.asarray(p) for path, p in parameters.flat(params).items()}, None)
    theirs = peer.model(input_ids=torch.from_numpy(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * np.abs(ours).max())


def test_both_sides_have_the_same_optimizer():
    config = load_values(str(shapes.CONFIG), shapes.values_of("S", "unread"))
    o = config.optimizer
    ours = {"learning_rate": o.learning_rate, "betas": (o.b1, o.b2), "eps": o.eps}
    assert ours | {"weight_decay": o.weight_decay, "clip_norm": o.clip_norm} == shapes.OPTIMIZER
    assert (o.name, o.schedule, o.decay_embeddings, o.decay_norms, o.decay_biases) == (
        "adamw", "constant", True, False, False,
    )  # fmt: skip


def test_another_batch_is_named_with_the_shape():
    assert shapes.named("G@64") == dataclasses.replace(shapes.SHAPES["G"], batch_size=64)
    for name in ("X", "G@x", "X@8"):
        with pytest.raises(ValueError, match="nor one of them with a batch size"):
            shapes.named(name)
