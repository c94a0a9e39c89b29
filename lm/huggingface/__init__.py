"""Read and write checkpoints in the format of Hugging Face's `transformers`, without it.

families.py declares each family once: the fields of its config.json and the names of its tensors,
with our config keys and parameter paths. config_files.py and weights.py translate with it in both
directions.
"""
