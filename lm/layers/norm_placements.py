"""Placements of the norms in a block: functions of the residual stream and of the block's two branches.

Each takes x_BTD, `attention` and `ffn` (functions of x_BTD) and `norm` (a function of a norm's name and x_BTD), and
returns x_BTD. The names of the norms are declared in lm/parameters.py.
"""


def pre(x, attention, ffn, norm):
    """x + f(norm x) (Radford et al. 2019).

    >>> pre(1.0, attention=lambda x: 10 * x, ffn=lambda x: 0 * x, norm=lambda name, x: x / 2)
    6.0
    """
    x = x + attention(norm("attention_norm", x))
    return x + ffn(norm("ffn_norm", x))


def post(x, attention, ffn, norm):
    """norm(x + f(x)) (Vaswani et al. 2017).

    >>> post(1.0, attention=lambda x: 10 * x, ffn=lambda x: 0 * x, norm=lambda name, x: x / 2)
    2.75
    """
    x = norm("attention_norm", x + attention(x))
    return norm("ffn_norm", x + ffn(x))


def sandwich(x, attention, ffn, norm):
    """x + norm(f(norm x)) (Ding et al. 2021).

    >>> sandwich(1.0, attention=lambda x: 10 * x, ffn=lambda x: 0 * x, norm=lambda name, x: x / 2)
    3.5
    """
    x = x + norm("attention_post_norm", attention(norm("attention_norm", x)))
    return x + norm("ffn_post_norm", ffn(norm("ffn_norm", x)))


def output(x, attention, ffn, norm):
    """x + norm(f(x)) (OLMo et al. 2025, arXiv:2501.00656).

    >>> output(1.0, attention=lambda x: 10 * x, ffn=lambda x: 0 * x, norm=lambda name, x: x / 2)
    6.0
    """
    x = x + norm("attention_post_norm", attention(x))
    return x + norm("ffn_post_norm", ffn(x))


def parallel(x, attention, ffn, norm):
    """x + attention(norm x) + ffn(norm x) (Wang and Komatsuzaki 2021).

    >>> parallel(1.0, attention=lambda x: 10 * x, ffn=lambda x: 0 * x, norm=lambda name, x: x / 2)
    6.0
    """
    y = norm("norm", x)
    return x + attention(y) + ffn(y)


def none(x, attention, ffn, norm):
    """x + f(x).

    >>> none(1.0, attention=lambda x: 10 * x, ffn=lambda x: 0 * x, norm=lambda name, x: x / 2)
    11.0
    """
    x = x + attention(x)
    return x + ffn(x)


NORM_PLACEMENTS = {f.__name__: f for f in (pre, post, sandwich, output, parallel, none)}
