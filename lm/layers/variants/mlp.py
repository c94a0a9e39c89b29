"""Two matrices around an activation: activation(x w_in + b_in) w_out + b_out."""

from lm.declarations import bias, weight
from lm.layers import feed_forward


def default_d_ff(d_model: int) -> int:
    return 4 * d_model


def table(c):
    D, F = c.d_model, c.d_ff
    found = {"w_in_DF": weight(c, (D, F), "DF"), "w_out_FD": weight(c, (F, D), "FD", contract="F", residual=True)}
    return found | ({"b_in_F": bias((F,), "F"), "b_out_D": bias((D,), "D")} if c.ffn_bias else {})


def apply(here, stream, x_BTD, tap):
    p = here.p
    return stream, feed_forward.mlp(
        x_BTD, p["w_in_DF"], p["w_out_FD"], activation=here.c.activation, b_in=p.get("b_in_F"), b_out=p.get("b_out_D"),
        tap=tap,
    )  # fmt: skip
