"""The comparison of the speed of generating text."""

import argparse

import numpy as np
import pytest

from benchmarks import generation


def test_all_sides_draw_the_same_tokens():
    pytest.importorskip("torch", reason="the extra [bench] is not installed")
    pytest.importorskip("transformers", reason="the extra [bench] is not installed")
    sides = generation.make_sides("tiny")
    prompts = np.random.default_rng(1).integers(0, 19, (3, 4)).astype(np.int32)
    drawn = {name: draw(prompts, 12) for name, (_, draw) in sides.items()}
    for name in sides:
        np.testing.assert_array_equal(drawn[name], drawn["ours"], err_msg=name)
    assert len(np.unique(drawn["ours"])) > 1
    rows = generation.compare(sides, 16, 2, argparse.Namespace(pin=True, rounds=1))
    assert [row["side"] for row in rows] == list(sides)
    assert "**" in generation.table(rows)


def test_sides_that_draw_other_tokens_are_an_error():
    """A side that draws other tokens is not timed."""
    sides = {
        name: (True, lambda ids, n, k=k: np.full((len(ids), n), k))
        for k, name in enumerate(["ours", "theirs"])
    }
    with pytest.raises(AssertionError, match="theirs draws other tokens"):
        generation.compare(sides, 16, 2, argparse.Namespace(pin=True, rounds=1))
