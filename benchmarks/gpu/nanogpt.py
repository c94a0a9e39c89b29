"""A GPT-2 in PyTorch with nanoGPT's training step (https://github.com/karpathy/nanoGPT).

As in its configuration for the 124M model: no biases, no dropout, a vocabulary that is padded to a
multiple of 64 and tied to the output head, bfloat16 by autocast, fused AdamW, flash attention,
torch.compile.
"""

import math

import torch  # in the extra [bench]
import torch.nn.functional as F

from benchmarks.peers import Peer
from benchmarks.shapes import Shape

STD = 0.02  # of initial weights


class LayerNorm(torch.nn.Module):
    """LayerNorm without a bias."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


class Block(torch.nn.Module):
    """Attention and an MLP, each added to the residual stream."""

    def __init__(self, shape: Shape):
        super().__init__()
        D = shape.d_model
        self.n_heads = shape.n_heads
        self.attention_norm = LayerNorm(D)
        self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
        self.out = torch.nn.Linear(D, D, bias=False)
        self.ffn_norm = LayerNorm(D)
        self.up = torch.nn.Linear(D, shape.d_ff, bias=False)
        self.down = torch.nn.Linear(shape.d_ff, D, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))

    def attention(self, x):
        B, T, D = x.shape
        heads = self.qkv(x).view(B, T, 3, self.n_heads, D // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class GPT2(torch.nn.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        vocab_size = math.ceil(shape.vocab_size / 64) * 64
        self.tokens = torch.nn.Embedding(vocab_size, shape.d_model)
        self.positions = torch.nn.Embedding(shape.seq_len, shape.d_model)
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = LayerNorm(shape.d_model)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_stream = name.endswith(("out.weight", "down.weight"))
                std = STD / math.sqrt(2 * shape.n_layers) if into_stream else STD
                torch.nn.init.normal_(p, std=std)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class NanoGPT(Peer):
    """nanoGPT's step in the loop of `Peer`."""

    def __init__(self, shape: Shape, tokens, dtype="float32", compiled=False):
        torch.manual_seed(0)
        super().__init__(shape, GPT2(shape), tokens, dtype, compiled)

    def logits(self, tokens):
        return self.model(tokens)

    def facts(self) -> dict:
        """Return the name of the device, as JAX has it."""
        return {"device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu"}
