"""Micro-batches of sweeps on CPUs: of at most 512 tokens for small models, unless the config sets
them.
"""

import pytest

from lm import parameters
from lm.command_line.loading import load_values
from lm.sweeps.cpu_memory import micro_batch_size


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8),
        ({"train.micro_batch_size": 16}, 16),
        ({"train.batch_size": 8}, None),
        ({"train.seq_len": 1024}, None),
        ({"train.batch_size": 20}, 5),
        ({"train.batch_size": 31}, None),
        ({"model.compute_dtype": "bfloat16"}, None),
        ({"model.vocab_size": 50_000}, None),
        ({"model.d_ff": 10_000}, None),
        ({"model.ffn": "moe"}, 8),
        ({"model.ffn": "moe", "model.d_ff": 2000}, None),
    ],
)
def test_micro_batches_have_at_most_512_tokens_unless_the_model_is_large(changes, expected):
    config = parameters.resolve(load_values("configs/shakespeare_small.py", changes), vocab_size=65)
    assert (
        micro_batch_size(config, parameters.count(parameters.parameter_table(config.model)))
        == expected
    )
