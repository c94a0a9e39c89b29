"""Parallel branches: x + attention(norm_1 x) + ffn(norm_2 x) (GPT-NeoX-20B, arXiv:2204.06745)."""


def block(here, x_BTD, branches):
    outputs = [branch(x_BTD) for branch in branches.values()]
    return sum(outputs, start=x_BTD)
