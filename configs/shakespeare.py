"""stub header"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "shakespeare"
    config.data.offline = "python_docs"
    config.model.d_model = 128
    config.model.qk_norm = True
    config.model.zero_init_residual = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.01
    config.optimizer.weight_decay = 0.0
    config.train.seq_len = 128
    config.train.batch_size = 32
    config.train.steps = 600
    config.train.steps_per_dispatch = 10
    config.eval.every = 100
    config.eval.final_splits = ("validation", "test", "validation+test")
    return config
