"""One training run: its loop, evaluation, checkpoints, metrics, and the directory that holds them."""
