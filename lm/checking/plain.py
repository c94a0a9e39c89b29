"""The plain Transformer in NumPy and float64, written without a line of the model's own code.

A model without its ideas must compute this. It is short, slow and close to the papers: Vaswani et
al. 2017 (arXiv:1706.03762), and Su et al. 2021 (arXiv:2104.09864) for the rotation.
"""

import dataclasses
import math

import numpy as np

from lm import ideas
from lm.config import ModelConfig, applied_layers, branches_of, layer_windows

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


def without_ideas(c):
    """Return the model section with all ideas off, and all that `forward` does not have."""
    default = ModelConfig()
    names = {key for site in ideas.SITES.values() for key in site}
    names |= {"mixers", "rope_scaling"}
    off = {name: getattr(default, name) for name in names}
    if c.residual != "parallel":
        off["residual"] = "sum"
    if c.ffn not in ("mlp", "glu"):
        off["ffn"] = "glu"
    if c.norm_algorithm == "running_mean":
        off["norm_algorithm"] = "two_pass"
    if c.norm not in ("rms", "layer", "dyt"):
        off["norm"] = "rms"
    if c.positions not in ("rope", "learned", "sinusoidal", "none"):
        off["positions"] = "none"
    if c.activation not in ACTIVATIONS:
        off["activation"] = "silu"
    return dataclasses.replace(c, **off)


def forward(flat_params: dict, c, tokens_BT, segments_BT, positions_BT):
    """Return the last hidden states (B, T, D) and the logits (B, T, V)."""
    p = {path: np.asarray(x, np.float64) for path, x in flat_params.items()}
    x_BTD = p["embedding"][tokens_BT] * c.embed_scale
    if c.positions == "learned":
        x_BTD = x_BTD + p["positions"][positions_BT]
    if c.positions == "sinusoidal":
        x_BTD = x_BTD + _sinusoids(positions_BT, c)
    windows = layer_windows(c)
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    distance_BTS = positions_BT[:, :, None] - positions_BT[:, None, :]
    for _, layer in applied_layers(c):
        own = {path: stack[layer] for path, stack in _module(p, "layers").items()}
        visible_BTS = same_BTS & (distance_BTS >= 0)
        if windows[layer]:
            visible_BTS &= distance_BTS < windows[layer]
        x_BTD = _block(own, c, layer, x_BTD, visible_BTS, positions_BT)
    if c.norm_placement not in ("post", "none"):
        x_BTD = _norm(p, c, "final_norm", x_BTD)
    width = c.d_model / c.mup_base_d_model if c.parametrization == "mup" else 1
    x_BTD = x_BTD / (width * c.logit_divisor)
    head_DV = p["embedding"].T if c.tie_embeddings else p["head/w_DV"]
    logits_BTV = x_BTD @ head_DV + p.get("head/b_V", 0)
    return x_BTD, _capped(logits_BTV, c.logit_softcap)


def _block(p, c, layer: int, x_BTD, visible_BTS, positions_BT):
    start_BTD = x_BTD
    for branch in branches_of(c):
        name = branch.name

        def f(h_BTD, branch=branch):
            if branch.kind == "ffn":
                y_BTD = _feed_forward(p, c, branch.name, h_BTD)
            else:
                y_BTD = _attention(p, c, branch.name, layer, h_BTD, visible_BTS, positions_BT)
            return branch.factor * c.residual_multiplier * y_BTD

        source_BTD = start_BTD if c.residual == "parallel" else x_BTD
        if c.norm_placement == "pre":
            x_BTD = x_BTD + f(_norm(p, c, f"{name}_norm", source_BTD))
        if c.norm_placement == "post":
            x_BTD = _norm(p, c, f"{name}_norm", x_BTD + f(x_BTD))
        if c.norm_placement == "sandwich":
            y_BTD = f(_norm(p, c, f"{name}_norm", source_BTD))
            x_BTD = x_BTD + _norm(p, c, f"{name}_post_norm", y_BTD)
        if c.norm_placement == "output":
            x_BTD = x_BTD + _norm(p, c, f"{name}_post_norm", f(source_BTD))
        if c.norm_placement == "parallel":
            x_BTD = x_BTD + f(_norm(p, c, "norm", start_BTD))
        if c.norm_placement == "none":
            x_BTD = x_BTD + f(source_BTD)
    return x_BTD


def _module(p, name: str) -> dict:
    """Return the parameters of a module by their own names."""
    prefix = f"{name}/"
    return {path.removeprefix(prefix): x for path, x in p.items() if path.startswith(prefix)}


def _norm(p, c, name: str, x_BTD):
    scale_D = p[f"{name}/scale_D"]
    bias_D = p.get(f"{name}/bias_D", 0)
    if c.norm == "dyt":
        return np.tanh(p[f"{name}/alpha"] * x_BTD) * scale_D + bias_D
    if c.norm == "layer":
        x_BTD = x_BTD - x_BTD.mean(axis=-1, keepdims=True)
        variance_BT1 = np.square(x_BTD).sum(axis=-1, keepdims=True) / (c.d_model - c.norm_ddof)
        return x_BTD / np.sqrt(variance_BT1 + c.norm_eps) * scale_D + bias_D
    return _rms(x_BTD, c.norm_eps) * scale_D


def _rms(x, eps: float, axes=-1):
    return x / np.sqrt(np.square(x).mean(axis=axes, keepdims=True) + eps)


def _attention(p, c, name: str, layer: int, x_BTD, visible_BTS, positions_BT):
    p = _module(p, name)
    q_BTHK = np.einsum("btd,dhk->bthk", x_BTD, p["w_q_DHK"]) + p.get("b_q_HK", 0)
    k_BTGK = np.einsum("btd,dgk->btgk", x_BTD, p["w_k_DGK"]) + p.get("b_k_GK", 0)
    v_BTGK = np.einsum("btd,dgk->btgk", x_BTD, p["w_v_DGK"]) + p.get("b_v_GK", 0)
    if c.qk_norm and c.qk_norm_over == "head":
        q_BTHK = _rms(q_BTHK, c.norm_eps) * p["q_scale_K"]
        k_BTGK = _rms(k_BTGK, c.norm_eps) * p["k_scale_K"]
    elif c.qk_norm:
        q_BTHK = _rms(q_BTHK, c.norm_eps, (-2, -1)) * p["q_scale_HK"]
        k_BTGK = _rms(k_BTGK, c.norm_eps, (-2, -1)) * p["k_scale_GK"]
    if c.positions == "rope" and c.rope_pattern[layer % len(c.rope_pattern)]:
        theta = c.rope_theta
        if c.rope_window_theta is not None and layer_windows(c)[layer]:
            theta = c.rope_window_theta
        q_BTHK = _rotated(q_BTHK, positions_BT, c, theta)
        k_BTGK = _rotated(k_BTGK, positions_BT, c, theta)
    n_shared = c.n_heads // c.n_kv_heads
    scale = c.attn_scale or c.d_head**-0.5
    if c.parametrization == "mup":
        scale = math.sqrt(c.mup_base_d_head) / c.d_head
    o_BTHK = np.zeros_like(q_BTHK)
    for h in range(c.n_heads):
        q_BTK = q_BTHK[:, :, h]
        k_BTK = k_BTGK[:, :, h // n_shared]
        v_BTK = v_BTGK[:, :, h // n_shared]
        scores_BTS = _capped(q_BTK @ k_BTK.swapaxes(1, 2) * scale, c.attn_softcap)
        weights_BTS = np.exp(scores_BTS) * visible_BTS
        weights_BTS /= weights_BTS.sum(axis=-1, keepdims=True)
        o_BTHK[:, :, h] = weights_BTS @ v_BTK
    return np.einsum("bthk,hkd->btd", o_BTHK, p["w_o_HKD"]) + p.get("b_o_D", 0)


def _rotated(x_BTHK, positions_BT, c, theta: float):
    """Multiply each pair of features, as a complex number, by exp(i position theta^(-2k / R))."""
    width = c.rope_width or c.d_head
    pairs = np.arange(width // 2)
    angles_BTR = positions_BT[..., None] * theta ** (-2 * pairs / width)
    if c.rope_pairing == "adjacent":
        first = 2 * pairs
        second = first + 1
    else:
        first = pairs
        second = pairs + width // 2
    z = x_BTHK[..., first] + 1j * x_BTHK[..., second]
    z = z * np.exp(1j * angles_BTR)[:, :, None, :]
    rotated = x_BTHK.copy()
    rotated[..., first] = z.real
    rotated[..., second] = z.imag
    return rotated


def _sinusoids(positions_BT, c):
    pairs = np.arange(c.d_model // 2)
    angles = positions_BT[..., None] * 10000.0 ** (-2 * pairs / c.d_model)
    x_BTD = np.zeros((*positions_BT.shape, c.d_model))
    of_sine = 0 if c.sinusoidal_order == "sine_first" else 1
    of_cosine = 1 - of_sine
    x_BTD[..., of_sine::2] = np.sin(angles)
    x_BTD[..., of_cosine::2] = np.cos(angles)
    return x_BTD


def _feed_forward(p, c, name: str, x_BTD):
    p = _module(p, name)
    activation = ACTIVATIONS[c.activation]
    if c.ffn == "mlp":
        h_BTF = activation(x_BTD @ p["w_in_DF"] + p.get("b_in_F", 0))
        return h_BTF @ p["w_out_FD"] + p.get("b_out_D", 0)
    gate_BTF = activation(x_BTD @ p["w_gate_DF"] + p.get("b_gate_F", 0))
    h_BTF = gate_BTF * (x_BTD @ p["w_up_DF"] + p.get("b_up_F", 0))
    return h_BTF @ p["w_down_FD"] + p.get("b_down_D", 0)


def _capped(x, cap: float | None):
    return x if cap is None else cap * np.tanh(x / cap)


def loss(logits_BTV, tokens_BT1, segments_BT1, is_target_BT1) -> tuple[float, int]:
    """Return the sum of the nats of all targets, and their number: one target after the other."""
    total = 0.0
    n = 0
    for row, tokens, segments, counts in zip(
        logits_BTV, tokens_BT1, segments_BT1, is_target_BT1, strict=True
    ):
        for t in range(len(tokens) - 1):
            is_next = segments[t] == segments[t + 1] and segments[t + 1] > 0
            if is_next and counts[t + 1]:
                largest = row[t].max()
                log_z = largest + math.log(np.exp(row[t] - largest).sum())
                total += log_z - row[t, tokens[t + 1]]
                n += 1
    return total, n
