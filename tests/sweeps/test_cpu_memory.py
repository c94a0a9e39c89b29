"""Micro-batches of sweeps on CPUs: of at most 512 tokens for small models, unless the config sets them."""

import pytest

from lm import parameters
from lm.command_line.loading import load_values
from lm.sweeps.cpu_memory import micro_batch_size


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("shakespeare_small", {}, 8),
        ("shakespeare_small", {"train.micro_batch_size": 16}, 16),
        ("shakespeare_small", {"train.batch_size": 8}, None),
        ("shakespeare_small", {"train.seq_len": 1024}, None),
        ("shakespeare_small", {"train.batch_size": 20}, 5),
        ("shakespeare_small", {"train.batch_size": 31}, None),
        ("shakespeare_small", {"model.compute_dtype": "bfloat16"}, None),
        ("shakespeare_small", {"model.vocab_size": 50_000}, None),
        ("shakespeare_small", {"model.d_ff": 10_000}, None),
        ("shakespeare_small", {"model.ffn": "moe"}, 8),
        ("shakespeare_small", {"model.ffn": "moe", "model.d_ff": 2000}, None),
        ("shakespeare_gpu", {"model.compute_dtype": "float32"}, None),
    ],
)
def test_micro_batches_have_at_most_512_tokens_unless_the_model_is_large(name, changes, expected):
    config = parameters.resolve(load_values(f"configs/{name}.py", changes), vocab_size=65)
    assert micro_batch_size(config, parameters.count(parameters.parameter_table(config.model))) == expected
