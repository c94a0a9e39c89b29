"""Ideas that can be added to the model, one file each, and the sites of the model where they attach.

An idea is a file of this folder with pure functions. Only `apply` and, with parameters, `table` are needed:

    table(c) -> {name: Parameter}      its parameters in one layer. Names end in the letters of their axes and are
                                       unique in their module of lm/model.py
    layers(c) -> range or tuple        the layers that have it, ascending; default: all
    carry(c, x_BTD) -> {name: array}   what it carries from layer to layer in the stream: the values before the first
                                       layer, given the embeddings x_BTD
    loss_weights(c, progress)          {name: weight} of its terms of the loss; progress: from 0 to 1 in training
    losses(fields, cross_entropy)      {name: sum over the targets of this device}; see `loss_terms`. Or `apply` adds
                                       such sums to stream["loss/NAME"], which `carry` starts at float32 0
    products(c)                        multiplications and additions of a token in one of its layers, besides those of
                                       parameters; default: 0
    apply(here, stream, value, ...) -> (stream, value)

`here` is a `Here`, `stream` a dict of arrays. The key under which an idea stands in a site is the key of config.model
that turns it on: with False, "none", 0 or None the idea is off and leaves no trace in the program. A site applies its
ideas in the order of the dict. docs/changing-the-model.md shows one of them, tests/test_variants.py checks all.

A kind of FEED_FORWARDS also has default_d_ff(d_model), and its `apply` gets a function `tap` for its hidden features.
One of RESIDUALS has `read` and `add` in place of `apply`, see residual_sum.py. An idea of MIXERS also has

    activations(c)                     float32 numbers of a token that one of its layers keeps for the backward pass

An idea that lets positions see each other calls `here.last`, `here.running_sum` or `here.recurrence`, which own its
cache for decoding.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from lm.config import ResolvedModel
from lm.declarations import Parameter, Table
from lm.layers.variants import (
    attention_gate,
    attention_sink,
    depth_attention,
    differential_attention,
    exclusive_attention,
    forgetting_gate,
    gated_delta,
    glu,
    hyper_connections,
    mlp,
    moe,
    multi_token_prediction,
    parallel_branches,
    residual_scalars,
    residual_sum,
    short_convolution,
    token_shift,
    value_embedding,
    value_residual,
)

Site = dict[str, Any]  # ideas, modules or objects with the functions above, by their key of config.model

EMBEDDING: Site = {"token_shift": token_shift}  # x_BTD, the stream before the first block
BLOCK_INPUT: Site = {  # x_BTD, at the start of each block
    "residual_scalars": residual_scalars,
    "conv_stream": short_convolution.stream,
}
QUERIES_KEYS: Site = {"conv_keys": short_convolution.keys}  # (q_BTHK, k_BTGK), after the rotation
VALUES: Site = {  # v_BTGK
    "conv_values": short_convolution.values,
    "value_embeddings": value_embedding,
    "value_residual": value_residual,
}
SCORES: Site = {"attn_sink": attention_sink, "attn_forget": forgetting_gate}  # options of attend: bias_BSH, sink_H, ...
MIXERS: Site = {"gated_delta": gated_delta}  # (q_BTHK, k_BTGK, v_BTGK) -> o_BTHK, in place of attention
HEADS: Site = {  # o_BTHK, the output of the heads; and v_BTGK
    "attn_differential": differential_attention,
    "attn_exclusive": exclusive_attention,
    "attn_gate": attention_gate,
}
LAST_HIDDEN: Site = {}  # x_BTD, after the final norm
LOSSES: Site = {"multi_token_prediction": multi_token_prediction}  # ideas with `losses`, and no `apply`

# Exclusive choices: how a branch reads and adds to the residual stream, by config.model.residual; the feed-forward
# layer, by config.model.ffn.
RESIDUALS = {
    "sum": residual_sum,
    "depth_attention": depth_attention,
    "hyper_connections": hyper_connections,
    "parallel": parallel_branches,
}
FEED_FORWARDS = {"mlp": mlp, "glu": glu, "moe": moe}

# The sites by the module of lm/model.py that declares their parameters.
SITES = {
    "model": (EMBEDDING, LAST_HIDDEN, LOSSES),
    "block": (BLOCK_INPUT,),
    "attention": (QUERIES_KEYS, VALUES, SCORES, MIXERS, HEADS),
}
OFF = (False, None, "none", 0)


@dataclasses.dataclass(frozen=True)
class Here:
    """Where an idea is applied."""

    c: ResolvedModel
    p: Table  # the parameters of the module
    x_BTD: Any  # the input of the module, after its norm
    layer: Any  # the index of the layer, traced under a scan; None outside of the blocks
    like: int | None  # an index known while tracing, of a layer with the same parameters
    context: Any  # `Context` of lm/model.py: tokens_BT, past (its positions and segments may be None), tap, dropout
    module: Any  # the module of lm/model.py

    def last(self, name: str, x_BTC, n: int):
        """Return the vectors of the last n positions up to each position, oldest first: (B, T, n, C).

        Vectors before the start of a document are 0. `name` is unique in the module.
        """
        return self.context.past.last(self.module, name, x_BTC, n)

    def running_sum(self, name: str, x_BTC):
        """Return the sum over each position and all earlier ones of its document, (B, T, C). `name` as for `last`."""
        return self.context.past.running_sum(self.module, name, x_BTC)

    def recurrence(self, name: str, chunk, state, inputs, size: int):
        """Return the outputs (B, T, ...) of a recurrence over the positions of each document; see lm/past.py."""
        n_batch = self.context.tokens_BT.ndim - 1
        return self.context.past.recurrence(self.module, name, chunk, state, inputs, size, n_batch=n_batch)


def active(c: ResolvedModel, module: str) -> Iterator[Any]:
    """Yield the ideas that are on, in one module of lm/model.py."""
    for site in SITES[module]:
        yield from (idea for key, idea in site.items() if getattr(c, key) not in OFF)
    if module == "block":
        yield RESIDUALS[c.residual]


def layers_of(idea: Any, c: ResolvedModel):
    """Return the layers that have an idea, a range or tuple. Raises ValueError if they are not ascending numbers."""
    layers = idea.layers(c) if hasattr(idea, "layers") else range(c.n_layers)
    ascending = layers.step > 0 if isinstance(layers, range) else list(layers) == sorted(set(layers))
    if not ascending or (layers and not 0 <= layers[0] <= layers[-1] < c.n_layers):
        raise ValueError(f"{_name(idea)}: layers {layers} must be ascending numbers from 0 to {c.n_layers - 1}")
    return layers if isinstance(layers, range) else tuple(layers)


def _name(idea: Any) -> str:
    return getattr(idea, "__name__", str(idea))


def at(site: dict, here: Here, stream: dict, value, *others):
    """Return the stream and the value after the ideas of a site that are on in this layer."""
    for key, idea in site.items():
        if getattr(here.c, key) not in OFF and (here.like is None or here.like in layers_of(idea, here.c)):
            found = idea.apply(here, stream, value, *others)
            if not isinstance(found, tuple) or [*map(_kind, found)] != [dict, _kind(value)]:
                raise TypeError(f"{_name(idea)}: apply returns (stream, value), with the value's dtype (x.astype(...))")
            stream, value = found
    return stream, value


def _kind(x):
    return tuple(map(_kind, x)) if isinstance(x, tuple) else getattr(x, "dtype", type(x))


def mixer(c: ResolvedModel, layer: int) -> Any:
    """Return the idea that takes the place of attention in a layer; None: attention.

    Raises:
        ValueError: two ideas take it.
    """
    ideas = [idea for key, idea in MIXERS.items() if getattr(c, key) not in OFF and layer in layers_of(idea, c)]
    if len(ideas) > 1:
        raise ValueError(f"{_name(ideas[0])} and {_name(ideas[1])} replace attention in layer {layer}; use one")
    return ideas[0] if ideas else None


def declared(c: ResolvedModel, module: str) -> dict[str, Parameter]:
    """Return the parameters of the ideas in one module of lm/model.py, each with the layers that have it.

    Raises:
        ValueError: two ideas declare a parameter of the same name.
    """
    found = _of_all(active(c, module), "table", c)
    if module == "model":
        return {name: p for name, (_, p) in found.items()}
    return {name: dataclasses.replace(p, layers=layers_of(idea, c)) for name, (idea, p) in found.items()}


def _of_all(ideas: Iterable[Any], function: str, *args) -> dict[str, tuple[Any, Any]]:
    """Return {name: (idea, value)} of the dicts that a function of the ideas returns.

    Raises:
        ValueError: two ideas have a name in common.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for idea in ideas:
        for name, value in (getattr(idea, function)(*args) if hasattr(idea, function) else {}).items():
            if (owner := found.setdefault(name, (idea, value))[0]) is not idea:
                raise ValueError(f"{_name(idea)} and {_name(owner)} both declare {name}; rename one")
    return found


def everywhere(c: ResolvedModel) -> list[Any]:
    """Return all ideas that are on, feed-forward layers included."""
    return [idea for module in SITES for idea in active(c, module)] + [kind for kind, _ in feed_forwards(c)]


def carried(c: ResolvedModel, x_BTD) -> dict:
    """Return what all ideas carry from layer to layer."""
    found = _of_all(everywhere(c), "carry", c, x_BTD)
    if "x" in found:
        raise ValueError(f"{_name(found['x'][0])}: carry has x, the residual stream; choose another name")
    return {name: array for name, (_, array) in found.items()}


def feed_forwards(c: ResolvedModel) -> list[tuple[Any, Any]]:
    """Return the kinds of feed-forward layers and the layers that have them.

    A kind with `layers` names the kind of all other layers: OTHERS.
    """
    kind = FEED_FORWARDS[c.ffn]
    layers = layers_of(kind, c)
    found = [(kind, layers)]
    if len(layers) < c.n_layers:
        found.append((FEED_FORWARDS[kind.OTHERS], tuple(i for i in range(c.n_layers) if i not in layers)))
    return found


def feed_forward(c: ResolvedModel, layer: int) -> Any:
    """Return the kind of feed-forward layer of a layer."""
    return next(kind for kind, layers in feed_forwards(c) if layer in layers)


def products(c: ResolvedModel) -> float:
    """Return the multiplications and additions of a token in all layers besides those of parameters and attention."""
    places = [(idea, layers_of(idea, c)) for module in ("block", "attention") for idea in active(c, module)]
    places += [(idea, (None,)) for idea in active(c, "model")] + feed_forwards(c)
    return sum(len(layers) * idea.products(c) for idea, layers in places if hasattr(idea, "products"))


def loss_weights(c: ResolvedModel, progress) -> dict:
    """Return the weights of the terms that ideas add to the loss, by name.

    `progress` is the fraction of the training steps that were taken, which may be traced.
    """
    return {name: weight for name, (_, weight) in _of_all(everywhere(c), "loss_weights", c, progress).items()}


def changing_terms(c: ResolvedModel) -> str:
    """Return the names of the terms of the loss whose weights change in training."""
    first, *later = (loss_weights(c, step / 10) for step in range(11))
    return ", ".join(name for name in first if any(weights[name] != first[name] for weights in later))


def loss_terms(c: ResolvedModel, stream: dict, fields: dict, cross_entropy, progress) -> dict[str, tuple]:
    """Return {name: (sum over targets, weight)} of the terms of all ideas, from the stream after the final norm.

    stream["x"] is (B, T, D). `fields` are those of the batch, see lm/step.py; cross_entropy(targets, weights) returns
    the `Sums` of lm/layers/losses.py for the model's logits; for `progress` see `loss_weights`.
    """
    sums = {name.removeprefix("loss/"): x for name, x in stream.items() if name.startswith("loss/")}
    sums |= {name: x for name, (_, x) in _of_all(everywhere(c), "losses", fields, cross_entropy).items()}
    weights = loss_weights(c, progress)
    if differ := sorted(sums.keys() ^ weights.keys()):
        raise ValueError(f"loss term {differ[0]!r} needs a sum (`losses` or `carry`) and a weight (`loss_weights`)")
    return {name: (sums[name], weights[name]) for name in weights}
