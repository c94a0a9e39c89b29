"""Names of the tensors of checkpoints, and our parameters in them. Imports no jax."""

from collections.abc import Mapping


def tensors(
    *parts: Mapping[str, str | tuple[str, ...]],
    embedding: str = "model.embed_tokens",
    layers: str = "model.layers",
    final_norm: str = "model.norm",
    head: str = "lm_head",
) -> dict[str, tuple[str, ...]]:
    """Return the tensors of a family; see `Family`. A model may lack some of their parameters.

    `parts` are the names of tensors within a layer, and our parameters within it; the rest are
    names of modules.
    """
    names: dict[str, tuple[str, ...]] = {f"{embedding}.weight": ("embedding",)}
    for part in parts:
        for name, paths in part.items():
            joined = (paths,) if isinstance(paths, str) else paths
            names[f"{layers}.{{}}.{name}"] = tuple(f"layers/{path}" for path in joined)
    names[f"{final_norm}.weight"] = ("final_norm/scale_D",)
    names[f"{final_norm}.bias"] = ("final_norm/bias_D",)
    names[f"{head}.weight"] = ("head/w_DV",)
    return names


def norms(**places: str) -> dict[str, str]:
    """Return the gains and biases of norms, given the names of theirs and ours."""
    names = {}
    for theirs, ours in places.items():
        names[f"{theirs}.weight"] = f"{ours}/scale_D"
        names[f"{theirs}.bias"] = f"{ours}/bias_D"
    return names


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
    "self_attn.q_proj.weight": "attention/w_q_DHK",
    "self_attn.k_proj.weight": "attention/w_k_DGK",
    "self_attn.v_proj.weight": "attention/w_v_DGK",
    "self_attn.o_proj.weight": "attention/w_o_HKD",
    "self_attn.q_proj.bias": "attention/b_q_HK",
    "self_attn.k_proj.bias": "attention/b_k_GK",
    "self_attn.v_proj.bias": "attention/b_v_GK",
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
