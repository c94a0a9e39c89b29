"""The base of the study of 2026's changes: a modern block at 0.11 M parameters besides embeddings.

    python -m lm.train --config configs/studies/changes_2026/base.py

RMSNorm, SwiGLU, RoPE, QK-norm and AdamW, 256 tokens per sequence. Four layers, so that changes by
layer have room.
Cost: 480 steps of 2,048 characters.
Result: rate, decay and warm-up are the best of 48 combinations on Python's documentation, and
0.0071 nats above the best on Tiny Shakespeare (changes_2026_base.py, one seed each). Rate and
warm-up are the largest that were tried. Against the first guess (rate 0.016, warm-up 48) the
validation loss fell by 0.028 on Tiny Shakespeare and 0.100 on Python's documentation.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "changes_2026_base"
    config.model.d_model = 48
    config.model.d_ff = 128
    config.model.n_layers = 4
    config.model.n_heads = 3
    config.model.qk_norm = True
    config.model.rope_pairing = "halves"
    config.optimizer.learning_rate = 3.2e-2
    config.optimizer.warmup_steps = 144
    config.train.steps = 480
    config.train.batch_size = 8
    config.train.seq_len = 256
    config.eval.every = 160
    config.eval.max_batches = 4
    config.eval.batch_size = 32
    config.eval.probes = ("recall",)
    config.checkpoint.every = 480
    config.log.every = 160
    return config
