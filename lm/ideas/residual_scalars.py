"""Scalars of the residual stream: x <- a_l x + b_l x_0 before layer l (nanochat, 2026).

x_0 are the embeddings. a = 1 and b = 0 at step 0, so that the model starts as the one without it.
modded-nanogpt mixes likewise.
"""

from lm.declarations import small_weight


def table(c):
    return {
        "residual_scale": small_weight((), "", init="ones"),
        "embedding_scale": small_weight((), ""),
    }


def same_at_start(c):
    return True


def carry(c, x_BTD):
    return {"x0_BTD": x_BTD}


def apply(here, x_BTD):
    a = here.p["residual_scale"].astype(x_BTD.dtype)
    b = here.p["embedding_scale"].astype(x_BTD.dtype)
    return a * x_BTD + b * here.stream["x0_BTD"]
