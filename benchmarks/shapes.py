"""Shapes of the timed models and their configs; benchmarks/peers.py builds the same."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from lm.system.errors import UserError

CONFIG = Path(__file__).parent / "config.py"
MODEL_KEYS = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff", "vocab_size")
FAMILIES = {
    "gpt2": {
        "model.norm": "layer", "model.ffn": "mlp", "model.activation": "gelu_tanh", "model.ffn_bias": True,
        "model.attn_bias": True, "model.positions": "learned",
    },
    "llama": {"model.rope_pairing": "halves", "model.rope_theta": 500_000.0},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch; family is the architecture: "gpt2" or "llama"."""

    what: str
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    seq_len: int
    batch_size: int
    family: str = "gpt2"
    n_kv_heads: int | None = None

    @property
    def token_dtype(self) -> str:
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def token_file(self) -> str:
        """File name: uint16 is read from train.bin, and uint32 from train.uint32.bin."""
        return "train.bin" if self.token_dtype == "uint16" else "train.uint32.bin"


SHAPES = {
    "tiny": Shape(("1 layer, 2 heads, d 16, context 16, batch 2, vocabulary 19; to test the "
                  "benchmarks themselves"),
                  1, 2, 16, 64, 19, 16, 2),
    "S": Shape("4 layers, 4 heads, d 128, context 64, batch 12, vocabulary 65", 4, 4, 128, 512, 65, 64, 12),
    "M": Shape("3 layers, 3 heads, d 192, context 128, batch 16, vocabulary 65", 3, 3, 192, 768, 65, 128, 16),
    "G": Shape("6 layers, 6 heads, d 384, context 256, batch 8, vocabulary 65", 6, 6, 384, 1536, 65, 256, 8),
    "L": Shape("8 layers, 8 heads, d 512, context 512, batch 4, vocabulary 65", 8, 8, 512, 2048, 65, 512, 4),
    "H": Shape("5 layers, 8 heads, d 128, d_ff 1024, context 64, batch 32, vocabulary 32074",
               5, 8, 128, 1024, 32_074, 64, 32),
    "124M": Shape("GPT-2 small, context 1024", 12, 12, 768, 3072, 50_257, 1024, 8),
    "1B": Shape("Llama 3.2 1B, context 2048", 16, 32, 2048, 8192, 128_256, 2048, 4, "llama", 8),
}  # fmt: skip

# Settings of ours that save memory and change the result by rounding only.
LESS_MEMORY = {
    "124M": {"train.loss_chunk": 4096},
    "1B": {"train.loss_chunk": 4096, "model.remat": "block", "model.scan_layers": True},
}

# AdamW and gradient clipping of both sides; benchmarks/config.py sets ours.
OPTIMIZER = {
    "learning_rate": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}


def named(name: str) -> Shape:
    """Return a shape by name, with another batch size for NAME@BATCH; UserError if unknown.

    >>> named("G@64").batch_size
    64
    """
    base, _, batch = name.partition("@")
    if base not in SHAPES or not re.fullmatch("|[1-9][0-9]{0,8}", batch):
        raise UserError(
            f"unknown shape {name[:80]!r}; use one of {', '.join(SHAPES)}, or NAME@BATCH such as "
            "G@64"
        )
    return dataclasses.replace(SHAPES[base], batch_size=int(batch)) if batch else SHAPES[base]


def less_memory(name: str) -> dict:
    """Return the entry of LESS_MEMORY for a shape, {} if it has none.

    >>> less_memory("124M@8"), less_memory("S")
    ({'train.loss_chunk': 4096}, {})
    """
    return LESS_MEMORY.get(name.partition("@")[0], {})


def values_of(name: str, data: str) -> dict:
    """Return the values of config keys for a shape and the token shards in `data`."""
    shape = dataclasses.asdict(named(name))
    values = {f"model.{key}": shape[key] for key in MODEL_KEYS if shape[key]}
    values |= {f"train.{key}": shape[key] for key in ("seq_len", "batch_size")}
    values |= less_memory(name)
    return FAMILIES[shape["family"]] | values | {"data.source": f"tokens:{data}"}


def config_of(name: str, data: str, overrides: dict):
    """Return our resolved config for a shape, with overrides by key."""
    from lm import parameters
    from lm.command_line.loading import load_values

    config = load_values(str(CONFIG), values_of(name, data) | overrides)
    return parameters.resolve(config, config.model.vocab_size)


def transformers_fields(config) -> str:
    """Return the config.json of the model that is ours in transformers.

    The tanh GELU is "gelu_new" there, as in the published GPT-2.
    """
    from lm.huggingface.config_files import export_fields

    return json.dumps(export_fields(config)[1]).replace('"gelu_pytorch_tanh"', '"gelu_new"')


def transformers_params(config, params: dict) -> dict[str, np.ndarray]:
    """Return our parameters (nested dicts) by transformers' names."""
    from lm.huggingface.config_files import export_fields
    from lm.huggingface.weights import exported_tensors

    family, _ = export_fields(config)
    return {
        tensor.name: tensor.value() for tensor in exported_tensors(family, config.model, params)
    }


def write_tokens(directory: Path, shape: Shape) -> None:
    """Write a flat file of a million random tokens, the format of nanoGPT's prepare.py."""
    directory.mkdir()
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 10**6)
    tokens.astype(shape.token_dtype).tofile(directory / shape.token_file)
