"""nanoGPT's GPU config for Tiny Shakespeare: characters, 6 layers, width 384, context 256.

    python -m lm.train --config configs/shakespeare_gpu.py

Cost: one GPU. Never run here.
Result to compare with: nanoGPT's README reports a best validation loss of 1.4697 nats per character for this size,
batch and number of steps, on the last 10 % of the text (our validation+test). Its model has LayerNorm, GELU and
learned positions; this one has the modern block of configs/shakespeare.py.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "shakespeare_gpu"
    config.model.d_model = 384
    config.model.n_layers = 6
    config.model.n_heads = 6
    config.model.init = "gpt2"
    config.model.dropout = 0.2
    config.model.compute_dtype = "bfloat16"
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.99
    config.train.steps = 5000
    config.train.batch_size = 64
    config.train.steps_per_dispatch = 10
    config.eval.every = 250
    config.eval.final_splits = ("validation", "test", "validation+test")
    config.log.every = 50
    return config
