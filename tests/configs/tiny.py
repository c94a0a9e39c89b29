"""The smallest run that still trains, evaluates, saves and logs; the text comes with
--config.data.source=text:PATH.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "tiny"
    config.model.d_model = 16
    config.model.n_layers = 1
    config.model.n_heads = 2
    config.model.dropout = 0.1  # a random draw that a resumed run must repeat
    config.train.steps = 12
    config.train.batch_size = 4
    config.train.seq_len = 16
    config.train.steps_per_dispatch = 2
    config.eval.every = 4
    config.eval.sample_tokens = 0
    config.checkpoint.every = 4
    config.log.every = 1
    config.log.tensorboard = False
    return config
