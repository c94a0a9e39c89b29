"""Find the tokenizer of a checkpoint, and write one for an exported model. Imports no jax."""

from pathlib import Path


def find_tokenizer(directory: str | Path) -> Path | None:
    """Return the path of a checkpoint's tokenizer.json, or None if it has none."""
    path = Path(directory) / "tokenizer.json"
    return path if path.is_file() else None
