"""The plain residual stream: a branch reads x, and its output is added to it."""


def read(here, stream, branch: str):
    """Return the input (B, T, D) of a branch, "attention" or "ffn"."""
    return stream["x"]


def add(here, stream, branch: str, y_BTD) -> dict:
    """Return the stream with the output of a branch. Its "x" is what the final norm reads after the last block."""
    return stream | {"x": stream["x"] + y_BTD}
