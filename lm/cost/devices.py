"""The one table of accelerators: speed, memory, links, and what GKE calls them. Imports no jax.

All figures are the vendors'. Where a figure is an assumption of this project, a comment marks it.
"""

import dataclasses
import re

from lm.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Device:
    """One JAX device. Bytes and bytes per second are decimal; link and network count one direction.

    Attributes:
        kind: `jax.Device.device_kind`, exactly.
        peak: dense FLOP/s of matrix products, by dtype.
        memory: bytes.
        bandwidth: bytes per second between the device and its memory.
        link: bytes per second to the other devices of its group.
        group: number of devices that `link` connects: a node of GPUs, a slice of TPUs.
        network: bytes per second to devices outside of the group.
        per_host: devices per host.
        gke: the node label gke-accelerator (GPUs) or gke-tpu-accelerator (TPUs) of Google
            Kubernetes Engine; None where this project has no launch recipe.
        attained: fraction of `peak` that matrix products attain in training. For the A100, H100,
            v5e and v5p it is fitted to one published run each (the anchors of
            benchmarks/published_runs.py). The H200 has the value of the H100. The others have 0.6
            by assumption.
        slices: the TPU slices that exist, by their chips ("4x4").
        largest_slice: the most chips of a 3-D slice of GKE: in addition to `slices`, slices AxBxC
            of up to so many exist, with A <= B <= C all multiples of 4.
        cores: devices per TPU chip.
    """

    kind: str
    peak: dict[str, float]
    memory: float
    bandwidth: float
    link: float
    group: int
    network: float
    per_host: int
    gke: str | None = None
    attained: float = 0.6
    slices: tuple[str, ...] = ()
    largest_slice: int = 0
    cores: int = 1

    @property
    def platform(self) -> str:
        """Return the name of the platform in JAX: "gpu" or "tpu"."""
        return "gpu" if self.kind.startswith("NVIDIA") else "tpu"


def _nvidia(tensor_16: float, tensor_32: float) -> dict[str, float]:
    # By default JAX multiplies float32 in TF32 on these devices; a higher precision is slower
    # still.
    return {"bfloat16": tensor_16 * 1e12, "float32": tensor_32 * 1e12}


def _tpu(matrix_16: float) -> dict[str, float]:
    return {"bfloat16": matrix_16 * 1e12}  # no float32 peak is published for TPUs


# GKE, "Plan TPUs in GKE" and Cloud TPU, "TPU types and topologies". Slices of hosts with four
# chips, which is what launch/gke.py asks for; 1x1 needs another machine type.
_SLICES_2D = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SLICES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")

# Peaks are dense: NVIDIA's data sheets print figures with structured sparsity for Hopper and Ada;
# these are half of them. NVLink is published for both directions together and halved here.
DEVICES = {
    # NVIDIA A100 data sheet (2021): 312 and 156 TFLOPS for all four variants. Network of a DGX
    # A100: one port of 200 Gb/s per GPU. PCIe cards: PCIe 4.0 x16, and by assumption 8 per node and
    # 100 Gb/s between nodes.
    "a100": Device(
        "NVIDIA A100-SXM4-80GB",
        _nvidia(312, 156),
        80e9,
        2.039e12,
        300e9,
        8,
        25e9,
        8,
        "nvidia-a100-80gb",
        0.74,
    ),
    "a100-40gb": Device(
        "NVIDIA A100-SXM4-40GB", _nvidia(312, 156), 40e9, 1.555e12, 300e9, 8, 25e9, 8, None, 0.74
    ),
    "a100-pcie": Device(
        "NVIDIA A100 80GB PCIe", _nvidia(312, 156), 80e9, 1.935e12, 32e9, 8, 1.5e9, 8
    ),
    "a100-pcie-40gb": Device(
        "NVIDIA A100-PCIE-40GB", _nvidia(312, 156), 40e9, 1.555e12, 32e9, 8, 1.5e9, 8
    ),
    # NVIDIA H100 white paper (2022), table 2: SXM5 989.4 and 494.7, PCIe 756 and 378. Memory and
    # NVLink: data sheet (2023). Network of a DGX H100: one port of 400 Gb/s per GPU. PCIe cards:
    # PCIe 5.0 x16, and by assumption 8 per node and 100 Gb/s between nodes.
    "h100": Device(
        "NVIDIA H100 80GB HBM3",
        _nvidia(989.4, 494.7),
        80e9,
        3.35e12,
        450e9,
        8,
        50e9,
        8,
        "nvidia-h100-80gb",
        0.56,
    ),
    "h100-pcie": Device("NVIDIA H100 PCIe", _nvidia(756, 378), 80e9, 2.0e12, 64e9, 8, 1.5e9, 8),
    # NVIDIA H200 data sheet (2023): the compute of the H100 SXM5 (1,979 and 989 sparse).
    "h200": Device(
        "NVIDIA H200",
        _nvidia(989.4, 494.7),
        141e9,
        4.8e12,
        450e9,
        8,
        50e9,
        8,
        "nvidia-h200-141gb",
        0.56,
    ),
    # NVIDIA HGX B200 data sheet (2024), per GPU: 4,500 and 2,200 sparse; NVLink 1.8 TB/s both ways.
    # Network as H100.
    "b200": Device(
        "NVIDIA B200", _nvidia(2250, 1100), 180e9, 7.7e12, 900e9, 8, 50e9, 8, "nvidia-b200"
    ),
    # NVIDIA L4 data sheet (2023): 242 and 120 sparse; PCIe 4.0 x16. By assumption 8 per node, 100
    # Gb/s between nodes.
    "l4": Device("NVIDIA L4", _nvidia(121, 60), 24e9, 300e9, 32e9, 8, 1.5e9, 8, "nvidia-l4"),
    # Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e": peak compute (bf16), memory
    # and interconnect per chip, in one direction (400 GB/s both ways for the v5e). By assumption
    # 100 Gb/s beyond a slice for each host of 4 chips.
    "v4": Device(
        "TPU v4",
        _tpu(275),
        32e9,
        1.228e12,
        300e9,
        4096,
        3e9,
        4,
        "tpu-v4-podslice",
        0.6,
        _SLICES_3D,
        4096,
    ),
    "v5e": Device(
        "TPU v5 lite",
        _tpu(197),
        16e9,
        819e9,
        200e9,
        256,
        3e9,
        4,
        "tpu-v5-lite-podslice",
        0.91,
        _SLICES_2D,
    ),
    "v5p": Device(
        "TPU v5",
        _tpu(459),
        95e9,
        2.765e12,
        600e9,
        8960,
        3e9,
        4,
        "tpu-v5p-slice",
        0.78,
        _SLICES_3D,
        6144,
    ),
    "v6e": Device(
        "TPU v6 lite",
        _tpu(918),
        32e9,
        1.64e12,
        448e9,
        256,
        3e9,
        4,
        "tpu-v6e-slice",
        slices=_SLICES_2D,
    ),
    # Google Cloud's page "TPU7x (Ironwood)": 2307 TFLOP/s (bf16), 192 GiB, 7380 GB/s, 1200 GB/s of
    # interconnect both ways and 100 Gb/s beyond a slice per chip, which is two devices: halved
    # here. Not tried with GKE.
    "tpu7x": Device(
        "TPU7x", _tpu(1153.5), 96e9, 3.69e12, 300e9, 18432, 6.25e9, 8, slices=_SLICES_3D, cores=2
    ),
}


def parse_device(text: str, n_slices: int = 1) -> tuple[str, int]:
    """Split "NAME:COUNT", or "NAME" for one, of DEVICES in a number of TPU slices.

    Raises:
        UserError: the name is unknown, the count is not between 1 and 99,999, or there are no such
            slices.

    >>> parse_device("h100:64")
    ('h100', 64)
    """
    name, colon, count = text.partition(":")
    count = count if colon else "1"
    if name not in DEVICES or not re.fullmatch(r"0*[1-9][0-9]{0,4}", count):
        raise UserError(
            f"--device: {text[:100]!r} is not NAME:COUNT, such as h100:64; the names are "
            f"{', '.join(DEVICES)}, and the count is 1 to 99999"
        )
    if n_slices != 1 and (n_slices < 1 or int(count) % n_slices or DEVICES[name].platform != "tpu"):
        raise UserError(
            f"--slices: {n_slices} does not divide {text} into TPU slices; COUNT is of all slices"
        )
    return name, int(count)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the vendor's dense peak of one device in FLOP/s, None if it is not known.

    Args:
        device_kind: `jax.devices()[0].device_kind`, matched exactly.
        dtype: the dtype of the matrix products, "bfloat16" or "float32", or such a dtype of NumPy.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") / 1e12
    312.0
    """
    return next((d.peak.get(str(dtype)) for d in DEVICES.values() if d.kind == device_kind), None)
