"""Bytes that devices exchange in a step, by formulas, which a test compares with programs.

In all functions `config` is a resolved config, `sizes` the size of each mesh axis, and `device` the
kind of device.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from lm import parameters
from lm.config import (
    Resolved,
    ResolvedModel,
    mixer_of,
    n_applied_layers,
    n_mixing_branches,
)
from lm.cost.devices import Device
from lm.cost.memory import (
    gathered_features,
    itemsizes,
    micro_batches_per_step,
    tokens_per_micro_batch,
)
from lm.model import MIXERS
from lm.optimizers import MATRIX_RULES
from lm.parallel import sharding
from lm.update_rules.matrices import split_sides

# that each device sends, by kind of collective and mesh axes
Bytes = defaultdict[tuple[str, tuple[str, ...]], float]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One purpose of communication: `times` collectives per step."""

    what: str  # what is sent
    # the collective, as in HLO: "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
    kind: str
    axes: tuple[str, ...]  # the mesh axes that take part; "slices" for one device of each TPU slice
    n: int  # devices that take part
    payload: float  # bytes of the full array that a device starts or ends with, whichever is larger
    times: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends per step."""
        return ring_bytes(self.kind, self.n, self.payload) * self.times


def ring_bytes(kind: str, n: int, payload: float) -> float:
    """Return the bytes each of n devices sends in a ring collective (Thakur et al. 2005).

    Arguments as in `Transfer`.

    >>> ring_bytes("all-reduce", 4, 100.0), ring_bytes("all-gather", 4, 100.0)
    (150.0, 75.0)
    """
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    return factor * payload


def seconds(transfer: Transfer, device: Device, sizes: dict[str, int]) -> float:
    """Return the seconds of a transfer by rings that enter and leave each group of devices once.

    Within a group (a node of GPUs) every hop of a ring uses `device.link`. Only one hop per ring
    leaves the group. NCCL builds as many rings as there are devices in the group, each with its own
    network port: a collective with m devices in a group sends 1/m of its bytes through each port.
    The slower of the link and the network determines the time. Latencies are not counted: those of
    NCCL change the predictions for published runs by at most 4 %.
    """
    if transfer.axes == ("slices",):
        return transfer.sent / device.network
    local = devices_per_group(device.group, sizes, transfer.axes)
    within = transfer.sent / device.link if local > 1 else 0.0
    beyond = transfer.sent / (local * device.network) if local < transfer.n else 0.0
    return max(within, beyond)


def devices_per_group(group: int, sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    """Return how many devices of a collective over these axes share a group of `group` devices.

    Device numbers increase fastest along the last axis, and a group has consecutive numbers. If the
    groups contain different numbers of its devices, the smallest number is returned.

    >>> sizes = {"replica": 4, "fsdp": 16, "tensor": 1, "sequence": 1}
    >>> devices_per_group(8, sizes, ("fsdp",)), devices_per_group(8, sizes, ("replica",))
    (8, 1)
    """
    stride = math.prod(sizes.values())
    numbers = [0]
    for axis, size in sizes.items():
        stride //= size
        if axis in axes:
            numbers = [number + i * stride for number in numbers for i in range(size)]
    return min(Counter(number // group for number in numbers).values())


def transfers(
    config: Resolved, sizes: dict[str, int], n_slices: int = 1, platform: str = "cpu"
) -> Iterator[Transfer]:
    """Yield what a step sends (see lm/parallel/sharding.py), over `n_slices` slices of TPUs.

    The slices divide the replica axis. Scalars, gains and biases are left out.
    """
    in_slice = sizes | {"replica": sizes["replica"] // n_slices, "slices": n_slices}
    for what, kind, axes, payload, times in (
        *_fsdp_transfers(config, sizes, n_slices, platform),
        *_tensor_transfers(config, sizes),
        *_sequence_transfers(config, sizes),
        *_matrix_transfers(config, sizes),
    ):
        axes = tuple(axis for axis in axes if in_slice[axis] > 1)
        n = math.prod(in_slice[axis] for axis in axes)
        if axes and payload and times:
            yield Transfer(what, kind, axes, n, payload, times)


def _fsdp_transfers(
    config: Resolved, sizes: dict[str, int], n_slices: int, platform: str
) -> Iterator[tuple]:
    """Yield the gathers of parameters over fsdp, and the sums of gradients over fsdp and others.

    Parameters without an axis of d_model, such as tables of values by token, are not sharded over
    fsdp. Over several slices XLA scatters gradients within a slice, sums parts over the slices, and
    gathers the sums.
    """
    m = config.model
    n = micro_batches_per_step(config, sizes)
    table = parameters.parameter_table(m)
    param, compute = itemsizes(config)

    def size(p) -> float:
        """Count the numbers that a device holds of a parameter gathered over fsdp."""
        return p.size / (sizes["tensor"] if "tensor" in sharding.parameter_spec(p, sizes) else 1)

    sharded = {path: p for path, p in table.items() if "fsdp" in sharding.parameter_spec(p, sizes)}
    # a layer gathers them whenever it is applied
    of_layers = [p for p in sharded.values() if p.layers]
    layers = sum(size(p) * n_applied_layers(m, p.layers) / len(p.layers) for p in of_layers)
    # looked up in param_dtype
    embeddings = sum(size(p) for p in sharded.values() if p.kind == "embedding")
    head = size(sharded["embedding" if m.tie_embeddings else "head/w_DV"]) if sharded else 0
    gradients = (layers + embeddings + head) * 4
    if m.tie_embeddings and platform == "gpu":  # XLA sums both gradients before it sends them
        gradients -= head * 4
    gather = ("all-gather", ("fsdp",))
    yield "parameters of the layers, forward and backward", *gather, layers * compute, 2 * n
    outer = embeddings * param + head * compute
    yield "parameters of embeddings and head", *gather, outer, n
    yield "gradients of these parameters", "reduce-scatter", ("fsdp",), gradients, n
    shards = sum(map(size, sharded.values())) / sizes["fsdp"]
    others = sum(size(p) for path, p in table.items() if path not in sharded and not p.small)
    for what, summed, rest in (
        ("gradients, once per step", shards * 4, ("replica", "sequence")),
        ("gradients of other parameters", others * 4, ("replica", "fsdp", "sequence")),
    ):
        if n_slices == 1:
            yield what, "all-reduce", rest, summed, 1
        else:
            n_parts = math.prod(sizes[axis] for axis in rest) // n_slices
            yield f"{what}, within a slice", "reduce-scatter", rest, summed, 1
            yield "their sum over the slices", "all-reduce", ("slices",), summed / n_parts, 1
            yield "their sum, within a slice", "all-gather", rest, summed, 1


def _tensor_transfers(config: Resolved, sizes: dict[str, int]) -> Iterator[tuple]:
    """Yield the sums over tensor of attention's and FFN's products (Shoeybi et al. 2019).

    The compilers for TPUs and GPUs add the gradients that reach one input, as from queries, keys
    and values, before they sum over devices; the one for CPUs sums each.
    """
    m = config.model
    n = micro_batches_per_step(config, sizes)
    n_tokens = tokens_per_micro_batch(config, sizes)
    compute = itemsizes(config)[1]
    sum_x_BTD = ("all-reduce", ("tensor",), n_tokens * m.d_model * compute)
    inputs, outputs = _split_products(m, sizes)
    if m.remat == "block":
        outputs += outputs - n_applied_layers(m)  # the last output of a block is not recomputed
    yield "outputs of attention and feed-forward layers", *sum_x_BTD, n * outputs
    yield "gradients of their inputs", *sum_x_BTD, n * inputs
    if m.vocab_size % sizes["tensor"] == 0:
        yield "embeddings, and the gradient of the head's input", *sum_x_BTD, 2 * n
    if m.qk_norm and m.qk_norm_over == "all_heads":
        # One float32 number per token for queries and for keys, forward and backward.
        times = n * n_applied_layers(m) * n_mixing_branches(m) * (4 + 2 * (m.remat != "none"))
        what = "squares of queries and keys, summed over heads"
        yield what, "all-reduce", ("tensor",), 4 * n_tokens, times


def _split_products(m: ResolvedModel, sizes: dict[str, int]) -> tuple[int, int]:
    """Count the modules with outputs split over tensor, and the weights with inputs split, each as
    often as its layer is applied.

    The weights of one module that are split by their outputs have the same input.
    """
    columns: dict[str, int] = {}
    rows = 0
    for path, p in parameters.parameter_table(m).items():
        if p.contract and p.layers is not None:
            spec = sharding.parameter_spec(p, sizes)
            times = n_applied_layers(m, p.layers)
            rows += times * any(spec[i] == "tensor" for i in p.rows)
            if any(spec[i] == "tensor" for i in p.columns):
                columns[path.rpartition("/")[0]] = times
    return sum(columns.values()), rows


def _sequence_transfers(config: Resolved, sizes: dict[str, int]) -> Iterator[tuple]:
    """Yield the gathers of keys and values over sequence: every device attends to all positions.

    The states that recurrences send on are not counted.
    """
    m = config.model
    n_tokens = tokens_per_micro_batch(config, sizes) * sizes["sequence"]
    gathers = 1 + (m.remat != "none")  # no policy keeps the gathered keys and values
    alike: dict[tuple, list[int]] = {}
    for layer in range(m.n_layers):
        features = gathered_features(m, layer, sizes)
        if features:
            alike.setdefault((mixer_of(m, layer), features), []).append(layer)
    for (kind, features), layers in alike.items():
        applied = n_applied_layers(m, layers) * n_mixing_branches(m)
        times = applied * micro_batches_per_step(config, sizes)
        what, arrays = "keys and values", 2
        if hasattr(MIXERS[kind], "cached"):
            what, arrays = f"what a cache of {kind} holds", 1
        payload = n_tokens * features / arrays * itemsizes(config)[1]
        yield what, "all-gather", ("sequence",), payload, gathers * arrays * times
        yield f"gradients of {what}", "reduce-scatter", ("sequence",), payload, arrays * times


def _matrix_transfers(config: Resolved, sizes: dict[str, int]) -> Iterator[tuple]:
    """Yield the exchanges of matrices' parts for whole ones, before and after an update rule."""
    rule = MATRIX_RULES.get(config.optimizer.name)
    payloads: Counter = Counter()
    for p in parameters.parameter_table(config.model).values():
        if rule and rule.takes(p):
            axes = split_sides(p, sizes).values()
            n_devices = math.prod(sizes[axis] for axis in axes)
            # some devices have none where they are not divisible
            n = math.ceil(p.n_matrices / n_devices)
            for axis in axes:
                payloads[axis] += n * p.size / p.n_matrices * itemsizes(config)[0]
    for axis, payload in payloads.items():
        yield f"matrices of {config.optimizer.name}", "all-to-all", (axis,), payload, 2
