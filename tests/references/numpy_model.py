"""The full model in NumPy and float64, from the papers' equations, with loops where they are
clearest.

It reads the parameters of lm/parameters.py by name and shares no code with lm.
"""

import dataclasses
import math

import numpy as np

_erf = np.vectorize(math.erf)

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def rms(x, gain, eps):
    """Normalize over the axes of the gain."""
    return x / np.sqrt((x**2).mean(tuple(range(-gain.ndim, 0)), keepdims=True) + eps) * gain


def norm(c, p, x):
    if c.norm == "rms":
        return rms(x, p["scale_D"], c.norm_eps)
    mean, n = x.mean(-1, keepdims=True), x.shape[-1]
    if c.norm_algorithm == "running_mean":
        running = np.cumsum(x, -1) / np.arange(1, n + 1)
        var = ((x - running) ** 2).sum(-1, keepdims=True) / (n - 1)
    else:
        var = x.var(-1, keepdims=True, ddof=c.norm_ddof)
    return (x - mean) / np.sqrt(var + c.norm_eps) * p["scale_D"] + p.get("bias_D", 0)


def frequency(c, f):
    """Scale one frequency, in the three cases of Llama 3.1's own code."""
    if c.rope_scaling != "llama3":
        return f / c.rope_factor
    wavelength, context = 2 * math.pi / f, c.rope_original_max_positions
    if wavelength > context / c.rope_low_freq_factor:
        return f / c.rope_factor
    if wavelength < context / c.rope_high_freq_factor:
        return f
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * f / c.rope_factor + smooth * f


def rotated(c, x, position):
    """Apply RoPE to one head's vector x (K,), with complex numbers."""
    if c.rope_width is not None and c.rope_width < len(x):
        whole = dataclasses.replace(c, rope_width=None)
        return np.concatenate([rotated(whole, x[: c.rope_width], position), x[c.rope_width :]])
    K = len(x)
    turn = np.exp(
        1j * position * np.array([frequency(c, c.rope_theta ** (-i / K)) for i in range(0, K, 2)])
    )
    if c.rope_pairing == "halves":
        z = (x[: K // 2] + 1j * x[K // 2 :]) * turn
        return np.concatenate([z.real, z.imag])
    z = (x[0::2] + 1j * x[1::2]) * turn
    return np.stack([z.real, z.imag], -1).ravel()


def attend(c, p, x_TD, window):
    """Return the intermediates of attention by name: q and k (rotated), v, scores and weights (H,
    T, S), heads.
    """
    T, (H, K) = len(x_TD), p["w_q_DHK"].shape[1:]
    q = np.einsum("td,dhk->thk", x_TD, p["w_q_DHK"]) + p.get("b_q_HK", 0)
    k = np.einsum("td,dhk->thk", x_TD, p["w_k_DGK"]) + p.get("b_k_GK", 0)
    v = np.einsum("td,dhk->thk", x_TD, p["w_v_DGK"]) + p.get("b_v_GK", 0)
    if c.qk_norm:
        names = (
            ("q_scale_K", "k_scale_K") if c.qk_norm_over == "head" else ("q_scale_HK", "k_scale_GK")
        )
        q, k = rms(q, p[names[0]], c.norm_eps), rms(k, p[names[1]], c.norm_eps)
    if c.positions == "rope":
        q, k = (
            np.array([[rotated(c, head, t) for head in x[t]] for t in range(T)]) for x in (q, k)
        )
    group = H // k.shape[1]
    scores = np.array([q[:, h] @ k[:, h // group].T for h in range(H)])
    scores = scores / math.sqrt(K) if c.attn_scale is None else scores * c.attn_scale
    if c.attn_softcap is not None:
        scores = c.attn_softcap * np.tanh(scores / c.attn_softcap)
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = np.where((distance >= 0) & (distance < (window or T)), scores, -np.inf)
    weights = np.exp(seen - seen.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.stack([weights[h] @ v[:, h // group] for h in range(H)], 1)
    return {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "heads": heads}


def attention(c, p, x_TD, window):
    return np.einsum("thk,hkd->td", attend(c, p, x_TD, window)["heads"], p["w_o_HKD"]) + p.get(
        "b_o_D", 0
    )


def feed_forward(c, p, x):
    f = ACTIVATIONS[c.activation]
    if c.ffn == "mlp":
        return f(x @ p["w_in_DF"] + p.get("b_in_F", 0)) @ p["w_out_FD"] + p.get("b_out_D", 0)
    gate, up = x @ p["w_gate_DF"] + p.get("b_gate_F", 0), x @ p["w_up_DF"] + p.get("b_up_F", 0)
    return (f(gate) * up) @ p["w_down_FD"] + p.get("b_down_D", 0)


def block(c, p, x, window):
    def attn(x):
        return attention(c, p["attention"], x, window)

    def ffn(x):
        return feed_forward(c, p["ffn"], x)

    if c.norm_placement == "pre":
        x = x + attn(norm(c, p["attention_norm"], x))
        return x + ffn(norm(c, p["ffn_norm"], x))
    if c.norm_placement == "post":
        x = norm(c, p["attention_norm"], x + attn(x))
        return norm(c, p["ffn_norm"], x + ffn(x))
    if c.norm_placement == "sandwich":
        x = x + norm(c, p["attention_post_norm"], attn(norm(c, p["attention_norm"], x)))
        return x + norm(c, p["ffn_post_norm"], ffn(norm(c, p["ffn_norm"], x)))
    if c.norm_placement == "output":
        x = x + norm(c, p["attention_post_norm"], attn(x))
        return x + norm(c, p["ffn_post_norm"], ffn(x))
    if c.norm_placement == "parallel":
        y = norm(c, p["norm"], x)
        return x + attn(y) + ffn(y)
    x = x + attn(x)
    return x + ffn(x)


def logits(c, params, tokens):
    """Return logits (T, V) for token ids (T,). params: nested dicts of float64 arrays of an
    unrolled model.
    """
    T, D = len(tokens), c.d_model
    x = params["embedding"][tokens] * c.embed_scale
    if c.positions == "learned":
        x = x + params["positions"][:T]
    if c.positions == "sinusoidal":
        for t in range(T):
            for i in range(D // 2):
                angle = t / 10_000 ** (2 * i / D)
                pair = [math.sin(angle), math.cos(angle)]
                x[t, 2 * i : 2 * i + 2] += (
                    pair if c.sinusoidal_order == "sine_first" else pair[::-1]
                )
    for i in range(c.n_layers):
        x = block(c, params[f"layers_{i}"], x, c.window_pattern[i % len(c.window_pattern)])
    if c.norm_placement in ("pre", "sandwich", "output", "parallel"):
        x = norm(c, params["final_norm"], x)
    out = (
        x @ params["embedding"].T
        if c.tie_embeddings
        else x @ params["head"]["w_DV"] + params["head"].get("b_V", 0)
    )
    return out if c.logit_softcap is None else c.logit_softcap * np.tanh(out / c.logit_softcap)
