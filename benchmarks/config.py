"""Config of all timed runs: constant rate, nanoGPT's AdamW, no evaluation, no checkpoints."""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "speed"
    config.data.tokenizer = "none"
    config.model.init = "gpt2"
    config.model.tie_embeddings = True
    config.optimizer.schedule = "constant"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.decay_embeddings = True
    config.train.steps = 10**6
    config.eval.every = config.checkpoint.every = 0
    return config
