"""From text to batches: sources -> tokenizers -> tokens -> batches.

`open_corpus(config.data)` finds the text, makes the tokenizer, and returns the tokens of each
split. From there a batch is a pure function of (tokens, seed, step), see `lm/data/batches.py`.
Nothing here keeps iterator state or imports jax.
"""

from lm.data.corpus import Corpus, Split, check_corpus
from lm.data.tokens import open_corpus

__all__ = ["Corpus", "Split", "check_corpus", "open_corpus"]
