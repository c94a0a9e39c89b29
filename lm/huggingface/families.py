"""The supported families of models: their config fields and tensors, and the names of these in lm.

Each family is declared once, and the declaration is used in both directions. Imports no jax.
"""

import dataclasses
from typing import Any, NamedTuple

from lm.config import ModelConfig
from lm.huggingface.conversions import (
    ACTIVATIONS,
    ATTENTION_MULTIPLIER,
    DENSE_LAYERS,
    EMBEDDING_SCALE,
    NO_WINDOWS,
    PARALLEL_BRANCHES,
    QUERY_SCALE,
    ROTATING_LAYERS,
    Conversion,
    activation,
    rope,
    rotating_layers,
    windows,
)
from lm.huggingface.tensor_names import (
    ATTENTION,
    EXPERTS,
    GLU,
    HEAD_NORMS,
    OUTPUT_NORMS,
    PRE_NORMS,
    QKV_BIASES,
    QKV_WEIGHTS,
    SANDWICH_NORMS,
    WIDE_NORMS,
    mlp,
    norms,
    tensors,
)

REQUIRED = object()


class Field(NamedTuple):
    """A field of config.json with the value of one of our keys."""

    name: str
    # where config.json lacks it or has null: a value, a function of the fields, or REQUIRED
    default: Any = REQUIRED


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models. What it does not say is as in Llama.

    Attributes:
        model_type, architecture: its names in config.json.
        fields: our keys and the fields with their values.
        fixed: our keys that have the same value in all models of the family.
        conversions: keys and fields that correspond in another way.
        context: the field with the largest number of positions.
        requires: fields that change what is computed, and the values that lm supports. Others are
            refused.
        writes: fields that are written with these values, because their defaults differ.
        tensors: the names of the tensors of its checkpoints, with {} for the numbers of layer and
            expert, and our parameters in each, which are joined along their output features.
        prefix: start of the names of tensors that some checkpoints leave out.
        gain_offset: what is added to the gains of norms: 1 where they are stored as gain - 1.
        zero_biases: whether our models without biases are exported with biases of zero.
        divisible: whether transformers requires that n_heads divides d_model.
        in_out: whether matrices of layers are stored as (in, out) features, like our weights, and
            not as (out, in) like torch.nn.Linear.
        by_head: whether a tensor of several parameters has them together for each head (GPT-NeoX).
    """

    model_type: str
    architecture: str
    fields: dict[str, Field]
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    conversions: tuple[Conversion, ...] = (rope(), NO_WINDOWS, activation("hidden_act"))
    tensors: dict[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: tensors(PRE_NORMS, ATTENTION, GLU)
    )
    context: str = "max_position_embeddings"
    requires: dict[str, tuple] = dataclasses.field(default_factory=dict)
    writes: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    gain_offset: float = 0.0
    zero_biases: bool = False
    divisible: bool = False
    in_out: bool = False
    by_head: bool = False


# Fields that transformers reads in all families, in its masks, its cache or its layers, as
# Family.requires.
IN_ALL_FAMILIES: dict[str, tuple] = {
    "quantization_config": (None,),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "attention_chunk_size": (None,),
    "per_layer_config": (None,),
    "kv_sharing_modes": (None,),
    "transformers_weights": (None,),  # another file of weights
}

# Our keys that do not change what a trained model computes, beyond rounding.
WITHOUT_EFFECT = frozenset({
    "dropout", "init", "embed_std", "init_draw", "zero_init_residual", "mup_base_d_model", "mup_base_d_head",
    "param_dtype", "compute_dtype", "round_logits", "scan_layers", "attention", "remat", "moe_balance", "router_z",
    "multi_token_prediction", "deep_supervision",
})  # fmt: skip
# Values of our keys in families that do not mention them: the defaults, so that an idea is off.
USUAL = {
    key.name: key.default
    for key in dataclasses.fields(ModelConfig)
    if key.name not in WITHOUT_EFFECT | {"d_head"}
} | {"attn_out_bias": False, "rope_pairing": "halves"}


def kv_heads(default: int | None) -> Field:
    """Return the field of key/value heads: without it `default`, where it is null that of queries."""

    def left_out(fields):
        if default is None or "num_key_value_heads" in fields:
            return fields["num_attention_heads"]
        return default

    return Field("num_key_value_heads", left_out)


def softcap(name: str, default: float) -> Field:
    """Return the field of a softcap: without it `default`; null switches the softcap off."""
    return Field(name, lambda fields: None if name in fields else default)


SIZES = {
    "vocab_size": Field("vocab_size"),
    "d_model": Field("hidden_size"),
    "n_layers": Field("num_hidden_layers"),
    "n_heads": Field("num_attention_heads"),
    "n_kv_heads": kv_heads(None),
    "d_head": Field(
        "head_dim", lambda fields: fields["hidden_size"] // fields["num_attention_heads"]
    ),
    "d_ff": Field("intermediate_size"),
    "norm_eps": Field("rms_norm_eps", 1e-6),
}
# n_heads divides d_model
WITHOUT_D_HEAD = {key: field for key, field in SIZES.items() if key != "d_head"}
TIED = {"tie_embeddings": Field("tie_word_embeddings", True)}
NOT_TIED = {"tie_embeddings": Field("tie_word_embeddings", False)}
LAST_LAYERS_SLIDE = windows(
    lambda fields, layer: layer >= fields.get("max_window_layers", 28), switch=True
)
ATTENTION_BIAS = {
    "attn_bias": Field("attention_bias", False),
    "attn_out_bias": Field("attention_bias", False),
}


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    fixed={
        "norm": "layer", "ffn": "mlp", "ffn_bias": True, "attn_bias": True, "attn_out_bias": True,
        "positions": "learned",
    },
    fields={
        "vocab_size": Field("vocab_size"),
        "d_model": Field("n_embd"),
        "n_layers": Field("n_layer"),
        "n_heads": Field("n_head"),
        "n_kv_heads": Field("n_head"),
        "d_ff": Field("n_inner", lambda fields: 4 * fields["n_embd"]),
        "norm_eps": Field("layer_norm_epsilon", 1e-5),
        "max_positions": Field("n_positions"),
    }
    | TIED,
    conversions=(NO_WINDOWS, activation("activation_function", "gelu_new")),
    context="n_positions",
    requires={
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
    },
    writes={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    tensors=tensors(
        norms(ln_1="attention_norm", ln_2="ffn_norm"),
        {"attn.c_attn.weight": QKV_WEIGHTS, "attn.c_attn.bias": QKV_BIASES},
        {"attn.c_proj.weight": "attention/w_o_HKD", "attn.c_proj.bias": "attention/b_o_D"},
        mlp("mlp.c_fc", "mlp.c_proj"),
        embedding="transformer.wte", layers="transformer.h", final_norm="transformer.ln_f",
    )
    | {"transformer.wpe.weight": ("positions",)},
    prefix="transformer.",
    zero_biases=True,
    in_out=True,
)  # fmt: skip

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    fields=SIZES | ATTENTION_BIAS | {"ffn_bias": Field("mlp_bias", False)} | NOT_TIED,
    divisible=True,
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    fields=SIZES | {"n_kv_heads": kv_heads(8)} | NOT_TIED,
    conversions=(rope(), windows(), activation("hidden_act")),
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    fixed={"attn_bias": True},
    fields=SIZES | {"n_kv_heads": kv_heads(32)} | NOT_TIED,
    conversions=(rope(), LAST_LAYERS_SLIDE, activation("hidden_act")),
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    fixed={"qk_norm": True},
    fields=SIZES
    | ATTENTION_BIAS
    | {"n_kv_heads": kv_heads(32), "d_head": Field("head_dim", 128)}
    | NOT_TIED,
    conversions=(rope(), LAST_LAYERS_SLIDE, activation("hidden_act")),
    tensors=tensors(PRE_NORMS, ATTENTION, HEAD_NORMS, GLU),
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    fixed={"qk_norm": True, "ffn": "moe"},
    fields=SIZES
    | ATTENTION_BIAS
    | {
        "n_kv_heads": kv_heads(4),
        "d_ff": Field("moe_intermediate_size"),
        "n_experts": Field("num_experts", lambda fields: fields.get("num_local_experts", 128)),
        "experts_per_token": Field("num_experts_per_tok", 8),
        "normalize_experts": Field("norm_topk_prob", False),
    }
    | NOT_TIED,
    conversions=(rope(), windows(switch=True), DENSE_LAYERS, activation("hidden_act")),
    requires={"decoder_sparse_step": (None, 1)},
    tensors=tensors(PRE_NORMS, ATTENTION, HEAD_NORMS, EXPERTS),
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    fixed={"qk_norm": True, "qk_norm_over": "all_heads", "ffn": "moe"},
    fields=WITHOUT_D_HEAD
    | ATTENTION_BIAS
    | {
        "norm_eps": Field("rms_norm_eps", 1e-5),
        "n_experts": Field("num_experts", lambda fields: fields.get("num_local_experts", 64)),
        "experts_per_token": Field("num_experts_per_tok", 8),
        "normalize_experts": Field("norm_topk_prob", False),
    }
    | NOT_TIED,
    requires={"clip_qkv": (None,)},
    tensors=tensors(PRE_NORMS, ATTENTION, WIDE_NORMS, EXPERTS),
)

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    fields=SIZES | ATTENTION_BIAS | {"n_kv_heads": kv_heads(16), "d_head": Field("head_dim", 256)} | TIED,
    conversions=(
        # The first checkpoints say "gelu" and mean the other form.
        rope(), NO_WINDOWS, EMBEDDING_SCALE,
        activation("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS | {"gelu": "gelu_tanh"}),
    ),
    requires={"use_bidirectional_attention": (None, False), "hidden_activation": (None, "gelu_pytorch_tanh")},
    gain_offset=1.0,
)  # fmt: skip

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    fixed={"norm_placement": "sandwich"},
    fields=SIZES
    | ATTENTION_BIAS
    | {
        "n_kv_heads": kv_heads(4),
        "d_head": Field("head_dim", 256),
        "attn_softcap": softcap("attn_logit_softcapping", 50.0),
        "logit_softcap": softcap("final_logit_softcapping", 30.0),
    }
    | TIED,
    conversions=(
        rope(), windows(lambda fields, layer: layer % 2 == 0),
        activation("hidden_activation", "gelu_pytorch_tanh"), QUERY_SCALE, EMBEDDING_SCALE,
    ),
    requires={"use_bidirectional_attention": (None, False)},
    tensors=tensors(SANDWICH_NORMS, ATTENTION, GLU),
    gain_offset=1.0,
    divisible=True,
)  # fmt: skip

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    fixed={"norm_placement": "sandwich", "qk_norm": True},
    fields={key: field for key, field in GEMMA2.fields.items() if key != "attn_softcap"}
    | {"logit_softcap": Field("final_logit_softcapping", None)},
    conversions=(
        rope(1e6, window_theta=1e4),
        windows(lambda fields, layer: (layer + 1) % fields.get("sliding_window_pattern", 6) != 0),
        *GEMMA2.conversions[2:],
    ),
    requires=GEMMA2.requires | {"attn_logit_softcapping": (None,)},
    tensors=tensors(SANDWICH_NORMS, ATTENTION, HEAD_NORMS, GLU),
    gain_offset=1.0,
    divisible=True,
)  # fmt: skip

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    fixed={"norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads"},
    fields=SIZES | ATTENTION_BIAS | {"norm_eps": Field("rms_norm_eps", 1e-5)} | NOT_TIED,
    requires={"clip_qkv": (None,)},
    tensors=tensors(OUTPUT_NORMS, ATTENTION, WIDE_NORMS, GLU),
)

OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    conversions=(
        rope(5e5, window_theta=0),
        windows(lambda fields, layer: (layer + 1) % 4 != 0),
        activation("hidden_act"),
    ),
)

SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    fields=SIZES
    | ATTENTION_BIAS
    | {"n_kv_heads": kv_heads(4), "ffn_bias": Field("mlp_bias", False)}
    | TIED,
    conversions=(
        rope(2e6),
        ROTATING_LAYERS,
        windows(
            lambda fields, layer: not rotating_layers(fields)[layer], switch=True, default=None
        ),
        activation("hidden_act"),
    ),
)

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    fields=SIZES | {"norm_eps": Field("rms_norm_eps", 1e-5)} | NOT_TIED,
    conversions=(rope(scalings={}, partial=1.0), windows(default=None), activation("hidden_act")),
    tensors=tensors(
        PRE_NORMS,
        {"self_attn.qkv_proj.weight": QKV_WEIGHTS, "self_attn.o_proj.weight": "attention/w_o_HKD"},
        {
            "mlp.gate_up_proj.weight": ("ffn/w_gate_DF", "ffn/w_up_DF"),
            "mlp.down_proj.weight": "ffn/w_down_FD",
        },
    ),
)

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    fixed={"norm": "layer", "ffn": "mlp"},
    fields=SIZES
    | {key: Field("use_bias", True) for key in ("attn_bias", "attn_out_bias", "ffn_bias")}
    | {"n_kv_heads": kv_heads(2), "norm_eps": Field("norm_epsilon", 1e-5)}
    | TIED,
    conversions=(rope(), windows(default=None), activation("hidden_act", "gelu_pytorch_tanh")),
    tensors=tensors(PRE_NORMS, ATTENTION, mlp("mlp.c_fc", "mlp.c_proj")),
)

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    fixed={"norm": "layer", "ffn": "mlp", "ffn_bias": True},
    fields=WITHOUT_D_HEAD
    | {key: Field("attention_bias", True) for key in ("attn_bias", "attn_out_bias")}
    | {"n_kv_heads": Field("num_attention_heads"), "norm_eps": Field("layer_norm_eps", 1e-5)}
    | NOT_TIED,
    conversions=(
        rope(partial=0.25, names=("rotary_emb_base", "rotary_pct")), NO_WINDOWS, PARALLEL_BRANCHES,
        activation("hidden_act", "gelu"),
    ),
    tensors=tensors(
        PRE_NORMS,
        {"attention.query_key_value.weight": QKV_WEIGHTS, "attention.query_key_value.bias": QKV_BIASES},
        {"attention.dense.weight": "attention/w_o_HKD", "attention.dense.bias": "attention/b_o_D"},
        mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        embedding="gpt_neox.embed_in", layers="gpt_neox.layers", final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    ),
    prefix="gpt_neox.",
    by_head=True,
)  # fmt: skip

GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    fields=LLAMA.fields
    | {
        "embed_scale": Field("embedding_multiplier", 1.0),
        "residual_multiplier": Field("residual_multiplier", 1.0),
        "logit_divisor": Field("logits_scaling", 1.0),
    },
    conversions=(rope(), NO_WINDOWS, ATTENTION_MULTIPLIER, activation("hidden_act")),
)

# In this order an exported model looks for its family.
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, OLMO2, GPT2, GEMMA, GEMMA3, OLMO3, QWEN3_MOE, OLMOE, SMOLLM3, PHI3,
        STARCODER2, GPT_NEOX, GRANITE,
    )
}  # fmt: skip
