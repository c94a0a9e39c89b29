"""The model of lm/model.py in PyTorch, the template of what `lm hf export --code` writes.

It is a complete program of all models, and lm never imports it. code_export.py decides each
`if` that reads nothing but `c`, the keys of the config, and leaves out what is then unused. So what
is written has the equations of one model. An `if` on a layer stands alone inside of such an `if`.

Parameters have the names of lm, and what is computed the names and axes of lm/layers/__init__.py.
"""

import dataclasses
import math
import types

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# ---- How positions see earlier ones --------------------------------------------------------------


class Past:
    """The cache: what earlier tokens leave behind, arrays (B, ...) by the name of their place."""

    # what transformers asks of a cache
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self):
        self.kept = {}

    def get_seq_length(self, layer_idx=0):
        """Return the number of earlier tokens."""
        return self.kept["real"].shape[1] if self.kept else 0

    def reorder_cache(self, beam_idx):
        """Continue these texts of the batch."""
        self.kept = {name: x.index_select(0, beam_idx) for name, x in self.kept.items()}


@dataclasses.dataclass
class Here:
    """Where an equation is applied: B texts, their T new tokens, and the S tokens so far."""

    c: types.SimpleNamespace
    past: Past
    tokens_BT: torch.Tensor
    positions_BT: torch.Tensor
    positions_BS: torch.Tensor
    real_BT: torch.Tensor  # False: padding
    real_BS: torch.Tensor
    stream: dict  # what goes from layer to layer
    rotations: dict  # cos and sin for queries and keys
    path: str = ""  # of the layer

    def at(self, place):
        """Return the environment inside of a layer, or of a part of it."""
        return dataclasses.replace(self, path=f"{self.path}/{place}")


def earlier(here, name, x_BT):
    """Return an array of all tokens so far, (B, S, ...)."""
    name = f"{here.path}/{name}"
    if name in here.past.kept:
        x_BT = torch.cat([here.past.kept[name], x_BT], dim=1)
    here.past.kept[name] = x_BT
    return x_BT


def visible(here, layer):
    """Return which tokens each new one sees, (B, T, S)."""
    c = here.c
    distance_BTS = here.positions_BT[:, :, None] - here.positions_BS[:, None, :]
    visible_BTS = (distance_BTS >= 0) & here.real_BS[:, None, :]
    if any(c.window_pattern) and c.window_pattern[layer]:
        visible_BTS &= distance_BTS < c.window_pattern[layer]
    return visible_BTS


def last(here, name, x_BTC, n):
    """Return the last n vectors up to each token, oldest first, (B, T, n, C); 0 before a text."""
    name = f"{here.path}/{name}"
    x_BTC = torch.where(here.real_BT[:, :, None], x_BTC, 0)
    B, _, C = x_BTC.shape
    before_BnC = here.past.kept.get(name, x_BTC.new_zeros(B, n - 1, C))
    x_BSC = torch.cat([before_BnC, x_BTC], dim=1)
    here.past.kept[name] = x_BSC[:, 1 - n :]
    return x_BSC.unfold(1, n, 1).transpose(2, 3)


def running_sum(here, name, x_BTC):
    """Return the sum of a text up to each token, (B, T, C)."""
    name = f"{here.path}/{name}"
    sum_BTC = torch.where(here.real_BT[:, :, None], x_BTC, 0).cumsum(1)
    if name in here.past.kept:
        sum_BTC = sum_BTC + here.past.kept[name][:, None]
    here.past.kept[name] = sum_BTC[:, -1]
    return sum_BTC


def convolution(here, name, x_BT, w_J):
    """Return x_t + sum_j w_j x_{t-3+j}, j = 0 .. 3."""
    last_BTJC = last(here, name, x_BT.flatten(2), 4)
    return x_BT + torch.einsum("BTJC,JC->BTC", last_BTJC, w_J.flatten(1)).reshape(x_BT.shape)


# ---- Norms, activations, rotations ---------------------------------------------------------------


def parameter(*shape):
    """Return a parameter, whose value is in the checkpoint."""
    return nn.Parameter(torch.zeros(shape))


def normalized(x, eps, n_axes=1):
    """Return x / sqrt(mean(x^2) + eps) over the last axes, in float32."""
    x = x.float()
    axes = tuple(range(-n_axes, 0))
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)


def rms_norm(x, scale, eps):
    """Return x / sqrt(mean(x^2) + eps) * scale over the axes of the scale."""
    return (normalized(x, eps, scale.ndim) * scale).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.scale_D = parameter(c.d_model)
        if c.norm == "dyt":
            self.alpha = parameter()
            self.bias_D = parameter(c.d_model)
        if c.norm == "layer" and c.norm_bias:
            self.bias_D = parameter(c.d_model)

    def forward(self, x_BTD):
        c = self.c
        if c.norm == "rms":
            return rms_norm(x_BTD, self.scale_D, c.norm_eps)
        elif c.norm == "layer":
            centered_BTD = x_BTD.float() - x_BTD.float().mean(-1, keepdim=True)
            squares_BT1 = centered_BTD.square().sum(-1, keepdim=True)
            variance_BT1 = squares_BT1 / (c.d_model - c.norm_ddof)
            y_BTD = centered_BTD * torch.rsqrt(variance_BT1 + c.norm_eps) * self.scale_D
            if c.norm_bias:
                y_BTD = y_BTD + self.bias_D
            return y_BTD.to(x_BTD.dtype)
        elif c.norm == "dyt":
            y_BTD = torch.tanh(self.alpha * x_BTD.float()) * self.scale_D + self.bias_D
            return y_BTD.to(x_BTD.dtype)


def activate(c, x):
    if c.activation == "silu":
        return F.silu(x)
    elif c.activation == "gelu":
        return F.gelu(x)
    elif c.activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    elif c.activation == "relu":
        return F.relu(x)
    elif c.activation == "relu_squared":
        return F.relu(x).square()
    elif c.activation == "sigmoid":
        return torch.sigmoid(x)


def frequencies(width, theta, device):
    """Return theta^(-2k / width) of each pair k of features."""
    return theta ** (-torch.arange(0, width, 2, device=device).float() / width)


def scaled(c, frequencies_R):
    """Return the frequencies for a longer context than the model was first trained with."""
    if c.rope_scaling == "linear":
        return frequencies_R / c.rope_factor
    elif c.rope_scaling == "llama3":
        turns_R = c.rope_original_max_positions * frequencies_R / (2 * math.pi)
        between = c.rope_high_freq_factor - c.rope_low_freq_factor
        unchanged_R = ((turns_R - c.rope_low_freq_factor) / between).clamp(0, 1)
        return frequencies_R * (unchanged_R + (1 - unchanged_R) / c.rope_factor)
    elif c.rope_scaling == "yarn":
        width = 2 * len(frequencies_R)
        positions = c.rope_original_max_positions / (2 * math.pi)
        low = width * math.log(positions / c.rope_beta_fast) / (2 * math.log(c.rope_theta))
        high = width * math.log(positions / c.rope_beta_slow) / (2 * math.log(c.rope_theta))
        low = max(math.floor(low), 0)
        high = min(math.ceil(high), width - 1)
        pairs_R = torch.arange(width // 2, device=frequencies_R.device)
        divided_R = ((pairs_R - low) / ((high - low) or 0.001)).clamp(0, 1)
        return frequencies_R * (1 - divided_R + divided_R / c.rope_factor)
    elif c.rope_scaling == "dynamic":
        n = len(frequencies_R)
        longest = max(c.max_positions, c.rope_original_max_positions)
        stretch = c.rope_factor * longest / c.rope_original_max_positions - (c.rope_factor - 1)
        exponents_R = -torch.arange(n, device=frequencies_R.device) / max(n - 1, 1)
        return frequencies_R * stretch**exponents_R


def cos_and_sin(positions_BT, frequencies_R):
    """Return cos and sin of the angles, (B, T, 1, R)."""
    angles_BT1R = positions_BT[:, :, None, None].float() * frequencies_R
    return angles_BT1R.cos(), angles_BT1R.sin()


def rotations(c, positions_BT):
    """Return the rotations of all layers, and of those with a window."""
    width = c.rope_width or c.d_head
    frequencies_R = frequencies(width, c.rope_theta, positions_BT.device)
    if c.rope_scaling != "none":
        frequencies_R = scaled(c, frequencies_R)
    cos, sin = cos_and_sin(positions_BT, frequencies_R)
    if c.rope_scaling == "yarn":
        cos = cos * c.rope_amplitude
        sin = sin * c.rope_amplitude
    found = {"all": (cos, sin)}
    if c.rope_window_theta is not None:
        of_windows_R = frequencies(width, c.rope_window_theta, positions_BT.device)
        found["window"] = cos_and_sin(positions_BT, of_windows_R)
    return found


def rotated(here, layer, x_BTHK):
    """Return queries or keys rotated by the angles of their positions (RoPE)."""
    c = here.c
    if not all(c.rope_pattern) and not c.rope_pattern[layer]:
        return x_BTHK
    if c.rope_window_theta is not None and c.window_pattern[layer]:
        return rotate(c, x_BTHK, *here.rotations["window"])
    return rotate(c, x_BTHK, *here.rotations["all"])


def rotate(c, x_BTHK, cos, sin):
    width = 2 * cos.shape[-1]
    x_BTHP = x_BTHK[..., :width]
    if c.rope_pairing == "adjacent":
        first = x_BTHP[..., 0::2]
        second = x_BTHP[..., 1::2]
        pairs = (first * cos - second * sin, first * sin + second * cos)
        y_BTHP = torch.stack(pairs, dim=-1).flatten(-2)
    elif c.rope_pairing == "halves":
        first, second = x_BTHP.chunk(2, dim=-1)
        pairs = (first * cos - second * sin, first * sin + second * cos)
        y_BTHP = torch.cat(pairs, dim=-1)
    return torch.cat([y_BTHP.to(x_BTHK.dtype), x_BTHK[..., width:]], dim=-1)


def sinusoidal(c, positions_BT):
    """Return sin and cos of the position times 10000^(-2k / D) for each pair k of features."""
    frequencies_R = frequencies(c.d_model, 10000.0, positions_BT.device)
    angles_BTR = positions_BT[..., None].float() * frequencies_R
    if c.sinusoidal_order == "sine_first":
        pairs = (angles_BTR.sin(), angles_BTR.cos())
    elif c.sinusoidal_order == "cosine_first":
        pairs = (angles_BTR.cos(), angles_BTR.sin())
    return torch.stack(pairs, dim=-1).flatten(-2)


# ---- Attention and other mixers ------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.c = c
        self.layer = layer
        D = c.d_model
        H = c.n_heads
        G = c.n_kv_heads
        K = c.d_head
        if c.attn_differential:
            H = 2 * c.n_heads
            self.w_lambda_DH = parameter(D, c.n_heads)
        self.w_q_DHK = parameter(D, H, K)
        self.w_k_DGK = parameter(D, G, K)
        self.w_v_DGK = parameter(D, G, K)
        self.w_o_HKD = parameter(c.n_heads, K, D)
        if c.attn_bias:
            self.b_q_HK = parameter(H, K)
            self.b_k_GK = parameter(G, K)
            self.b_v_GK = parameter(G, K)
        if c.attn_out_bias:
            self.b_o_D = parameter(D)
        if c.qk_norm and c.qk_norm_over == "head":
            self.q_scale_K = parameter(K)
            self.k_scale_K = parameter(K)
        if c.qk_norm and c.qk_norm_over == "all_heads":
            self.q_scale_HK = parameter(H, K)
            self.k_scale_GK = parameter(G, K)
        if c.conv_keys:
            self.w_conv_keys_JGK = parameter(4, G, K)
        if c.conv_values:
            self.w_conv_values_JGK = parameter(4, G, K)
        if c.query_scale != "none":
            self.query_scale_H = parameter(H)
        if c.value_embeddings and (c.n_layers - 1 - layer) % 2 == 0:
            self.value_embedding_VGK = parameter(c.vocab_size, G, K)
            self.w_value_gate_CG = parameter(min(12, D), G)
        if c.value_residual == "learned":
            self.value_mix = parameter()
        if c.attn_sink:
            self.sink_H = parameter(H)
        if c.attn_forget:
            self.w_forget_DH = parameter(D, H)
            self.b_forget_H = parameter(H)
        if c.attn_exclusive == "learned":
            self.exclusive_H = parameter(c.n_heads)
        if c.attn_gate in ("head", "head_identity"):
            self.w_gate_DH = parameter(D, c.n_heads)
        if c.attn_gate in ("element", "element_identity"):
            self.w_gate_DHK = parameter(D, c.n_heads, K)
        if c.gated_delta != "none" and (c.gated_delta == "all" or layer % 4 != 3):
            self.w_decay_DH = parameter(D, H)
            self.w_write_DH = parameter(D, H)
            self.decay_log_H = parameter(H)
            self.decay_step_H = parameter(H)
            self.delta_scale_K = parameter(K)

    def forward(self, here, x_BTD):
        """Return softmax(q k^T / sqrt(K)) v of each head, projected to the residual stream."""
        c = self.c
        q_BTHK = torch.einsum("BTD,DHK->BTHK", x_BTD, self.w_q_DHK)
        k_BTGK = torch.einsum("BTD,DGK->BTGK", x_BTD, self.w_k_DGK)
        v_BTGK = torch.einsum("BTD,DGK->BTGK", x_BTD, self.w_v_DGK)
        if c.attn_bias:
            q_BTHK = q_BTHK + self.b_q_HK
            k_BTGK = k_BTGK + self.b_k_GK
            v_BTGK = v_BTGK + self.b_v_GK
        if c.qk_norm and c.qk_norm_over == "head":
            q_BTHK = rms_norm(q_BTHK, self.q_scale_K, c.norm_eps)
            k_BTGK = rms_norm(k_BTGK, self.k_scale_K, c.norm_eps)
        if c.qk_norm and c.qk_norm_over == "all_heads":
            q_BTHK = rms_norm(q_BTHK, self.q_scale_HK, c.norm_eps)
            k_BTGK = rms_norm(k_BTGK, self.k_scale_GK, c.norm_eps)
        if c.positions == "rope":
            q_BTHK = rotated(here, self.layer, q_BTHK)
            k_BTGK = rotated(here, self.layer, k_BTGK)
        if c.conv_keys:
            k_BTGK = convolution(here, "conv_keys", k_BTGK, self.w_conv_keys_JGK)
        if c.query_scale != "none":
            q_BTHK = scaled_queries(self, here, q_BTHK)
        if c.conv_values:
            v_BTGK = convolution(here, "conv_values", v_BTGK, self.w_conv_values_JGK)
        if c.value_embeddings and (c.n_layers - 1 - self.layer) % 2 == 0:
            v_BTGK = with_value_embedding(self, here, x_BTD, v_BTGK)
        if c.value_residual != "none":
            v_BTGK = with_first_values(self, here, v_BTGK)

        if c.gated_delta == "none":
            o_BTHK = softmax_attention(self, here, x_BTD, q_BTHK, k_BTGK, v_BTGK)
        elif c.gated_delta == "all":
            o_BTHK = gated_delta(self, here, x_BTD, q_BTHK, k_BTGK, v_BTGK)
        elif c.gated_delta == "three_of_four":
            if self.layer % 4 == 3:
                o_BTHK = softmax_attention(self, here, x_BTD, q_BTHK, k_BTGK, v_BTGK)
            else:
                o_BTHK = gated_delta(self, here, x_BTD, q_BTHK, k_BTGK, v_BTGK)

        if c.attn_differential:
            gate_BTH = torch.sigmoid(torch.einsum("BTD,DH->BTH", x_BTD, self.w_lambda_DH))
            o_BTHK = o_BTHK[:, :, 0::2] - gate_BTH[..., None] * o_BTHK[:, :, 1::2]
        if c.attn_exclusive != "none":
            o_BTHK = without_own_value(self, o_BTHK, v_BTGK)
        if c.attn_gate in ("head", "head_identity"):
            gate_BTH = torch.sigmoid(torch.einsum("BTD,DH->BTH", x_BTD, self.w_gate_DH))
            o_BTHK = o_BTHK * gate_BTH[..., None]
        if c.attn_gate in ("element", "element_identity"):
            gate_BTHK = torch.sigmoid(torch.einsum("BTD,DHK->BTHK", x_BTD, self.w_gate_DHK))
            o_BTHK = o_BTHK * gate_BTHK
        if c.attn_gate in ("head_identity", "element_identity"):
            o_BTHK = 2 * o_BTHK
        y_BTD = torch.einsum("BTHK,HKD->BTD", o_BTHK, self.w_o_HKD)
        if c.attn_out_bias:
            y_BTD = y_BTD + self.b_o_D
        return y_BTD


def softmax_attention(p, here, x_BTD, q_BTHK, k_BTGK, v_BTGK):
    c = here.c
    k_BSHK = for_queries(earlier(here, "k", k_BTGK), q_BTHK)
    v_BSHK = for_queries(earlier(here, "v", v_BTGK), q_BTHK)
    scores_BHTS = c.attn_scale * torch.einsum("BTHK,BSHK->BHTS", q_BTHK.float(), k_BSHK.float())
    if c.attn_softcap is not None:
        scores_BHTS = c.attn_softcap * torch.tanh(scores_BHTS / c.attn_softcap)
    if c.attn_forget:
        scores_BHTS = scores_BHTS - forgotten(p, here, x_BTD)
    scores_BHTS = masked(scores_BHTS, visible(here, p.layer))
    if c.attn_sink:
        # one more key, whose value is 0
        B, _, T, _ = scores_BHTS.shape
        sink_BHT1 = p.sink_H[None, :, None, None].expand(B, -1, T, -1)
        scores_BHTS = torch.cat([scores_BHTS, sink_BHT1.float()], dim=-1)
        weights_BHTS = torch.softmax(scores_BHTS, dim=-1)[..., :-1]
    else:
        weights_BHTS = torch.softmax(scores_BHTS, dim=-1)
    return torch.einsum("BHTS,BSHK->BTHK", weights_BHTS.to(v_BSHK.dtype), v_BSHK)


def for_queries(k_BSGK, q_BTHK):
    """Return the keys or values of each query head: groups of heads share them."""
    return k_BSGK.repeat_interleave(q_BTHK.shape[2] // k_BSGK.shape[2], dim=2)


def masked(scores_BHTS, visible_BTS):
    lowest = torch.finfo(scores_BHTS.dtype).min
    return scores_BHTS.masked_fill(~visible_BTS[:, None], lowest)


def forgotten(p, here, x_BTD):
    """Return the sum of log f up to each key, (B, H, 1, S): the part of a query changes nothing."""
    logits_BTH = torch.einsum("BTD,DH->BTH", x_BTD, p.w_forget_DH) + p.b_forget_H
    sum_BTH = running_sum(here, "forgotten", F.logsigmoid(logits_BTH.float()))
    return earlier(here, "bias", sum_BTH).transpose(1, 2)[:, :, None]


def scaled_queries(p, here, q_BTHK):
    c = here.c
    scale_BTH = p.query_scale_H.float()
    if c.query_scale == "log_n":
        log_n_BT = torch.log(1.0 + here.positions_BT) / math.log(1 + c.max_positions)
        scale_BTH = scale_BTH * log_n_BT[..., None]
    return (q_BTHK * scale_BTH[..., None]).to(q_BTHK.dtype)


def with_value_embedding(p, here, x_BTD, v_BTGK):
    logits_BTG = torch.einsum("BTC,CG->BTG", x_BTD[..., :12], p.w_value_gate_CG)
    e_BTGK = p.value_embedding_VGK[here.tokens_BT]
    return v_BTGK + 3 * torch.sigmoid(logits_BTG)[..., None] * e_BTGK


def with_first_values(p, here, v_BTGK):
    """Return (1 - a) v + a v_0, with the values v_0 of the first layer that has attention."""
    c = here.c
    first_BTGK = here.stream.setdefault("first_values", v_BTGK)
    if c.value_residual == "learned":
        a = p.value_mix
    elif c.value_residual == "half":
        a = 0.5
    return (1 - a) * v_BTGK + a * first_BTGK


def without_own_value(p, o_BTHK, v_BTGK):
    """Return o - a (o . v / |v|^2) v, with the token's own value v."""
    c = p.c
    v_BTHK = for_queries(v_BTGK, o_BTHK).float()
    along_BTH1 = (o_BTHK * v_BTHK).sum(-1, keepdim=True)
    along_BTH1 = along_BTH1 / v_BTHK.square().sum(-1, keepdim=True).clamp(min=1e-12)
    if c.attn_exclusive == "learned":
        along_BTH1 = along_BTH1 * torch.tanh(p.exclusive_H.float())[:, None]
    return (o_BTHK - along_BTH1 * v_BTHK).to(o_BTHK.dtype)


def gated_delta(p, here, x_BTD, q_BTHK, k_BTGK, v_BTGK):
    """Return norm(S_t^T q_t), S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T."""
    c = here.c
    k_BTHK = for_queries(k_BTGK, q_BTHK).float()
    v_BTHK = for_queries(v_BTGK, q_BTHK).float()
    k_BTHK = k_BTHK * torch.rsqrt(k_BTHK.square().sum(-1, keepdim=True) + 1e-6)
    queries_BTHK = q_BTHK.float()
    squares_BTH1 = queries_BTHK.square().sum(-1, keepdim=True)
    queries_BTHK = queries_BTHK * torch.rsqrt(squares_BTH1 + 1e-6)
    decay_BTH = torch.einsum("BTD,DH->BTH", x_BTD, p.w_decay_DH).float()
    step_BTH = F.softplus(decay_BTH + p.decay_step_H.float())
    a_BTH = torch.exp(-torch.exp(p.decay_log_H.float()) * step_BTH)
    b_BTH = torch.sigmoid(torch.einsum("BTD,DH->BTH", x_BTD, p.w_write_DH).float())
    # padding leaves the state as it is
    a_BTH = torch.where(here.real_BT[..., None], a_BTH, 1)
    b_BTH = torch.where(here.real_BT[..., None], b_BTH, 0)

    B, T, H, K = k_BTHK.shape
    name = f"{here.path}/delta"
    S_BHKV = here.past.kept.get(name, k_BTHK.new_zeros(B, H, K, K))
    outputs = []
    for t in range(T):
        S_BHKV = a_BTH[:, t, :, None, None] * S_BHKV
        read_BHV = torch.einsum("BHK,BHKV->BHV", k_BTHK[:, t], S_BHKV)
        u_BHV = b_BTH[:, t, :, None] * (v_BTHK[:, t] - read_BHV)
        S_BHKV = S_BHKV + torch.einsum("BHK,BHV->BHKV", k_BTHK[:, t], u_BHV)
        outputs.append(torch.einsum("BHK,BHKV->BHV", queries_BTHK[:, t], S_BHKV))
    here.past.kept[name] = S_BHKV
    return rms_norm(torch.stack(outputs, dim=1), p.delta_scale_K, c.norm_eps).to(x_BTD.dtype)


class LatentAttention(nn.Module):
    """Keys and values of all heads are made of one narrow vector of each token (DeepSeek-V2)."""

    def __init__(self, c, layer):
        super().__init__()
        self.c = c
        self.layer = layer
        D = c.d_model
        H = c.n_heads
        K = c.d_head
        R = c.latent_width
        P = 2 * max(1, K // 4)
        self.w_q_DHC = parameter(D, H, K + P)
        self.w_down_DC = parameter(D, R + P)
        self.latent_scale_R = parameter(R)
        self.w_k_RHK = parameter(R, H, K)
        self.w_v_RHK = parameter(R, H, K)
        self.w_o_HKD = parameter(H, K, D)

    def forward(self, here, x_BTD):
        c = self.c
        R = c.latent_width
        K = c.d_head
        q_BTHC = torch.einsum("BTD,DHC->BTHC", x_BTD, self.w_q_DHC)
        q_BTHK = q_BTHC[..., :K]
        q_BTHP = q_BTHC[..., K:]
        down_BTC = torch.einsum("BTD,DC->BTC", x_BTD, self.w_down_DC)
        latent_BTR = rms_norm(down_BTC[..., :R], self.latent_scale_R, c.norm_eps)
        k_BT1P = down_BTC[:, :, None, R:]
        if c.positions == "rope":
            P = k_BT1P.shape[-1]
            frequencies_R = frequencies(P, c.rope_theta, x_BTD.device)
            rotation = cos_and_sin(here.positions_BT, frequencies_R)
            q_BTHP = rotate(c, q_BTHP, *rotation)
            k_BT1P = rotate(c, k_BT1P, *rotation)
        latent_BSR = earlier(here, "latent", latent_BTR)
        k_BSP = earlier(here, "k", k_BT1P[:, :, 0])
        k_BSHK = torch.einsum("BSR,RHK->BSHK", latent_BSR, self.w_k_RHK)
        v_BSHK = torch.einsum("BSR,RHK->BSHK", latent_BSR, self.w_v_RHK)
        scores_BHTS = torch.einsum("BTHK,BSHK->BHTS", q_BTHK.float(), k_BSHK.float())
        scores_BHTS += torch.einsum("BTHP,BSP->BHTS", q_BTHP.float(), k_BSP.float())
        scores_BHTS /= math.sqrt(q_BTHC.shape[-1])
        weights_BHTS = torch.softmax(masked(scores_BHTS, visible(here, self.layer)), dim=-1)
        o_BTHK = torch.einsum("BHTS,BSHK->BTHK", weights_BHTS.to(v_BSHK.dtype), v_BSHK)
        return torch.einsum("BTHK,HKD->BTD", o_BTHK, self.w_o_HKD)


class TalkingHeads(nn.Module):
    """Scores, and then weights, of each head are sums over those of all heads."""

    def __init__(self, c, layer):
        super().__init__()
        self.c = c
        self.layer = layer
        D = c.d_model
        H = c.n_heads
        G = c.n_kv_heads
        K = c.d_head
        self.w_q_DHK = parameter(D, H, K)
        self.w_k_DGK = parameter(D, G, K)
        self.w_v_DGK = parameter(D, G, K)
        self.w_o_HKD = parameter(H, K, D)
        self.w_scores_HC = parameter(H, H)
        self.w_weights_HC = parameter(H, H)

    def forward(self, here, x_BTD):
        c = self.c
        q_BTHK = torch.einsum("BTD,DHK->BTHK", x_BTD, self.w_q_DHK)
        k_BTGK = torch.einsum("BTD,DGK->BTGK", x_BTD, self.w_k_DGK)
        v_BTGK = torch.einsum("BTD,DGK->BTGK", x_BTD, self.w_v_DGK)
        if c.positions == "rope":
            q_BTHK = rotated(here, self.layer, q_BTHK)
            k_BTGK = rotated(here, self.layer, k_BTGK)
        k_BSHK = for_queries(earlier(here, "k", k_BTGK), q_BTHK)
        v_BSHK = for_queries(earlier(here, "v", v_BTGK), q_BTHK)
        scores_BHTS = torch.einsum("BTHK,BSHK->BHTS", q_BTHK.float(), k_BSHK.float())
        scores_BHTS = mixed(scores_BHTS / math.sqrt(c.d_head), self.w_scores_HC)
        weights_BHTS = torch.softmax(masked(scores_BHTS, visible(here, self.layer)), dim=-1)
        weights_BHTS = mixed(weights_BHTS, self.w_weights_HC)
        o_BTHK = torch.einsum("BHTS,BSHK->BTHK", weights_BHTS.to(v_BSHK.dtype), v_BSHK)
        return torch.einsum("BTHK,HKD->BTD", o_BTHK, self.w_o_HKD)


def mixed(x_BHTS, w_HC):
    """Return x (I + w) over heads."""
    return x_BHTS + torch.einsum("BHTS,HC->BCTS", x_BHTS, w_HC.to(x_BHTS.dtype))


class RgLru(nn.Module):
    """Griffin's recurrence: h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t)."""

    def __init__(self, c, layer):
        super().__init__()
        D = c.d_model
        H = c.n_heads
        K = c.d_head
        self.w_in_DHK = parameter(D, H, K)
        self.w_gate_DHK = parameter(D, H, K)
        self.w_conv_JHK = parameter(4, H, K)
        self.w_a_HKC = parameter(H, K, K)
        self.b_a_HK = parameter(H, K)
        self.w_x_HKC = parameter(H, K, K)
        self.b_x_HK = parameter(H, K)
        self.decay_K = parameter(K)
        self.w_out_HKD = parameter(H, K, D)

    def forward(self, here, x_BTD):
        u_BTHK = torch.einsum("BTD,DHK->BTHK", x_BTD, self.w_in_DHK)
        u_BTHK = convolution(here, "conv", u_BTHK, self.w_conv_JHK)
        r_BTHK = torch.einsum("BTHK,HKC->BTHC", u_BTHK, self.w_a_HKC).float() + self.b_a_HK
        i_BTHK = torch.einsum("BTHK,HKC->BTHC", u_BTHK, self.w_x_HKC).float() + self.b_x_HK
        # decay_K is the difference from the values of step 0
        decays_K = torch.linspace(0.9, 0.999, len(self.decay_K), dtype=torch.float64)
        start_K = torch.log(torch.expm1(-torch.log(decays_K) / 8)).float()
        rates_K = F.softplus(self.decay_K.float() + start_K.to(x_BTD.device))
        log_a_BTHK = -8 * rates_K * torch.sigmoid(r_BTHK)
        scale_BTHK = torch.sqrt((-torch.expm1(2 * log_a_BTHK)).clamp(min=1e-12))
        new_BTHK = scale_BTHK * torch.sigmoid(i_BTHK) * u_BTHK.float()
        # padding leaves the state as it is
        real_BT11 = here.real_BT[..., None, None]
        a_BTHK = torch.where(real_BT11, log_a_BTHK.exp(), 1)
        new_BTHK = torch.where(real_BT11, new_BTHK, 0)

        name = f"{here.path}/state"
        h_BHK = here.past.kept.get(name, torch.zeros_like(new_BTHK[:, 0]))
        states = []
        for t in range(new_BTHK.shape[1]):
            h_BHK = a_BTHK[:, t] * h_BHK + new_BTHK[:, t]
            states.append(h_BHK)
        here.past.kept[name] = h_BHK
        h_BTHK = torch.stack(states, dim=1).to(x_BTD.dtype)
        gate_BTHK = F.gelu(torch.einsum("BTD,DHK->BTHK", x_BTD, self.w_gate_DHK))
        return torch.einsum("BTHK,HKD->BTD", h_BTHK * gate_BTHK, self.w_out_HKD)


# ---- Feed-forward layers -------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.w_in_DF = parameter(c.d_model, c.d_ff)
        self.w_out_FD = parameter(c.d_ff, c.d_model)
        if c.ffn_bias:
            self.b_in_F = parameter(c.d_ff)
            self.b_out_D = parameter(c.d_model)

    def forward(self, here, x_BTD):
        """Return activation(x w_in + b_in) w_out + b_out."""
        c = self.c
        h_BTF = torch.einsum("BTD,DF->BTF", x_BTD, self.w_in_DF)
        if c.ffn_bias:
            h_BTF = h_BTF + self.b_in_F
        y_BTD = torch.einsum("BTF,FD->BTD", activate(c, h_BTF), self.w_out_FD)
        if c.ffn_bias:
            y_BTD = y_BTD + self.b_out_D
        return y_BTD


class Glu(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.w_gate_DF = parameter(c.d_model, c.d_ff)
        self.w_up_DF = parameter(c.d_model, c.d_ff)
        self.w_down_FD = parameter(c.d_ff, c.d_model)
        if c.ffn_bias:
            self.b_gate_F = parameter(c.d_ff)
            self.b_up_F = parameter(c.d_ff)
            self.b_down_D = parameter(c.d_model)

    def forward(self, here, x_BTD):
        """Return (activation(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down."""
        c = self.c
        gate_BTF = torch.einsum("BTD,DF->BTF", x_BTD, self.w_gate_DF)
        up_BTF = torch.einsum("BTD,DF->BTF", x_BTD, self.w_up_DF)
        if c.ffn_bias:
            gate_BTF = gate_BTF + self.b_gate_F
            up_BTF = up_BTF + self.b_up_F
        y_BTD = torch.einsum("BTF,FD->BTD", activate(c, gate_BTF) * up_BTF, self.w_down_FD)
        if c.ffn_bias:
            y_BTD = y_BTD + self.b_down_D
        return y_BTD


class Experts(nn.Module):
    """A mixture of experts: the sum of p_e glu_e(x) over the k best experts e of a token."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        D = c.d_model
        E = c.n_experts
        self.w_router_DE = parameter(D, E)
        self.w_gate_EDF = parameter(E, D, c.d_ff)
        self.w_up_EDF = parameter(E, D, c.d_ff)
        self.w_down_EFD = parameter(E, c.d_ff, D)
        if c.shared_expert:
            self.w_shared_gate_DF = parameter(D, c.d_ff)
            self.w_shared_up_DF = parameter(D, c.d_ff)
            self.w_shared_down_FD = parameter(c.d_ff, D)

    def forward(self, here, x_BTD):
        c = self.c
        x_MD = x_BTD.flatten(0, 1)  # the tokens of all texts
        probabilities_ME = torch.softmax(x_MD.float() @ self.w_router_DE.float(), dim=-1)
        p_Mk, experts_Mk = probabilities_ME.topk(c.experts_per_token, dim=-1)
        if c.normalize_experts:
            p_Mk = p_Mk / p_Mk.sum(-1, keepdim=True)
        y_MD = torch.zeros_like(x_MD)
        for e in range(c.n_experts):
            tokens, places = torch.where(experts_Mk == e)
            x_CD = x_MD[tokens]
            h_CF = activate(c, x_CD @ self.w_gate_EDF[e]) * (x_CD @ self.w_up_EDF[e])
            p_C1 = p_Mk[tokens, places][:, None].to(x_MD.dtype)
            y_MD = y_MD.index_add(0, tokens, p_C1 * (h_CF @ self.w_down_EFD[e]))
        if c.shared_expert:
            h_MF = activate(c, x_MD @ self.w_shared_gate_DF) * (x_MD @ self.w_shared_up_DF)
            y_MD = y_MD + h_MF @ self.w_shared_down_FD
        return y_MD.reshape(x_BTD.shape)


# ---- The block and the model ---------------------------------------------------------------------

MIXERS = {
    "attention": Attention,
    "latent": LatentAttention,
    "talking_heads": TalkingHeads,
    "rg_lru": RgLru,
}


class Block(nn.Module):
    """One layer: attention and the feed-forward layer read the residual stream and add to it."""

    def __init__(self, c, layer):
        super().__init__()
        self.c = c
        for name, kind, factor in c.branches:  # noqa: B007
            if kind == "ffn":
                if c.ffn == "mlp":
                    setattr(self, name, Mlp(c))
                elif c.ffn == "glu":
                    setattr(self, name, Glu(c))
                elif c.ffn == "moe":
                    setattr(self, name, Glu(c) if layer < c.moe_first_layer else Experts(c))
            elif set(c.mixers) == {"attention"}:
                setattr(self, name, Attention(c, layer))
            elif set(c.mixers) == {"latent"}:
                setattr(self, name, LatentAttention(c, layer))
            elif set(c.mixers) == {"talking_heads"}:
                setattr(self, name, TalkingHeads(c, layer))
            elif set(c.mixers) == {"rg_lru"}:
                setattr(self, name, RgLru(c, layer))
            else:
                setattr(self, name, MIXERS[c.mixers[layer]](c, layer))
            if c.norm_placement in ("pre", "post", "sandwich"):
                setattr(self, f"{name}_norm", Norm(c))
            if c.norm_placement in ("sandwich", "output"):
                setattr(self, f"{name}_post_norm", Norm(c))
            if c.residual == "depth_attention":
                setattr(self, f"{name}_depth_D", parameter(c.d_model))
            if c.residual == "hyper_connections":
                setattr(self, f"w_{name}_maps_CDM", parameter(4, c.d_model, 24))
                setattr(self, f"{name}_maps_M", parameter(24))
                setattr(self, f"{name}_maps_scale", parameter())
        if c.norm_placement == "parallel":
            self.norm = Norm(c)
        if c.residual_scalars:
            self.residual_scale = parameter()
            self.embedding_scale = parameter()
        if c.conv_stream:
            self.w_conv_stream_JD = parameter(4, c.d_model)

    def forward(self, x_BTD, here):
        c = self.c
        if c.residual_scalars:
            x_BTD = self.residual_scale * x_BTD + self.embedding_scale * here.stream["embeddings"]
        if c.conv_stream:
            x_BTD = convolution(here, "conv_stream", x_BTD, self.w_conv_stream_JD)
        if c.norm_placement == "parallel":
            input_BTD = self.norm(x_BTD)
        if c.residual == "parallel":
            output_BTD = x_BTD
        for name, kind, factor in c.branches:  # noqa: B007
            if c.residual == "hyper_connections":
                x_BTD = read_streams(self, name, here.stream["streams"])
            if c.norm_placement in ("pre", "sandwich"):
                h_BTD = getattr(self, f"{name}_norm")(x_BTD)
            elif c.norm_placement == "parallel":
                h_BTD = input_BTD
            else:
                h_BTD = x_BTD
            y_BTD = getattr(self, name)(here.at(name), h_BTD)
            if factor != 1:
                y_BTD = y_BTD * factor
            if c.norm_placement in ("sandwich", "output"):
                y_BTD = getattr(self, f"{name}_post_norm")(y_BTD)
            if c.residual == "depth_attention":
                here.stream["outputs"].append(y_BTD)
                w_D = getattr(self, f"{name}_depth_D")
                x_BTD = depth_mean(here.stream["outputs"], w_D, c.norm_eps)
            elif c.residual == "hyper_connections":
                add_to_streams(self, name, here, y_BTD)
            elif c.residual == "parallel":
                output_BTD = output_BTD + y_BTD
            else:
                x_BTD = x_BTD + y_BTD
            if c.norm_placement == "post":
                x_BTD = getattr(self, f"{name}_norm")(x_BTD)
        if c.residual == "hyper_connections":
            x_BTD = here.stream["streams"].mean(2)
        if c.residual == "parallel":
            x_BTD = output_BTD
        return x_BTD


def depth_mean(outputs, w_D, eps):
    """Return the mean of all outputs so far, by a softmax of their products with w."""
    y_BTYD = torch.stack(outputs, dim=2)
    keys_BTYD = normalized(y_BTYD, eps).to(w_D.dtype)
    scores_BTY = torch.einsum("BTYD,D->BTY", keys_BTYD, w_D).float()
    weights_BTY = torch.softmax(scores_BTY, dim=-1).to(y_BTYD.dtype)
    return torch.einsum("BTY,BTYD->BTD", weights_BTY, y_BTYD)


def map_logits(p, name, x_BTCD):
    """Return a x W + b of a branch, (B, T, M), in float32; x is the norm of all four streams."""
    c = p.c
    x_BTX = normalized(x_BTCD.flatten(2), c.norm_eps).to(x_BTCD.dtype)
    w_XM = getattr(p, f"w_{name}_maps_CDM").flatten(0, 1)
    product_BTM = (x_BTX @ w_XM).float()
    return getattr(p, f"{name}_maps_scale") * product_BTM + getattr(p, f"{name}_maps_M")


def read_streams(p, name, x_BTCD):
    """Return what a branch reads of the four streams."""
    pre_BTC = torch.sigmoid(map_logits(p, name, x_BTCD)[..., :4] - math.log(3.0))
    return (pre_BTC.to(x_BTCD.dtype)[..., None] * x_BTCD).sum(2)


def add_to_streams(p, name, here, y_BTD):
    """X <- R X + post y."""
    x_BTCD = here.stream["streams"]
    logits_BTM = map_logits(p, name, x_BTCD)
    post_BTC = 2 * torch.sigmoid(logits_BTM[..., 4:8]).to(x_BTCD.dtype)
    logits_BTCE = logits_BTM[..., 8:].unflatten(-1, (4, 4))
    logits_BTCE = logits_BTCE - 8 * (1 - torch.eye(4, device=x_BTCD.device))
    for _ in range(20):  # Sinkhorn's algorithm
        logits_BTCE = logits_BTCE - logits_BTCE.logsumexp(-1, keepdim=True)
        logits_BTCE = logits_BTCE - logits_BTCE.logsumexp(-2, keepdim=True)
    mix_BTCE = logits_BTCE.exp().to(x_BTCD.dtype)
    x_BTCD = torch.einsum("BTCE,BTED->BTCD", mix_BTCE, x_BTCD)
    here.stream["streams"] = x_BTCD + post_BTC[..., None] * y_BTD[:, :, None]


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.w_DV = parameter(c.d_model, c.vocab_size)
        if c.head_bias:
            self.b_V = parameter(c.vocab_size)

    def forward(self, x_BTD):
        c = self.c
        logits_BTV = torch.einsum("BTD,DV->BTV", x_BTD, self.w_DV)
        if c.head_bias:
            logits_BTV = logits_BTV + self.b_V
        return logits_BTV


class LanguageModelConfig(PretrainedConfig):
    """config.json. Its field `model` has the keys that the equations read."""

    model_type = "lm"


class LanguageModel(PreTrainedModel, GenerationMixin):
    """From token ids to logits."""

    config_class = LanguageModelConfig
    base_model_prefix = ""
    _is_stateful = True  # the cache cannot forget its last tokens

    def __init__(self, config):
        super().__init__(config)
        c = types.SimpleNamespace(**config.model)
        self.c = c
        self.embedding = parameter(c.vocab_size, c.d_model)
        if c.positions == "learned":
            self.positions = parameter(c.max_positions, c.d_model)
        if c.token_shift:
            self.shift_scale = parameter()
            self.w_shift_C1 = parameter(min(24, c.d_model), 1)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.n_layers))
        if c.norm_placement not in ("post", "none"):
            self.final_norm = Norm(c)
        if not c.tie_embeddings:
            self.head = Head(c)
        self.post_init()

    def _init_weights(self, module):
        """Leave all values to the checkpoint."""

    def hidden(self, here):
        """Return the residual stream after the final norm."""
        c = self.c
        x_BTD = self.embedding[here.tokens_BT]
        if c.embed_scale != 1:
            x_BTD = x_BTD * c.embed_scale
        if c.positions == "learned":
            x_BTD = x_BTD + self.positions[here.positions_BT]
        if c.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoidal(c, here.positions_BT).to(x_BTD.dtype)
        if c.token_shift:
            gate_BT1 = torch.sigmoid(x_BTD[..., :24] @ self.w_shift_C1)
            previous_BTD = last(here, "shift", x_BTD, 2)[:, :, 0]
            x_BTD = x_BTD + self.shift_scale * gate_BT1 * previous_BTD
        if c.positions == "rope":
            here.rotations = rotations(c, here.positions_BT)
        if c.residual_scalars:
            here.stream["embeddings"] = x_BTD
        if c.residual == "depth_attention":
            here.stream["outputs"] = [x_BTD]
        if c.residual == "hyper_connections":
            here.stream["streams"] = x_BTD[:, :, None].expand(-1, -1, 4, -1)
        for depth, layer in enumerate(c.applied_layers):
            x_BTD = self.layers[layer](x_BTD, here.at(depth))
        if c.norm_placement not in ("post", "none"):
            x_BTD = self.final_norm(x_BTD)
        return x_BTD

    def forward(
        self,
        input_ids,
        attention_mask=None,
        cache=None,
        past_key_values=None,
        use_cache=False,
        labels=None,
        logits_to_keep=0,
        return_dict=True,
    ):
        """Return the logits of the next token of each position.

        Args:
            input_ids: new tokens (B, T).
            attention_mask: (B, T) or (B, S): 0 at padding, which may stand before a text.
            cache, past_key_values: names in two versions of transformers for what `use_cache`
                returned for the earlier tokens.
            labels: (B, T): the tokens themselves, -100 where they do not count in the loss.
            logits_to_keep: the last positions whose logits are needed; 0: all.
        """
        c = self.c
        past = cache or past_key_values or Past()
        T = input_ids.shape[1]
        if attention_mask is None:
            real_BT = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            real_BT = attention_mask[:, -T:].bool()
        real_BS = torch.cat([past.kept["real"], real_BT], dim=1) if past.kept else real_BT
        positions_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)
        if c.positions == "learned" and positions_BS.max() >= c.max_positions:
            raise ValueError(f"the text is longer than {c.max_positions} tokens")
        past.kept["real"] = real_BS
        here = Here(
            c=c,
            past=past,
            tokens_BT=input_ids,
            positions_BT=positions_BS[:, -T:],
            positions_BS=positions_BS,
            real_BT=real_BT,
            real_BS=real_BS,
            stream={},
            rotations={},
        )
        x_BTD = self.hidden(here)[:, -logits_to_keep:]
        if c.logit_divisor != 1:
            x_BTD = x_BTD / c.logit_divisor
        if c.tie_embeddings:
            logits_BTV = torch.einsum("BTD,VD->BTV", x_BTD, self.embedding).float()
        else:
            logits_BTV = self.head(x_BTD).float()
        if c.logit_softcap is not None:
            logits_BTV = c.logit_softcap * torch.tanh(logits_BTV / c.logit_softcap)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets)
        output = CausalLMOutputWithPast(loss, logits_BTV, past if use_cache else None)
        return output if return_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids,
        attention_mask=None,
        cache=None,
        past_key_values=None,
        use_cache=True,
        logits_to_keep=0,
        **others,
    ):
        """Return the arguments of `forward` for the tokens that are not in the cache yet."""
        past = cache or past_key_values
        if past is not None:
            input_ids = input_ids[:, past.get_seq_length() :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "cache": past,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `Past` is the cache
