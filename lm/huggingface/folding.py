"""Factors that a family lacks, multiplied into weights of an exported model. Imports no jax."""

import dataclasses
import math
from typing import Any

from lm.config import ResolvedModel
from lm.huggingface.families import Family

BIASES = ("attn_bias", "attn_out_bias", "ffn_bias", "norm_bias")


def fold(family: Family, c: ResolvedModel) -> tuple[ResolvedModel, dict[str, float]]:
    """Return the model section of an exported model, and the factors of its parameters by path.

    The factor of attention scores is multiplied into the queries, that of the embeddings into an
    untied table, and that of the last hidden states (muP) into the final norm. Biases that the
    family needs and the model lacks are zero.
    """
    has = {*family.fields, *(key for conversion in family.conversions for key in conversion.keys)}
    changes: dict[str, Any] = dict.fromkeys(BIASES, True) if family.zero_biases else {}
    factors: dict[str, float] = {}
    if c.parametrization == "mup":
        changes["parametrization"] = "standard"
        changes["attn_scale"] = math.sqrt(c.mup_base_d_head) / c.d_head
        for name in ("scale_D", "bias_D"):
            factors[f"final_norm/{name}"] = c.mup_base_d_model / c.d_model
    scale = changes.get("attn_scale", c.attn_scale)
    if scale is not None and "attn_scale" not in has:
        changes["attn_scale"] = None
        queries = ("q_scale_K", "q_scale_HK") if c.qk_norm else ("w_q_DHK", "b_q_HK")
        factors |= {f"layers/attention/{name}": scale * math.sqrt(c.d_head) for name in queries}
    if c.embed_scale != 1 and not c.tie_embeddings and "embed_scale" not in has:
        changes["embed_scale"] = 1.0
        factors["embedding"] = c.embed_scale
    return dataclasses.replace(c, **changes), factors
