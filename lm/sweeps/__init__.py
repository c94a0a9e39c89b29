"""Sweeps: compare variants of a config at their best learning rates. Sweep files import their names from here."""

from lm.sweeps.design.axes import (
    LEARNING_RATE,
    each,
    match_flops,
    match_params,
    match_rate,
    match_tokens,
    product,
    zipped,
)
from lm.sweeps.design.search import Search, choice, log_uniform, uniform
from lm.sweeps.design.spec import Budget, Sweep

__all__ = [
    "LEARNING_RATE",
    "Budget",
    "Search",
    "Sweep",
    "choice",
    "each",
    "log_uniform",
    "match_flops",
    "match_params",
    "match_rate",
    "match_tokens",
    "product",
    "uniform",
    "zipped",
]
