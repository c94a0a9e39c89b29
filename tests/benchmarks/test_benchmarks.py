"""The other side of the benchmarks is the same model: its logits from our parameters are ours."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import redrawn

from benchmarks import compare, gpu, shapes, train_speed
from lm import data, model, parameters
from lm.config.loading import load_values
from lm.layers import losses

TINY = {
    "gpt2": shapes.Shape("", n_layers=2, n_heads=4, d_model=32, d_ff=48, vocab_size=19, seq_len=12, batch_size=2),
    "llama": shapes.Shape("", 2, 4, 32, 48, 19, 12, 2, family="llama", n_kv_heads=2),
}


NANOGPT = Path(__file__).parents[1] / "references" / "nanogpt"


def peer_and_ours(shape: shapes.Shape, monkeypatch, **options):
    """(the peer with our parameters, our model's config, the parameters)."""
    pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    from benchmarks.peers import Peer

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # float32 there is TF32, and arrays live elsewhere
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape)
    values = shapes.values_of("tiny", "unread") | ({"model.activation": "gelu"} if options.get("nanogpt") else {})
    config = load_values(str(shapes.CONFIG), values)
    config = parameters.resolve(config, config.model.vocab_size)
    params = redrawn(config.model)  # none zero or one: an exchanged or forgotten one would show
    arrays = {path: np.asarray(p) for path, p in parameters.flat(params).items()}
    return Peer(shape, arrays, None, **options), config.model, params


@pytest.mark.parametrize(
    ("shape", "nanogpt"),
    [(TINY["gpt2"], None), (TINY["llama"], None), (dataclasses.replace(TINY["gpt2"], d_ff=128), NANOGPT)],
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
def test_torch_compile_gets_causal_attention_without_a_mask(family, monkeypatch):
    """A mask would keep torch's flash kernels out, and let us win against less than a user has."""
    peer, _, _ = peer_and_ours(TINY[family], monkeypatch)
    import torch

    calls = []

    def record(graph, inputs):
        calls.extend(n for n in graph.graph.nodes if "scaled_dot_product_attention" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(peer._loss, backend=record)(torch_of(np.zeros((2, 13), np.int64)))
    assert len(calls) == 2  # a layer has one
    for call in calls:
        assert call.kwargs["is_causal"] is True
        assert call.kwargs.get("attn_mask") is None


@pytest.mark.parametrize("n", [5, 37, 48])
def test_the_score_counts_every_token_once(n, monkeypatch):
    """Windows of 12 from the first token on, the last one shorter; the mean is over tokens, not over windows."""
    peer, config, params = peer_and_ours(TINY["gpt2"], monkeypatch)
    from benchmarks.peers import score

    tokens, total = np.random.default_rng(n).integers(0, 19, n + 1).astype(np.uint16), 0.0
    for i in range(0, n, 12):
        end = min(i + 12, n)
        logits = model.logits(params, config, jnp.asarray(tokens[None, i:end]))
        total += losses.softmax_cross_entropy(logits, jnp.asarray(tokens[None, i + 1 : end + 1]))[0]
    np.testing.assert_allclose(score(peer, tokens, 12), total / n, rtol=1e-5)


@pytest.mark.parametrize("name", ["S", "1B"])
def test_our_side_reads_the_tokens_that_were_written(name, tmp_path):
    shape = shapes.SHAPES[name]
    shapes.write_tokens(tmp_path / "data", shape)
    corpus = data.open_corpus(shapes.config_of(name, str(tmp_path / "data"), {}).data, seq_len=8, say=print)
    written = np.fromfile(tmp_path / "data" / shape.token_file, shape.token_dtype)
    assert len(corpus.split("train").tokens) == len(written) == 10**6
    np.testing.assert_array_equal(corpus.split("train").tokens[:100], written[:100])


def torch_of(tokens):
    import torch

    return torch.from_numpy(np.ascontiguousarray(tokens))


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


def test_readme_has_a_place_for_each_table_that_its_commands_make():
    readme = (compare.ROOT / "README.md").read_text()
    commands = re.findall(r"python -m benchmarks\.(\w+) ?([^`]*--readme)", readme)
    assert len(commands) >= 5
    for module, options in commands:
        name = re.search(r"--name (\w+)", options)
        assert compare.place(name[1] if name else module).search(readme), module


@pytest.mark.parametrize(
    ("seconds", "at_least", "n"), [(0.01, 1, 400), (0.3, 1, 13), (1.9, 1, 2), (9.0, 1, 1), (1.9, 10, 10)]
)
def test_a_turn_is_of_about_four_seconds(seconds, at_least, n):
    class Side:
        def ask(self, run):
            return {"wall": seconds * run}

    found = train_speed.n_steps(Side(), 4.0, at_least)
    assert found == (n // 10 * 10 if n >= 10 else n)


@pytest.mark.parametrize(
    ("mfu", "ratio", "targets"),
    [
        (0.5, 1.2, "mfu 0.45: reached, ratio 1.1: reached"),
        (0.4, 1.0, "mfu 0.45: MISSED, ratio 1.1: MISSED"),
        (None, 1.1, "mfu 0.45: not known, ratio 1.1: reached"),
    ],
)
def test_a_gpu_is_held_to_its_targets(mfu, ratio, targets, tmp_path, monkeypatch):
    """At the first batch that fits; with another attention than cuDNN's there is no result."""
    found = {"median": ratio, "low": ratio, "high": ratio}
    row = {"attention": "cudnn", "tokens_per_second": 1e5, "mfu": mfu, "mfu_full_square": mfu, "ratio": {"wall": found}}
    tried = []

    def run(module, shape, *options):
        tried.append(shape)
        if len(tried) < 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
        (tmp_path / f"{options[options.index('--name') + 1]}.json").write_text(json.dumps({"rows": [row]}))

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.speed("124M")["targets"] == targets
    assert tried == ["124M@128", "124M@64", "124M@48"]
    row["attention"] = "einsum"
    with pytest.raises(RuntimeError, match="attention was einsum"):
        gpu.speed("124M")
