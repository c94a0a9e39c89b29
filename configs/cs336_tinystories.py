"""The TinyStories model of Stanford's CS336, assignment 1 (2025): 22,696,448 parameters,
327,680,000 tokens.

Download TinyStoriesV2-GPT4-train.txt and TinyStoriesV2-GPT4-valid.txt (Hugging Face,
roneneldan/TinyStories), and split them into a folder of their own, with names that sort the
training text first:

    mkdir -p data/tinystories
    split -C 16M --additional-suffix=.txt TinyStoriesV2-GPT4-train.txt data/tinystories/train-
    split -C 16M --additional-suffix=.txt TinyStoriesV2-GPT4-valid.txt data/tinystories/valid-
    python -m lm.train --config configs/cs336_tinystories.py

Cost: one GPU. Never run here. All parts are read into memory. Tokenizing one needs memory of about
140 times its size.
Result to compare with: the assignment asks for a validation loss of at most 1.45 nats per token.

Unlike in the course, the last 1 % of the joined text is the validation split, and the <|endoftext|>
between stories is tokenized as ordinary text, also when the BPE is trained; the special token only
separates the parts.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "cs336_tinystories"
    config.data.source = "text:data/tinystories"
    config.data.tokenizer = "bpe:10000"
    config.data.splits = (0.99, 0.01, 0.0)
    config.model.vocab_size = 10_000
    config.model.d_model = 512
    config.model.n_heads = 16
    config.model.d_ff = 1344
    config.model.compute_dtype = "bfloat16"
    config.optimizer.warmup_steps = 400
    config.optimizer.final_fraction = 0.0
    config.train.steps = 10_000
    config.train.batch_size = 128
    config.eval.every = 500
    config.eval.max_batches = 50
    config.eval.final_splits = ("validation",)
    config.log.every = 50
    return config
