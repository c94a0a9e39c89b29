"""A draft for the track shakespeare-2-cores: 6 layers of width 256, Muon, dropout, bfloat16. Not tuned, never run.

benchmarks/NOTES.md has the plan of its tuning and the measured time of a step.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "speedrun"
    config.model.n_layers = 6
    config.model.d_model = 256
    config.model.qk_norm = True
    config.model.logit_softcap = 15.0
    config.model.rope_pairing = "halves"
    config.model.zero_init_residual = True
    config.model.dropout = 0.1
    config.model.compute_dtype = "bfloat16"
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.005
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 50
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.1
    config.train.steps = 2000
    config.train.batch_size = 16
    config.train.steps_per_dispatch = 10
    config.eval.sample_tokens = 0
    config.checkpoint.every = 0
    config.log.tensorboard = False
    return config
