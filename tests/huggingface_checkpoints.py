"""The checkpoints of tests/references/huggingface, as directories, and random models of ours for
each family.
"""

import json
import random
import shutil
from pathlib import Path

from running import ROOT

from lm.huggingface.safetensors_files import Planned, TensorFiles, write_tensors

FOLDER = ROOT / "tests/references/huggingface"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def checkpoint(directory: Path, case: str = "llama", **fields) -> Path:
    """Write a stored checkpoint to a directory, with changed fields in its config.json (None
    removes one).
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = EXPECTED[case]["config"] | fields
    config = {
        name: value for name, value in config.items() if value is not None or name not in fields
    }
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copyfile(
        FOLDER / f"{EXPECTED[case]['weights']}.safetensors", directory / "model.safetensors"
    )
    return directory


def edit_tensors(directory: Path, change) -> None:
    """Rewrite model.safetensors with change(tensors), a function of arrays by name."""
    with TensorFiles(directory) as files:
        tensors = change({name: files.read(name) for name in files.shapes})
    (directory / "model.safetensors").unlink()
    write_tensors(directory, planned(tensors))


def planned(tensors: dict) -> list[Planned]:
    """Return arrays by name as `write_tensors` takes them."""
    return [Planned(name, x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()]


COMMON = {
    "n_layers": (1, 2, 3), "heads": ((4, 2), (4, 4), (2, 1)), "norm_eps": (1e-3, 1e-6), "tie_embeddings": (True, False),
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid"),
}  # fmt: skip
ROPE = COMMON | {
    "d_head": (4, 6, 8), "attn_bias": (True, False), "rope_theta": (1e4, 50.0), "rope_pairing": ("halves", "adjacent"),
    "rope_scaling": ("none", "linear", "llama3", "yarn", "dynamic"), "rope_factor": (4.0,),
    "rope_original_max_positions": (8,), "rope_beta_fast": (1.2, 4.0), "rope_amplitude": (None, 0.8),
}  # fmt: skip
NO_BIAS = {"attn_bias": (False,)}
EXPERTS = NO_BIAS | {
    "ffn": ("moe",), "n_experts": (3, 4), "experts_per_token": (1, 2), "normalize_experts": (True, False),
    "qk_norm": (True,),
}  # fmt: skip
ONE_WINDOW = {"window_pattern": ((0,), (3,))}
WINDOWS = {"window_pattern": ((0,), (3,), (3, 0), (0, 0, 5))}
RANDOM = {  # the values of our keys in models that each family can express
    "gpt2": COMMON | {
        "heads": ((4, 4), (2, 2)), "norm": ("layer",), "ffn": ("mlp",), "positions": ("learned",),
        "attn_bias": (True, False), "ffn_bias": (True, False), "norm_bias": (True, False),
    },
    "llama": ROPE | {"ffn_bias": (True, False)},
    "mistral": ROPE | NO_BIAS | {"window_pattern": ((3,), (5,))},
    "qwen2": ROPE | WINDOWS | {"attn_bias": (True,), "attn_out_bias": (False,)},
    "qwen3": ROPE | WINDOWS | {"qk_norm": (True,)},
    "gemma2": ROPE | WINDOWS | {
        "norm_placement": ("sandwich",), "attn_softcap": (5.0, None), "logit_softcap": (3.0, None),
        "embed_scale": (4.0,), "attn_scale": (None, 0.5),
    },
    "olmo2": ROPE | {"norm_placement": ("output",), "qk_norm": (True,), "qk_norm_over": ("all_heads",)},
    "gemma3_text": ROPE | WINDOWS | {
        "norm_placement": ("sandwich",), "qk_norm": (True,), "logit_softcap": (3.0, None), "embed_scale": (4.0,),
        "attn_scale": (None, 0.5), "rope_window_theta": (50.0, 1e4),
    },
    "olmo3": ROPE | {
        "norm_placement": ("output",), "qk_norm": (True,), "qk_norm_over": ("all_heads",), "rope_window_theta": (1e4,),
        "window_pattern": ((3,), (3, 0), (5, 0, 0)),
    },
    "gemma": ROPE | {"embed_scale": (4.0,), "tie_embeddings": (True,), "activation": ("silu", "gelu_tanh", "relu")},
    "qwen3_moe": ROPE | EXPERTS | {"n_layers": (2, 3), "moe_first_layer": (0, 1)} | ONE_WINDOW,
    "olmoe": ROPE | EXPERTS | {"d_head": (None,), "qk_norm_over": ("all_heads",)},
    "gpt_neox": ROPE | {
        "heads": ((2, 2),), "d_head": (None,), "norm": ("layer",), "ffn": ("mlp",), "ffn_bias": (True,),
        "rope_width": (4, 6), "residual": ("parallel", "sum"),
    },
    "granite": ROPE | {
        "residual_multiplier": (0.5,), "logit_divisor": (1.0, 3.0), "embed_scale": (1.0, 5.0),
        "attn_scale": (None, 0.3), "ffn_bias": (True, False),
    },
    "smollm3": ROPE | WINDOWS | {"rope_pattern": ((0,), (0, 1), (0, 1, 1)), "ffn_bias": (True, False)},
    "phi3": ROPE | NO_BIAS | {"rope_scaling": ("none",), "rope_factor": (1.0,), "rope_width": (2,)} | ONE_WINDOW,
    "starcoder2": ROPE | ONE_WINDOW | {
        "heads": ((4, 2), (2, 1)), "norm": ("layer",), "ffn": ("mlp",), "attn_bias": (False,), "ffn_bias": (False,),
    },
}  # fmt: skip


def drawn(family: str, seed: int) -> dict:
    """Return random keys of a model that the family can express."""
    choose = random.Random(f"{family} {seed}").choice
    keys = {name: choose(values) for name, values in RANDOM[family].items()}
    keys["n_heads"], keys["n_kv_heads"] = keys.pop("heads")
    return keys
