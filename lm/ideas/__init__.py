"""Ideas that can be added to the model, one file each, and the sites where they attach.

An idea is a file of this folder with pure functions, value in and value out. Most have two, `table`
and `apply`:

    apply(here, value, ...) -> value
        The equation. An idea at several sites has a function named after each of them instead.
    table(c) -> {name: Parameter}
        Its parameters in one layer. Names end in the letters of their axes.
    layers(c) -> range or tuple
        The layers that have it, ascending; default: all.
    carry(c, x_BTD) -> {name: array}
        What goes from layer to layer in here.stream: its values before the first layer, given the
        embeddings. `apply` reads and writes here.stream[name].
    loss_weights(c, fraction) -> {name: weight}
        The weights of its terms of the loss; fraction: from 0 to 1 in training.
    losses(fields, cross_entropy) -> {name: Sums}
        Terms of the loss that are cross-entropies; see `loss_terms`.
    products(c, n_keys) -> number
        Multiplications and additions of a token in one of its layers, besides those of parameters,
        if a query sees n_keys keys in the mean; default: 0.
    loss_products(c) -> number
        Products of a token that only the loss needs, such as other logits; default: 0.
    activations(c, n_keys) -> number
        Of a mixer, or an idea in place of the softmax: float32 numbers of a token that one of its
        layers keeps for the backward pass. Those that remat = dots keeps, too, besides outputs of
        products with weights that contract D: products_kept(c, n_keys).

    same_at_start(c) -> bool
        Whether the model of step 0 is the one without the idea; default: False.
    unread(c) -> {name: layers}
        Parameters that have no effect in some of the layers that have them; default: none.

Other terms of the loss are sums over the targets of this device, here.stream["loss/NAME"]: `carry`
starts them at float32 0, `apply` adds.

`here` is the `Here` of lm/here.py. The key under which an idea stands in a site is the key of
config.model that turns it on. With False, "none" or None the idea is off and leaves no trace in the
program. A site applies its ideas in the order of the dict. docs/changing-the-model.md shows one of
them, tests/test_ideas.py checks all.

An idea that lets positions see each other calls `here.earlier`, `here.last`, `here.running_sum` or
`here.recurrence`, which own its cache for decoding.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm.config import ResolvedModel, branches_of, mixer_of, present_mixers
from lm.declarations import Parameter
from lm.ideas import (
    attention_gate,
    attention_sink,
    deep_supervision,
    depth_attention,
    differential_attention,
    exclusive_attention,
    forgetting_gate,
    gated_delta,
    hyper_connections,
    kimi_delta,
    latent_attention,
    loop_input,
    masked_diffusion,
    moe,
    multi_token_prediction,
    parallel_branches,
    query_scale,
    residual_scalars,
    rg_lru,
    short_convolution,
    talking_heads,
    token_shift,
    value_embedding,
    value_residual,
)
from lm.layers.losses import Sums
from lm.system.errors import UserError

# By site, the ideas that attach there (modules or objects with the functions above) by their key of
# config.model.
SITES: dict[str, dict[str, Any]] = {
    "token_embeddings": {"masked_diffusion": masked_diffusion},  # embedding_VD, the table
    "embedding": {"token_shift": token_shift},  # x_BTD, the stream before the first block
    # x_BTD, before each turn of the looped layers; here.turn
    "turn_input": {"loop_input": loop_input},
    "block_input": {  # x_BTD, at the start of each block
        "residual_scalars": residual_scalars,
        "conv_stream": short_convolution.stream,
        "loop_input": loop_input,
        "deep_supervision": deep_supervision,
    },
    # (q_BTHK, k_BTGK), after the rotation
    "queries_keys": {"conv_keys": short_convolution.keys, "query_scale": query_scale},
    "values": {  # v_BTGK
        "conv_values": short_convolution.values,
        "value_embeddings": value_embedding,
        "value_residual": value_residual,
    },
    # options of `causal_attention`: softcap, scale, and bias_BSH and sink_H of ideas
    "scores": {"attn_sink": attention_sink, "attn_forget": forgetting_gate},
    # (q_BTHK, k_BTGK, v_BTGK) -> o_BTHK, in place of the softmax of scores times values
    "softmax": {"gated_delta": gated_delta},
    "heads": {  # o_BTHK, the output of the heads; and v_BTGK
        "attn_differential": differential_attention,
        "attn_exclusive": exclusive_attention,
        "attn_gate": attention_gate,
    },
    "ffn_hidden": {},  # h_BTF, inside the feed-forward layer; not of experts
    "last_residual": {},  # x_BTD, after the last block and before the final norm
    # logits_BTV, some at a time: without positions
    "logits": {"multi_token_prediction": multi_token_prediction},
}
OF_THE_STREAM = ("block_input", "turn_input")  # no branch may read what is changed there
# The sites of each module, which declares the parameters. Those of an idea in several modules are
# of the first one.
MODULES = {
    "model": ("token_embeddings", "embedding", "turn_input", "last_residual", "logits"),
    "block": ("block_input",),
    "attention": ("queries_keys", "values", "scores", "softmax", "heads"),
    "ffn": ("ffn_hidden",),
}

# Exclusive choices by value.
# config.model.residual: block(here, x_BTD, branches) -> x_BTD, in place of the plain sum. The
# branches, by name, include their norms.
# config.model.ffn: in place of the feed-forward layer, in the layers that have it; the others have
# the one named OTHERS.
# config.model.mixers: in place of attention with all its projections, see `Mixer` of lm/model.py.
RESIDUALS = {
    "sum": None,  # the blocks of lm/model.py
    "depth_attention": depth_attention,
    "hyper_connections": hyper_connections,
    "parallel": parallel_branches,
}
FEED_FORWARDS = {"moe": moe}
MIXERS = {
    "latent": latent_attention,
    "talking_heads": talking_heads,
    "rg_lru": rg_lru,
    "kda": kimi_delta,
}


def is_on(value: Any) -> bool:
    """Return whether the value of a key turns its idea on. The number 0 does: it may be a layer."""
    return value is not None and value is not False and value != "none"


def _of_site(site: str, c: ResolvedModel) -> list[Any]:
    """Return the ideas of a site that are on."""
    return [idea for key, idea in SITES[site].items() if is_on(getattr(c, key))]


def active(c: ResolvedModel, module: str) -> Iterator[Any]:
    """Yield the ideas that are on and whose parameters are of this module, each once."""
    outer: list[Any] = []
    for name, sites in MODULES.items():
        own: list[Any] = []
        for site in sites:
            own += [idea for idea in _of_site(site, c) if idea not in own and idea not in outer]
        if name == "block" and RESIDUALS[c.residual] is not None:
            own.append(RESIDUALS[c.residual])
        if name == "ffn" and c.ffn in FEED_FORWARDS:
            own.append(FEED_FORWARDS[c.ffn])
        if name == module:
            yield from own
            return
        outer += own


def everywhere(c: ResolvedModel) -> list[Any]:
    """Return all ideas that are on."""
    return [idea for module in MODULES for idea in active(c, module)]


def layers_of(idea: Any, c: ResolvedModel):
    """Return the layers that have an idea, a range or tuple.

    Raises:
        ValueError: they are not ascending numbers of layers.
    """
    layers = idea.layers(c) if hasattr(idea, "layers") else range(c.n_layers)
    of_attention = any(idea in SITES[site].values() for site in MODULES["attention"])
    if of_attention and set(c.mixers) != {"attention"}:
        attending = mixing_layers(c, "attention")
        layers = tuple(layer for layer in layers if layer in attending)
    ascending = sorted(set(layers).intersection(range(c.n_layers)))
    if list(layers) != ascending:
        raise ValueError(
            f"{_name(idea)}: layers {layers} must be ascending numbers from 0 to {c.n_layers - 1}"
        )
    return layers if isinstance(layers, range) else tuple(layers)


def subsets(c: ResolvedModel) -> set:
    """Return the layers of each idea that is on in blocks, a set of ranges and tuples."""
    return {
        layers_of(idea, c) for module in ("block", "attention", "ffn") for idea in active(c, module)
    }


def _name(idea: Any) -> str:
    return getattr(idea, "__name__", str(idea))


def at(site: str, here, value, *others):
    """Return the value after the ideas of a site that are on in this layer."""
    for idea in _of_site(site, here.c):
        function = getattr(idea, site, None) or getattr(idea, "apply", None)
        if function is None or (
            here.layer is not None and here.prototype not in layers_of(idea, here.c)
        ):
            continue
        after = function(here, value, *others)
        if _kind(after) != _kind(value):
            raise TypeError(
                f"{_name(idea)}: the site {site} gave {_kind(value)} and got {_kind(after)}; "
                "return the value alone, with its dtype (x.astype(...)), and write what is carried "
                "to here.stream"
            )
        if after is not value and site in OF_THE_STREAM and _own_stream(here.c):
            raise UserError(
                f"config.model.residual: {here.c.residual}, whose branches do not read the stream "
                f"that {_name(idea)} changes at the site {site}; use residual = sum"
            )
        value = after
    return value


def _own_stream(c: ResolvedModel) -> bool:
    """Return whether branches read other streams than the plain sum."""
    return getattr(RESIDUALS[c.residual], "OWN_STREAM", False)


def applied(site: str, c: ResolvedModel) -> bool:
    """Return whether an idea changes the value of a site."""
    return any(hasattr(idea, site) or hasattr(idea, "apply") for idea in _of_site(site, c))


def _kind(x):
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return str(x.dtype) if hasattr(x, "dtype") else type(x).__name__


def mixing_layers(c: ResolvedModel, kind: str) -> Sequence[int]:
    """Return the layers that have a mixer, a range if all have it."""
    if present_mixers(c) == [kind]:
        return range(c.n_layers)
    return tuple(layer for layer in range(c.n_layers) if mixer_of(c, layer) == kind)


def in_place_of_softmax(c: ResolvedModel, layer: int) -> Any:
    """Return the idea that takes the place of the softmax in a layer of attention; None: none does.

    Raises:
        ValueError: two ideas take it.
    """
    present = [idea for idea in _of_site("softmax", c) if layer in layers_of(idea, c)]
    if len(present) > 1:
        one, other = map(_name, present[:2])
        raise ValueError(f"{one} and {other} replace attention in layer {layer}; use one")
    return present[0] if present else None


def feed_forward(c: ResolvedModel, layer: int) -> Any:
    """Return the idea in place of the feed-forward layer in a layer; None: there is a plain one."""
    idea = FEED_FORWARDS.get(c.ffn)
    return idea if idea and layer in layers_of(idea, c) else None


def declared(c: ResolvedModel, module: str) -> dict[str, Parameter]:
    """Return the parameters of the ideas in one module, each with the layers that have it.

    Raises:
        ValueError: two ideas declare a parameter of the same name.
    """
    present = list(active(c, module))
    for idea in present:
        if module == "attention" and not layers_of(idea, c):
            raise UserError(
                f"config.model.mixers: {', '.join(c.mixers)}, but no layer of {_name(idea)} has "
                "attention, which it changes; use one of both"
            )
    tables = _of_all(present, "table", c)
    if module == "model":
        return {name: p for name, (_, p) in tables.items()}
    return {
        name: dataclasses.replace(p, layers=layers_of(idea, c))
        for name, (idea, p) in tables.items()
    }


def passed_on(c: ResolvedModel, module: str) -> list[str]:
    """Return the parameters of a module that ideas read at a site of a module inside it, too."""
    names = []
    inner = list(MODULES)[list(MODULES).index(module) + 1 :]
    there = [idea for name in inner for site in MODULES[name] for idea in _of_site(site, c)]
    for idea in active(c, module):
        if idea in there and hasattr(idea, "table"):
            names += idea.table(c)
    return names


def _of_all(ideas: Iterable[Any], function: str, *args) -> dict[str, tuple[Any, Any]]:
    """Return {name: (idea, value)} of the dicts that a function of the ideas returns.

    Raises:
        ValueError: two ideas have a name in common.
    """
    by_name: dict[str, tuple[Any, Any]] = {}
    for idea in ideas:
        if not hasattr(idea, function):
            continue
        for name, value in getattr(idea, function)(*args).items():
            owner, _ = by_name.setdefault(name, (idea, value))
            if owner is not idea:
                raise ValueError(
                    f"{_name(idea)} and {_name(owner)} both declare {name}; rename one"
                )
    return by_name


def carried(c: ResolvedModel, x_BTD) -> dict:
    """Return what all ideas carry from layer to layer."""
    arrays = _of_all(everywhere(c), "carry", c, x_BTD)
    if "x" in arrays:
        idea, _ = arrays["x"]
        raise ValueError(f"{_name(idea)}: carry has x, the residual stream; choose another name")
    return {name: array for name, (_, array) in arrays.items()}


def products(c: ResolvedModel, layer: int | None, n_keys: float) -> float:
    """Return the products of a token besides those of parameters and mixers, in a layer.

    None: outside of the layers. A query sees n_keys keys in the mean.
    """
    total = 0.0
    for module in MODULES:
        kinds = [branch.kind for branch in branches_of(c)]
        times = 1 if module in ("model", "block") else kinds.count(module)
        for idea in active(c, module):
            if not hasattr(idea, "products") or (module == "model") != (layer is None):
                continue
            if layer is None or layer in layers_of(idea, c):
                total += idea.products(c, n_keys) * times
    return total


def loss_products(c: ResolvedModel) -> float:
    """Return the products of a token that only terms of the loss need."""
    counts = [idea.loss_products(c) for idea in everywhere(c) if hasattr(idea, "loss_products")]
    return sum(counts)


def loss_weights(c: ResolvedModel, fraction) -> dict:
    """Return the weights of the terms that ideas add to the loss, by name.

    `fraction`: how much of the training is done, from 0 to 1; it may be traced.
    """
    weights = _of_all(everywhere(c), "loss_weights", c, fraction)
    return {name: weight for name, (_, weight) in weights.items()}


def changing_terms(c: ResolvedModel) -> str:
    """Return the names of the terms of the loss whose weights change in training."""
    first, *later = (loss_weights(c, step / 10) for step in range(11))
    changing = [name for name in first if any(w[name] != first[name] for w in later)]
    return ", ".join(changing)


def loss_terms(
    c: ResolvedModel, stream: dict, fields: dict, cross_entropy, fraction
) -> dict[str, tuple]:
    """Return {name: (sum over targets, weight)} of the terms of all ideas.

    Args:
        c: model section of a resolved config.
        stream: that of the model after the final norm.
        fields: those of the batch, see lm/step.py.
        cross_entropy: (targets, weights, of="x") -> the `Sums` of lm/layers/losses.py for the
            logits of stream[of], (B, T, D).
        fraction: see `loss_weights`.

    Raises:
        TypeError: `losses` returns a number that is not `Sums`, such as a mean. Only the caller
            knows what sums are divided by.
    """
    sums = {name.removeprefix("loss/"): x for name, x in stream.items() if name.startswith("loss/")}
    for name, (idea, x) in _of_all(everywhere(c), "losses", fields, cross_entropy).items():
        if not isinstance(x, Sums):
            raise TypeError(
                f"{_name(idea)}: losses gave {name} as {_kind(x)}; return what cross_entropy gives"
            )
        sums[name] = x.objective
    weights = loss_weights(c, fraction)
    if differ := sorted(sums.keys() ^ weights.keys()):
        raise ValueError(
            f"loss term {differ[0]!r} needs a sum (`losses` or `carry`) and a weight "
            "(`loss_weights`)"
        )
    return {name: (sums[name], weights[name]) for name in weights}
