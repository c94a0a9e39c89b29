"""Translate the tensors of a checkpoint to our parameters and back."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from lm import parameters
from lm.config import Resolved, ResolvedModel
from lm.huggingface.config_files import family_of, read_fields
from lm.huggingface.families import Family
from lm.huggingface.folding import fold
from lm.huggingface.safetensors_files import Planned, TensorFiles
from lm.parameters import Parameter
from lm.system.errors import UserError
from lm.system.text_tables import some

MAX_SHOWN = 5  # problems in an error message
# Ends of the names of buffers in old checkpoints, which are not parameters.
BUFFERS = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


@dataclasses.dataclass(frozen=True)
class Place:
    """One tensor of a checkpoint, and where its values are in our parameters."""

    name: str  # of the tensor
    paths: tuple[str, ...]  # of our parameters
    # where the values are in stacks over layers, and over experts; (): they are not stacked
    index: tuple[int, ...]
    parameters: tuple[Parameter, ...]  # their declarations, without the axes of these stacks
    transposed: bool  # whether it is stored as (out, in) features
    by_head: bool  # see `Family`

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape."""
        p = self.parameters[0]
        size = sum(p.size for p in self.parameters)
        if p.kind == "embedding":
            return p.shape
        if p.kind != "weight":
            return (size,)
        shape = (p.fan_in, size // p.fan_in)
        return shape[::-1] if self.transposed else shape

    @property
    def _kept(self) -> tuple[int, ...]:
        """Return the first dimensions of the parameters, along which they are not joined."""
        p = self.parameters[0]
        if self.by_head:
            return p.shape[:-1]
        return (p.fan_in,) if p.kind == "weight" else ()

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Return the value of each of our parameters."""
        if self.transposed:
            tensor = tensor.T
        sizes = [p.size // math.prod(self._kept) for p in self.parameters]
        parts = np.split(tensor.reshape(*self._kept, -1), np.cumsum(sizes)[:-1], axis=-1)
        return [part.reshape(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def join(self, values: list[np.ndarray]) -> np.ndarray:
        """Return the tensor; the inverse of `split`."""
        parts = [value.reshape(*self._kept, -1) for value in values]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        if self.transposed:
            return joined.reshape(self.shape[::-1]).T
        return joined.reshape(self.shape)


def places(family: Family, c: ResolvedModel) -> Iterator[Place]:
    """Yield the tensors that a checkpoint of this model has, in the order of the declaration."""
    table = parameters.parameter_table(c)
    for name, paths in family.tensors.items():
        if (first := table.get(paths[0])) is None:
            continue
        n = len(first.batch)
        unstacked = []
        for path in paths:
            p = table[path]
            unstacked.append(
                dataclasses.replace(p, shape=p.shape[n:], axes=p.axes[n:], batch="", layers=None)
            )
        transposed = first.kind == "weight" and not (family.in_out and first.layers is not None)
        for index in np.ndindex(first.shape[:n]):
            numbers: tuple[int, ...] = ()
            if first.layers is not None:  # the stack may have some of the layers only
                numbers = (first.layers[index[0]], *index[1:])
            tensor = name.format(*numbers)
            yield Place(tensor, paths, index, tuple(unstacked), transposed, family.by_head)


# ---- Import --------------------------------------------------------------------------------------


def load_params(directory: str | Path, config: Resolved) -> dict:
    """Return the parameters of a checkpoint as nested dicts of arrays on the first device.

    They are moved one by one: NumPy arrays would be copied all at once where a checkpoint is saved.
    """
    arrays = {}
    for path, value in read_params(directory, config):
        arrays[path] = jax.block_until_ready(jax.device_put(value))
    return parameters.nest(arrays)


def read_params(directory: str | Path, config: Resolved) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and the value of each parameter of a checkpoint.

    In memory are one parameter, or those that the checkpoint joins, such as queries, keys and
    values; and one tensor. The config is that of `read_config`; parameters are cast to its
    model.param_dtype.

    Raises:
        UserError: if tensors are missing, unexpected or of another shape, or files are damaged.
    """
    c = config.model
    family = family_of(directory, read_fields(directory))
    table = parameters.parameter_table(c)
    dtype = np.dtype(c.param_dtype)
    with TensorFiles(directory) as files:
        names = _match(directory, family, c, files)
        of_all_layers = itertools.groupby(places(family, c), key=lambda place: place.paths)
        for paths, group in of_all_layers:
            values = [np.empty(table[path].shape, dtype) for path in paths]
            for place in group:
                parts = place.split(files.read(names[place.name]))
                for value, part, p in zip(values, parts, place.parameters, strict=True):
                    if family.gain_offset and p.kind == "norm":
                        part = part.astype(np.float32) + np.float32(family.gain_offset)
                    value[place.index] = part
            yield from zip(paths, values, strict=True)


def _match(
    directory: str | Path, family: Family, c: ResolvedModel, files: TensorFiles
) -> dict[str, str]:
    """Return the name in the files of each tensor, by its usual name; UserError if they differ."""
    short = {name.removeprefix(family.prefix): name for name in files.shapes}
    wanted = {place.name: place.shape for place in places(family, c)}
    names = {}
    missing = []
    for name in wanted:
        actual = short.get(name.removeprefix(family.prefix))
        if actual is None:
            missing.append(name)
        else:
            names[name] = actual
    problems = []
    if missing:
        problems.append(f"tensors are missing: {some(missing)}")
    known = {*names.values()}
    if c.tie_embeddings:
        known |= {*_tied_copies(directory, family, files)}
    unexpected = [name for name in files.shapes if name not in known]
    if unexpected := [name for name in unexpected if not name.endswith(BUFFERS)]:
        problems.append(f"tensors that no part of the model uses: {some(unexpected)}")
    for name, actual in names.items():
        if files.shapes[actual] != wanted[name]:
            problems.append(
                f"{actual} has shape {files.shapes[actual]}; config.json implies {wanted[name]}"
            )
    if len(problems) > MAX_SHOWN:
        problems[MAX_SHOWN:] = [f"{len(problems) - MAX_SHOWN} more"]
    if problems:
        raise UserError(*(f"{directory}: {problem}" for problem in problems))
    return names


def _tied_copies(directory: str | Path, family: Family, files: TensorFiles) -> list[str]:
    """Return the name of a head that repeats a tied embedding; UserError if it differs from it."""
    tensor_of = {paths: name for name, paths in family.tensors.items()}
    head = tensor_of[("head/w_DV",)]
    embedding = tensor_of[("embedding",)]
    if embedding not in files.shapes:
        embedding = embedding.removeprefix(family.prefix)
    if head not in files.shapes or embedding not in files.shapes:
        return []
    if not np.array_equal(files.read(head), files.read(embedding)):
        raise UserError(
            f"{directory}: {head} differs from the embedding that config.json ties it to; "
            'set "tie_word_embeddings": false in config.json to use it'
        )
    return [head]


# ---- Export --------------------------------------------------------------------------------------


def exported_tensors(family: Family, c: ResolvedModel, params: dict | None = None) -> list[Planned]:
    """Return the tensors of an exported model, whose values are computed when they are written.

    The family is that of `export_fields`. params = None: the values are not needed.

    Raises:
        UserError: the family has no tensor for one of the model's parameters.
    """
    flat = parameters.flat(params or {})
    dtype = np.dtype(c.param_dtype)
    order = _halves(c) if c.positions == "rope" and c.rope_pairing == "adjacent" else None
    exported, factors = fold(family, c)

    def value_of(place: Place) -> np.ndarray:
        values = []
        for path, p in zip(place.paths, place.parameters, strict=True):
            if path not in flat:
                values.append(np.zeros(p.shape, dtype))
                continue
            value = np.asarray(flat[path][place.index])
            if order is not None and path.rpartition("/")[2].startswith(ROTATED):
                value = value[..., order]
            offset = family.gain_offset if p.kind == "norm" else 0.0
            if offset or path in factors:
                factor = np.float32(factors.get(path, 1))
                value = value.astype(np.float32) * factor - np.float32(offset)
            values.append(value.astype(dtype))
        return place.join(values)

    unclaimed = set(parameters.parameter_table(c))
    planned = []
    for place in places(family, exported):
        unclaimed -= {*place.paths}
        value = functools.partial(value_of, place)
        planned.append(Planned(place.name, place.shape, dtype, value))
    if unclaimed:
        raise UserError(
            f"the model cannot be exported: {family.model_type} has no tensor for "
            f"{some(sorted(unclaimed))}"
        )
    return planned


# parameters of queries and keys, by features
ROTATED = ("w_q_", "w_k_", "b_q_", "b_k_", "q_scale_", "k_scale_")


def _halves(c: ResolvedModel) -> np.ndarray:
    """Return the order of features in which rotated pairs (2k, 2k + 1) become (k, k + R/2).

    Scores and QK-norm do not change if the features of queries and keys are permuted alike.
    """
    width = c.rope_width or c.d_head
    return np.concatenate(
        [np.arange(0, width, 2), np.arange(1, width, 2), np.arange(width, c.d_head)]
    )
