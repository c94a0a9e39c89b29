"""Exact counts of weights and floating-point operations, the peaks of known devices, and MFU.

The model configuration is only read: `d_model`, `n_layers`, `n_heads`, `n_kv_heads`, `d_head`, `d_ff`, `vocab_size`,
`ffn` ("mlp" or "glu") and `window_pattern`, all with their final values.
"""

from lm.config import layer_windows


def matmul_params(config) -> int:
    """The number of weights that take part in matrix products.

    The head counts, also when it is tied to the embedding; the embedding lookup, biases, gains and learned positions
    do not.
    """
    attention = config.d_model * config.d_head * (2 * config.n_heads + 2 * config.n_kv_heads)
    feed_forward = config.d_model * config.d_ff * {"mlp": 2, "glu": 3}[config.ffn]
    return config.n_layers * (attention + feed_forward) + config.d_model * config.vocab_size


def mean_attended_keys(seq_len: int, window: int) -> float:
    """The mean over query positions t = 0 .. seq_len-1 of the keys in sight: t + 1, or min(t + 1, window)."""
    if window <= 0 or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def flops_per_token(config, seq_len: int, *, full_square: bool = False) -> float:
    """Floating-point operations to train on one token: forward and backward, recomputation not counted.

    6 for each weight in a matrix product (2 forward, 4 backward) and 12 x n_heads x d_head for each attended key
    (queries x keys and weights x values, each 2 forward and 4 backward). Only the keys a query may see are counted.
    With `full_square` every query counts seq_len keys, the convention of Chowdhery et al. 2022 (PaLM, appendix B),
    which most published MFU figures follow.
    """
    keys = sum(seq_len if full_square else mean_attended_keys(seq_len, w) for w in layer_windows(config))
    return 6 * matmul_params(config) + 12 * config.n_heads * config.d_head * keys


def _nvidia(tensor_16: float, tensor_32: float) -> dict[str, float]:
    # JAX multiplies float32 in TF32 on these devices unless a higher precision is asked for; that peak is lower still.
    return {"bfloat16": tensor_16 * 1e12, "float16": tensor_16 * 1e12, "float32": tensor_32 * 1e12}


def _tpu(matrix_16: float) -> dict[str, float]:
    # No float32 or float16 peak is published for TPUs.
    return {"bfloat16": matrix_16 * 1e12}


# Operations per second of one JAX device, keyed by jax.Device.device_kind, without structured sparsity (NVIDIA's
# data sheets print the sparse figures for Hopper and Ada: half of those). TPU v2, v3 and TPU7x are left out: there
# a JAX device is a part of a chip, while the published peak is the chip's.
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU data sheet (2021): 312 and 156 TFLOPS, all four variants.
    "NVIDIA A100-SXM4-40GB": _nvidia(312, 156),
    "NVIDIA A100-SXM4-80GB": _nvidia(312, 156),
    "NVIDIA A100-PCIE-40GB": _nvidia(312, 156),
    "NVIDIA A100 80GB PCIe": _nvidia(312, 156),
    # NVIDIA H100 Tensor Core GPU Architecture white paper (2022), table 2: SXM5 989.4 and 494.7, PCIe 756 and 378.
    "NVIDIA H100 80GB HBM3": _nvidia(989.4, 494.7),
    "NVIDIA H100 PCIe": _nvidia(756, 378),
    # NVIDIA H200 data sheet (2023): the compute of the H100 SXM5 (1,979 and 989 sparse).
    "NVIDIA H200": _nvidia(989.4, 494.7),
    # NVIDIA L4 data sheet (2023): 242 and 120 sparse.
    "NVIDIA L4": _nvidia(121, 60),
    # Google Cloud, "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" pages: peak compute per chip (bf16).
    "TPU v4": _tpu(275),
    "TPU v5 lite": _tpu(197),
    "TPU v5": _tpu(459),
    "TPU v6 lite": _tpu(918),
}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """The vendor's dense peak of one device in operations per second, or None where it is not known for certain.

    `device_kind` is what `jax.devices()[0].device_kind` prints, matched exactly; `dtype` is the name of the dtype in
    which matrices are multiplied ("bfloat16", "float16" or "float32").
    """
    return _PEAKS.get(device_kind, {}).get(str(dtype))


def mfu(tokens_per_second: float, flops_per_token: float, n_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilization in [0, 1] (Chowdhery et al. 2022): operations needed over operations possible.

    `tokens_per_second` is over all `n_devices` together, `peak` that of one. None where the peak is not known.
    """
    return None if peak is None else tokens_per_second * flops_per_token / (n_devices * peak)
