"""The other side of the comparisons: PyTorch models of transformers in nanoGPT's loop."""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch  # in the extra [bench]

from benchmarks.shapes import OPTIMIZER, SHAPES, Shape, named


def tokens_in(directory: Path, shape: Shape):
    return np.memmap(directory / shape.token_file, shape.token_dtype, "r")


class Peer:
    """A PyTorch model that trains like nanoGPT: random windows, fused AdamW, clipping.

    The model is of `built`, and `tokens` a flat array. "bfloat16" means autocast over float32
    parameters.
    """

    def __init__(self, shape: Shape, model, tokens, dtype="float32", compiled=False):
        self.shape = shape
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as JAX by default
        else:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.model = model.train().to(self.device)
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.autocast = torch.autocast(self.device, torch.bfloat16, enabled=dtype == "bfloat16")
        o = OPTIMIZER
        decays = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": decays, "weight_decay": o["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=o["learning_rate"], betas=o["betas"], eps=o["eps"], fused=True
        )
        self.tokens = tokens
        self.rng = np.random.default_rng(0)
        self.step = 0
        self.logged = 0.0

    def batch(self):
        n = self.shape.seq_len
        starts = self.rng.integers(0, len(self.tokens) - n, self.shape.batch_size)
        tokens = torch.from_numpy(
            np.stack([self.tokens[s : s + n + 1] for s in starts]).astype(np.int64)
        )
        return (
            tokens.pin_memory().to(self.device, non_blocking=True)
            if self.device == "cuda"
            else tokens
        )

    def logits(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits

    def _loss(self, tokens):
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:].contiguous()
        return torch.nn.functional.cross_entropy(
            self.logits(inputs).flatten(0, 1), targets.flatten()
        )

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
        return [
            self.train_step(torch.from_numpy(b.astype(np.int64)).to(self.device)).item()
            for b in batches
        ]

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    def facts(self) -> dict:
        return {}


def causal_sdpa() -> str:
    """Register transformers' SDPA under a name by which it has is_causal=True and no mask.

    Under the name "sdpa", transformers passes an explicit mask when compiled, which disables the
    flash kernels.
    """
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def built(fields: str, params: dict | None = None, attention: str | None = None):
    """Build a model of transformers from a config.json, with parameters or PyTorch's own.

    Its attention is a name of transformers, or `causal_sdpa`. Raises ValueError if parameters do
    not match the model.
    """
    import transformers

    values = json.loads(fields)
    model_class = getattr(transformers, values["architectures"][0])
    model = model_class(
        model_class.config_class(**values, attn_implementation=attention or causal_sdpa())
    )
    if params is not None:
        tensors = {
            name: torch.from_numpy(np.array(value, np.float32)) for name, value in params.items()
        }
        unmatched = model.load_state_dict(tensors, strict=False)
        if unmatched.unexpected_keys or set(unmatched.missing_keys) - {
            "lm_head.weight"
        }:  # the head is tied to the embedding
            raise ValueError(f"parameters do not match the model: {unmatched}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Take one step of a shape."
    )
    parser.add_argument("shape", metavar="SHAPE", help=f"{', '.join(SHAPES)}, or NAME@BATCH")
    parser.add_argument("path", type=Path, help="the directory of the shape's tokens")
    parser.add_argument(
        "fields", metavar="JSON", help="the config.json of its model in transformers"
    )
    a = parser.parse_args()
    Peer(named(a.shape), built(a.fields), tokens_in(a.path, named(a.shape))).run(1)
    print("step 1", flush=True)


if __name__ == "__main__":
    main()
