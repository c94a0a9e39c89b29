"""Parallel branches: x + attention(norm_1 x) + ffn(norm_2 x) (GPT-NeoX-20B, Black et al. 2022,
arXiv:2204.06745).
"""


def block(here, x_BTD, attention, ffn):
    return x_BTD + attention(x_BTD) + ffn(x_BTD)
