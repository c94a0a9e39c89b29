"""The base of the CPU sweeps: a plain modern block, small enough for a hundred runs in an hour.

    python -m lm.train --config configs/shakespeare_small.py

Cost: 400 steps of 2,048 characters with 221,888 parameters, about two minutes on 2 CPU cores.
Result: see the sweeps in docs/results that start from this config.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "shakespeare_small"
    config.data.offline = "python_docs"
    config.model.d_model = 64
    config.model.rope_pairing = "halves"
    config.optimizer.learning_rate = 8e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.0
    config.train.steps = 400
    config.train.seq_len = 64
    config.eval.every = 50
    config.eval.max_batches = 8
    config.checkpoint.every = 200
    config.log.every = 50
    return config
