"""The models that are timed, as configs of ours; benchmarks/peers.py builds the same in torch from them."""

import dataclasses
from pathlib import Path

import numpy as np

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
    """A model and its batch: widths, vocabulary, positions; family: whose architecture."""

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
        """By whose name lm/data/shards.py knows how wide the numbers are."""
        return "train.bin" if self.token_dtype == "uint16" else "train.uint32.bin"


SHAPES = {
    "S": Shape("4 layers, 4 heads, d 128, context 64, batch 12, vocabulary 65", 4, 4, 128, 512, 65, 64, 12),
    "G": Shape("6 layers, 6 heads, d 384, context 256, batch 8, vocabulary 65", 6, 6, 384, 1536, 65, 256, 8),
    "H": Shape("5 layers, 8 heads, d 128, d_ff 1024, context 64, batch 32, vocabulary 32074",
               5, 8, 128, 1024, 32_074, 64, 32),
    "124M": Shape("GPT-2 small, context 1024", 12, 12, 768, 3072, 50_257, 1024, 8),
    "1B": Shape("Llama 3.2 1B, context 2048", 16, 32, 2048, 8192, 128_256, 2048, 4, "llama", 8),
}  # fmt: skip

# What may be set to be faster without another result (but for the rounding of bfloat16), by shape.
BEST = {
    "S": {"train.steps_per_dispatch": 10},
    "G": {"train.steps_per_dispatch": 10},
    "H": {"train.steps_per_dispatch": 10, "train.loss_chunk": 512},
    "124M": {"train.loss_chunk": 4096},
    "1B": {"train.loss_chunk": 4096, "model.remat": "block", "model.scan_layers": True},
}

# AdamW and clipping of both sides, as benchmarks/config.py has them for ours.
OPTIMIZER = {"learning_rate": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


def named(name: str) -> Shape:
    """The shape of a name, or of NAME@BATCH with another batch; raises ValueError."""
    base, _, batch = name.partition("@")
    if base not in SHAPES or (batch and not batch.isdecimal()):
        raise ValueError(f"{name!r} is none of {', '.join(SHAPES)}, nor one of them with a batch size: G@64")
    return dataclasses.replace(SHAPES[base], batch_size=int(batch)) if batch else SHAPES[base]


def values_of(name: str, data: str) -> dict:
    """The values of our config keys that make a shape, trained on the token shards `data`."""
    shape = dataclasses.asdict(named(name))
    values = {f"model.{key}": shape[key] for key in MODEL_KEYS if shape[key]}
    values |= {f"train.{key}": shape[key] for key in ("seq_len", "batch_size")}
    return FAMILIES[shape["family"]] | values | {"data.source": f"tokens:{data}"}


def config_of(name: str, data: str, overrides: dict):
    """Our config of it."""
    from lm.config.loading import load_values

    return load_values(str(CONFIG), values_of(name, data) | overrides)


def write_tokens(directory: Path, shape: Shape) -> None:
    """A million random tokens, flat, as nanoGPT's prepare.py writes them."""
    directory.mkdir()
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 10**6)
    tokens.astype(shape.token_dtype).tofile(directory / shape.token_file)
