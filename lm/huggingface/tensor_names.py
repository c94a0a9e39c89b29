"""Names of the tensors of checkpoints, and our parameters in them. Imports no jax."""

from collections.abc import Mapping


def tensors(
    *parts: Mapping[str, str | tuple[str, ...]],
    embedding: str = "model.embed_tokens",
    layers: str = "model.layers",
    final_norm: str = "model.norm",
    head: str = "lm_head",
) -> dict[str, tuple[str, ...]]:
    """Return the tensors of a family; see `Family`. Those of parameters that a model lacks do not
    exist.

    `parts` are the names of tensors within a layer, and our parameters within it; the rest are
    names of modules.
    """
    layer = {name: paths for part in parts for name, paths in part.items()}
    return {
        f"{embedding}.weight": ("embedding",),
        **{
            f"{layers}.{{}}.{name}": tuple(
                f"layers/{path}" for path in ([paths] if isinstance(paths, str) else paths)
            )
            for name, paths in layer.items()
        },
        f"{final_norm}.weight": ("final_norm/scale_D",),
        f"{final_norm}.bias": ("final_norm/bias_D",),
        f"{head}.weight": ("head/w_DV",),
    }


def norms(**places: str) -> dict[str, str]:
    """Return the gains and biases of norms, given the names of theirs and ours."""
    return {f"{theirs}.weight": f"{ours}/scale_D" for theirs, ours in places.items()} | {
        f"{theirs}.bias": f"{ours}/bias_D" for theirs, ours in places.items()
    }


PRE_NORMS = norms(input_layernorm="attention_norm", post_attention_layernorm="ffn_norm")
OUTPUT_NORMS = norms(
    post_attention_layernorm="attention_post_norm", post_feedforward_layernorm="ffn_post_norm"
)
SANDWICH_NORMS = OUTPUT_NORMS | norms(
    input_layernorm="attention_norm", pre_feedforward_layernorm="ffn_norm"
)
HEAD_NORMS = {
    "self_attn.q_norm.weight": "attention/q_scale_K",
    "self_attn.k_norm.weight": "attention/k_scale_K",
}
WIDE_NORMS = {
    "self_attn.q_norm.weight": "attention/q_scale_HK",
    "self_attn.k_norm.weight": "attention/k_scale_GK",
}
QKV_WEIGHTS = ("attention/w_q_DHK", "attention/w_k_DGK", "attention/w_v_DGK")
QKV_BIASES = ("attention/b_q_HK", "attention/b_k_GK", "attention/b_v_GK")
ATTENTION = {
    **{
        f"self_attn.{name}_proj.weight": path for name, path in zip("qkv", QKV_WEIGHTS, strict=True)
    },
    "self_attn.o_proj.weight": "attention/w_o_HKD",
    **{f"self_attn.{name}_proj.bias": path for name, path in zip("qkv", QKV_BIASES, strict=True)},
    "self_attn.o_proj.bias": "attention/b_o_D",
}
GLU = {
    "mlp.gate_proj.weight": "ffn/w_gate_DF",
    "mlp.up_proj.weight": "ffn/w_up_DF",
    "mlp.down_proj.weight": "ffn/w_down_FD",
    "mlp.gate_proj.bias": "ffn/b_gate_F",
    "mlp.up_proj.bias": "ffn/b_up_F",
    "mlp.down_proj.bias": "ffn/b_down_D",
}
EXPERTS = GLU | {
    "mlp.gate.weight": "ffn/w_router_DE",
    "mlp.experts.{}.gate_proj.weight": "ffn/w_gate_EDF",
    "mlp.experts.{}.up_proj.weight": "ffn/w_up_EDF",
    "mlp.experts.{}.down_proj.weight": "ffn/w_down_EFD",
}


def mlp(first: str, second: str) -> dict[str, str]:
    """Return the tensors of an MLP, given the names of its two modules."""
    return {
        f"{first}.weight": "ffn/w_in_DF",
        f"{first}.bias": "ffn/b_in_F",
        f"{second}.weight": "ffn/w_out_FD",
        f"{second}.bias": "ffn/b_out_D",
    }
