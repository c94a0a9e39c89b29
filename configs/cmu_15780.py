"""The Transformer of CMU's course 15-780 (2024), on Tiny Shakespeare by words.

    python -m lm.train --config configs/cmu_15780.py

Measured on 2 cores of a 2.6 GHz Xeon (shared virtual machine, jax 0.10.2), 2026-11-22: a validation loss of 6.51 nats
per word after one epoch (158.4 steps; 160 are made, in 94 s), where counting words alone gives 6.24: one epoch of plain
SGD is too little for this text (configs/sweeps/cmu_15780.py has five epochs of five seeds). Published by the course,
for the complete works (32,074 words, 9,892,554 parameters): 5.9 after one epoch. Theirs is a longer text whose words
leave out the spacing: the two cannot be compared.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "cmu_15780"
    # The text is cut 70/30 in order. Windows of 256 words do not overlap; the model reads 1..255 and predicts 2..256.
    config.data.tokenizer = "word"
    config.data.vocabulary_from = "all"
    config.data.splits = (0.7, 0.3, 0.0)
    config.data.order = "epochs"
    config.data.shuffle = False
    config.data.stride = 256
    config.train.seq_len = 255
    config.train.batch_size = 5
    config.train.steps = 160  # one epoch, rounded
    config.train.steps_per_dispatch = 10
    config.model.d_model = 128
    config.model.n_layers = 5
    config.model.n_heads = 8
    config.model.d_ff = 1024
    config.model.ffn = "mlp"
    config.model.activation = "relu"
    config.model.norm = "layer"
    config.model.norm_ddof = 1
    config.model.ffn_bias = config.model.attn_bias = config.model.head_bias = True
    config.model.positions = "sinusoidal"
    config.model.sinusoidal_order = "cosine_first"
    config.model.init = "he"
    config.model.embed_std = 1.0
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.5
    config.optimizer.schedule = "constant"
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = None
    config.eval.final_splits = ("validation",)
    config.eval.sample_tokens = 100
    config.train.loss_chunk = 255
    return config
