"""Write tests/references/huggingface/: tiny random checkpoints of each family, with the logits of transformers.

    python tests/references/make_huggingface.py        needs torch and transformers

Weights are stored in bfloat16, logits are computed from them in float32. expected.json has for each case the name of
the file with the weights, the config.json, the ids, the logits after the last id and the greedy continuation.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "huggingface"
SIZES = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-3, "max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 1.2,
    "beta_slow": 0.5,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
PARTIAL = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
# case: (file of the weights, model_type, fields)
CASES = {
    "gpt2": ("gpt2", "gpt2", {"vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}),
    "gpt2 erf gelu": (
        "gpt2", "gpt2",
        {"vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "activation_function": "gelu",
         "layer_norm_epsilon": 1e-2},
    ),
    "llama": ("llama", "llama", SIZES | {"head_dim": 6}),
    "llama3 rope": ("llama", "llama", SIZES | {"head_dim": 6, "rope_parameters": LLAMA3}),
    "linear rope": (
        "llama", "llama",
        SIZES | {"head_dim": 6, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}},
    ),
    "mistral": ("llama", "mistral", SIZES | {"head_dim": 6, "sliding_window": 3}),
    "qwen2": ("qwen2", "qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen3": (
        "qwen3", "qwen3",
        SIZES | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", "gemma2", SIZES | {"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 3}),
    "olmo2": ("olmo2", "olmo2", SIZES),
    "yarn rope": ("llama", "llama", SIZES | {"head_dim": 6, "rope_parameters": YARN}),
    "gemma3_text": (
        "gemma3_text", "gemma3_text",
        SIZES | {"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 3, "layer_types": LAYERS,
                 "rope_parameters": {LAYERS[0]: {"rope_type": "default", "rope_theta": 20.0},
                                     LAYERS[1]: {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}}},
    ),
    "olmo3": (
        "olmo2", "olmo3",
        SIZES | {"sliding_window": 3, "layer_types": LAYERS,
                 "rope_parameters": {LAYERS[0]: {"rope_type": "default", "rope_theta": 50.0}, LAYERS[1]: YARN}},
    ),
    "gemma": ("llama", "gemma", SIZES | {"head_dim": 6, "tie_word_embeddings": False}),
    "qwen3_moe": (
        "qwen3_moe", "qwen3_moe",
        SIZES | EXPERTS | {"head_dim": 6, "moe_intermediate_size": 12, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", "olmoe", SIZES | EXPERTS),
    "smollm3": (
        "llama", "smollm3",
        SIZES | {"head_dim": 6, "tie_word_embeddings": False, "no_rope_layers": [0, 1], "pad_token_id": 0},
    ),
    "phi3": ("phi3", "phi3", SIZES | {"rope_parameters": PARTIAL, "sliding_window": 3, "pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", "gpt_neox", SIZES | {"rope_parameters": PARTIAL}),
    "gpt_neox without parallel branches": (
        "gpt_neox", "gpt_neox", SIZES | {"rope_parameters": PARTIAL, "use_parallel_residual": False},
    ),
    "granite": (
        "llama", "granite",
        SIZES | {"head_dim": 6, "attention_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 3.0,
                 "residual_multiplier": 0.5},
    ),
    "starcoder2": ("starcoder2", "starcoder2", SIZES | {"norm_epsilon": 1e-3}),
}  # fmt: skip


def main():
    FOLDER.mkdir(exist_ok=True)
    expected = {}
    for case, (name, model_type, fields) in CASES.items():
        config = AutoConfig.for_model(model_type, **fields)
        path = FOLDER / f"{name}.safetensors"
        if case == name:
            write_weights(config, path)
        model = load(config, path).eval()
        ids = np.random.default_rng(0).integers(0, 11, 9)
        tokens = torch.tensor(ids[None])
        with torch.no_grad():
            logits = model(tokens).logits[0, -1].tolist()
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            attended = torch.ones_like(tokens)  # else id 0 counts as padding
            greedy = model.generate(tokens, attention_mask=attended, max_new_tokens=6, **options)[0, 9:].tolist()
        saved = json.loads(config.to_json_string()) | {"dtype": "float32"}
        expected[case] = {"weights": name, "config": saved, "ids": ids.tolist(), "logits": logits, "greedy": greedy}
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(value)}" for case, value in expected.items())
    (FOLDER / "expected.json").write_text("{\n" + lines + "\n}\n")


def write_weights(config, path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        gain = p.ndim == 1 and "bias" not in name and not config.model_type.startswith("gemma")
        torch.nn.init.normal_(p, float(gain), 0.4)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    (FOLDER / "model.safetensors").rename(path)
    path.chmod(0o644)
    for other in ("config.json", "generation_config.json"):
        (FOLDER / other).unlink()


def load(config, path):
    """Return the model that transformers loads; no tensor may be missing or left over."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        shutil.copyfile(path, f"{folder}/model.safetensors")
        options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
        model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


if __name__ == "__main__":
    main()
