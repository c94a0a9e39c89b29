"""Parallel branches: x + attention(norm_1 x) + ffn(norm_2 x) (GPT-NeoX-20B, Black et al. 2022, arXiv:2204.06745)."""


def carry(c, x_BTD):
    return {"block_input_BTD": x_BTD}


def read(here, stream, branch: str):
    return stream["x"] if branch == "attention" else stream["block_input_BTD"]


def add(here, stream, branch: str, y_BTD) -> dict:
    block_input_BTD = stream["x"] if branch == "attention" else stream["block_input_BTD"]
    return stream | {"x": stream["x"] + y_BTD, "block_input_BTD": block_input_BTD}
