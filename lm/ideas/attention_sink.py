"""Attention sink: one more key for each head, with a learned score and the value 0 (gpt-oss).

The paper is arXiv:2508.10925. The softmax's denominator gains exp(s_h), so a head may attend to
nothing. s_h starts at 0, as if one key had score 0.
"""

from lm.config import query_heads
from lm.declarations import small_weight


def table(c):
    return {"sink_H": small_weight((query_heads(c),), "H")}


def apply(here, options):
    return options | {"sink_H": here.p["sink_H"]}
