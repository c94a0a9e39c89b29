"""nanoGPT's GPU size on Tiny Shakespeare, by characters: 6 layers, 384 wide, context 256.

    python -m lm.train --config configs/shakespeare_gpu.py

One GPU. Not run here. Published: nanoGPT gives a best validation loss of 1.4697 in its README for this size, batch and
number of steps, over the last 10 % of the text (our validation+test), with LayerNorm, GELU and learned positions; the
block here is the modern one of configs/shakespeare.py.
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
