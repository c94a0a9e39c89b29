"""Bytes that one device needs for a training step, by formulas. Nothing is allocated or compiled.

In all functions `config` is a resolved config, `sizes` the size of each mesh axis, and `device` the kind of device.
"""

import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from lm import parameters
from lm.config import MeshConfig, Resolved, layer_windows
from lm.cost.devices import Device
from lm.declarations import query_heads
from lm.errors import UserError
from lm.kernels.fused_attention import choose_implementation, chunk_size
from lm.layers import variants
from lm.parallel import sharding
from lm.step import init_state, n_micro_batches


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of each kind of array."""

    parameters: float
    optimizer: float
    gradients: float  # of one micro-batch, and with several their float32 sum
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(dataclasses.asdict(self).values())


def memory_per_device(config: Resolved, device: Device, sizes: dict[str, int]) -> Memory:
    """Return the bytes that a training step needs.

    Args:
        config: a resolved config.
        device: decides which implementation of attention runs.
        sizes: the size of each mesh axis.

    Raises:
        UserError: the device does not support config.model.attention.
    """
    params, optimizer = train_state_bytes(config, sizes)
    summed = 4 / jnp.dtype(config.model.param_dtype).itemsize if micro_batches_per_step(config, sizes) > 1 else 0
    return Memory(
        parameters=params,
        optimizer=optimizer,
        gradients=params * (1 + summed),
        gathered=gathered_parameter_bytes(config, sizes),
        activations=activation_bytes(config, device, sizes),
        logits=logit_bytes(config, sizes),
    )


def abstract_train_state(config: Resolved, mesh):
    """Return the train state's shapes, dtypes and shardings on a concrete or an abstract mesh."""
    without_mesh = dataclasses.replace(config, mesh=MeshConfig())
    return sharding.shard_state(_state_shapes(without_mesh), parameters.parameter_table(config.model), mesh)


@functools.lru_cache(maxsize=4)
def _state_shapes(config: Resolved):
    return jax.eval_shape(functools.partial(init_state, config), 0)


def train_state_bytes(config: Resolved, sizes: dict[str, int]) -> tuple[int, int]:
    """Return the bytes that one device holds of the parameters, and of the optimizer state and the EMA."""
    state = abstract_train_state(config, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    return local_bytes(state.params), local_bytes((state.opt_state, state.ema))


def local_bytes(tree) -> int:
    """Return the bytes that one device holds of arrays with shardings."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def micro_batches_per_step(config: Resolved, sizes: dict[str, int]) -> int:
    """Return the number of micro-batches per step."""
    t = config.train
    return n_micro_batches(t.batch_size // (sizes["replica"] * sizes["fsdp"]), t.micro_batch_size)


def tokens_per_micro_batch(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the tokens that one device has of a micro-batch."""
    t = config.train
    n_parts = sizes["replica"] * sizes["fsdp"] * sizes["sequence"]
    return t.batch_size * t.seq_len / (n_parts * micro_batches_per_step(config, sizes))


def gathered_parameter_bytes(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of parameters that exist as a whole at the same time, although fsdp shards them.

    These are two layers (the present and the next one), the embeddings and the head. The gradients of the last two
    also exist as a whole before they are scattered.
    """
    if sizes["fsdp"] == 1:
        return 0
    m, table = config.model, parameters.parameter_table(config.model)
    layer = sum(p.size / m.n_layers for p in table.values() if p.layers is not None)
    outer = sum(p.size for p in table.values() if p.outer)
    compute, param = jnp.dtype(m.compute_dtype).itemsize, jnp.dtype(m.param_dtype).itemsize
    return (2 * layer * compute + outer * (compute + param)) / sizes["tensor"]


def activation_bytes(config: Resolved, device: Device, sizes: dict[str, int]) -> float:
    """Return the bytes kept for the backward pass: what config.model.remat keeps of all layers, all of one layer.

    Raises:
        UserError: the device does not support config.model.attention.
    """
    m, tensor = config.model, sizes["tensor"]
    layer = layer_activations(config, sizes)
    layer += 2 * m.n_kv_heads * m.d_head / tensor * (sizes["sequence"] - 1)  # keys and values of all positions
    # Attention weights in compute_dtype and scores in float32.
    scores = 1 + 4 / jnp.dtype(m.compute_dtype).itemsize
    layer += scores * query_heads(m) / tensor * scores_per_query(config, device, sizes)
    qkv, hidden = _qkv_and_hidden(config, sizes)
    block = m.d_model + carried_features(config)  # the input of a block
    kept = {"none": layer, "dots": block + qkv + 2 * m.d_model + hidden, "block": block}[m.remat]
    recomputed = layer if m.remat != "none" else 0
    per_token = m.n_layers * kept + recomputed
    return per_token * tokens_per_micro_batch(config, sizes) * jnp.dtype(m.compute_dtype).itemsize


def layer_activations(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the number of activations per token that a device computes in one layer, without attention scores.

    These are the inputs and outputs of both norms; queries, keys and values, twice if they are rotated or normalized;
    the output of attention; the products of the feed-forward layer before and after its activation; what ideas carry
    from layer to layer, which each branch may write.
    """
    m, (qkv, hidden) = config.model, _qkv_and_hidden(config, sizes)
    copies = 2 if m.positions == "rope" or m.qk_norm else 1
    heads = query_heads(m) * m.d_head / sizes["tensor"]
    return 4 * m.d_model + copies * qkv + heads + 2 * hidden + 2 * carried_features(config)


def carried_features(config: Resolved) -> int:
    """Return how many numbers per token ideas carry from layer to layer."""
    m = config.model
    x_1D = jax.ShapeDtypeStruct((1, m.d_model), m.compute_dtype)
    carried = jax.eval_shape(functools.partial(variants.carried, m), x_1D)
    return sum(a.size for a in carried.values() if a.ndim)  # terms of the loss have one number for all tokens


def _qkv_and_hidden(config: Resolved, sizes: dict[str, int]) -> tuple[float, float]:
    """Return the sizes of queries, keys and values, and of the feed-forward layer, per token on one device."""
    m = config.model
    features: Counter = Counter()  # of the products of a token, by their last axis, on average over the layers
    for p in parameters.parameter_table(m).values():
        if p.contract and p.layers is not None:
            width = p.used * math.prod(p.shape[i] for i in p.columns)
            features[p.axes[-1]] += width * len(p.layers) / m.n_layers
    return features["K"] / sizes["tensor"], features["F"] / sizes["tensor"]


def moved_activation_bytes(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of activations and logits that a device reads and writes in a step, outside of attention.

    By assumption each activation of a layer is moved 6 times: it is written and read in the forward pass and read in
    the backward pass; its gradient is written once and read twice. Recomputing a block moves it 2 more times.
    The float32 logits are moved 5 times.
    """
    m, times = config.model, 8 if config.model.remat == "block" else 6
    computed = m.n_layers * layer_activations(config, sizes)
    per_token = times * computed * jnp.dtype(m.compute_dtype).itemsize
    per_token += 5 * 4 * m.vocab_size / (sizes["tensor"] if m.vocab_size % sizes["tensor"] == 0 else 1)
    return per_token * tokens_per_micro_batch(config, sizes) * micro_batches_per_step(config, sizes)


def attention_implementation(config: Resolved, device: Device, sizes: dict[str, int]) -> tuple[str, str]:
    """Return the implementation of attention that runs, and why.

    Raises:
        UserError: the device does not support config.model.attention.
    """
    m = config.model
    window_varies = m.scan_layers and len(set(layer_windows(m))) > 1
    try:
        return choose_implementation(
            m.attention,
            platform=device.platform,
            dtype=m.compute_dtype,
            d_head=m.d_head,
            softcap=m.attn_softcap,
            window="varies" if window_varies else None,
            segments=config.data.packing == "documents",
            contiguous=sizes["sequence"] == 1,
            n_queries=config.train.seq_len,
            more_scores=any(getattr(m, key) not in variants.OFF for key in variants.SCORES),
        )
    except ValueError as error:
        raise UserError(f"config.model.attention: {error}") from None


def scores_per_query(config: Resolved, device: Device, sizes: dict[str, int]) -> float:
    """Return the number of keys for which attention keeps a query's scores, averaged over the layers.

    Raises:
        UserError: the device does not support config.model.attention.
    """
    n, windows = config.train.seq_len, layer_windows(config.model)
    window_varies = config.model.scan_layers and len(set(windows)) > 1
    implementation, _ = attention_implementation(config, device, sizes)
    if implementation in ("cudnn", "splash"):
        return 0
    if implementation != "chunked":
        return n
    # A chunk of queries sees the keys up to its own end. A window only cuts keys off where it is known at compile time.
    size = chunk_size(n)
    keys = [(n + size) / 2 if window_varies or not w else min((n + size) / 2, size + w - 1) for w in windows]
    return sum(keys) / len(keys)


def logit_bytes(config: Resolved, sizes: dict[str, int]) -> float:
    """Return the bytes of the float32 logits that exist at the same time and of their gradient."""
    n, chunk, vocab_size = tokens_per_micro_batch(config, sizes), config.train.loss_chunk, config.model.vocab_size
    if chunk:
        n = min(n, chunk)
    n_parts = sizes["tensor"] if vocab_size % sizes["tensor"] == 0 else 1
    return 2 * 4 * n * vocab_size / n_parts
