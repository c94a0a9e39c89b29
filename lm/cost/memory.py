"""Bytes that one device needs for a training step, by formulas. Nothing is allocated or compiled.

In all functions `config` is a resolved config, `sizes` the size of each mesh axis, and `device` the
kind of device. Those with a device raise UserError if it does not support config.model.attention.
"""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from lm import ideas, layer_stack, parameters
from lm.config import (
    MeshConfig,
    Resolved,
    ResolvedModel,
    mixer_of,
    n_applied_layers,
    n_mixing_branches,
    query_heads,
)
from lm.cost.devices import Device
from lm.kernels.fused_attention import LANES, choose_implementation, chunk_size
from lm.model import MIXERS
from lm.parallel import sharding
from lm.step import init_state, n_micro_batches
from lm.system.errors import UserError

OUTPUTS = "KFCR"  # the last axes of products with weights whose outputs are kept


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of each kind of array at the moment of a step that needs the most.

    This is the loss or the backward pass of one layer. One follows the other, so that they need not
    fit together. On CPUs, where no compiler's figures were compared, their sum is counted.
    """

    parameters: float
    optimizer: float  # its state, and the EMA
    # Of the layers, those of embeddings and head before they are scattered, and with several
    # micro-batches the float32 sum of all.
    gradients: float
    copies: float  # see `_copies`
    activations: float  # what config.model.remat keeps of all layers for the backward pass
    # the gathered head, and a chunk of logits with their gradient; 0 at the other moment
    loss: float
    # one layer's activations, gathered parameters and their gradients; 0 at the other moment
    layer: float

    @property
    def total(self) -> float:
        return sum(dataclasses.asdict(self).values())


def memory_per_device(config: Resolved, device: Device, sizes: dict[str, int]) -> Memory:
    """Return the bytes that a training step needs.

    Each term is one of the largest buffers of compiled programs; benchmarks/NOTES.md compares the
    sums.
    """
    params, optimizer = train_state_bytes(config, sizes)
    of_layers = itemsizes(config)[0] * local_size(config, sizes, lambda p: p.layers)
    # XLA:TPU adds the gradient of an untied embedding when those of the layers are done.
    late = device.platform == "tpu" and not config.model.tie_embeddings

    def is_outer(p) -> bool:
        return p.outer and "V" in p.axes and not (late and p.kind == "embedding")

    at_loss = 4 * local_size(config, sizes, is_outer, gathered=True)
    if micro_batches_per_step(config, sizes) > 1:  # the sum over them
        at_loss += 4 * local_size(config, sizes)
    copied, transposed = _copies(config, device, sizes)
    kept = activation_bytes(config, device, sizes)
    loss = _loss_bytes(config, sizes)
    layer = layer_bytes(config, device, sizes)
    backward = Memory(params, optimizer, at_loss + of_layers, copied + transposed, kept, 0, layer)
    if device.platform == "cpu":
        return dataclasses.replace(backward, loss=loss)
    if device.platform == "gpu":
        # XLA:GPU fills the gradients of all layers with zeros before the loss, XLA:TPU after it.
        at_loss += of_layers
    forward = Memory(params, optimizer, at_loss, copied, kept, loss, 0)
    return max(backward, forward, key=lambda memory: memory.total)


def abstract_train_state(config: Resolved, mesh):
    """Return the train state's shapes, dtypes and shardings on a concrete or an abstract mesh."""
    # The shapes are those of any mesh, and cached for the search of meshes.
    shapes = _state_shapes(dataclasses.replace(config, mesh=MeshConfig()))
    return sharding.shard_state(shapes, parameters.parameter_table(config.model), mesh)


@functools.lru_cache(maxsize=4)
def _state_shapes(config: Resolved):
    return jax.eval_shape(functools.partial(init_state, config), 0)


def train_state_bytes(config: Resolved, sizes: dict[str, int]) -> tuple[int, int]:
    """Return the bytes of the parameters, and of optimizer state and EMA, on one device."""
    state = abstract_train_state(config, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    return local_bytes(state.params), local_bytes((state.opt_state, state.ema))


def local_bytes(tree) -> int:
    """Return the bytes that one device holds of arrays with shardings."""
    total = 0
    for array in jax.tree.leaves(tree):
        total += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return total


def micro_batches_per_step(config: Resolved, sizes: dict[str, int]) -> int:
    """Return the number of micro-batches per step."""
    t = config.train
    return n_micro_batches(t.batch_size // (sizes["replica"] * sizes["fsdp"]), t.micro_batch_size)


def tokens_per_micro_batch(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the tokens that one device has of a micro-batch."""
    t = config.train
    n_parts = sizes["replica"] * sizes["fsdp"] * sizes["sequence"]
    return t.batch_size * t.seq_len / (n_parts * micro_batches_per_step(config, sizes))


def local_size(
    config: Resolved, sizes: dict[str, int], chosen=lambda p: True, *, gathered: bool = False
) -> float:
    """Count the numbers of the chosen parameters on a device; `gathered`: whole over fsdp."""
    if gathered:
        sizes = sizes | {"fsdp": 1}
    total = 0.0
    for p in filter(chosen, parameters.parameter_table(config.model).values()):
        axes = filter(None, sharding.parameter_spec(p, sizes))
        total += p.size / math.prod(sizes[axis] for axis in axes)
    return total


def itemsizes(config: Resolved) -> tuple[int, int]:
    """Return the bytes of a number in the dtypes of parameters and of products."""
    param = jnp.dtype(config.model.param_dtype)
    compute = jnp.dtype(config.model.compute_dtype)
    return param.itemsize, compute.itemsize


def _copies(config: Resolved, device: Device, sizes: dict[str, int]) -> tuple[float, float]:
    """Return the bytes of copies of the layers' parameters, and of copies of their gradients.

    XLA:TPU converts the shards of all layers to the dtype of products before the first layer, and
    with remat=none the backward pass keeps them converted on all platforms. XLA:GPU transposes the
    weights whose last axis is sharded over fsdp, to gather them, and likewise their gradients.
    """
    param, compute = itemsizes(config)
    converted = transposed = 0.0
    if compute != param and (device.platform == "tpu" or config.model.remat == "none"):
        converted = compute * local_size(config, sizes, lambda p: p.layers and p.contract)
    if device.platform == "gpu" and sizes["fsdp"] > 1:

        def is_transposed(p) -> bool:
            return p.layers and sharding.parameter_spec(p, sizes)[-1] == "fsdp"

        transposed = param * local_size(config, sizes, is_transposed)
    return converted + transposed, transposed


def _loss_bytes(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of the head as its product reads it, of logits and of hidden states."""
    m = config.model
    param, compute = itemsizes(config)
    # the last states, their chunks, their gradient
    numbers = 3 * tokens_per_micro_batch(config, sizes) * m.d_model
    if sizes["fsdp"] > 1 or compute != param:  # the head is copied
        numbers += _local_vocabulary(m, sizes) * m.d_model
    return compute * numbers + logit_bytes(config, sizes)


def logit_bytes(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of the logits that exist at once, and of their gradient."""
    n = tokens_per_micro_batch(config, sizes)
    n = min(n, config.train.loss_chunk or n)
    m = config.model
    compute = itemsizes(config)[1]
    logit = compute if m.round_logits else 4
    # Other logits of terms of the loss exist at the same time, unless all are made in chunks.
    others = 0 if config.train.loss_chunk else ideas.loss_products(m) / (m.d_model * m.vocab_size)
    return (logit + compute) * n * _local_vocabulary(m, sizes) * (1 + others)


def _local_vocabulary(m: ResolvedModel, sizes: dict[str, int]) -> float:
    return m.vocab_size / (sizes["tensor"] if m.vocab_size % sizes["tensor"] == 0 else 1)


def layer_bytes(config: Resolved, device: Device, sizes: dict[str, int]) -> float:
    """Return the bytes of one layer's backward pass, beside what is kept of all layers."""
    n_layers = config.model.n_layers
    param, compute = itemsizes(config)
    whole = local_size(config, sizes, lambda p: p.layers, gathered=True) / n_layers
    weights = 0.0
    if sizes["fsdp"] > 1 and device.platform == "gpu":
        # float32 gradients, scattered at the end of the layer from transposed copies
        weights = 2 * 4 * whole
    elif sizes["fsdp"] > 1:
        # Gradients of the feed-forward layer are scattered before attention has its own.
        of_ffn = local_size(config, sizes, lambda p: p.layers and "F" in p.axes, gathered=True)
        weights = compute * whole + 4 * of_ffn / n_layers
    elif compute != param:
        weights = compute * whole
    activations = _needed_activations(config, device, sizes)
    is_packed = config.data.packing == "documents"
    if is_packed and attention_implementation(config, device, sizes)[0] == "cudnn":
        # the mask of all queries and keys, and its gradient
        activations += 2 * config.train.seq_len
    return weights + compute * activations * tokens_per_micro_batch(config, sizes)


def activation_bytes(config: Resolved, device: Device, sizes: dict[str, int]) -> float:
    """Return the bytes that config.model.remat keeps of all layers for the backward pass."""
    m = config.model
    kept: float = m.d_model + carried_features(config)  # the input of a block
    if m.remat == "none":
        kept = _needed_activations(config, device, sizes)
    elif m.remat == "dots":  # outputs of products, but the last one, which is only added
        products = _features(config, sizes, batched=False)
        kept += m.d_model + sum(products[letter] for letter in OUTPUTS)
        kept += n_mixing_branches(m) * _of_mixers(config, sizes, "products_kept")
    n_tokens = n_applied_layers(m) * tokens_per_micro_batch(config, sizes)
    return kept * n_tokens * itemsizes(config)[1]


def _needed_activations(config: Resolved, device: Device, sizes: dict[str, int]) -> float:
    """Return the numbers per token that the backward pass of a layer needs, and attention's own."""
    m = config.model
    heads = query_heads(m) / sizes["tensor"]
    lanes = 0.0
    if attention_implementation(config, device, sizes)[0] == "splash":
        # its arrays have heads of whole lanes
        width = _features(config, sizes)["K"] / max(1, n_mixing_branches(m)) + heads * m.d_head
        lanes = (-m.d_head % LANES) / m.d_head * width
    seen = sum(gathered_features(m, layer, sizes) for layer in range(m.n_layers)) / m.n_layers
    gathered = seen * (sizes["sequence"] - 1)
    # Weights in compute_dtype and scores in float32.
    float32 = 4 / itemsizes(config)[1]
    scores = (1 + float32) * heads * scores_per_query(config, device, sizes)
    mixed = _of_mixers(config, sizes, "activations")
    of_attention = n_mixing_branches(m) * (lanes + gathered + scores + mixed)
    return layer_activations(config, sizes) + of_attention


def _of_mixers(config: Resolved, sizes: dict[str, int], name: str) -> float:
    """Return the mean over layers of what mixers declare in float32, in numbers of products."""
    m = config.model
    mixers = [_other_mixer(m, layer) for layer in range(m.n_layers)]
    n_keys = config.train.seq_len
    kept = sum(getattr(mixer, name)(m, n_keys) for mixer in mixers if hasattr(mixer, name))
    return kept * 4 / itemsizes(config)[1] / m.n_layers / sizes["tensor"]


def layer_activations(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the numbers per token that a device computes in one layer, without attention scores.

    These are the inputs and outputs of both norms and of all products, and attention's output,
    which the next product reads in another layout; what ideas carry from layer to layer, which each
    branch may write.
    """
    m = config.model
    attended = n_mixing_branches(m) * query_heads(m) * m.d_head / sizes["tensor"]
    norms = 2 * len(m.branches) * m.d_model
    products = sum(_features(config, sizes).values())
    return norms + products + attended + 2 * carried_features(config)


def carried_features(config: Resolved) -> int:
    """Return how many numbers per token ideas carry from layer to layer."""
    m = config.model
    x_1D = jax.ShapeDtypeStruct((1, m.d_model), m.compute_dtype)
    carried = jax.eval_shape(functools.partial(ideas.carried, m), x_1D)
    # terms of the loss have one number for all tokens
    return sum(a.size for a in carried.values() if a.ndim)


def _features(config: Resolved, sizes: dict[str, int], *, batched: bool = True) -> Counter:
    """Return the numbers per token that enter and leave a layer's products, except the stream's.

    By the last axis: "K", "F", "C" and "R" leave products, "to K" and "to F" enter them. Averages
    over the layers. `batched`: also those with a weight of each expert.
    """
    m = config.model
    features: Counter = Counter()
    for p in parameters.parameter_table(m).values():
        if not p.contract or not p.layers or (p.batch != "N" and not batched):
            continue
        for dimensions, others, prefix in ((p.columns, p.rows, ""), (p.rows, p.columns, "to ")):
            letters = "KF" if prefix or p.batch != "N" else OUTPUTS
            if dimensions and p.axes[dimensions[-1]] in letters:
                width = p.matmul_size / math.prod(p.shape[i] for i in others)
                is_split = any(sharding.RULES.get(letter) == "tensor" for letter in p.axes)
                n = sizes["tensor"] if is_split or p.axes[dimensions[-1]] in "KF" else 1
                features[prefix + p.axes[dimensions[-1]]] += width / m.n_layers / n
    return features


def gathered_features(m: ResolvedModel, layer: int, sizes: dict[str, int]) -> float:
    """Return the numbers per token that the positions of other devices see in a layer."""
    cached = getattr(_other_mixer(m, layer), "cached", None)
    return 2 * m.n_kv_heads * m.d_head / sizes["tensor"] if cached is None else cached(m)


def moved_activation_bytes(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of activations and logits that a step moves, outside of attention.

    By assumption each activation of a layer is moved 6 times: it is written and read in the forward
    pass and read in the backward pass; its gradient is written once and read twice. Recomputing a
    block moves it 2 more times. The float32 logits are moved 5 times.
    """
    m = config.model
    times = n_applied_layers(m) * (8 if m.remat == "block" else 6)
    per_token = times * layer_activations(config, sizes) * itemsizes(config)[1]
    per_token += 5 * 4 * _local_vocabulary(m, sizes)
    return per_token * tokens_per_micro_batch(config, sizes) * micro_batches_per_step(config, sizes)


def attention_implementation(
    config: Resolved, device: Device, sizes: dict[str, int]
) -> tuple[str, str]:
    """Return the implementation of attention that runs, and why."""
    m = config.model
    attending = _attending_layers(m)
    if not attending:
        return "none", "no layer has it"
    mixers = dict.fromkeys(mixer_of(m, layer) for layer in attending)
    (chosen, why), *others = (_implementation(config, device, sizes, mixer) for mixer in mixers)
    for mixer, (other, _) in zip([*mixers][1:], others, strict=True):
        if other != chosen:
            why += f"; {other} in layers of {mixer}"
    if len(attending) < m.n_layers:
        why += f"; in {len(attending)} of {m.n_layers} layers"
    return chosen, why


def _implementation(
    config: Resolved, device: Device, sizes: dict[str, int], mixer: str
) -> tuple[str, str]:
    """Return the implementation of attention in the layers of a mixer, and why."""
    m = config.model
    is_plain = mixer == "attention"
    module: Any = MIXERS[mixer]
    scores = ideas.SITES["scores"] if is_plain else ()
    try:
        return choose_implementation(
            m.attention,
            platform=device.platform,
            dtype=m.compute_dtype,
            d_head=m.d_head if is_plain else module.query_width(m),
            softcap=m.attn_softcap if is_plain else None,
            window="varies" if _window_varies(config) else None,
            segments=config.data.packing == "documents",
            contiguous=sizes["sequence"] == 1 and not m.masked_diffusion,
            n_queries=config.train.seq_len,
            more_scores=any(ideas.is_on(getattr(m, key)) for key in scores),
        )
    except ValueError as error:
        raise UserError(f"config.model.attention: {error}") from None


def _window_varies(config: Resolved) -> bool:
    """Return whether a scan over layers has several windows, which are then traced."""
    return config.model.scan_layers and len(set(_windows(config))) > 1


def _windows(config: Resolved) -> tuple[int | None, ...]:
    # the model is then given positions, and keeps all windows
    packed = config.data.packing == "documents"
    return layer_stack.windows(config.model, None if packed else config.train.seq_len)


def _other_mixer(m: ResolvedModel, layer: int) -> Any:
    """Return what mixes positions in a layer in place of softmax attention; None: attention."""
    kind = mixer_of(m, layer)
    return MIXERS[kind] if kind != "attention" else ideas.in_place_of_softmax(m, layer)


def _attending_layers(m: ResolvedModel) -> list[int]:
    """Return the layers that call `causal_attention`, which chooses an implementation."""
    mixers = [_other_mixer(m, layer) for layer in range(m.n_layers)]
    return [i for i, mixer in enumerate(mixers) if mixer is None or hasattr(mixer, "query_width")]


def scores_per_query(config: Resolved, device: Device, sizes: dict[str, int]) -> float:
    """Return the number of keys whose scores attention keeps for a query, a mean over layers."""
    n = config.train.seq_len
    size = chunk_size(n)
    windows = _windows(config)
    total = 0.0
    for layer in _attending_layers(config.model):
        mixer = mixer_of(config.model, layer)
        implementation, _ = _implementation(config, device, sizes, mixer)
        if implementation in ("cudnn", "splash"):
            continue
        keys: float = n
        if implementation == "chunked":
            # A chunk of queries sees the keys up to its own end. A window only cuts keys off where
            # it is known at compile time.
            keys = (n + size) / 2
            window = windows[layer]
            if window and not _window_varies(config):
                keys = min(keys, size + window - 1)
        total += keys
    return total / len(windows)
