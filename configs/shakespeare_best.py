"""A character-level model of Tiny Shakespeare, tuned for 15 minutes on 2 CPU cores.

    python -m lm.train --config configs/shakespeare_best.py

Cost: 14 minutes on 2 cores of a 2.6 GHz Xeon with units for 16-bit products (AMX), with
compilation, evaluations and checkpoints. A CPU without such units takes longer; there,
--config.model.compute_dtype=float32 is faster.
Result: 1.4389 nats per character on validation+test (seed 0, on an AMD EPYC; 2.7 million
parameters, 7.8 million characters). With the former Muon of Optax, on the Xeon, the mean of 5 seeds
was 1.436, the range 1.434 to 1.438. For comparison, nanoGPT's README reports 1.4697 on random
batches of the same text for its GPU run with 10.7 million parameters. All values except the number
of steps were chosen on another text, Python's documentation: see the end of benchmarks/NOTES.md.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "shakespeare_best"
    config.data.offline = "python_docs"
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
    config.eval.every = 475
    config.eval.batch_size = 32
    config.eval.final_splits = ("validation", "test", "validation+test")
    config.checkpoint.every = 475
    return config
