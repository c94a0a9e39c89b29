"""The gated linear unit: (activation(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down."""

from lm.declarations import bias, weight
from lm.layers import feed_forward


def default_d_ff(d_model: int) -> int:
    """Return 8/3 d_model, for as many weights as the two matrices of an MLP, in multiples of 64.

    >>> default_d_ff(512)
    1344
    """
    return max(64, (8 * d_model + 96) // 192 * 64)  # floor(8 d / 3 / 64 + 1/2) * 64 in integers


def table(c):
    D, F = c.d_model, c.d_ff
    found = {f"w_{name}_DF": weight(c, (D, F), "DF") for name in ("gate", "up")}
    found["w_down_FD"] = weight(c, (F, D), "FD", contract="F", residual=True)
    if c.ffn_bias:
        found |= {"b_gate_F": bias((F,), "F"), "b_up_F": bias((F,), "F"), "b_down_D": bias((D,), "D")}
    return found


def apply(here, stream, x_BTD, tap):
    p = here.p
    return stream, feed_forward.glu(
        x_BTD, p["w_gate_DF"], p["w_up_DF"], p["w_down_FD"], activation=here.c.activation,
        b_gate=p.get("b_gate_F"), b_up=p.get("b_up_F"), b_down=p.get("b_down_D"), tap=tap,
    )  # fmt: skip
