"""6 layers of width 192, Muon, dropout, bfloat16; values compared on Python's documentation, here or in tuned_on_docs.

The number of steps is what fits into 15 minutes. The warm-up and bfloat16 were not compared. benchmarks/NOTES.md has
the tuning runs.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "speedrun"
    config.model.n_layers = 6
    config.model.d_model = 192
    config.model.n_heads = 3
    config.model.qk_norm = True
    config.model.rope_pairing = "halves"
    config.model.zero_init_residual = True
    config.model.dropout = 0.1
    config.model.compute_dtype = "bfloat16"
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.06
    config.optimizer.muon_beta = 0.9
    config.optimizer.adam_learning_rate = 0.01
    config.optimizer.b1 = 0.8
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.1
    config.train.steps = 1900
    config.train.batch_size = 16
    config.eval.sample_tokens = 0
    config.checkpoint.every = 0
    config.log.tensorboard = False
    return config
