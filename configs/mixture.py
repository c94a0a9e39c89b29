"""A mixture of two texts that everybody has: Tiny Shakespeare and Python's documentation, half of
the tokens each.

    python -m lm.train --config configs/mixture.py

Other weights: --config.data.mixture='(("shakespeare", "tfds:tiny_shakespeare", 3.0), ("python",
"python_docs", 1.0))'.
Cost: 300 steps of 2,048 bytes with 246,336 parameters, about 40 s on 2 CPU cores.
Result (mean of the seeds 0 and 1, which differ by at most 0.06; CPython 3.11.7): with the weights 3
: 1, 1 : 1 and 1 : 3 of Shakespeare and Python, the losses of the test splits are 1.994, 2.042 and
2.174 nats per byte on Shakespeare, and 2.058, 1.871 and 1.733 on Python's documentation.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "mixture"
    config.data.mixture = (
        ("shakespeare", "tfds:tiny_shakespeare", 0.5),
        ("python", "python_docs", 0.5),
    )
    config.data.order = "epochs"
    config.data.tokenizer = "byte"
    config.model.d_model = 64
    config.optimizer.learning_rate = 8e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.0
    config.train.steps = 300
    config.train.seq_len = 64
    config.eval.every = 100
    config.eval.max_batches = 8
    config.log.every = 50
    return config
