"""3 layers of width 96, Muon; first values from two_layers, each then compared with others on Python's documentation.

Only the number of steps was chosen without it. benchmarks/NOTES.md has the table of all tuning runs.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "speedrun"
    config.model.n_layers = 3
    config.model.d_model = 96
    config.model.qk_norm = True
    config.model.rope_pairing = "halves"
    config.model.zero_init_residual = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.08
    config.optimizer.muon_beta = 0.85
    config.optimizer.adam_learning_rate = 0.02
    config.optimizer.b1 = 0.8
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 5
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.train.steps = 170
    config.train.batch_size = 20
    config.train.seq_len = 64
    config.train.steps_per_dispatch = 10
    config.eval.batch_size = 64
    config.eval.sample_tokens = 0
    config.checkpoint.every = 0
    config.log.tensorboard = False
    return config
