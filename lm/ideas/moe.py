"""Mixture of experts: y = sum of p_e glu_e(x) over the k best experts e (Shazeer et al. 2017).

The paper is arXiv:1701.06538. p is the softmax of the router's logits x W. With normalize_experts
it is divided by its sum over the k chosen, as in Mixtral and Qwen3; without, it is not, as in OLMoE
(arXiv:2409.02060). No token is dropped: tokens are sorted by expert, and `jax.lax.ragged_dot`
multiplies each group with the weights of its expert. model.d_ff is the width of one expert. A
shared expert sees every token (DeepSeek-V2, arXiv:2405.04434).

Terms of the loss:

moe_balance  T sum_e f_e P_e for each sequence of T tokens. f_e is E / (k T) times the number of
             tokens that chose e, and P_e the mean of p_e over the tokens (DeepSeek-V3,
             arXiv:2412.19437, eq. 17 to 20).
router_z     the sum of log(Z)^2 of the router's logits (ST-MoE, arXiv:2202.08906, eq. 5).
"""

import jax
import jax.numpy as jnp

from lm.declarations import weight
from lm.layers.feed_forward import ACTIVATIONS, gated
from lm.layers.linear import einsum
from lm.system.errors import UserError

OTHERS = "glu"  # the feed-forward layer of the layers before config.model.moe_first_layer


def layers(c):
    return range(c.moe_first_layer, c.n_layers)


def table(c):
    if c.experts_per_token > c.n_experts:
        raise UserError(
            f"config.model.experts_per_token: {c.experts_per_token} of {c.n_experts} experts; use "
            "fewer"
        )
    if not layers(c):
        last = c.n_layers - 1
        raise UserError(
            f"config.model.moe_first_layer: {c.moe_first_layer}, but the last layer is {last}; use "
            f"{last}"
        )
    D = c.d_model
    F = c.d_ff
    E = c.n_experts
    used = c.experts_per_token / E
    own = {
        "w_router_DE": weight(c, (D, E), "DE"),
        "w_gate_EDF": weight(c, (E, D, F), "EDF", batch="E", products=used),
        "w_up_EDF": weight(c, (E, D, F), "EDF", batch="E", products=used),
        "w_down_EFD": weight(
            c, (E, F, D), "EFD", contract="F", batch="E", products=used, residual=True
        ),
    }
    if c.shared_expert:
        own["w_shared_gate_DF"] = weight(c, (D, F), "DF")
        own["w_shared_up_DF"] = weight(c, (D, F), "DF")
        own["w_shared_down_FD"] = weight(c, (F, D), "FD", contract="F", residual=True)
    return own


def carry(c, x_BTD):
    return {f"loss/{name}": jnp.float32(0) for name in loss_weights(c, 0)}


def loss_weights(c, fraction):
    return {"moe_balance": c.moe_balance, "router_z": c.router_z}


def apply(here, x_BTD):
    c = here.c
    p = here.p
    # float32: rounded logits would choose other experts
    logits_BTE = jnp.einsum(
        "...D,DE->...E", x_BTD, p["w_router_DE"], preferred_element_type=jnp.float32
    )
    probabilities_BTE = jax.nn.softmax(logits_BTE)
    weights_BTk, experts_BTk = jax.lax.top_k(probabilities_BTE, c.experts_per_token)
    if c.normalize_experts:
        weights_BTk /= jnp.sum(weights_BTk, axis=-1, keepdims=True)
    y_BTD = dispatch(x_BTD, weights_BTk, experts_BTk, p, ACTIVATIONS[c.activation])
    if c.shared_expert:
        gate_BTF = einsum("BTD,DF->BTF", x_BTD, p["w_shared_gate_DF"])
        up_BTF = einsum("BTD,DF->BTF", x_BTD, p["w_shared_up_DF"])
        h_BTF = here.tap("hidden", gated(gate_BTF, up_BTF, c.activation))
        y_BTD += einsum("BTF,FD->BTD", h_BTF, p["w_shared_down_FD"])
    for name, term in _loss_terms(c, logits_BTE, probabilities_BTE, experts_BTk).items():
        here.stream[name] += term.astype(jnp.float32)
    return y_BTD


def dispatch(x_BTD, weights_BTk, experts_BTk, p, activation):
    """Return the weighted sum of the chosen experts' outputs for each token, (B, T, D)."""
    n_experts = len(p["w_gate_EDF"])
    k = experts_BTk.shape[-1]
    # Pairs of a token and one of its experts, sorted by expert. Pair i is of token i // k.
    order = jnp.argsort(experts_BTk.reshape(-1), stable=True)
    sizes_E = jnp.bincount(experts_BTk.reshape(-1), length=n_experts).astype(jnp.int32)
    rows = x_BTD.reshape(-1, x_BTD.shape[-1])[order // k]
    w_gate_EDF = p["w_gate_EDF"].astype(x_BTD.dtype)
    w_up_EDF = p["w_up_EDF"].astype(x_BTD.dtype)
    w_down_EFD = p["w_down_EFD"].astype(x_BTD.dtype)
    gate = jax.lax.ragged_dot(rows, w_gate_EDF, sizes_E)
    up = jax.lax.ragged_dot(rows, w_up_EDF, sizes_E)
    y = jax.lax.ragged_dot(activation(gate) * up, w_down_EFD, sizes_E)
    # the argsort of an order is its inverse
    y_BTkD = y[jnp.argsort(order)].reshape(*experts_BTk.shape, -1)
    return jnp.sum(weights_BTk[..., None].astype(y.dtype) * y_BTkD, axis=-2)


def _loss_terms(c, logits_BTE, probabilities_BTE, experts_BTk) -> dict:
    T = logits_BTE.shape[-2]
    chosen_BTE = jnp.sum(jax.nn.one_hot(experts_BTk, c.n_experts), axis=-2)
    f_BE = jnp.mean(chosen_BTE, axis=-2) * c.n_experts / c.experts_per_token
    balance = T * jnp.sum(f_BE * jnp.mean(probabilities_BTE, axis=-2))
    router_z = jnp.sum(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)))
    return {"loss/moe_balance": balance, "loss/router_z": router_z}
