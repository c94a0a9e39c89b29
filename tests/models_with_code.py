"""Models that are exported with their code: config keys by name. Each idea and choice is in one."""

from test_ideas import PAIRS, VARIANTS, Row, smooth

PLACEMENTS = ("post", "sandwich", "output", "parallel", "none")
LONGER = {"rope_factor": 4.0, "rope_original_max_positions": 4, "d_head": 8}
PLAIN = {
    "the defaults": {},
    "LayerNorm, d_model - 1": {"norm": "layer", "norm_ddof": 1},
    "LayerNorm without bias": {"norm": "layer", "norm_bias": False, "norm_algorithm": "welford"},
    **{f"norms: {name}": {"norm_placement": name} for name in PLACEMENTS},
    "MLP with learned positions": {
        "ffn": "mlp",
        "positions": "learned",
        "attn_bias": True,
        "ffn_bias": True,
        "activation": "gelu_tanh",
        "head_bias": True,
    },
    "sines, tied": {"positions": "sinusoidal", "tie_embeddings": True, "embed_scale": 4.0},
    "cosines": {
        "positions": "sinusoidal",
        "sinusoidal_order": "cosine_first",
        "attn_out_bias": True,
    },
    **{name: {"activation": name} for name in ("relu", "gelu", "relu_squared", "sigmoid")},
    "norms of heads": {"qk_norm": True, "attn_bias": True, "attn_out_bias": False},
    "norms of all heads": {"qk_norm": True, "qk_norm_over": "all_heads", "rope_pairing": "halves"},
    "rope: linear": {"rope_scaling": "linear", "rope_factor": 2.0, "rope_width": 2},
    "rope: llama3": LONGER | {"rope_scaling": "llama3"},
    "rope: dynamic": LONGER | {"rope_scaling": "dynamic"},
    "caps, windows": {
        "attn_softcap": 2.0,
        "logit_softcap": 3.0,
        "attn_scale": 0.7,
        "window_pattern": (3, 0),
    },
    "muP": {"parametrization": "mup", "mup_base_d_model": 5, "mup_base_d_head": 3},
    "macaron": {"branches": ("ffn*0.5", "attention", "ffn*0.5")},
    "two attentions": {
        "branches": ("attention", "ffn", "attention*0.3", "ffn"),
        "value_residual": "half",
        "norm_placement": "sandwich",
    },
    "loops": {
        "loops": 3,
        "loop_layers": (1, 3),
        "value_residual": "learned",
        "conv_stream": True,
    },
    "latent attention in loops": {
        "mixers": ("latent", "attention"),
        "latent_width": 6,
        "loops": 2,
        "window_pattern": (3,),
    },
    "parallel branches with two norms": {
        "residual": "parallel",
        "branches": ("ffn*0.5", "attention", "ffn"),
        "norm_placement": "sandwich",
    },
    "forgetting with windows": {
        "attn_forget": True,
        "positions": "none",
        "window_pattern": (3,),
    },
}
# without norms, logits are large numbers, and so are their differences
PLAIN["norms: none"] |= {"residual_multiplier": 0.01}
WITHOUT_CODE = {"kda"}  # mixers that the code in PyTorch does not have
ROWS = {
    name: row
    for name, row in VARIANTS.items()
    if not WITHOUT_CODE.intersection(row.keys.get("mixers", ()))
}
ALL = (
    PLAIN
    | {name: smooth(row) | row.keys for name, row in ROWS.items()}
    | {f"pair {i}": smooth(Row(keys)) | keys for i, keys in enumerate(PAIRS)}
)
MODELS = {name: {"n_layers": 4, "scan_layers": True} | keys for name, keys in ALL.items()}
