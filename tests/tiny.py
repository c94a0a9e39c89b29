"""A small resolved config, for tests that change one thing in it."""

import dataclasses

from lm import parameters
from lm.config import Config

MODEL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 19}
TRAIN = {"steps": 20, "batch_size": 4, "seq_len": 8}


def tiny(**sections) -> Config:
    """The tiny config with keys changed by section: tiny(model={"norm": "layer"}, train={"seed": 3})."""
    sections = {"model": {}, "train": {}} | sections
    sections["model"] = MODEL | sections["model"]
    sections["train"] = TRAIN | sections["train"]
    config = Config()
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return parameters.resolve(dataclasses.replace(config, **changed), vocab_size=19)
