"""Shapes of the timed models, and the data both sides read."""

import numpy as np
import pytest

from benchmarks import shapes
from lm import data


@pytest.mark.parametrize("name", ["S", "1B"])  # uint16 and uint32 tokens
def test_our_side_reads_the_tokens_that_were_written(name, tmp_path):
    shape = shapes.SHAPES[name]
    shapes.write_tokens(tmp_path / "data", shape)
    corpus = data.open_corpus(
        shapes.config_of(name, str(tmp_path / "data"), {}).data, seq_len=8, say=print
    )
    written = np.fromfile(tmp_path / "data" / shape.token_file, shape.token_dtype)
    assert len(corpus.split("train").tokens) == len(written) == 10**6
    np.testing.assert_array_equal(corpus.split("train").tokens[:100], written[:100])


def test_both_sides_have_the_same_optimizer():
    o = shapes.config_of("S", "unread", {}).optimizer
    ours = {"learning_rate": o.learning_rate, "betas": (o.b1, o.b2), "eps": o.eps}
    assert ours | {"weight_decay": o.weight_decay, "clip_norm": o.clip_norm} == shapes.OPTIMIZER
    assert (o.name, o.schedule) == ("adamw", "constant")
    decayed = o.decay_embeddings, o.decay_norms, o.decay_biases
    assert decayed == (True, False, False), "nanoGPT decays matrices, embeddings included"
