"""Exchange models with Hugging Face: import a checkpoint as a run, export a run, and compare the two."""
