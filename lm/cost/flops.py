"""Exact counts of weights and operations from the declarations of a model, and MFU."""

from lm import ideas
from lm.config import (
    ResolvedModel,
    layer_windows,
    mixer_of,
    n_applied_layers,
    n_mixing_branches,
    turns,
)
from lm.model import MIXERS
from lm.parameters import parameter_table


def matmul_params(config: ResolvedModel) -> int:
    """Count the weights that take part in the matrix products of one token.

    The head counts, tied to the embedding or not. The embedding lookup, biases, gains and learned
    positions do not. A layer that is applied several times counts as often.
    """
    total = 0
    for p in parameter_table(config).values():
        if p.layers is None:
            total += p.matmul_size
        else:
            total += p.matmul_size * n_applied_layers(config, p.layers) // len(p.layers)
    return total


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

    6 for each weight in a matrix product (2 forward, 4 backward) and for each of the `products` of
    mixers and ideas. Those of attention are 2 x n_heads x d_head for each attended key: queries x
    keys, and weights x values.

    With `full_square`, count seq_len keys for every query instead of the keys that it sees. This is
    the convention of Chowdhery et al. 2022 (PaLM, appendix B), which most published MFU figures
    follow.
    """
    n_products = matmul_params(config) + ideas.loss_products(config)
    n_products += ideas.products(config, None, seq_len)
    windows = layer_windows(config)
    n_mixing = n_mixing_branches(config)
    for layers in turns(config):
        for layer in layers:
            n_keys = seq_len if full_square else mean_attended_keys(seq_len, windows[layer])
            if config.masked_diffusion and not full_square:
                n_keys = 2 * n_keys - 1  # as many after a query as before it
            mixer = mixer_of(config, layer)
            if mixer != "attention" or ideas.in_place_of_softmax(config, layer) is None:
                n_products += n_mixing * MIXERS[mixer].products(config, n_keys)
            n_products += ideas.products(config, layer, n_keys)
    return 6 * n_products


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
