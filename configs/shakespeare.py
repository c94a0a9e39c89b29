"""A character-level model of Tiny Shakespeare with a modern block, sized for a laptop.

    python -m lm.train --config configs/shakespeare.py

Cost: 85 s on 2 cores of an AMD EPYC (shared virtual machine), compilation included.
Result: 1.590 nats per character on validation+test after 600 steps (0.77 million parameters, 1.2
million characters). For comparison, nanoGPT's README reports 1.88 on random batches of the same
text for its CPU run of this size, which takes about 3 minutes.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "shakespeare"
    config.notes = (
        "a better model than that of configs/shakespeare.py: this config with "
        "--config.train.steps=3000, or --config.model.d_model=256 --config.model.n_layers=6; with "
        "a GPU use configs/shakespeare_gpu.py"
    )
    config.data.offline = "python_docs"
    config.model.d_model = 128
    config.model.qk_norm = True
    config.model.rope_pairing = "halves"  # as good as "adjacent" and faster on a CPU
    config.model.zero_init_residual = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.04
    config.optimizer.adam_learning_rate = 0.01
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 20
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.train.steps = 600
    config.train.batch_size = 16
    config.train.seq_len = 128
    config.eval.every = 200
    config.eval.batch_size = 32
    config.eval.final_splits = ("validation", "test", "validation+test")
    config.checkpoint.every = 200
    return config
