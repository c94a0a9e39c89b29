"""The model: a thin Linen shell that hands the parameters of lm/parameters.py to the pure functions of lm/layers."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm import parameters
from lm.config import ModelConfig, layer_windows
from lm.layers import feed_forward, norms
from lm.layers import position_encodings as positions
from lm.layers.attention import UNLIMITED, causal_attention
from lm.layers.dropout import dropout
from lm.layers.linear import PRODUCT, einsum
from lm.layers.losses import head_logits
from lm.parallel import collectives


class Context(NamedTuple):
    """What every layer of one call shares."""

    positions: jax.Array | None  # (T,) or (B, T) integers; None: 0 .. T-1
    segments: jax.Array | None  # (B, T) integers; tokens see their own segment only
    rotation: tuple[jax.Array, jax.Array] | None  # cos, sin for queries and keys
    dropout_keys_B: jax.Array | None  # one key an example; None: no dropout


# One entry makes a norm: (x, its parameters, config) -> x.
NORMS = {
    "rms": lambda x, p, c: norms.rms_norm(x, p["scale_D"], eps=c.norm_eps),
    "layer": lambda x, p, c: norms.layer_norm(
        x, p["scale_D"], p.get("bias_D"), eps=c.norm_eps, algorithm=c.norm_algorithm, ddof=c.norm_ddof
    ),
}

# One entry makes a position scheme: (positions p, config) -> (what the embeddings gain, the rotation of q and k).
POSITIONS = {
    "none": lambda p, c: (None, None),
    "learned": lambda p, c: (None, None),  # its table is a parameter: see Transformer
    "sinusoidal": lambda p, c: (positions.sinusoidal(p, c.d_model, order=c.sinusoidal_order), None),
    "rope": lambda p, c: (None, positions.rope_table(p, c.d_head, theta=c.rope_theta)),
}


def _declare(module: nn.Module, table: parameters.Table) -> dict:
    """The module's parameters by name, whole over fsdp; their values come from parameters.init_params."""
    c = module.config

    def declared(path, p):
        w = module.param(path, lambda _: jnp.zeros(collectives.local_shape(p), c.param_dtype))
        # Rows of embeddings are added up in the backward pass, which 16 bits would round off.
        dtype = c.param_dtype if p.kind == "embedding" else c.compute_dtype
        with jax.named_scope(path):  # names the communication in profiles, and in tests that count it
            return collectives.gather_parameter(w, p, dtype)

    return {path: declared(path, p) for path, p in table.items()}


class Norm(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        return NORMS[self.config.norm](x_BTD, _declare(self, parameters.norm_table(self.config)), self.config)


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, context: Context, window):
        c, p = self.config, _declare(self, parameters.attention_table(self.config))
        q_BTHK = einsum("...D,DHK->...HK", x_BTD, p["w_q_DHK"], p.get("b_q_HK"))
        k_BTGK = einsum("...D,DGK->...GK", x_BTD, p["w_k_DGK"], p.get("b_k_GK"))
        v_BTGK = einsum("...D,DGK->...GK", x_BTD, p["w_v_DGK"], p.get("b_v_GK"))
        if c.qk_norm:
            q_BTHK = norms.rms_norm(q_BTHK, p["q_scale_K"], eps=c.norm_eps)
            k_BTGK = norms.rms_norm(k_BTGK, p["k_scale_K"], eps=c.norm_eps)
        if context.rotation is not None:
            q_BTHK = positions.apply_rope(q_BTHK, *context.rotation, pairing=c.rope_pairing)
            k_BTGK = positions.apply_rope(k_BTGK, *context.rotation, pairing=c.rope_pairing)
        plain = context.positions is None
        at = collectives.local_positions(x_BTD.shape[-2]) if plain else context.positions
        segments = context.segments
        all_positions = collectives.gather_positions(at, -1)
        out_BTHK = causal_attention(
            q_BTHK,
            collectives.gather_keys(k_BTGK),
            collectives.gather_keys(v_BTGK),
            q_positions=at,
            k_positions=all_positions,
            q_segments=segments,
            k_segments=None if segments is None else collectives.gather_positions(segments, -1),
            window=window,
            softcap=c.attn_softcap,
            scale=math.sqrt(c.mup_base_d_head) / c.d_head if c.parametrization == "mup" else None,
            implementation=c.attention,
            contiguous=plain and segments is None and at.shape == all_positions.shape,
        )
        return einsum("...HK,HKD->...D", out_BTHK, p["w_o_HKD"], p.get("b_o_D"))


class FeedForward(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        c, p = self.config, _declare(self, parameters.ffn_table(self.config))
        if c.ffn == "mlp":
            weights, biases = (p["w_in_DF"], p["w_out_FD"]), {"b_in": p.get("b_in_F"), "b_out": p.get("b_out_D")}
            return feed_forward.mlp(x_BTD, *weights, activation=c.activation, **biases)
        weights = p["w_gate_DF"], p["w_up_DF"], p["w_down_FD"]
        biases = {"b_gate": p.get("b_gate_F"), "b_up": p.get("b_up_F"), "b_down": p.get("b_down_D")}
        return feed_forward.glu(x_BTD, *weights, activation=c.activation, **biases)


class Block(nn.Module):
    """One layer: attention and feed-forward, each a branch of the residual stream, with norms where the config says.

    pre: x + f(norm x) (Radford et al. 2019). post: norm(x + f(x)) (Vaswani et al. 2017). sandwich: x + norm(f(norm x))
    (Ding et al. 2021). parallel: x + attn(norm x) + ffn(norm x) (Wang and Komatsuzaki 2021). none: x + f(x).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, context: Context, layer, window):
        c = self.config

        def attention(x):
            y = Attention(c, name="attention")(x, context, window)
            return self._dropout(y, context, 2 * layer + 1)

        def ffn(x):
            return self._dropout(FeedForward(c, name="ffn")(x), context, 2 * layer + 2)

        def norm(name, x):
            return Norm(c, name=name)(x)

        if c.norm_placement == "pre":
            x_BTD = x_BTD + attention(norm("attention_norm", x_BTD))
            x_BTD = x_BTD + ffn(norm("ffn_norm", x_BTD))
        elif c.norm_placement == "post":
            x_BTD = norm("attention_norm", x_BTD + attention(x_BTD))
            x_BTD = norm("ffn_norm", x_BTD + ffn(x_BTD))
        elif c.norm_placement == "sandwich":
            x_BTD = x_BTD + norm("attention_post_norm", attention(norm("attention_norm", x_BTD)))
            x_BTD = x_BTD + norm("ffn_post_norm", ffn(norm("ffn_norm", x_BTD)))
        elif c.norm_placement == "parallel":
            y_BTD = norm("norm", x_BTD)
            x_BTD = x_BTD + attention(y_BTD) + ffn(y_BTD)
        else:
            x_BTD = x_BTD + attention(x_BTD)
            x_BTD = x_BTD + ffn(x_BTD)
        self.sow("intermediates", "x_BTD", x_BTD)
        return x_BTD

    def _dropout(self, y_BTD, context: Context, site):
        return _dropout(self.config, y_BTD, context.dropout_keys_B, site)


class Transformer(nn.Module):
    """Decoder-only Transformer: token ids (B, T) to the last hidden states (B, T, D); `logits` turns these into logits.

    positions: integers (T,) or (B, T), 0 .. T-1 if not given. segments: (B, T), documents that must not see each other.
    dropout_keys_B: one key per example; without them there is no dropout.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, *, positions=None, segments=None, dropout_keys_B=None):
        c = self.config
        table = parameters.parameter_table(c)
        outer = _declare(self, {path: p for path, p in table.items() if "/" not in path})
        given = collectives.local_positions(tokens_BT.shape[-1]) if positions is None else positions
        added, rotation = POSITIONS[c.positions](given, c)
        if c.positions == "learned":
            added = outer["positions"][given]
        x_BTD = outer["embedding"][tokens_BT].astype(c.compute_dtype)
        if added is not None:
            x_BTD = x_BTD + added.astype(x_BTD.dtype)
        x_BTD = _dropout(c, x_BTD, dropout_keys_B, 0)
        context = Context(positions, segments, rotation, dropout_keys_B)
        x_BTD = self._blocks(x_BTD, context)
        if "final_norm/scale_D" in table:
            x_BTD = Norm(c, name="final_norm")(x_BTD)
        factor = parameters.width_factor(c)
        return x_BTD if factor == 1 else x_BTD / factor

    def _blocks(self, x_BTD, context: Context):
        c = self.config
        # A window that nothing lies beyond is none: the same program, and a sweep can tell that it changes nothing.
        seq_len = collectives.global_seq_len(x_BTD.shape[-2]) if context.positions is None else UNLIMITED
        windows = [w if w < seq_len else 0 for w in layer_windows(c)]
        if not c.scan_layers:
            block = _rematerialized(c, static_window=True)
            for i, window in enumerate(windows):
                x_BTD = block(c, name=f"layers_{i}")(x_BTD, context, i, window or None)
            return x_BTD
        same = len(set(windows)) == 1  # a window that does not vary stays static, which fused kernels need
        block = _rematerialized(c, static_window=same)
        window_N = jnp.asarray([w or UNLIMITED for w in windows])
        scanned = nn.scan(
            lambda module, x, layer, window: (
                module(x, context, layer, (windows[0] or None) if same else window),
                None,
            ),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={},
            length=c.n_layers,
        )
        return scanned(block(c, name="layers"), x_BTD, jnp.arange(c.n_layers), window_N)[0]


def _rematerialized(c: ModelConfig, static_window: bool) -> type[Block]:
    """Block, recomputing in the backward pass what config.remat says, and always completing its parameters anew."""
    if c.remat == "none" and not collectives.gathers_parameters():
        return Block
    policies = jax.checkpoint_policies
    policy = {
        "none": collectives.keep_all_but_gathered,
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(PRODUCT)
        ),
        "block": policies.nothing_saveable,
    }[c.remat]
    static = (4,) if static_window else ()  # the window's place among the arguments of Block.__call__
    return nn.remat(Block, policy=policy, prevent_cse=not c.scan_layers, static_argnums=static)


def _dropout(c: ModelConfig, y_BTD, keys_B, site):
    """Dropout at one site of the model; the key of an example's draw is its own key and the site's number."""
    if keys_B is None or c.dropout == 0:
        return y_BTD
    return dropout(y_BTD, jax.vmap(lambda key: jax.random.fold_in(key, site))(keys_B), c.dropout)


def head(params: dict, c: ModelConfig) -> tuple[jax.Array, jax.Array | None]:
    """The head's weight, (V, D) if tied and (D, V) if not, and its bias (V,) or None."""
    table = parameters.parameter_table(c)
    path = "embedding" if c.tie_embeddings else "head/w_DV"
    with jax.named_scope(path):
        w = collectives.gather_parameter(parameters.flat(params)[path], table[path], c.compute_dtype)
    return w, None if c.tie_embeddings else params["head"].get("b_V")


def hidden(params: dict, c: ModelConfig, tokens_BT, **inputs):
    """The last hidden states (B, T, D), after the final norm; `inputs` as for Transformer.

    params: nested dicts as parameters.init_params makes them. mutable=["intermediates"]: also what the layers sowed.
    """
    params = params if c.scan_layers else parameters.unstack_layers(params)
    return Transformer(c).apply({"params": params}, tokens_BT, **inputs)


def logits(params: dict, c: ModelConfig, tokens_BT, **inputs):
    """Next-token logits (B, T, V) in float32; `inputs` as for Transformer."""
    h_BTD, (w, b) = hidden(params, c, tokens_BT, **inputs), head(params, c)
    return head_logits(h_BTD, w, b, softcap=c.logit_softcap, transposed=c.tie_embeddings)
