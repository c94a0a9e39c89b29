"""Published config.json files, in the spelling of transformers 4: the parameter counts are the
published ones.
"""

import json

import pytest

from lm import parameters
from lm.huggingface.config_files import export_fields, read_config
from lm.huggingface.tokenizer_files import read_settings

LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "num_hidden_layers": 32,
    "hidden_size": 4096, "num_attention_heads": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_theta": 500000.0, "vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# name: (config.json, number of parameters)
PUBLISHED = {
    "gpt2": (
        {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_ctx": 1024,
         "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "Llama-3.1-8B": (LLAMA | LLAMA3 | {"intermediate_size": 14336}, 8_030_261_248),
    "Llama-3.2-1B": (
        LLAMA | LLAMA3 | {"intermediate_size": 8192, "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
                          "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {name: value for name, value in LLAMA.items() if not name.endswith("_bias")}
        | {"model_type": "mistral", "intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8,
           "sliding_window": 4096, "max_position_embeddings": 32768},
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        QWEN | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
                "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
                "sliding_window": 32768},
        494_032_768,
    ),
    "Qwen3-0.6B": (
        QWEN | {"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
                "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
                "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_scaling": None,
                "sliding_window": None},
        596_049_920,
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation":
         "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
         "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
         "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
         "torch_dtype": "float32", "vocab_size": 256000},
        2_614_341_888,
    ),
    "OLMo-2-0425-1B": (
        {"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 16,
         "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_scaling": None,
         "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352},
        1_484_916_736,
    ),
    "gemma-3-1b-pt": (
        {"model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation":
         "hybrid", "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
         "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
         "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
         "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
         "sliding_window_pattern": 6, "torch_dtype": "float32", "vocab_size": 262144},
        999_885_952,
    ),
    "Olmo-3-1025-7B": (
        {"model_type": "olmo3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 11008, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
         "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096,
         "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                          "original_max_position_embeddings": 8192, "rope_type": "yarn"},
         "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100278},
        7_298_011_136,
    ),
    "gemma-2b": (
        {"model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
         "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18,
         "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
         "torch_dtype": "float32", "vocab_size": 256000},
        2_506_172_416,
    ),
    "Qwen3-30B-A3B": (
        QWEN | {"model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
                "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
                "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
                "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
                "num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None,
                "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False},
        30_532_122_624,
    ),
    "OLMoE-1B-7B-0924": (
        {"model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False,
         "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
         "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 50304},
        6_919_161_856,
    ),
    "SmolLM3-3B": (
        {"model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
         "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
         "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
         "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True,
         "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 128256},
        3_075_098_624,
    ),
    "Phi-3-mini-4k-instruct": (
        {"model_type": "phi3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 3072,
         "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "vocab_size": 32064},
        3_821_079_552,
    ),
    "pythia-70m": (
        {"model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048,
         "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6,
         "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
         "use_parallel_residual": True, "vocab_size": 50304},
        70_426_624,
    ),
    "granite-3.0-2b-base": (
        LLAMA | {"model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
                 "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0,
                 "max_position_embeddings": 4096, "num_hidden_layers": 40, "num_key_value_heads": 8,
                 "residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True,
                 "vocab_size": 49155},
        2_533_531_648,
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "activation_function": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
         "hidden_size": 3072, "intermediate_size": 12288, "max_position_embeddings": 16384, "norm_epsilon": 1e-5,
         "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2, "rope_theta": 999999.4420358813,
         "sliding_window": 4096, "torch_dtype": "bfloat16", "use_bias": True, "vocab_size": 49152},
        3_030_371_328,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters_and_is_written_again(
    name, tmp_path
):
    fields, n_parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert parameters.count(parameters.parameter_table(config.model)) == n_parameters
    family, written = export_fields(config, read_settings(tmp_path))
    assert family.model_type == fields["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path).model == config.model
