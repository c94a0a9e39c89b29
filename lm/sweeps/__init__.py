"""What lm.sweep and lm.report are made of. A sweep file takes its words from here."""

from lm.sweeps.spec import LEARNING_RATE, Budget, Sweep, each, match_flops, match_params, product, zipped

__all__ = ["LEARNING_RATE", "Budget", "Sweep", "each", "match_flops", "match_params", "product", "zipped"]
