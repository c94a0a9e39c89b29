"""Exact counts of weights and operations from the declarations of a model, and MFU."""

from lm import ideas
from lm.config import ResolvedModel, layer_windows, query_heads
from lm.parameters import parameter_table


def matmul_params(config: ResolvedModel) -> int:
    """Count the weights that take part in the matrix products of one token.

    The head counts, tied to the embedding or not. The embedding lookup, biases, gains and learned
    positions do not.
    """
    return sum(p.matmul_size for p in parameter_table(config).values())


def mean_attended_keys(seq_len: int, window: int) -> float:
    """Return the number of keys that a causal query sees, averaged over the seq_len positions.

    Query t = 0 .. seq_len-1 sees t + 1 keys, or min(t + 1, window). A window of 0 is no window.

    >>> mean_attended_keys(4, 0), mean_attended_keys(4, 2)  # (1 + 2 + 3 + 4) / 4, (1 + 2 + 2 + 2) / 4
    (2.5, 1.75)
    """
    if window <= 0 or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def flops_per_token(config: ResolvedModel, seq_len: int, *, full_square: bool = False) -> float:
    """Count the operations of training on one token, forward and backward, without recomputation.

    6 for each weight in a matrix product (2 forward, 4 backward) and 12 x n_heads x d_head for each
    attended key (queries x keys and weights x values, each 2 forward and 4 backward), except in
    layers with a mixer in place of attention. Ideas add 6 for each of their `products`.

    With `full_square`, count seq_len keys for every query instead of the keys that it sees. This is
    the convention of Chowdhery et al. 2022 (PaLM, appendix B), which most published MFU figures
    follow.
    """
    width = query_heads(config) * config.d_head  # of all query heads together
    keys = 0.0
    for layer, window in enumerate(layer_windows(config)):
        if ideas.mixer(config, layer) is None:
            keys += seq_len if full_square else mean_attended_keys(seq_len, window)
    return 6 * (matmul_params(config) + ideas.products(config)) + 12 * width * keys


def mfu(
    tokens_per_second: float, flops_per_token: float, n_devices: int, peak: float | None
) -> float | None:
    """Return model FLOPs utilization (Chowdhery et al. 2022): needed over possible, in [0, 1].

    `tokens_per_second` is that of all devices together, `peak` the FLOP/s of one device. If it is
    not known (None), so is the result.

    >>> mfu(1000.0, 6e9, n_devices=2, peak=1e13)
    0.3
    """
    return None if peak is None else tokens_per_second * flops_per_token / (n_devices * peak)
