"""A linear language model of the last 8 characters of Tiny Shakespeare: softmax regression over their embeddings.

    python -m lm.train --config configs/linear_lm.py

Cost: TODO
Result: TODO
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "linear_lm"
    config.data.offline = "python_docs"
    # With d_model >= vocab_size the model can represent every linear function of the characters (one-hot vectors).
    config.model.fixed_window = 8
    config.model.n_layers = 1
    config.model.d_model = 64
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
    config.train.steps_per_dispatch = 10
    config.eval.every = 500
    config.eval.batch_size = 32
    config.eval.final_splits = ("validation", "test", "validation+test")
    config.checkpoint.every = 1000
    config.log.every = 50
    return config
