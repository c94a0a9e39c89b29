"""Write layers.json beside this file: inputs and results of PyTorch 2.13 in float64, for
tests/layers.

Run once by hand, with torch installed: python tests/references/make_layers.py. The tests read only
the JSON file.
"""

import json
import pathlib

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def numbers(*shape):
    """Draw normal numbers that are exact in float32 (multiples of 2^-10), so that both sides have
    the same inputs.
    """
    return (torch.randn(*shape) * 1024).round() / 1024


def activations():
    x = torch.cat([torch.linspace(-6, 6, 25), torch.tensor([-0.001953125, 0.001953125])])
    names = {
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    return {"x": x} | {name: f(x) for name, f in names.items()}


def norms():
    x, scale, bias = 3 + 2 * numbers(3, 10), 1 + numbers(10) / 4, numbers(10)
    x.requires_grad_()
    layer_norm = F.layer_norm(x, (10,), scale, bias, eps=1e-5)
    (d_x,) = torch.autograd.grad(layer_norm.pow(3).sum(), x)
    rms_norm = F.rms_norm(x, (10,), scale, eps=1e-5)
    return {
        "x": x,
        "scale": scale,
        "bias": bias,
        "layer_norm": layer_norm,
        "layer_norm_d_x": d_x,
        "rms_norm": rms_norm,
    }


def attention():
    """Compute attention of shape (batch, positions, heads, width): 4 query heads, 2 key heads, a
    window of 3 keys.
    """
    q, k, v = numbers(2, 6, 4, 8), numbers(2, 6, 2, 8), numbers(2, 6, 2, 8)
    heads_first = [a.transpose(1, 2) for a in (q, k, v)]
    distance = torch.arange(6)[:, None] - torch.arange(6)
    windowed = F.scaled_dot_product_attention(
        *heads_first, attn_mask=(distance >= 0) & (distance < 3), enable_gqa=True
    )
    causal = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return {
        "q": q,
        "k": k,
        "v": v,
        "causal": causal.transpose(1, 2),
        "window_3": windowed.transpose(1, 2),
    }


def losses():
    logits, targets = (3 * numbers(2, 4, 9)).requires_grad_(), torch.randint(9, (2, 4))
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").unflatten(
        0, (2, 4)
    )
    (d_logits,) = torch.autograd.grad(nll.sum(), logits)
    return {"logits": logits, "targets": targets, "nll": nll, "d_logits": d_logits}


if __name__ == "__main__":
    groups = {f.__name__: f() for f in (activations, norms, attention, losses)}
    answers = {name: {k: v.tolist() for k, v in group.items()} for name, group in groups.items()}
    path = pathlib.Path(__file__).with_name("layers.json")
    path.write_text(json.dumps({"torch": torch.__version__.split("+")[0], **answers}) + "\n")
