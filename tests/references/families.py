"""Small models of published families, and their logits by Hugging Face's transformers.

Weights are those of `redrawn`, mapped by hand to the names of transformers. Run once by hand, with torch 2.13 and
transformers 5.23 installed, to write families.json beside this file: PYTHONPATH=.:tests python
tests/references/families.py
"""

import json
import pathlib

import numpy as np
from tiny import redrawn, tiny, unstack_layers

from lm.config import ModelConfig
from lm.parameters import flat

PATH = pathlib.Path(__file__).with_name("families.json")
TOKENS = [3, 1, 4, 15, 9, 2, 6, 18]

LLAMA = {"rope_pairing": "halves", "norm_eps": 1e-6}
FAMILIES = {  # our keys by family
    "gpt2": {
        "norm": "layer", "ffn": "mlp", "activation": "gelu_tanh", "positions": "learned", "n_kv_heads": 4,
        "attn_bias": True, "ffn_bias": True, "tie_embeddings": True,
    },
    "llama_linear": LLAMA | {"d_head": 6, "attn_bias": True, "rope_scaling": "linear", "rope_factor": 4.0},
    "llama3": LLAMA | {
        "d_head": 8, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_max_positions": 200,
        "tie_embeddings": True,
    },
    "qwen2": LLAMA | {"attn_bias": True, "attn_out_bias": False, "window_pattern": (0, 3)},
    "qwen3": LLAMA | {"d_head": 6, "qk_norm": True},
    "gemma2": LLAMA | {
        "d_model": 20, "d_head": 6, "norm_placement": "sandwich", "activation": "gelu_tanh", "window_pattern": (3, 0),
        "attn_scale": 10**-0.5, "attn_softcap": 2.0, "logit_softcap": 3.0, "embed_scale": 20**0.5,
        "tie_embeddings": True,
    },
    "olmo2": LLAMA | {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "all_heads"},
    "stablelm": LLAMA | {
        "norm": "layer", "d_head": 8, "d_model": 32, "rope_width": 2, "attn_bias": True, "attn_out_bias": False,
    },
}  # fmt: skip


def model_config(name: str) -> ModelConfig:
    """Return the model section of a family's resolved config."""
    return tiny(model=FAMILIES[name]).model


def transformers_logits(name: str) -> np.ndarray:
    """Return logits (T, V) of TOKENS by transformers in float64 (norms and RoPE in its own float32)."""
    import torch

    c = model_config(name)
    model = _model(name, c).double().eval()
    weights = {path: np.asarray(w, np.float64) for path, w in flat(unstack_layers(redrawn(c))).items()}
    state = (_gpt2_state if name == "gpt2" else _llama_state)(name, c, weights)
    missing, unexpected = model.load_state_dict({key: torch.tensor(w) for key, w in state.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if c.tie_embeddings else set()), missing
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def _model(name: str, c: ModelConfig):
    """Return the model of transformers, with random weights."""
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=c.vocab_size, n_embd=c.d_model, n_layer=c.n_layers, n_head=c.n_heads, n_inner=c.d_ff,
            n_positions=c.max_positions, layer_norm_epsilon=c.norm_eps, attn_implementation="eager",
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    rope = {"rope_theta": c.rope_theta, "rope_type": "default"}
    own = {"rms_norm_eps": c.norm_eps}
    if name == "llama_linear":
        rope |= {"rope_type": "linear", "factor": c.rope_factor}
        own |= {"attention_bias": True}
    if name == "llama3":
        rope |= {"rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": c.rope_original_max_positions}
    if name == "qwen2":
        own |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    if name == "gemma2":
        own |= {"sliding_window": 3, "query_pre_attn_scalar": 10, "attn_logit_softcapping": c.attn_softcap}
        own |= {"final_logit_softcapping": c.logit_softcap, "hidden_activation": "gelu_pytorch_tanh"}
    if name == "stablelm":
        rope |= {"partial_rotary_factor": 0.25}
        own = {"layer_norm_eps": c.norm_eps, "use_qkv_bias": True}
    if name not in ("qwen2", "olmo2", "stablelm"):  # they have no such key
        own |= {"head_dim": c.d_head}
    prefix = {"llama_linear": "Llama", "llama3": "Llama", "stablelm": "StableLm"}.get(name, name.capitalize())
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, max_position_embeddings=400,
        rope_parameters=rope, tie_word_embeddings=c.tie_embeddings, attn_implementation="eager", pad_token_id=0, **own,
    )  # fmt: skip
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def _llama_state(name: str, c: ModelConfig, weights: dict) -> dict:
    """Return the state dict of Llama and its descendants."""
    norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if name in ("gemma2", "olmo2"):
        norms |= {"ffn_norm": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
        norms |= {"attention_post_norm": "post_attention_layernorm"}
    places = {f"{ours}/scale_D": f"{theirs}.weight" for ours, theirs in norms.items()}
    places |= {f"{ours}/bias_D": f"{theirs}.bias" for ours, theirs in norms.items()}
    for letter, axes in (("q", "HK"), ("k", "GK"), ("v", "GK")):
        places[f"attention/w_{letter}_D{axes}"] = f"self_attn.{letter}_proj.weight"
        places[f"attention/b_{letter}_{axes}"] = f"self_attn.{letter}_proj.bias"
        for scale_axes in {"K", axes}:
            places[f"attention/{letter}_scale_{scale_axes}"] = f"self_attn.{letter}_norm.weight"
    places |= {"attention/w_o_HKD": "self_attn.o_proj.weight", "attention/b_o_D": "self_attn.o_proj.bias"}
    places |= {
        f"ffn/w_{n}_{axes}": f"mlp.{n}_proj.weight"
        for n, axes in zip(("gate", "up", "down"), ("DF", "DF", "FD"), strict=True)
    }
    state = {}
    for path, w in weights.items():
        layer, _, rest = path.partition("/")
        outer = {
            "embedding": "embed_tokens.weight",
            "final_norm/scale_D": "norm.weight",
            "final_norm/bias_D": "norm.bias",
        }
        place = f"model.{outer[path]}" if path in outer else "lm_head.weight"
        if layer.startswith("layers_"):
            place = f"model.layers.{layer[7:]}.{places[rest]}"
        if name == "gemma2" and path.endswith("scale_D"):
            w = w - 1  # the gain is 1 + w
        if "/w_" in path:
            w = w.reshape(c.n_heads * c.d_head if path.endswith("HKD") else len(w), -1).T
        state[place] = w if "/w_" in path or path == "embedding" else w.reshape(-1)
    return state


def _gpt2_state(name: str, c: ModelConfig, weights: dict) -> dict:
    """Return the state dict of GPT-2, whose matrices have the inputs first."""
    state = {"transformer.wte.weight": weights["embedding"], "transformer.wpe.weight": weights["positions"]}
    state |= {
        "transformer.ln_f.weight": weights["final_norm/scale_D"],
        "transformer.ln_f.bias": weights["final_norm/bias_D"],
    }
    for i in range(c.n_layers):
        w = {path.removeprefix(f"layers_{i}/"): value for path, value in weights.items()}
        qkv = [w[f"attention/w_{letter}"].reshape(c.d_model, -1) for letter in ("q_DHK", "k_DGK", "v_DGK")]
        biases = [w[f"attention/b_{letter}"].reshape(-1) for letter in ("q_HK", "k_GK", "v_GK")]
        own = {
            "attn.c_attn.weight": np.concatenate(qkv, 1), "attn.c_attn.bias": np.concatenate(biases),
            "attn.c_proj.weight": w["attention/w_o_HKD"].reshape(-1, c.d_model),
            "attn.c_proj.bias": w["attention/b_o_D"],
            "mlp.c_fc.weight": w["ffn/w_in_DF"], "mlp.c_fc.bias": w["ffn/b_in_F"],
            "mlp.c_proj.weight": w["ffn/w_out_FD"], "mlp.c_proj.bias": w["ffn/b_out_D"],
            "ln_1.weight": w["attention_norm/scale_D"], "ln_1.bias": w["attention_norm/bias_D"],
            "ln_2.weight": w["ffn_norm/scale_D"], "ln_2.bias": w["ffn_norm/bias_D"],
        }  # fmt: skip
        state |= {f"transformer.h.{i}.{key}": value for key, value in own.items()}
    return state


if __name__ == "__main__":
    answers = {name: transformers_logits(name).round(7).tolist() for name in FAMILIES}
    PATH.write_text(json.dumps(answers) + "\n")
