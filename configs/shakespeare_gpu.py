"""The sizes of nanoGPT's GPU config for Tiny Shakespeare: characters, 6 layers, width 384, context
256.

    python -m lm.train --config configs/shakespeare_gpu.py

Cost: on an H200 4 seconds of steps and, the first time, half a minute of compilation.
Result (one seed): a loss of 1.4987 nats per character on the last 10 % of the text
(config.data.splits=0.9,0.1,0.0). With 5,000 steps, as many as nanoGPT's, the best loss was 1.5069,
after 750 steps; at the end it was 2.47. nanoGPT's README reports a best loss of 1.4697. Its model
has LayerNorm, GELU, learned positions, and also dropout in attention.
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
    config.train.steps = 600
    config.train.batch_size = 64
    config.train.steps_per_dispatch = 10
    config.eval.every = 100
    config.eval.final_splits = ("validation", "test", "validation+test")
    config.log.every = 50
    return config
