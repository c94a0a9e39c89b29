"""Evaluate a trained model on any text: `evaluate(lm.load("runs/mine"), split="test")`.

A run evaluates itself while it trains (`lm/training/evaluation.py`): the mean loss of its own
splits, on all devices of the run. This package evaluates a finished model on one device, and
reports more: standard errors, a sliding window, the loss by length of the context, and other texts.
"""

from lm.scoring.means import Estimate, TextMeans
from lm.scoring.texts import TextResult, evaluate

__all__ = ["Estimate", "TextMeans", "TextResult", "evaluate"]
