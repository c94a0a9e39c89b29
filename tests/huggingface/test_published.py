"""Published config.json files, in the spelling of transformers 4: the parameter counts are the published ones."""

import json

import pytest

from lm import parameters
from lm.huggingface.config_files import export_fields, read_config

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
    "Llama-2-7b": (
        LLAMA | {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
                 "num_key_value_heads": 32, "rope_scaling": None, "torch_dtype": "float16"},
        6_738_415_616,
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
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters_and_is_written_again(name, tmp_path):
    fields, n_parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert parameters.count(parameters.parameter_table(config.model)) == n_parameters
    family, written = export_fields(config)
    assert family.model_type == fields["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path).model == config.model
