"""To nanoGPT's CPU loss on Tiny Shakespeare as soon as possible; benchmarks/time_to_loss.py runs it."""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "speedrun"
    config.model.d_model = 128
    config.model.qk_norm = True
    config.model.rope_pairing = "halves"
    config.model.zero_init_residual = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.04
    config.optimizer.adam_learning_rate = 0.01
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 5
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.train.steps = 90
    config.train.batch_size = 16
    config.train.seq_len = 128
    config.train.steps_per_dispatch = 10
    config.eval.batch_size = 64
    config.eval.final_splits = ("validation+test",)
    config.eval.sample_tokens = 0
    config.checkpoint.every = 0
    config.log.tensorboard = False
    return config
