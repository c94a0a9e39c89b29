"""Sweeps: compare variants of a config, each tuned, on fresh seeds. Sweep files import their names
from here.
"""

from lm.sweeps.declare import Budget, Sweep, each, match_params, product
from lm.sweeps.tuning import LEARNING_RATE

__all__ = ["LEARNING_RATE", "Budget", "Sweep", "each", "match_params", "product"]
