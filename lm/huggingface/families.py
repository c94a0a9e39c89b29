"""The supported families of models: their config fields and tensors, and the names of these in lm.

Each family is declared once, and the declaration is used in both directions. Imports no jax.
"""

import dataclasses
from typing import Any, NamedTuple

from lm.huggingface.conversions import (
    ALL_LAYERS_SLIDE,
    ALTERNATING_LAYERS_SLIDE,
    LAST_LAYERS_SLIDE,
    ROPE,
    Conversion,
    activation,
    attention_scale,
    embedding_scale,
)

REQUIRED = object()


class Field(NamedTuple):
    """A field of config.json with the value of one of our keys.

    Attributes:
        name: the field.
        default: its value where config.json lacks it or has null; a function of the fields, or REQUIRED.
    """

    name: str
    default: Any = REQUIRED


class Tensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        name: its name, with {} for the number of the layer.
        paths: our parameters in it; several are joined along their output features.
        in_out: whether it is stored as (in, out) features, like our weights, and not as (out, in) like torch.nn.Linear.
    """

    name: str
    paths: tuple[str, ...]
    in_out: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        model_type, architecture: its names in config.json.
        fixed: our keys that have the same value in all models of the family.
        fields: our keys and the fields with their values.
        conversions: keys and fields that correspond in another way.
        context: the field with the largest number of positions.
        requires: fields that change what is computed, and the values that lm supports. Others are refused.
        writes: fields that are written with these values, because their defaults differ.
        tensors: the tensors of its checkpoints.
        prefix: start of the names of tensors that some checkpoints leave out.
        ignored: ends of the names of tensors that are not parameters.
        gain_offset: what is added to the gains of norms: 1 where they are stored as gain - 1.
        zero_biases: whether our models without biases are exported with biases of zero.
        divisible: whether transformers requires that n_heads divides d_model.
    """

    model_type: str
    architecture: str
    fixed: dict[str, Any]
    fields: dict[str, Field]
    conversions: tuple[Conversion, ...]
    tensors: tuple[Tensor, ...]
    context: str = "max_position_embeddings"
    requires: dict[str, tuple] = dataclasses.field(default_factory=dict)
    writes: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    gain_offset: float = 0.0
    zero_biases: bool = False
    divisible: bool = False


# Values of our keys in families that do not mention them.
USUAL = {
    "norm": "rms", "norm_bias": True, "norm_algorithm": "two_pass", "norm_ddof": 0, "norm_placement": "pre",
    "ffn": "glu", "ffn_bias": False, "attn_bias": False, "attn_out_bias": False, "head_bias": False,
    "positions": "rope", "rope_theta": 10_000.0, "rope_pairing": "halves", "rope_pattern": (1,), "rope_width": None,
    "rope_scaling": "none",
    "rope_factor": 1.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_positions": 8192,
    "sinusoidal_order": "sine_first", "max_positions": None, "qk_norm": False, "qk_norm_over": "head",
    "window_pattern": (0,), "attn_softcap": None, "attn_scale": None, "logit_softcap": None, "embed_scale": 1.0,
    "parametrization": "standard",
}  # fmt: skip


def kv_heads(default: int | None) -> Field:
    """Return the number of key/value heads: without the field, `default`; where it is null, that of query heads."""

    def left_out(fields):
        return fields["num_attention_heads"] if default is None or "num_key_value_heads" in fields else default

    return Field("num_key_value_heads", left_out)


SIZES = {
    "vocab_size": Field("vocab_size"),
    "d_model": Field("hidden_size"),
    "n_layers": Field("num_hidden_layers"),
    "n_heads": Field("num_attention_heads"),
    "n_kv_heads": kv_heads(None),
    "d_head": Field("head_dim", lambda fields: fields["hidden_size"] // fields["num_attention_heads"]),
    "d_ff": Field("intermediate_size"),
    "norm_eps": Field("rms_norm_eps", 1e-6),
}
TIED, NOT_TIED = ({"tie_embeddings": Field("tie_word_embeddings", default)} for default in (True, False))
ATTENTION_BIAS = {"attn_bias": Field("attention_bias", False), "attn_out_bias": Field("attention_bias", False)}
WHOLE_ROPE = {"partial_rotary_factor": (None, 1.0)}


def decoder_tensors(norms: dict[str, str]) -> tuple[Tensor, ...]:
    """Return the tensors of Llama and the families that follow it.

    Args:
        norms: the names of a layer's norms, and the paths of their gains within a layer.
    """
    layer = norms | {
        "self_attn.q_proj.weight": "attention/w_q_DHK",
        "self_attn.k_proj.weight": "attention/w_k_DGK",
        "self_attn.v_proj.weight": "attention/w_v_DGK",
        "self_attn.o_proj.weight": "attention/w_o_HKD",
        "self_attn.q_proj.bias": "attention/b_q_HK",
        "self_attn.k_proj.bias": "attention/b_k_GK",
        "self_attn.v_proj.bias": "attention/b_v_GK",
        "self_attn.o_proj.bias": "attention/b_o_D",
        "mlp.gate_proj.weight": "ffn/w_gate_DF",
        "mlp.up_proj.weight": "ffn/w_up_DF",
        "mlp.down_proj.weight": "ffn/w_down_FD",
        "mlp.gate_proj.bias": "ffn/b_gate_F",
        "mlp.up_proj.bias": "ffn/b_up_F",
        "mlp.down_proj.bias": "ffn/b_down_D",
    }
    return (
        Tensor("model.embed_tokens.weight", ("embedding",)),
        *(Tensor(f"model.layers.{{}}.{name}", (f"layers/{path}",)) for name, path in layer.items()),
        Tensor("model.norm.weight", ("final_norm/scale_D",)),
        Tensor("lm_head.weight", ("head/w_DV",)),
    )


PRE_NORMS = {
    "input_layernorm.weight": "attention_norm/scale_D",
    "post_attention_layernorm.weight": "ffn_norm/scale_D",
}
OUTPUT_NORMS = {
    "post_attention_layernorm.weight": "attention_post_norm/scale_D",
    "post_feedforward_layernorm.weight": "ffn_post_norm/scale_D",
}
SANDWICH_NORMS = OUTPUT_NORMS | {
    "input_layernorm.weight": "attention_norm/scale_D",
    "pre_feedforward_layernorm.weight": "ffn_norm/scale_D",
}
HEAD_NORMS = {"self_attn.q_norm.weight": "attention/q_scale_K", "self_attn.k_norm.weight": "attention/k_scale_K"}
WIDE_NORMS = {"self_attn.q_norm.weight": "attention/q_scale_HK", "self_attn.k_norm.weight": "attention/k_scale_GK"}

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
    conversions=(activation("activation_function", "gelu_new"),),
    context="n_positions",
    requires={
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
    },
    writes={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    tensors=(
        Tensor("transformer.wte.weight", ("embedding",)),
        Tensor("transformer.wpe.weight", ("positions",)),
        *(
            Tensor(f"transformer.h.{{}}.{name}", tuple(f"layers/{path}" for path in paths), in_out=True)
            for name, paths in {
                "ln_1.weight": ("attention_norm/scale_D",),
                "ln_1.bias": ("attention_norm/bias_D",),
                "attn.c_attn.weight": ("attention/w_q_DHK", "attention/w_k_DGK", "attention/w_v_DGK"),
                "attn.c_attn.bias": ("attention/b_q_HK", "attention/b_k_GK", "attention/b_v_GK"),
                "attn.c_proj.weight": ("attention/w_o_HKD",),
                "attn.c_proj.bias": ("attention/b_o_D",),
                "ln_2.weight": ("ffn_norm/scale_D",),
                "ln_2.bias": ("ffn_norm/bias_D",),
                "mlp.c_fc.weight": ("ffn/w_in_DF",),
                "mlp.c_fc.bias": ("ffn/b_in_F",),
                "mlp.c_proj.weight": ("ffn/w_out_FD",),
                "mlp.c_proj.bias": ("ffn/b_out_D",),
            }.items()
        ),
        Tensor("transformer.ln_f.weight", ("final_norm/scale_D",)),
        Tensor("transformer.ln_f.bias", ("final_norm/bias_D",)),
        Tensor("lm_head.weight", ("head/w_DV",)),
    ),
    prefix="transformer.",
    ignored=("attn.bias", "attn.masked_bias"),
    zero_biases=True,
)  # fmt: skip

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    fixed={},
    fields=SIZES | ATTENTION_BIAS | {"ffn_bias": Field("mlp_bias", False)} | NOT_TIED,
    conversions=(ROPE, activation("hidden_act")),
    requires=WHOLE_ROPE,
    tensors=decoder_tensors(PRE_NORMS),
    divisible=True,
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    fixed={},
    fields=SIZES | {"n_kv_heads": kv_heads(8)} | NOT_TIED,
    conversions=(ROPE, ALL_LAYERS_SLIDE, activation("hidden_act")),
    requires=WHOLE_ROPE | {"layer_types": (None,)},
    tensors=decoder_tensors(PRE_NORMS),
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    fixed={"attn_bias": True},
    fields=SIZES | {"n_kv_heads": kv_heads(32)} | NOT_TIED,
    conversions=(ROPE, LAST_LAYERS_SLIDE, activation("hidden_act")),
    requires=WHOLE_ROPE,
    tensors=decoder_tensors(PRE_NORMS),
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    fixed={"qk_norm": True},
    fields=SIZES | ATTENTION_BIAS | {"n_kv_heads": kv_heads(32), "d_head": Field("head_dim", 128)} | NOT_TIED,
    conversions=(ROPE, LAST_LAYERS_SLIDE, activation("hidden_act")),
    requires=WHOLE_ROPE,
    tensors=decoder_tensors(PRE_NORMS | HEAD_NORMS),
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    fixed={"norm_placement": "sandwich"},
    fields=SIZES
    | ATTENTION_BIAS
    | {
        "n_kv_heads": kv_heads(4),
        "d_head": Field("head_dim", 256),
        # Without the field there is a softcap; null switches it off.
        "attn_softcap": Field("attn_logit_softcapping", lambda f: None if "attn_logit_softcapping" in f else 50.0),
        "logit_softcap": Field("final_logit_softcapping", lambda f: None if "final_logit_softcapping" in f else 30.0),
    }
    | TIED,
    conversions=(
        ROPE, ALTERNATING_LAYERS_SLIDE, activation("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale("query_pre_attn_scalar", 256), embedding_scale("hidden_size"),
    ),
    requires=WHOLE_ROPE | {"use_bidirectional_attention": (None, False)},
    tensors=decoder_tensors(SANDWICH_NORMS),
    gain_offset=1.0,
    divisible=True,
)  # fmt: skip

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    fixed={"norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads"},
    fields=SIZES | ATTENTION_BIAS | {"norm_eps": Field("rms_norm_eps", 1e-5)} | NOT_TIED,
    conversions=(ROPE, activation("hidden_act")),
    requires=WHOLE_ROPE | {"clip_qkv": (None,)},
    tensors=decoder_tensors(OUTPUT_NORMS | WIDE_NORMS),
)

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, OLMO2, GPT2)}
