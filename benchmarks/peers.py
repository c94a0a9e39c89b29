"""The other side of the comparisons: transformers' GPT-2 or Llama in PyTorch, in a loop like nanoGPT's train.py."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch  # in the extra [bench]

from benchmarks.shapes import OPTIMIZER, SHAPES, Shape, named

CONV = {
    "attn.c_proj.weight": "attention/w_o_HKD",
    "mlp.c_fc.weight": "ffn/w_in_DF",
    "mlp.c_proj.weight": "ffn/w_out_FD",
}
GPT2_VECTORS = {
    "ln_1.weight": "attention_norm/scale_D", "ln_1.bias": "attention_norm/bias_D", "ln_2.weight": "ffn_norm/scale_D",
    "ln_2.bias": "ffn_norm/bias_D", "attn.c_proj.bias": "attention/b_o_D", "mlp.c_fc.bias": "ffn/b_in_F",
    "mlp.c_proj.bias": "ffn/b_out_D",
}  # fmt: skip
LLAMA = {
    "input_layernorm.weight": "attention_norm/scale_D", "post_attention_layernorm.weight": "ffn_norm/scale_D",
    "mlp.gate_proj.weight": "ffn/w_gate_DF", "mlp.up_proj.weight": "ffn/w_up_DF",
    "mlp.down_proj.weight": "ffn/w_down_FD",
    "self_attn.q_proj.weight": "attention/w_q_DHK", "self_attn.k_proj.weight": "attention/w_k_DGK",
    "self_attn.v_proj.weight": "attention/w_v_DGK",
}  # fmt: skip


def tokens_in(directory: Path, shape: Shape):
    return np.memmap(directory / shape.token_file, shape.token_dtype, "r")


class Peer:
    """A PyTorch model that trains like nanoGPT's train.py: random windows, fused AdamW, gradient clipping.

    Args:
        shape: sizes of model and batch.
        params: our initial parameters by path, as numpy arrays; None: PyTorch's own initialization.
        tokens: flat array of training tokens.
        dtype: "float32", or "bfloat16" for autocast over float32 parameters.
        compiled: use torch.compile.
    """

    def __init__(self, shape: Shape, params: dict | None, tokens, dtype="float32", compiled=False):
        self.shape, self.device = shape, "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as JAX by default
        else:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(0)
        builder = {"gpt2": gpt2, "llama": llama}[shape.family]
        self.model = builder(shape, params).train().to(self.device)
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.autocast = torch.autocast(self.device, torch.bfloat16, enabled=dtype == "bfloat16")
        o = OPTIMIZER
        decays = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decays, "weight_decay": o["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=o["learning_rate"], betas=o["betas"], eps=o["eps"], fused=True)
        self.tokens = tokens
        self.rng, self.step, self.logged = np.random.default_rng(0), 0, 0.0

    def batch(self):
        n = self.shape.seq_len
        starts = self.rng.integers(0, len(self.tokens) - n, self.shape.batch_size)
        tokens = torch.from_numpy(np.stack([self.tokens[s : s + n + 1] for s in starts]).astype(np.int64))
        return tokens.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else tokens

    def logits(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits

    def _loss(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        return torch.nn.functional.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())

    def train_step(self, tokens):
        with self.autocast:
            loss = self.loss(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER["clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def run(self, n_steps: int) -> None:
        """Train, reading the loss every 10 steps as our loop does."""
        for _ in range(n_steps):
            loss = self.train_step(self.batch())
            self.step += 1
            if self.step % 10 == 0:
                self.logged = loss.item()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def losses(self, batches) -> list[float]:
        """Train on these batches (numpy, each (B, T+1)) and return their losses."""
        return [self.train_step(torch.from_numpy(b.astype(np.int64)).to(self.device)).item() for b in batches]

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    def facts(self) -> dict:
        return {}


def causal_sdpa() -> str:
    """Register transformers' SDPA under another name, so that it is called with is_causal=True and without a mask.

    Under the name "sdpa", transformers passes an explicit mask when compiled, which disables the flash kernels.
    """
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def gpt2(m: Shape, params: dict | None):
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=m.vocab_size, n_positions=m.seq_len, n_embd=m.d_model, n_layer=m.n_layers,
            n_head=m.n_heads, n_inner=m.d_ff, activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, layer_norm_epsilon=1e-5, attn_implementation=causal_sdpa(),
        )
    )  # fmt: skip
    return model if params is None else loaded(model, gpt2_state(m, params))


def gpt2_state(m: Shape, params: dict) -> dict:
    """Convert our parameters to GPT-2's names and layouts."""
    D = m.d_model
    state = {"transformer.wte.weight": params["embedding"], "transformer.wpe.weight": params["positions"]}
    state |= {
        "transformer.ln_f.weight": params["final_norm/scale_D"],
        "transformer.ln_f.bias": params["final_norm/bias_D"],
    }
    for i in range(m.n_layers):
        layer = {name: params[f"layers/{path}"][i] for name, path in (GPT2_VECTORS | CONV).items()}
        layer["attn.c_proj.weight"] = layer["attn.c_proj.weight"].reshape(-1, D)
        qkv = [params[f"layers/attention/{name}"][i] for name in ("w_q_DHK", "w_k_DGK", "w_v_DGK")]
        layer["attn.c_attn.weight"] = np.concatenate([w.reshape(D, -1) for w in qkv], axis=1)
        biases = [params[f"layers/attention/{name}"][i] for name in ("b_q_HK", "b_k_GK", "b_v_GK")]
        layer["attn.c_attn.bias"] = np.concatenate([b.reshape(-1) for b in biases])
        state |= {f"transformer.h.{i}.{name}": value for name, value in layer.items()}
    return state


def llama(m: Shape, params: dict | None):
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=m.vocab_size, hidden_size=m.d_model, intermediate_size=m.d_ff, num_hidden_layers=m.n_layers,
            num_attention_heads=m.n_heads, num_key_value_heads=m.n_kv_heads, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            max_position_embeddings=m.seq_len, tie_word_embeddings=True, attn_implementation=causal_sdpa(),
        )
    )  # fmt: skip
    if params is None:
        return model
    state = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["final_norm/scale_D"]}
    for i in range(m.n_layers):
        for name, path in LLAMA.items():
            w = params[f"layers/{path}"][i]
            state[f"model.layers.{i}.{name}"] = w.reshape(m.d_model, -1).T if "attn" in name and w.ndim == 3 else w.T
        w_o = params["layers/attention/w_o_HKD"][i].reshape(-1, m.d_model)
        state[f"model.layers.{i}.self_attn.o_proj.weight"] = w_o.T
    return loaded(model, state)


def loaded(model, state: dict):
    """Load parameters into a model with tied head. Raises ValueError if one is missing or unexpected."""
    tensors = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in state.items()}
    found = model.load_state_dict(tensors, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"parameters do not match the model: {found}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Take one step of a shape.")
    parser.add_argument("shape", metavar="SHAPE", help=f"{', '.join(SHAPES)}, or NAME@BATCH")
    parser.add_argument("path", type=Path, help="the directory of the shape's tokens")
    a = parser.parse_args()
    Peer(named(a.shape), None, tokens_in(a.path, named(a.shape))).run(1)
    print("step 1", flush=True)


if __name__ == "__main__":
    main()
