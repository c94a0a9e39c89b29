"""The model: thin Linen modules that pass the parameters of lm/parameters.py to the pure functions of lm/layers.

Read Transformer first, then Block, Attention and FeedForward. From block to block goes a stream: a dict of arrays, "x"
(the residual stream) and whatever ideas carry. Ideas are one file each in lm/layers/variants, where the sites at which
they attach are listed. How the layers are repeated (unrolled, scanned, rematerialized) is in lm/layer_stack.py, how
positions see each other in lm/past.py, communication between devices in lm/parallel/collectives.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from lm import layer_stack, parameters
from lm.config import ResolvedModel, layer_windows
from lm.declarations import Table
from lm.layers import norms, position_encodings, variants
from lm.layers.attention import UNLIMITED
from lm.layers.dropout import dropout
from lm.layers.layer_norms import layer_norm
from lm.layers.linear import project
from lm.layers.losses import Head, head_logits
from lm.layers.variants import Here, at
from lm.parallel import collectives
from lm.past import Past

# Norms: (x, parameters, config) -> x.
NORMS = {
    "rms": lambda x, p, c: norms.rms_norm(x, p["scale_D"], eps=c.norm_eps),
    "layer": lambda x, p, c: layer_norm(
        x, p["scale_D"], p.get("bias_D"), eps=c.norm_eps, algorithm=c.norm_algorithm, ddof=c.norm_ddof
    ),
    "dyt": lambda x, p, c: norms.dyt(x, p["alpha"], p["scale_D"], p["bias_D"]),
}

# Position encodings: (positions, config, parameters) -> (what is added to the embeddings, the rotation of q and k).
POSITION_ENCODINGS = {
    "none": lambda at, c, p: (None, None),
    "learned": lambda at, c, p: (p["positions"][at], None),
    "sinusoidal": lambda at, c, p: (position_encodings.sinusoidal(at, c.d_model, order=c.sinusoidal_order), None),
    "rope": lambda at, c, p: (None, position_encodings.rope_table(
        at, c.rope_width or c.d_head, theta=c.rope_theta, scaling=c.rope_scaling, factor=c.rope_factor,
        low_freq_factor=c.rope_low_freq_factor, high_freq_factor=c.rope_high_freq_factor, beta_fast=c.rope_beta_fast,
        beta_slow=c.rope_beta_slow, original_max_positions=c.rope_original_max_positions, amplitude=c.rope_amplitude,
        max_positions=c.max_positions or 0,
    )),
}  # fmt: skip


@flax.struct.dataclass
class Context:
    """Inputs that all layers share in one call."""

    tokens_BT: jax.Array
    past: Past  # how positions see earlier ones
    rotation: tuple[jax.Array, jax.Array] | None  # cos and sin for queries and keys; None: no rotation
    window_rotation: tuple[jax.Array, jax.Array] | None  # those of layers with a window; None: `rotation`
    dropout_keys_B: jax.Array | None  # one key per example; None: no dropout
    # Called as tap(module, name, x) with each named intermediate; its result takes the place of x.
    tap: Callable = flax.struct.field(pytree_node=False)
    windows: tuple = flax.struct.field(pytree_node=False)  # the attention window of each layer; None: no window

    def window(self, layer):
        """Return the window of a layer. Traced layers have a static one if all are equal, as fused kernels need."""
        if isinstance(layer, int) or len(set(self.windows)) == 1:
            return self.windows[layer if isinstance(layer, int) else 0]
        return jnp.asarray([window or UNLIMITED for window in self.windows])[layer]

    def rotation_in(self, c: ResolvedModel, layer):
        """Return cos and sin in a layer, which are 1 and 0 in the layers that do not rotate."""
        found = self.rotation
        if self.window_rotation is not None:
            windowed = jnp.asarray(layer_windows(c), bool)[layer]
            found = jax.tree.map(functools.partial(jnp.where, windowed), self.window_rotation, found)
        if found is None or all(c.rope_pattern):
            return found
        rotates = jnp.asarray(c.rope_pattern, bool)[layer % len(c.rope_pattern)]
        return jnp.where(rotates, found[0], 1), jnp.where(rotates, found[1], 0)

    def dropout(self, x_BTD, rate: float, site: int):
        """Apply dropout at one numbered site of the model, where each example draws from its own key."""
        if self.dropout_keys_B is None or rate == 0:
            return x_BTD
        return dropout(x_BTD, jax.vmap(lambda key: jax.random.fold_in(key, site))(self.dropout_keys_B), rate)


def declare(module: nn.Module, table: Table) -> Table:
    """Return the module's parameters by name, gathered; parameters.init_params computes their initial values."""
    c = module.config

    def declared(path, p):
        w = module.param(path, lambda _: jnp.zeros(collectives.local_shape(p), c.param_dtype))
        # The backward pass sums the gradients of rows of embeddings, which would lose precision in 16 bits.
        dtype = c.param_dtype if p.kind == "embedding" else c.compute_dtype
        with jax.named_scope(path):  # names the communication in profiles
            return collectives.gather_parameter(w, p, dtype)

    return Table(type(module).__name__, {path: declared(path, p) for path, p in table.items()})


class Norm(nn.Module):
    """RMSNorm, LayerNorm, ... over the features of a position."""

    config: ResolvedModel

    @nn.compact
    def __call__(self, x_BTD):
        return NORMS[self.config.norm](x_BTD, declare(self, parameters.norm_table(self.config)), self.config)


class Attention(nn.Module):
    """Causal self-attention, or a mixer in its place, with its projections, QK-norm and rotation."""

    config: ResolvedModel
    like: int

    @nn.compact
    def __call__(self, x_BTD, stream: dict, context: Context, layer):
        c, p = self.config, declare(self, parameters.attention_table(self.config, self.like))
        here = Here(c, p, x_BTD, layer, self.like, context, self)
        q_BTHK = project(x_BTD, p["w_q_DHK"], p.get("b_q_HK"))
        k_BTGK = project(x_BTD, p["w_k_DGK"], p.get("b_k_GK"))
        v_BTGK = project(x_BTD, p["w_v_DGK"], p.get("b_v_GK"))
        if c.qk_norm:
            q_axes, k_axes = parameters.QK_NORM_AXES[c.qk_norm_over]
            q_BTHK = norms.rms_norm(q_BTHK, p[f"q_scale_{q_axes}"], eps=c.norm_eps)
            k_BTGK = norms.rms_norm(k_BTGK, p[f"k_scale_{k_axes}"], eps=c.norm_eps)
        if (rotation := context.rotation_in(c, layer)) is not None:
            q_BTHK = position_encodings.apply_rope(q_BTHK, *rotation, pairing=c.rope_pairing)
            k_BTGK = position_encodings.apply_rope(k_BTGK, *rotation, pairing=c.rope_pairing)
        scale = c.attn_scale or 1 / math.sqrt(c.d_head)
        scale = math.sqrt(c.mup_base_d_head) / c.d_head if c.parametrization == "mup" else scale
        options = {"softcap": c.attn_softcap, "scale": scale, "implementation": c.attention}
        stream, (q_BTHK, k_BTGK) = at(variants.QUERIES_KEYS, here, stream, (q_BTHK, k_BTGK))
        stream, v_BTGK = at(variants.VALUES, here, stream, v_BTGK)
        if (mixer := variants.mixer(c, self.like)) is None:
            stream, options = at(variants.SCORES, here, stream, options)
            o_BTHK = context.past.attend(self, q_BTHK, k_BTGK, v_BTGK, context.window(layer), **options)
        else:
            stream, o_BTHK = mixer.apply(here, stream, (q_BTHK, k_BTGK, v_BTGK))
        stream, o_BTHK = at(variants.HEADS, here, stream, o_BTHK, v_BTGK)
        o_BTHK = context.tap(self, "heads", o_BTHK)
        return stream, project(o_BTHK, p["w_o_HKD"], p.get("b_o_D"), n_in=2)


class FeedForward(nn.Module):
    """The MLP, the gated linear unit or another kind of lm/layers/variants."""

    config: ResolvedModel
    like: int

    @nn.compact
    def __call__(self, x_BTD, stream: dict, context: Context, layer):
        c, p = self.config, declare(self, parameters.ffn_table(self.config, self.like))
        here = Here(c, p, x_BTD, layer, self.like, context, self)
        kind = variants.feed_forward(c, self.like)
        return kind.apply(here, stream, x_BTD, lambda h_BTF: context.tap(self, "hidden", h_BTF))


class Block(nn.Module):
    """One layer: attention and feed-forward, each a branch of the residual stream.

    With the plain sum and norms at the inputs of the branches:

        x = x + dropout(Attention(norm(x)))
        x = x + dropout(FeedForward(norm(x)))

    `like` is a layer with the same parameters, known while tracing; `layer` may be traced.
    """

    config: ResolvedModel
    like: int

    @nn.compact
    def __call__(self, stream: dict, context: Context, layer) -> dict:
        c, residual = self.config, variants.RESIDUALS[self.config.residual]
        norms_at, _ = parameters.NORM_PLACEMENTS[c.norm_placement]
        p = declare(self, parameters.own_table(c, "block", self.like))

        def norm(place, name, x_BTD):
            return context.tap(self, f"{name}/output", Norm(c, name=name)(x_BTD)) if place in norms_at else x_BTD

        def branch(name, module, x_BTD, stream, site):
            stream, y_BTD = module(c, self.like, name=name)(x_BTD, stream, context, layer)
            y_BTD = y_BTD if c.residual_multiplier == 1 else y_BTD * c.residual_multiplier
            y_BTD = context.dropout(context.tap(self, f"{name}/output", y_BTD), c.dropout, site)
            stream = residual.add(here, stream, name, norm("output", f"{name}_post_norm", y_BTD))
            return stream | {"x": norm("sum", f"{name}_norm", stream["x"])}

        here = Here(c, p, stream["x"], layer, self.like, context, self)
        stream, x_BTD = at(variants.BLOCK_INPUT, here, stream, stream["x"])
        stream |= {"x": x_BTD}

        x_BTD = norm("both inputs", "norm", residual.read(here, stream, "attention"))
        stream = branch("attention", Attention, norm("input", "attention_norm", x_BTD), stream, 2 * layer + 1)
        if "both inputs" not in norms_at:
            x_BTD = residual.read(here, stream, "ffn")
        stream = branch("ffn", FeedForward, norm("input", "ffn_norm", x_BTD), stream, 2 * layer + 2)
        return stream | {"x": context.tap(self, "residual", stream["x"])}


class Transformer(nn.Module):
    """Decoder-only Transformer from token ids (B, T) to the stream after the final norm; its "x" is (B, T, D).

    The arguments of a call are those of `Context`.
    """

    config: ResolvedModel

    @nn.compact
    def __call__(self, tokens_BT, past: Past, dropout_keys_B=None, tap=lambda module, name, x: x) -> dict:
        c = self.config
        p = declare(self, parameters.own_table(c, "model"))
        at_T = collectives.local_positions(tokens_BT.shape[-1]) if past.positions is None else past.positions
        added, rotation = POSITION_ENCODINGS[c.positions](at_T, c, p)
        window_rotation = None
        if c.rope_window_theta is not None:
            own = dataclasses.replace(c, rope_theta=c.rope_window_theta, rope_scaling="none")
            _, window_rotation = POSITION_ENCODINGS[c.positions](at_T, own, p)
        windows = layer_stack.windows(c, tokens_BT.shape[-1] if past.positions is None else None)
        context = Context(tokens_BT, past, rotation, window_rotation, dropout_keys_B, tap, windows)
        x_BTD = p["embedding"][tokens_BT].astype(c.compute_dtype)
        x_BTD = x_BTD if c.embed_scale == 1 else x_BTD * c.embed_scale
        x_BTD = x_BTD if added is None else x_BTD + added.astype(x_BTD.dtype)
        x_BTD = context.dropout(tap(self, "embedding", x_BTD), c.dropout, site=0)

        here = Here(c, p, x_BTD, None, None, context, self)
        stream, x_BTD = at(variants.EMBEDDING, here, {}, x_BTD)
        stream |= variants.carried(c, x_BTD) | {"x": x_BTD}
        stream = layer_stack.apply_layers(Block, c, stream, context)
        x_BTD = stream["x"]
        if parameters.has_final_norm(c):
            x_BTD = tap(self, "final_norm/output", Norm(c, name="final_norm")(x_BTD))
        stream, x_BTD = at(variants.LAST_HIDDEN, here, stream, x_BTD)
        factor = parameters.width_factor(c) * c.logit_divisor
        return stream | {"x": x_BTD if factor == 1 else x_BTD / factor}


def head(params: dict, c: ResolvedModel) -> Head:
    """Return the output head; a tied one is the embedding table."""
    table = parameters.parameter_table(c)
    path = "embedding" if c.tie_embeddings else "head/w_DV"
    with jax.named_scope(path):
        w = collectives.gather_parameter(parameters.flat(params)[path], table[path], c.compute_dtype)
    return Head(w, params.get("head", {}).get("b_V"), softcap=c.logit_softcap, transposed=c.tie_embeddings)


def forward(params: dict, c: ResolvedModel, tokens_BT, *, positions=None, segments=None, past=None, **options):
    """Return the stream of the model after the final norm: "x" (B, T, D), and what ideas carry, such as loss terms.

    Args:
        params: nested dicts, as returned by parameters.init_params.
        c: model section of a resolved config.
        tokens_BT: integers (B, T).
        positions, segments: see `Past`.
        past: in place of both: how positions see earlier ones.
        **options: dropout_keys_B and tap, see `Context`. mutable=["intermediates"]: also return what hooks sow.
    """
    params = layer_stack.split_layers(params, c)
    return Transformer(c).apply({"params": params}, tokens_BT, past or Past(positions, segments), **options)


def hidden(params: dict, c: ResolvedModel, tokens_BT, **inputs):
    """Return the last hidden states (B, T, D), after the final norm. Arguments as for `forward`, but mutable."""
    return forward(params, c, tokens_BT, **inputs)["x"]


def logits(params: dict, c: ResolvedModel, tokens_BT, **inputs):
    """Return next-token logits (B, T, V) in float32. Arguments as for `forward`."""
    return head_logits(hidden(params, c, tokens_BT, **inputs), head(params, c))
