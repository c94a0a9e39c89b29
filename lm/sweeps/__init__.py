"""Sweeps: compare variants of a config at their best learning rates. Sweep files import their names from here."""

from lm.sweeps.spec import LEARNING_RATE, Budget, Sweep, each, match_flops, match_params, product, zipped

__all__ = ["LEARNING_RATE", "Budget", "Sweep", "each", "match_flops", "match_params", "product", "zipped"]
