"""The model: from token ids to logits, as equations of the parameters, top to bottom.

    1. The block: how attention and the feed-forward layer read the residual stream and add to it.
    2. Attention and the feed-forward layer, each below the declaration of its parameters.
    3. The model: embeddings, blocks, final norm, output head.

Functions of a layer get `here`, their environment (lm/here.py): config, parameters, and what ideas
carry. Ideas are one file each in lm/ideas; they attach where `at("...", here, x)` stands.
`here.tap(name, x)` returns x, or what an observer puts in its place. A module is a group of
parameters with one name: the model, a block, a norm, "attention" or another mixer, "ffn".

How the block is repeated (unrolled, scanned, rematerialized) is in lm/layer_stack.py, how positions
see each other in lm/past.py. All parameters and their initial values are in lm/parameters.py, the
model as a Flax module is in lm/linen.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from lm import ideas, layer_stack
from lm.config import (
    Branch,
    ResolvedModel,
    branches_of,
    mixer_of,
    present_mixers,
    query_heads,
    turns,
    width_factor,
)
from lm.declarations import INITIALIZERS, Parameter, Table, bias, flat, gain, small_weight, weight
from lm.here import Here, unchanged
from lm.ideas import at
from lm.layers import norms, position_encodings
from lm.layers.attention import causal_attention
from lm.layers.feed_forward import activate, gated
from lm.layers.layer_norms import layer_norm
from lm.layers.linear import einsum
from lm.layers.losses import Head, head_logits
from lm.parallel import collectives
from lm.past import Past

# ---- 1. The block --------------------------------------------------------------------------------
#
# x is the residual stream (B, T, D). branches are {"attention": f, "ffn": g}, in the order of
# config.model.branches; norm(name, x) is a norm with its own parameters.


def pre(x, branches, norm):
    """Radford et al. 2019 (GPT-2)."""
    for name, f in branches.items():
        x = x + f(norm(f"{name}_norm", x))
    return x


def post(x, branches, norm):
    """Vaswani et al. 2017."""
    for name, f in branches.items():
        x = norm(f"{name}_norm", x + f(x))
    return x


def sandwich(x, branches, norm):
    """Ding et al. 2021 (CogView)."""
    for name, f in branches.items():
        x = x + norm(f"{name}_post_norm", f(norm(f"{name}_norm", x)))
    return x


def output(x, branches, norm):
    """OLMo et al. 2025, arXiv:2501.00656 (OLMo 2)."""
    for name, f in branches.items():
        x = x + norm(f"{name}_post_norm", f(x))
    return x


def parallel(x, branches, norm):
    """Wang and Komatsuzaki 2021 (GPT-J)."""
    h = norm("norm", x)
    for f in branches.values():
        x = x + f(h)
    return x


def none(x, branches, norm):
    """Without norms."""
    for f in branches.values():
        x = x + f(x)
    return x


# by config.model.norm_placement
BLOCKS = {f.__name__: f for f in (pre, post, sandwich, output, parallel, none)}


def has_final_norm(c: ResolvedModel) -> bool:
    """Return whether a norm follows the last block."""
    return c.norm_placement not in ("post", "none")


def norm_names(c: ResolvedModel) -> list[str]:
    """Return the names of the norms of a block, which calls each of them once.

    >>> from lm.config import ModelConfig
    >>> norm_names(ModelConfig(norm_placement="sandwich"))
    ['attention_norm', 'attention_post_norm', 'ffn_norm', 'ffn_post_norm']
    """
    names = []

    def norm(name, x):
        names.append(name)
        return x

    # The block runs on a number, only to call its norms.
    nothing = {branch.name: lambda x: x for branch in branches_of(c)}
    BLOCKS[c.norm_placement](0, nothing, norm)
    return names


def block(params: dict, here: Here) -> tuple[dict, dict]:
    """Apply one layer. Returns the stream and the memory (see `Here`) after it."""
    c, stream = here.c, here.stream
    own = gathered(params, own_table(c, "block", here.prototype), c)
    here = here.replace(p=own.with_outer(here.p))

    def of_branch(branch):
        module, table, function = part(c, branch, here.prototype)

        def apply(x):
            p = gathered(params[module], table, c)
            with jax.named_scope(module):
                y = function(here.inside(module, p, x), x)
            factor = branch.factor * c.residual_multiplier
            y = y if factor == 1 else y * factor
            place = 1 + len(c.branches) * here.depth + branch.number  # 0: the embedding
            return here.dropout(here.tap(f"{branch.name}/output", y), place)

        return apply

    def norm(name, x):
        with jax.named_scope(name):
            return here.tap(f"{name}/output", normalize(c, params[name], x))

    branches = {branch.name: of_branch(branch) for branch in branches_of(c)}
    x = at("block_input", here.replace(x_BTD=stream["x"]), stream["x"])
    residual = ideas.RESIDUALS[c.residual]
    if residual is None:
        x = BLOCKS[c.norm_placement](x, branches, norm)
    else:
        normed = {name: with_norms(c, name, f, norm) for name, f in branches.items()}
        x = residual.block(here, x, normed)
    stream["x"] = here.tap("residual", x)
    return stream, here.memory


def part(c: ResolvedModel, branch: Branch, layer: int) -> tuple[str, Table, Callable]:
    """Return the module of a branch in a layer, its table, and its function (here, x) -> y."""
    if branch.kind == "ffn":
        return branch.name, ffn_table(c, layer), feed_forward
    kind = mixer_of(c, layer)
    return mixer_module(branch, kind), mixer_table(c, kind, layer), MIXERS[kind].apply


def with_norms(c: ResolvedModel, name: str, branch: Callable, norm: Callable) -> Callable:
    """Return a branch together with its norms, for blocks that do not add it to a plain sum."""

    def normed(x):
        if c.norm_placement in ("pre", "sandwich"):
            x = norm(f"{name}_norm", x)
        y = branch(x)
        if c.norm_placement in ("sandwich", "output"):
            y = norm(f"{name}_post_norm", y)
        return y

    return normed


# ---- 2. Norms, attention, feed-forward layer -----------------------------------------------------

# Norms: (x, parameters, config) -> x.
NORMS = {
    "rms": lambda x, p, c: norms.rms_norm(x, p["scale_D"], eps=c.norm_eps),
    "layer": lambda x, p, c: layer_norm(
        x,
        p["scale_D"],
        p.get("bias_D"),
        eps=c.norm_eps,
        algorithm=c.norm_algorithm,
        ddof=c.norm_ddof,
    ),
    "dyt": lambda x, p, c: norms.dyt(x, p["alpha"], p["scale_D"], p["bias_D"]),
}


def norm_table(c: ResolvedModel) -> Table:
    """Return the parameters of a norm."""
    table = {"scale_D": gain((c.d_model,), "D")}
    if c.norm == "dyt":
        table["alpha"] = small_weight((), "", init="ones", std=0.5)
    if c.norm == "dyt" or (c.norm == "layer" and c.norm_bias):
        table["bias_D"] = bias((c.d_model,), "D")
    return Table("the parameter table of a norm", table)


def normalize(c: ResolvedModel, params: dict, x_BTD):
    """Return RMSNorm, LayerNorm, ... over the features of each position."""
    return NORMS[c.norm](x_BTD, gathered(params, norm_table(c), c), c)


# The axes of the gains of queries and keys, by config.model.qk_norm_over. The mean of the norm is
# over the same axes.
QK_NORM_AXES = {"head": ("K", "K"), "all_heads": ("HK", "GK")}


def attention_parameters(c: ResolvedModel) -> dict[str, Parameter]:
    """Return the parameters of attention, without those of ideas."""
    D, H, G, K = c.d_model, query_heads(c), c.n_kv_heads, c.d_head
    table = {
        "w_q_DHK": weight(c, (D, H, K), "DHK"),
        "w_k_DGK": weight(c, (D, G, K), "DGK"),
        "w_v_DGK": weight(c, (D, G, K), "DGK"),
        "w_o_HKD": weight(c, (c.n_heads, K, D), "HKD", contract="HK", residual=True),
    }
    if c.attn_bias:
        table["b_q_HK"] = bias((H, K), "HK")
        table["b_k_GK"] = bias((G, K), "GK")
        table["b_v_GK"] = bias((G, K), "GK")
    if c.attn_bias if c.attn_out_bias is None else c.attn_out_bias:
        table["b_o_D"] = bias((D,), "D")
    if c.qk_norm:
        shapes = {"K": (K,), "HK": (H, K), "GK": (G, K)}
        q_axes, k_axes = QK_NORM_AXES[c.qk_norm_over]
        table[f"q_scale_{q_axes}"] = gain(shapes[q_axes], q_axes)
        table[f"k_scale_{k_axes}"] = gain(shapes[k_axes], k_axes)
    return table


def attention(here: Here, x_BTD):
    """Return softmax(q k^T / sqrt(K)) v of each head, projected to the residual stream."""
    c, p = here.c, here.p
    with jax.named_scope("queries_keys_values"):
        q_BTHK = einsum("BTD,DHK->BTHK", x_BTD, p["w_q_DHK"], p.get("b_q_HK"))
        k_BTGK = einsum("BTD,DGK->BTGK", x_BTD, p["w_k_DGK"], p.get("b_k_GK"))
        v_BTGK = einsum("BTD,DGK->BTGK", x_BTD, p["w_v_DGK"], p.get("b_v_GK"))
    if c.qk_norm:
        with jax.named_scope("norm_of_queries_and_keys"):
            q_axes, k_axes = QK_NORM_AXES[c.qk_norm_over]
            q_BTHK = norms.rms_norm(q_BTHK, p[f"q_scale_{q_axes}"], eps=c.norm_eps)
            k_BTGK = norms.rms_norm(k_BTGK, p[f"k_scale_{k_axes}"], eps=c.norm_eps)
    rotation = here.rotation_of_layer()
    if rotation is not None:
        with jax.named_scope("rotation"):
            q_BTHK = position_encodings.apply_rope(q_BTHK, *rotation, pairing=c.rope_pairing)
            k_BTGK = position_encodings.apply_rope(k_BTGK, *rotation, pairing=c.rope_pairing)
    q_BTHK, k_BTGK = at("queries_keys", here, (q_BTHK, k_BTGK))
    v_BTGK = at("values", here, v_BTGK)

    other = ideas.in_place_of_softmax(c, here.prototype)
    if other is None:
        with jax.named_scope("softmax_of_scores_times_values"):
            o_BTHK = softmax_attention(here, q_BTHK, k_BTGK, v_BTGK)
    else:
        o_BTHK = other.apply(here, (q_BTHK, k_BTGK, v_BTGK))
    o_BTHK = here.tap("heads", at("heads", here, o_BTHK, v_BTGK))
    with jax.named_scope("output_projection"):
        return einsum("BTHK,HKD->BTD", o_BTHK, p["w_o_HKD"], p.get("b_o_D"))


def softmax_attention(here: Here, q_BTHK, k_BTGK, v_BTGK):
    """Return softmax(scale q k^T) v over the keys that each query sees, (B, T, H, K)."""
    c = here.c
    q_BTHK = here.tap("q", q_BTHK)
    k_BSGK, mask = here.earlier("k", here.tap("k", k_BTGK), window=here.window())
    v_BSGK, _ = here.earlier("v", here.tap("v", v_BTGK), window=here.window())
    options = {"softcap": c.attn_softcap, "scale": score_scale(c)}
    options = here.past.observed(here, q_BTHK, k_BSGK, mask, at("scores", here, options))
    return causal_attention(q_BTHK, k_BSGK, v_BSGK, mask, **options, implementation=c.attention)


def score_scale(c: ResolvedModel) -> float:
    """Return the factor of attention scores."""
    if c.parametrization == "mup":
        return math.sqrt(c.mup_base_d_head) / c.d_head
    return c.attn_scale or 1 / math.sqrt(c.d_head)


def attention_products(c: ResolvedModel, n_keys: float) -> float:
    """Return the multiplications and additions of q k^T and of the weighted sum of v."""
    return 2 * query_heads(c) * c.d_head * n_keys


class Mixer(NamedTuple):
    """What lets positions see each other in a branch, with projections of its own.

    The files of `ideas.MIXERS` have functions with these names.
    """

    table: Callable  # config -> {name: Parameter}
    products: Callable  # (config, keys of a query) -> products of a token besides those of weights
    apply: Callable  # (here, x_BTD) -> y_BTD


MIXERS = {"attention": Mixer(attention_parameters, attention_products, attention)} | ideas.MIXERS


def mixer_table(c: ResolvedModel, kind: str, layer: int | None = None) -> Table:
    """Return the parameters of a mixer in a layer; None: in any layer that has it."""
    table = in_layers(MIXERS[kind].table(c), ideas.mixing_layers(c, kind))
    if kind == "attention":
        table = _joined(table, ideas.declared(c, "attention"))
    return Table(f"the parameter table of {kind}", of_layer(table, layer))


def mixer_module(branch: Branch, kind: str) -> str:
    """Return the module of a mixer: "attention", "latent", or "latent_2" in a second branch."""
    return branch.name.replace("attention", kind, 1)


def mlp_table(c: ResolvedModel) -> dict[str, Parameter]:
    D, F = c.d_model, c.d_ff
    table = {
        "w_in_DF": weight(c, (D, F), "DF"),
        "w_out_FD": weight(c, (F, D), "FD", contract="F", residual=True),
    }
    if c.ffn_bias:
        table |= {"b_in_F": bias((F,), "F"), "b_out_D": bias((D,), "D")}
    return table


def mlp(here: Here, x_BTD):
    """Return activation(x w_in + b_in) w_out + b_out."""
    c, p = here.c, here.p
    h_BTF = activate(einsum("BTD,DF->BTF", x_BTD, p["w_in_DF"], p.get("b_in_F")), c.activation)
    h_BTF = here.tap("hidden", at("ffn_hidden", here, h_BTF))
    return einsum("BTF,FD->BTD", h_BTF, p["w_out_FD"], p.get("b_out_D"))


def glu_table(c: ResolvedModel) -> dict[str, Parameter]:
    D, F = c.d_model, c.d_ff
    table = {
        "w_gate_DF": weight(c, (D, F), "DF"),
        "w_up_DF": weight(c, (D, F), "DF"),
        "w_down_FD": weight(c, (F, D), "FD", contract="F", residual=True),
    }
    if c.ffn_bias:
        table |= {
            "b_gate_F": bias((F,), "F"),
            "b_up_F": bias((F,), "F"),
            "b_down_D": bias((D,), "D"),
        }
    return table


def glu(here: Here, x_BTD):
    """Return (activation(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down; silu: SwiGLU."""
    c, p = here.c, here.p
    gate_BTF = einsum("BTD,DF->BTF", x_BTD, p["w_gate_DF"], p.get("b_gate_F"))
    up_BTF = einsum("BTD,DF->BTF", x_BTD, p["w_up_DF"], p.get("b_up_F"))
    h_BTF = gated(gate_BTF, up_BTF, c.activation)
    h_BTF = here.tap("hidden", at("ffn_hidden", here, h_BTF))
    return einsum("BTF,FD->BTD", h_BTF, p["w_down_FD"], p.get("b_down_D"))


FEED_FORWARDS = {"mlp": (mlp_table, mlp), "glu": (glu_table, glu)}


def feed_forward(here: Here, x_BTD):
    """Return the output of the feed-forward layer, or of the idea in its place."""
    idea = ideas.feed_forward(here.c, here.prototype)
    if idea is not None:
        if ideas.applied("ffn_hidden", here.c):
            raise ValueError(
                f"ideas of the site ffn_hidden need an MLP or a GLU, not ffn = {here.c.ffn}"
            )
        return idea.apply(here, x_BTD)
    _, function = FEED_FORWARDS[plain_feed_forward(here.c)]
    return function(here, x_BTD)


def plain_feed_forward(c: ResolvedModel) -> str:
    """Return the kind of the feed-forward layers in which no idea takes their place."""
    return ideas.FEED_FORWARDS[c.ffn].OTHERS if c.ffn in ideas.FEED_FORWARDS else c.ffn


def default_d_ff(c) -> int:
    """Return 4 d_model for an MLP, and for others 8/3 d_model, as many weights, in multiples of 64.

    >>> from lm.config import ModelConfig
    >>> default_d_ff(ModelConfig(ffn="glu", d_model=512))
    1344
    """
    if c.ffn == "mlp":
        return 4 * c.d_model
    return max(64, (8 * c.d_model + 96) // 192 * 64)  # floor(8 d / 3 / 64 + 1/2) * 64 in integers


def ffn_table(c: ResolvedModel, layer: int | None = None) -> Table:
    """Return the parameters of the feed-forward layer in a layer; None: in any layer."""
    layers: Sequence[int] = range(c.n_layers)
    if c.ffn not in FEED_FORWARDS:
        layers = tuple(i for i in layers if ideas.feed_forward(c, i) is None)
    table: dict[str, Parameter] = {}
    if layers or not c.n_layers:
        own, _ = FEED_FORWARDS[plain_feed_forward(c)]
        table = in_layers(own(c), layers)
    table = _joined(table, ideas.declared(c, "ffn"))
    return Table("the parameter table of the feed-forward layer", of_layer(table, layer))


# ---- 3. The model --------------------------------------------------------------------------------

# Position encodings: (positions, config, parameters) -> (what is added to the embeddings, the
# rotation of q and k).
POSITION_ENCODINGS = {
    "none": lambda positions, c, p: (None, None),
    "learned": lambda positions, c, p: (p["positions"][positions], None),
    "sinusoidal": lambda positions, c, p: (
        position_encodings.sinusoidal(positions, c.d_model, order=c.sinusoidal_order),
        None,
    ),
    "rope": lambda positions, c, p: (None, rotation_angles(positions, c)),
}


def rotation_angles(positions, c: ResolvedModel):
    """Return cos and sin of RoPE's angles at these positions."""
    return position_encodings.rope_table(
        positions,
        c.rope_width or c.d_head,
        theta=c.rope_theta,
        scaling=c.rope_scaling,
        factor=c.rope_factor,
        low_freq_factor=c.rope_low_freq_factor,
        high_freq_factor=c.rope_high_freq_factor,
        beta_fast=c.rope_beta_fast,
        beta_slow=c.rope_beta_slow,
        original_max_positions=c.rope_original_max_positions,
        amplitude=c.rope_amplitude,
        max_positions=c.max_positions or 0,
    )


def forward(
    params: dict,
    c: ResolvedModel,
    tokens_BT,
    *,
    positions=None,
    segments=None,
    past=None,
    dropout_keys_B=None,
    tap: Callable = unchanged,
    memory: dict | None = None,
) -> dict:
    """Return the stream after the final norm: "x" (B, T, D), and what ideas carry.

    Args:
        params: nested dicts, as returned by parameters.init_params.
        c: model section of a resolved config.
        tokens_BT: integers (B, T).
        positions, segments: see `Past`.
        past: in place of both: how positions see earlier ones.
        dropout_keys_B: one key per example; None: no dropout.
        tap: called as tap(here, name, x) with each named intermediate; its result takes the place
            of x.
        memory: see `Here`; what layers keep is written to this dict.
    """
    params = layer_stack.split_layers(params, c, block_table(c))
    past = past or Past(positions, segments)
    p = gathered(params, own_table(c, "model"), c)
    T = tokens_BT.shape[-1]
    positions_T = Here(tokens_BT, past).positions
    added, rotation = POSITION_ENCODINGS[c.positions](positions_T, c, p)
    window_rotation = None
    if c.rope_window_theta is not None:
        with_windows = dataclasses.replace(c, rope_theta=c.rope_window_theta, rope_scaling="none")
        _, window_rotation = POSITION_ENCODINGS[c.positions](positions_T, with_windows, p)
    here = Here(
        tokens_BT,
        past,
        rotation,
        window_rotation,
        dropout_keys_B,
        c=c,
        p=p,
        hook=tap,
        windows=layer_stack.windows(c, T if past.positions is None else None),
        stream={},
        memory={} if memory is None else memory,
    )

    with jax.named_scope("embedding"):
        embedding_VD = at("token_embeddings", here, p["embedding"])
        x_BTD = embedding_VD[tokens_BT].astype(c.compute_dtype)
        x_BTD = x_BTD if c.embed_scale == 1 else x_BTD * c.embed_scale
        x_BTD = x_BTD if added is None else x_BTD + added.astype(x_BTD.dtype)
    x_BTD = here.dropout(here.tap("embedding", x_BTD), place=0)
    x_BTD = at("embedding", here, x_BTD)

    here.stream.update(ideas.carried(c, x_BTD) | {"x": x_BTD})
    # parameters of the model that ideas read in blocks, too
    passed_on = {name: p[name] for name in ideas.passed_on(c, "model")}
    for turn, layers in enumerate(turns(c)):
        here = here.replace(turn=turn)
        before = here.replace(path=f"turns/{turn}")
        here.stream["x"] = at("turn_input", before, here.stream["x"])
        in_layers_here = here.replace(p=passed_on)
        layer_stack.apply_layers(block, params, in_layers_here, block_table(c), layers)
    x_BTD = at("last_residual", here, here.stream["x"])

    if has_final_norm(c):
        with jax.named_scope("final_norm"):
            x_BTD = here.tap("final_norm/output", normalize(c, params["final_norm"], x_BTD))
    here.stream["x"] = for_head(c, x_BTD)
    return here.stream


def for_head(c: ResolvedModel, x_BTD):
    """Return hidden states as the output head reads them."""
    divisor = width_factor(c) * c.logit_divisor
    return x_BTD if divisor == 1 else x_BTD / divisor


def head(params: dict, c: ResolvedModel) -> Head:
    """Return the output head; a tied one is the embedding table."""
    path = "embedding" if c.tie_embeddings else "head/w_DV"
    table = own_table(c, "model") | head_table(c)
    with jax.named_scope(path):
        w = collectives.gather_parameter(flat(params)[path], table[path], c.compute_dtype)
    b_V = params.get("head", {}).get("b_V")
    if not ideas.applied("logits", c):
        return Head(w, b_V, c.logit_softcap, c.tie_embeddings, c.round_logits)
    p = dict(
        gathered(params, Table("the table of ideas of the model", ideas.declared(c, "model")), c)
    )
    after = functools.partial(_with_ideas, c)
    return Head(w, b_V, c.logit_softcap, c.tie_embeddings, c.round_logits, p, after)


def _with_ideas(c: ResolvedModel, p: dict, logits_BTV):
    """Return logits after the ideas of this site, which has neither tokens nor a stream."""
    return at("logits", Here(None, Past(), c=c, p=p, stream={}), logits_BTV)


def hidden(params: dict, c: ResolvedModel, tokens_BT, **inputs):
    """Return the last hidden states (B, T, D), after the final norm. Arguments as for `forward`."""
    return forward(params, c, tokens_BT, **inputs)["x"]


def logits(params: dict, c: ResolvedModel, tokens_BT, **inputs):
    """Return next-token logits (B, T, V) in float32. Arguments as for `forward`."""
    return head_logits(hidden(params, c, tokens_BT, **inputs), head(params, c))


# ---- The parameters of the parts together --------------------------------------------------------


def own_table(c: ResolvedModel, module: str, layer: int | None = None) -> Table:
    """Return the parameters that "model" or "block" has itself, not in a module within it."""
    table = {}
    if module == "model":
        embed_std = c.embed_std or INITIALIZERS[c.init][2]
        table["embedding"] = Parameter(
            (c.vocab_size, c.d_model), "VD", "embedding", init="normal", std=embed_std
        )
        if c.tie_embeddings:  # the head multiplies with it
            table["embedding"] = dataclasses.replace(table["embedding"], contract="D")
        if c.positions == "learned":
            shape = c.max_positions, c.d_model
            table["positions"] = Parameter(shape, "TD", "embedding", init="normal", std=embed_std)
    table = _joined(table, ideas.declared(c, module))
    return Table(f"the parameter table of the {module}", of_layer(table, layer))


def block_table(c: ResolvedModel) -> Table:
    """Return the parameters of a block, without the axis of layers.

    A parameter with `layers` belongs to these layers only.
    """
    table: dict[str, Parameter] = {}
    for name in norm_names(c):
        table |= with_prefix(name, norm_table(c))
    table |= own_table(c, "block")
    for branch in branches_of(c):
        if branch.kind == "ffn":
            table |= with_prefix(branch.name, ffn_table(c))
        else:
            for kind in present_mixers(c):
                table |= with_prefix(mixer_module(branch, kind), mixer_table(c, kind))
    return Table("the parameter table of a block", table)


def head_table(c: ResolvedModel) -> dict[str, Parameter]:
    """Return the parameters of the output head by path, none if it is tied to the embeddings."""
    if c.tie_embeddings:
        return {}
    # Under muP the variance is that of a head of the base width under the standard parametrization.
    base = dataclasses.replace(c, parametrization="standard")
    w = weight(base, (round(c.d_model / width_factor(c)), c.vocab_size), "DV")
    table = {"head/w_DV": dataclasses.replace(w, shape=(c.d_model, c.vocab_size))}
    if c.head_bias:
        table["head/b_V"] = bias((c.vocab_size,), "V")
    return table


def gathered(params: dict, table: Table, c: ResolvedModel) -> Table:
    """Return the parameters of a table by name, whole: over fsdp each device has a part of them."""

    def one(name: str, p: Parameter):
        # The backward pass sums the gradients of rows of embeddings, which would lose precision in
        # 16 bits.
        dtype = c.param_dtype if p.kind == "embedding" else c.compute_dtype
        with jax.named_scope(name):  # names the communication in profiles
            return collectives.gather_parameter(params[name], p, dtype)

    return Table(table.name, {name: one(name, p) for name, p in table.items()})


def with_prefix(prefix: str, table: Table) -> dict[str, Parameter]:
    """Return the parameters by path."""
    return {f"{prefix}/{name}": p for name, p in table.items()}


def in_layers(table: dict[str, Parameter], layers: Sequence[int]) -> dict[str, Parameter]:
    """Return the parameters as those of these layers, or of the ones among them that they name."""

    def of(p: Parameter) -> Sequence[int]:
        return layers if p.layers is None else tuple(i for i in p.layers if i in layers)

    return {name: dataclasses.replace(p, layers=of(p)) for name, p in table.items()}


def of_layer(table: dict, layer: int | None) -> dict:
    """Return the parameters that a layer has; None: those of all layers."""
    return {name: p for name, p in table.items() if None in (layer, p.layers) or layer in p.layers}


def _joined(table: dict, more: dict) -> dict:
    """Return both, which belong to one module. Raises ValueError if they have a name in common."""
    if both := sorted(table.keys() & more.keys()):
        raise ValueError(f"{both[0]} is declared twice in one module of lm/model.py; rename one")
    return table | more
