"""One training run: its preparation, loop, evaluation and end. Its files: lm/workdir."""
