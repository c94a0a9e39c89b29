"""Estimate memory, communication and step time on other hardware.

Nothing is allocated or compiled. All figures are computed by formulas (lm/cost/memory.py,
lm/cost/communication.py) from the vendors' figures (lm/cost/devices.py). The memory that XLA needs
is known only after it has compiled the step for the device. benchmarks/NOTES.md compares the
estimate with published runs.
"""

import dataclasses
import math

from lm.config import MESH_AXES, MeshConfig, Resolved
from lm.config.values import divisors
from lm.cost import flops
from lm.cost.communication import Bytes, Transfer, seconds, transfers
from lm.cost.devices import DEVICES, Device
from lm.cost.memory import Memory, memory_per_device, moved_activation_bytes
from lm.parallel.mesh import check_mesh
from lm.system.errors import UserError

USABLE = 0.9  # of the memory; the rest is left to XLA and fragmentation
# axes whose communication can run at the same time as matrix products
OVERLAPPING = {"replica", "fsdp"}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated memory, communication and step time of a run on one mesh."""

    config: Resolved
    device_name: str  # a name of lm.cost.devices.DEVICES
    sizes: dict[str, int]  # of each mesh axis
    memory: Memory  # per device
    sent: tuple[Transfer, ...]  # in a step
    seconds: float  # per step
    n_slices: int = 1  # the number of TPU slices that the devices form

    @property
    def device(self) -> Device:
        return DEVICES[self.device_name]

    @property
    def n_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def peak(self) -> float:
        return self.device.peak[self.config.model.compute_dtype]

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE * self.device.memory

    @property
    def sent_by_collective(self) -> Bytes:
        """Return the sum of what is sent for all purposes."""
        sent: Bytes = Bytes(float)
        for transfer in self.sent:
            sent[transfer.kind, transfer.axes] += transfer.sent
        return sent

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.train.seq_len


def estimate(config: Resolved, device_name: str, n_devices: int, n_slices: int = 1) -> Estimate:
    """Estimate memory, communication and step time on the config's mesh, for any devices.

    For the arguments see `Estimate`.

    Raises:
        UserError: the mesh does not fit the config, the device does not support
            config.model.attention, or its peak in config.model.compute_dtype is not published.
    """
    sizes = check_mesh(config, n_devices, n_slices)
    dtype = config.model.compute_dtype
    device = DEVICES[device_name]
    if dtype not in device.peak:
        published = " or ".join(device.peak)
        raise UserError(
            f"config.model.compute_dtype: no {dtype} peak is published for {device_name}; use "
            f"{published}"
        )
    memory = memory_per_device(config, device, sizes)
    sent = tuple(transfers(config, sizes, n_slices, device.platform))
    # bytes that the optimizer moves, gradients included
    update = 3 * memory.parameters + 2 * memory.optimizer
    moved = moved_activation_bytes(config, sizes)
    products = product_seconds(config, device, n_devices) + moved / device.bandwidth
    hidden = sum(seconds(t, device, sizes) for t in sent if overlaps(t, device))
    exposed = sum(seconds(t, device, sizes) for t in sent if not overlaps(t, device))
    time = products + max(0.0, hidden - products) + exposed + update / device.bandwidth
    return Estimate(config, device_name, sizes, memory, sent, time, n_slices)


def overlaps(transfer: Transfer, device: Device) -> bool:
    """Return whether products run at the same time as a transfer.

    Products wait for results over tensor and sequence. On TPUs the others are asynchronous in
    compiled programs, but less than half of the bytes of reduce-scatters are. On GPUs all are, but
    published runs are as slow as without.
    """
    return (
        device.platform == "tpu"
        and transfer.kind != "reduce-scatter"
        and bool(set(transfer.axes) & OVERLAPPING)
    )


def product_seconds(config: Resolved, device: Device, n_devices: int) -> float:
    """Return the seconds of a step's matrix products, at `device.attained` of the peak."""
    t = config.train
    m = config.model
    recomputed = 4 / 3 if m.remat == "block" else 1
    needed = recomputed * flops.flops_per_token(m, t.seq_len) * t.batch_size * t.seq_len
    return needed / n_devices / device.peak[m.compute_dtype] / device.attained


def search_meshes(
    config: Resolved, device_name: str, n_devices: int, n_slices: int = 1
) -> list[Estimate]:
    """Estimate all meshes that the config can be sharded over. Arguments as for `estimate`.

    Returns:
        The meshes that fit, fastest first, then those that do not fit, least memory first.

    Raises:
        UserError: there is no such mesh; the error lists the problems of pure data parallelism.
    """
    estimates = []
    first_error: UserError | None = None
    for sizes in factorizations(n_devices, len(MESH_AXES)):
        try:
            on_mesh = dataclasses.replace(config, mesh=MeshConfig(*sizes))
            estimates.append(estimate(on_mesh, device_name, n_devices, n_slices))
        except UserError as error:
            first_error = first_error or error
    if first_error and not estimates:
        raise first_error
    return sorted(estimates, key=lambda e: (not e.fits, e.seconds * e.fits, e.memory.total))


def factorizations(n: int, n_factors: int) -> list[tuple[int, ...]]:
    """Return all ways to write n as a product of ordered factors, large first factors first.

    >>> factorizations(4, 2)
    [(4, 1), (2, 2), (1, 4)]
    """
    if n_factors == 1:
        return [(n,)]
    return [
        (d, *rest) for d in reversed(divisors(n)) for rest in factorizations(n // d, n_factors - 1)
    ]
