"""The checkpoints of tests/references/huggingface, as directories."""

import json
import shutil
from pathlib import Path

from running import ROOT

from lm.huggingface.safetensors_files import Planned, TensorFiles, write_tensors

FOLDER = ROOT / "tests/references/huggingface"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def checkpoint(directory: Path, case: str = "llama", **fields) -> Path:
    """Write a stored checkpoint to a directory, with changed fields in its config.json (None removes one)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = EXPECTED[case]["config"] | fields
    config = {name: value for name, value in config.items() if value is not None or name not in fields}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copyfile(FOLDER / f"{EXPECTED[case]['weights']}.safetensors", directory / "model.safetensors")
    return directory


def edit_tensors(directory: Path, change) -> None:
    """Rewrite model.safetensors with change(tensors), a function of arrays by name."""
    with TensorFiles(directory) as files:
        tensors = change({name: files.read(name) for name in files.shapes})
    planned = [Planned(name, x.shape, x.dtype) for name, x in tensors.items()]
    write_tensors(directory, planned, iter(tensors.values()))
