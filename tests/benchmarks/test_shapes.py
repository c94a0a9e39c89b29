"""Shapes of the timed models, and the data both sides read."""

import dataclasses

import numpy as np
import pytest

from benchmarks import shapes
from lm import data
from lm.command_line.loading import load_values


@pytest.mark.parametrize("name", ["S", "1B"])  # uint16 and uint32 tokens
def test_our_side_reads_the_tokens_that_were_written(name, tmp_path):
    shape = shapes.SHAPES[name]
    shapes.write_tokens(tmp_path / "data", shape)
    corpus = data.open_corpus(shapes.config_of(name, str(tmp_path / "data"), {}).data, seq_len=8, say=print)
    written = np.fromfile(tmp_path / "data" / shape.token_file, shape.token_dtype)
    assert len(corpus.split("train").tokens) == len(written) == 10**6
    np.testing.assert_array_equal(corpus.split("train").tokens[:100], written[:100])


def test_both_sides_have_the_same_optimizer():
    o = load_values(str(shapes.CONFIG), shapes.values_of("S", "unread")).optimizer
    ours = {"learning_rate": o.learning_rate, "betas": (o.b1, o.b2), "eps": o.eps}
    assert ours | {"weight_decay": o.weight_decay, "clip_norm": o.clip_norm} == shapes.OPTIMIZER
    assert (o.name, o.schedule) == ("adamw", "constant")
    assert o.decay_embeddings, "nanoGPT decays matrices, embeddings included"
    assert not o.decay_norms
    assert not o.decay_biases


def test_a_shape_with_another_batch_size():
    assert shapes.named("G@64") == dataclasses.replace(shapes.SHAPES["G"], batch_size=64)


@pytest.mark.parametrize("name", ["X", "G@x", "X@8", "G@0", "G@²", "G@" + "9" * 400, ""])
def test_unknown_shapes_are_refused(name):
    with pytest.raises(ValueError, match=r"unknown shape '.*'; use one of tiny, S, "):
        shapes.named(name)
