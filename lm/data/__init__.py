"""The data room: open_corpus(config) finds the text, makes the tokenizer, and gives the tokens of each split.

After that a batch is a pure function of (tokens, seed, step), see `lm/data/batches.py`. Nothing here holds iterator
state, and nothing here imports jax.
"""

from lm.data.corpus import Corpus, Split, problems, unigram_loss
from lm.data.tokens import open_corpus

__all__ = ["Corpus", "Split", "open_corpus", "problems", "unigram_loss"]
