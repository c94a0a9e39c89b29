"""Read and write tensors in safetensors files, one at a time. Imports no jax.

The format: 8 bytes with the length of the header (little-endian), the header in JSON (name ->
dtype, shape and the range of bytes), and the tensors. https://github.com/huggingface/safetensors
"""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lm.huggingface.config_files import MAX_TOKENIZER_BYTES, find_file
from lm.system.errors import UserError
from lm.system.files import name_errors, read_json, write_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"  # of peft; with it, transformers changes the weights
PICKLES = (".bin", ".pt", ".pth")
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}
SHARD_BYTES = 5 * 10**9


class TensorFiles:
    """The tensors of a checkpoint and their `shapes` by name, in one file, or several of an index.

    A context manager.
    """

    def __init__(self, directory: str | Path):
        """Open the files and check their headers; raises UserError if something is wrong."""
        from safetensors import SafetensorError, safe_open

        self._directory = Path(directory)
        self._file_of: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, expected in self._find_files().items():
                path = find_file(self._directory, name)
                if path is None:
                    raise UserError(f"{self._directory / name} is missing; download it again")
                try:
                    file = stack.enter_context(safe_open(path, framework="np", backend="pread"))
                except SafetensorError as error:
                    raise UserError(
                        f"{path} is corrupted or truncated ({error}); download it again"
                    ) from None
                for tensor in file.keys():  # noqa: SIM118
                    other, _ = self._file_of.setdefault(tensor, (name, file))
                    if other != name:
                        raise UserError(
                            f"{path} and {other} both have the tensor {tensor}; download both again"
                        )
                if expected and (lost := sorted(expected - set(file.keys()))):
                    raise UserError(
                        f"{path} has no tensor {lost[0]}, which {INDEX} places there; download "
                        "both again"
                    )
            self.shapes = {
                name: tuple(file.get_slice(name).get_shape())
                for name, (_, file) in self._file_of.items()
            }
            self._stack = stack.pop_all()

    def _find_files(self) -> dict[str, set[str] | None]:
        """Return the names of the files, with the tensors that an index places in each."""
        if find_file(self._directory, ADAPTER):
            raise UserError(
                f"{self._directory} has {ADAPTER}: its weights are to be changed by an adapter, "
                "which is not read; merge them with peft, merge_and_unload().save_pretrained(DIR), "
                f"or remove {ADAPTER} to use the weights alone"
            )
        single = find_file(self._directory, SINGLE)
        index = find_file(self._directory, INDEX, MAX_TOKENIZER_BYTES)
        if single and index:
            raise UserError(
                f"{self._directory} has both {SINGLE} and {INDEX}, which may hold other weights; "
                f"remove one of them (transformers reads {SINGLE})"
            )
        if index:
            places = read_json(index, {"weight_map": {str: str}}, "download it again")["weight_map"]
            tensors_of: dict[str, set[str]] = {}
            for tensor, name in places.items():
                is_beside = Path(name).name == name and len(name.encode()) <= 255
                if not is_beside or not name.endswith(".safetensors"):
                    raise UserError(f"{index}: {name[:80]!r} is not a safetensors file beside it")
                tensors_of.setdefault(name, set()).add(tensor)
            return dict(tensors_of)
        if single:
            return {SINGLE: None}
        for path in sorted(self._directory.iterdir()):
            if path.suffix in PICKLES:
                raise UserError(
                    f"{self._directory} has {path.name} and no {SINGLE}: pickle files can run any "
                    "code when read and are never opened here; convert them with transformers, "
                    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR), or "
                    "download the safetensors files"
                )
        raise UserError(f"{self._directory} has neither {SINGLE} nor {INDEX}")

    def read(self, name: str) -> np.ndarray:
        """Return a tensor; raises UserError if it is not of a supported type."""
        file_name, file = self._file_of[name]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise UserError(
                f"{self._directory / file_name}: {name} is stored as {dtype}; supported are "
                f"{', '.join(DTYPES)}"
            )
        return file.get_tensor(name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()


class Planned(NamedTuple):
    """A tensor to be written, whose value is computed then."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    value: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(directory: Path, planned: list[Planned], shard_bytes=SHARD_BYTES) -> list[str]:
    """Write tensors to model.safetensors, or to several files with an index; return their names.

    One value at a time is in memory. A file has at most shard_bytes, unless a single tensor is
    larger.
    """
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.n_bytes
    if len(shards) == 1:
        _write_file(directory / SINGLE, planned)
        return [SINGLE]
    names = []
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard)
        names.append(name)
        places |= {tensor.name: name for tensor in shard}
    total = {"total_size": sum(tensor.n_bytes for tensor in planned)}
    index = json.dumps({"metadata": total, "weight_map": places}, indent=2)
    write_text(directory / INDEX, index + "\n")
    return [*names, INDEX]


def _write_file(path: Path, planned: list[Planned]) -> None:
    # transformers refuses files without a format
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    for tensor in planned:
        start = end
        end += tensor.n_bytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with name_errors(path), open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in planned:
            file.write(np.ascontiguousarray(tensor.value()).reshape(-1).view(np.uint8).data)
