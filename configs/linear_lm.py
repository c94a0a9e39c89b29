"""A linear language model of the last 8 characters of Tiny Shakespeare: softmax regression over their embeddings.

    python -m lm.train --config configs/linear_lm.py

Cost: 34 s of CPU time on 2 cores of a 2.6 GHz Xeon (shared virtual machine), compilation included.
Result: 2.195 nats per character on validation+test after 2,000 steps (37,505 parameters, 4.1 million characters). A
bigram model reaches 2.484, a trigram model 2.038. docs/baselines.md compares these and other models.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "linear_lm"
    config.data.offline = "python_docs"
    config.model.fixed_window = 8
    config.model.n_layers = 1
    config.model.d_model = 64  # with the bias, as expressive as one-hot vectors of 65 characters
    config.model.head_bias = True
    config.model.positions = "none"
    config.model.norm_placement = "none"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 20
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.train.steps = 2000
    config.train.batch_size = 16
    config.train.seq_len = 128
    config.eval.every = 500
    config.eval.batch_size = 32
    config.eval.final_splits = ("validation", "test", "validation+test")
    config.checkpoint.every = 1000
    config.log.every = 50
    return config
