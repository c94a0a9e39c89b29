"""Inputs: equal batches whether the device or the host gathers them, and no array is copied or read
twice.
"""

import numpy as np
import pytest
from tiny import redrawn, tiny, with_keys

from lm.data import Split, batches
from lm.data.concatenated import ConcatenatedArray
from lm.data.mixtures import Part
from lm.parallel import sharding
from lm.step import take_batch
from lm.training.batch_source import BatchSource
from lm.training.evaluation import evaluate

TOKENS = np.random.default_rng(0).integers(0, 19, 9 * 30).astype(np.uint16)
PLAIN = Split("validation", TOKENS, TOKENS.size, None)
PACKED = Split("validation", TOKENS.reshape(30, 9), TOKENS.size, None, np.ones((30, 9), np.uint16))
PARTS = tuple(Part(name, start, 135, 0.5, 1.0) for name, start in (("a", 0), ("b", 135)))
MIXED = Split("validation", ConcatenatedArray(np.split(TOKENS, 2)), TOKENS.size, None, parts=PARTS)
MIXTURE = {"mixture": (("a", "text:a", 1.0), ("b", "text:b", 1.0))}


def config_of(device_bytes=2**20, **data):
    return tiny(data={"device_bytes": device_bytes} | data, train={"steps_per_dispatch": 3})


@pytest.mark.parametrize("split", [PLAIN, PACKED, MIXED], ids=["plain", "packed", "mixed"])
@pytest.mark.parametrize("device_bytes", [2**20, 0], ids=["resident", "host"])
def test_inputs_are_the_batches_of_the_steps(split, device_bytes):
    config = config_of(device_bytes, order="epochs", **(MIXTURE if split is MIXED else {}))
    source = BatchSource(split, config)
    assert (source.resident is None) == (device_bytes == 0)
    inputs = source.train(5, 2)
    assert {len(array) for array in inputs.values()} == {3}  # steps_per_dispatch
    for i in range(2):
        batch = take_batch(source.resident, {name: array[i] for name, array in inputs.items()}, 8)
        expected = batches.train_batch(split, config, 5 + i)
        assert batch.keys() == expected.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], expected[name])


def test_another_seed_shares_the_arrays():
    config = config_of()
    source = BatchSource(PLAIN, config)
    other = source.with_seed(7)
    assert other.resident is source.resident
    expected = batches.window_starts(PLAIN, with_keys(config, train_seed=7), np.arange(3))
    np.testing.assert_array_equal(other.train(0, 3)["starts"], expected)


def test_a_split_is_sent_to_the_device_once_for_all_evaluations(monkeypatch):
    sent, replicate = [], sharding.replicate
    monkeypatch.setattr(
        sharding, "replicate", lambda mesh, array: sent.append(array) or replicate(mesh, array)
    )
    config = config_of()
    source, params = BatchSource(PLAIN, config), redrawn(config.model)
    losses = [evaluate(params, source)["loss"] for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    assert len(sent) == 1


def test_evaluation_stops_between_two_batches():
    config, calls = config_of(), []
    source = BatchSource(PLAIN, config)
    assert (
        evaluate(redrawn(config.model), source, stop=lambda: calls.append(1) or len(calls) == 2)
        is None
    )
    assert len(calls) == 2
