"""The model: thin Linen modules that pass the parameters of lm/parameters.py to the pure functions of lm/layers.

Read Transformer first, then Block, Attention and FeedForward. How the layers are repeated (unrolled, scanned,
rematerialized) is in lm/layer_stack.py, communication between devices in lm/parallel/collectives.py.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax

from lm import layer_stack, parameters
from lm.config import ModelConfig
from lm.layers import feed_forward, norms, position_encodings
from lm.layers.attention import Mask, causal_attention
from lm.layers.dropout import dropout
from lm.layers.linear import project
from lm.layers.losses import Head, head_logits
from lm.layers.norm_placements import NORM_PLACEMENTS
from lm.linen import declare
from lm.parallel import collectives

# Norms: (x, parameters, config) -> x.
NORMS = {
    "rms": lambda x, p, c: norms.rms_norm(x, p["scale_D"], eps=c.norm_eps),
    "layer": lambda x, p, c: norms.layer_norm(
        x, p["scale_D"], p.get("bias_D"), eps=c.norm_eps, algorithm=c.norm_algorithm, ddof=c.norm_ddof
    ),
}

# Position encodings: (positions, config, parameters) -> (what is added to the embeddings, the rotation of q and k).
POSITION_ENCODINGS = {
    "none": lambda at, c, p: (None, None),
    "learned": lambda at, c, p: (p["positions"][at], None),
    "sinusoidal": lambda at, c, p: (position_encodings.sinusoidal(at, c.d_model, order=c.sinusoidal_order), None),
    "rope": lambda at, c, p: (None, position_encodings.rope_table(
        at, c.rope_width or c.d_head, theta=c.rope_theta, scaling=c.rope_scaling, factor=c.rope_factor,
        low_freq_factor=c.rope_low_freq_factor, high_freq_factor=c.rope_high_freq_factor,
        original_max_positions=c.rope_original_max_positions,
    )),
}  # fmt: skip

# Feed-forward layers: (x, parameters, activation, tap of the hidden activations) -> x.
FEED_FORWARDS = {
    "mlp": lambda x, p, activation, tap: feed_forward.mlp(
        x, p["w_in_DF"], p["w_out_FD"], activation=activation, b_in=p.get("b_in_F"), b_out=p.get("b_out_D"), tap=tap
    ),
    "glu": lambda x, p, activation, tap: feed_forward.glu(
        x, p["w_gate_DF"], p["w_up_DF"], p["w_down_FD"], activation=activation,
        b_gate=p.get("b_gate_F"), b_up=p.get("b_up_F"), b_down=p.get("b_down_D"), tap=tap,
    ),
}  # fmt: skip


@flax.struct.dataclass
class Context:
    """Inputs that all layers share in one call.

    `tap(module, name, x)` is called with each named intermediate, and its result takes the place of x; see
    lm/interpret/. `attend` replaces the computation of attention; see lm/generation/kv_cache.py.
    """

    positions: jax.Array | None  # integers (T,) or (B, T); None: 0 .. T-1
    segments: jax.Array | None  # integers (B, T): tokens see their own segment only
    rotation: tuple[jax.Array, jax.Array] | None  # cos and sin for queries and keys
    dropout_keys_B: jax.Array | None  # one key per example; None: no dropout
    attend: Callable | None = flax.struct.field(pytree_node=False, default=None)
    tap: Callable = flax.struct.field(pytree_node=False, default=lambda module, name, x: x)

    def mask(self, n_tokens: int, window) -> Mask:
        """Return which keys the n_tokens queries of this device see, among the keys of all devices of a sequence."""
        positions = collectives.local_positions(n_tokens) if self.positions is None else self.positions
        k_positions = collectives.gather_sequence(positions, -1)
        k_segments = None if self.segments is None else collectives.gather_sequence(self.segments, -1)
        contiguous = self.positions is None and self.segments is None and positions.shape == k_positions.shape
        return Mask(positions, k_positions, self.segments, k_segments, window, contiguous)

    def dropout(self, x_BTD, rate: float, site: int):
        """Apply dropout at one numbered site of the model, where each example draws from its own key."""
        if self.dropout_keys_B is None or rate == 0:
            return x_BTD
        return dropout(x_BTD, jax.vmap(lambda key: jax.random.fold_in(key, site))(self.dropout_keys_B), rate)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the features of a position."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        return NORMS[self.config.norm](x_BTD, declare(self, parameters.norm_table(self.config)), self.config)


class Attention(nn.Module):
    """Causal self-attention with its projections, QK-norm and rotation of queries and keys."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, context: Context, window):
        c, p = self.config, declare(self, parameters.attention_table(self.config))
        q_BTHK = project(x_BTD, p["w_q_DHK"], p.get("b_q_HK"))
        k_BTGK = project(x_BTD, p["w_k_DGK"], p.get("b_k_GK"))
        v_BTGK = project(x_BTD, p["w_v_DGK"], p.get("b_v_GK"))
        if c.qk_norm:
            q_axes, k_axes = parameters.QK_NORM_AXES[c.qk_norm_over]
            q_BTHK = norms.rms_norm(q_BTHK, p[f"q_scale_{q_axes}"], eps=c.norm_eps)
            k_BTGK = norms.rms_norm(k_BTGK, p[f"k_scale_{k_axes}"], eps=c.norm_eps)
        if context.rotation is not None:
            q_BTHK = position_encodings.apply_rope(q_BTHK, *context.rotation, pairing=c.rope_pairing)
            k_BTGK = position_encodings.apply_rope(k_BTGK, *context.rotation, pairing=c.rope_pairing)
        scale = math.sqrt(c.mup_base_d_head) / c.d_head if c.parametrization == "mup" else c.attn_scale
        options = {"softcap": c.attn_softcap, "scale": scale, "implementation": c.attention}
        if context.attend is not None:
            out_BTHK = context.attend(self, q_BTHK, k_BTGK, v_BTGK, window, **options)
        else:
            k_BSGK, v_BSGK = collectives.gather_keys(k_BTGK), collectives.gather_keys(v_BTGK)
            mask = context.mask(x_BTD.shape[-2], window)
            out_BTHK = causal_attention(q_BTHK, k_BSGK, v_BSGK, mask, **options)
        return project(out_BTHK, p["w_o_HKD"], p.get("b_o_D"), n_in=2)


class FeedForward(nn.Module):
    """The MLP or gated linear unit."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, context: Context):
        c, p = self.config, declare(self, parameters.ffn_table(self.config))
        return FEED_FORWARDS[c.ffn](x_BTD, p, c.activation, lambda h_BTF: context.tap(self, "hidden", h_BTF))


class Block(nn.Module):
    """One layer: attention and feed-forward, each a branch of the residual stream."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, context: Context, layer, window):
        c = self.config

        def attention(x_BTD):
            y_BTD = Attention(c, name="attention")(x_BTD, context, window)
            return context.dropout(context.tap(self, "attention/output", y_BTD), c.dropout, 2 * layer + 1)

        def ffn(x_BTD):
            y_BTD = FeedForward(c, name="ffn")(x_BTD, context)
            return context.dropout(context.tap(self, "ffn/output", y_BTD), c.dropout, 2 * layer + 2)

        def norm(name, x_BTD):
            return context.tap(self, f"{name}/output", Norm(c, name=name)(x_BTD))

        x_BTD = NORM_PLACEMENTS[c.norm_placement](x_BTD, attention, ffn, norm)
        return context.tap(self, "residual", x_BTD)


class Transformer(nn.Module):
    """Decoder-only Transformer from token ids (B, T) to the last hidden states (B, T, D).

    Call arguments:
        tokens_BT: integers (B, T).
        positions: integers (T,) or (B, T); None: 0 .. T-1.
        segments: integers (B, T), documents that must not see each other; None: one document.
        dropout_keys_B: one key per example; None: no dropout.
        attend: a function (module, q, k, v, window, **options) -> output that replaces attention over the tokens.
        tap: a function (module, name, x) -> x that observes or replaces named intermediates.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, *, positions=None, segments=None, dropout_keys_B=None, **hooks):
        c = self.config
        table = parameters.parameter_table(c)
        p = declare(self, {path: declared for path, declared in table.items() if "/" not in path})
        at = collectives.local_positions(tokens_BT.shape[-1]) if positions is None else positions
        added, rotation = POSITION_ENCODINGS[c.positions](at, c, p)
        context = Context(positions, segments, rotation, dropout_keys_B, **hooks)
        x_BTD = p["embedding"][tokens_BT].astype(c.compute_dtype)
        x_BTD = x_BTD if c.embed_scale == 1 else x_BTD * c.embed_scale
        x_BTD = x_BTD if added is None else x_BTD + added.astype(x_BTD.dtype)
        x_BTD = context.dropout(context.tap(self, "embedding", x_BTD), c.dropout, site=0)
        x_BTD = layer_stack.apply_layers(Block, c, x_BTD, context)
        if parameters.has_final_norm(c):
            x_BTD = context.tap(self, "final_norm/output", Norm(c, name="final_norm")(x_BTD))
        factor = parameters.width_factor(c)
        return x_BTD if factor == 1 else x_BTD / factor


def head(params: dict, c: ModelConfig) -> Head:
    """Return the output head; a tied one is the embedding table."""
    table = parameters.parameter_table(c)
    path = "embedding" if c.tie_embeddings else "head/w_DV"
    with jax.named_scope(path):
        w = collectives.gather_parameter(parameters.flat(params)[path], table[path], c.compute_dtype)
    return Head(w, params.get("head", {}).get("b_V"), softcap=c.logit_softcap, transposed=c.tie_embeddings)


def hidden(params: dict, c: ModelConfig, tokens_BT, **inputs):
    """Return the last hidden states (B, T, D), after the final norm.

    Args:
        params: nested dicts, as returned by parameters.init_params.
        c: model section of a resolved config.
        tokens_BT: integers (B, T).
        **inputs: see Transformer. mutable=["intermediates"]: also return what its hooks sow.
    """
    params = params if c.scan_layers else layer_stack.unstack_layers(params)
    return Transformer(c).apply({"params": params}, tokens_BT, **inputs)


def logits(params: dict, c: ModelConfig, tokens_BT, **inputs):
    """Return next-token logits (B, T, V) in float32. Arguments as for `hidden`."""
    return head_logits(hidden(params, c, tokens_BT, **inputs), head(params, c))
