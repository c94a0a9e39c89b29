"""Exchange models with Hugging Face: a checkpoint becomes a run, a run becomes a checkpoint, and both are compared."""
