"""The Transformer of CMU's course 15-780 (2024) on Tiny Shakespeare, split into words, with plain
SGD.

    python -m lm.train --config configs/cmu_15780.py

Cost: 160 steps (one epoch) of a model with 5,807,282 parameters, minutes on 2 CPU cores.
Result: 5.79 nats per word after five epochs in configs/sweeps/cmu_15780.py (five seeds,
docs/results/cmu_15780.md), where a unigram model reaches 6.24. After 160 steps, two of them in the
second epoch, it is 6.34 on the first half of the validation text. A loss after one epoch is
uncertain by about 0.2, because plain SGD at 0.5 is chaotic.

The course trains on the complete works, with words that leave out the space before them: 32,074
words and 9,892,554 parameters. Its loss of 5.9 after one epoch can be compared on the same words
only; docs/data.md ("Words of your own") shows how to train on them. These losses were measured
outside this repository and not rerun here: on the lecture's words, this model 5.95 to 6.37 after
one epoch and 5.48 to 5.58 after five, the lecture's code 5.97 to 6.29 and 5.61; on the words of
this config, both 5.81 after five epochs.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "cmu_15780"
    # The first 70 % of the text are for training. Windows of 256 words do not overlap; the model
    # reads words 1..255 of one and predicts 2..256.
    config.data.tokenizer = "word"
    config.data.splits = (0.7, 0.3, 0.0)
    config.data.order = "epochs"
    config.data.shuffle = False
    config.data.stride = 256
    config.train.seq_len = 255
    config.train.batch_size = 5
    config.train.steps = 160  # one epoch, rounded
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
