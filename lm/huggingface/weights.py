"""Translate the tensors of a checkpoint to our parameters and back."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from lm import parameters
from lm.config import Resolved, ResolvedModel
from lm.errors import UserError
from lm.huggingface.config_files import family_of, read_fields
from lm.huggingface.families import Family, Tensor
from lm.huggingface.folding import fold
from lm.huggingface.safetensors_files import Planned, TensorFiles
from lm.parameters import Parameter

MAX_SHOWN = 5  # names in an error message


@dataclasses.dataclass(frozen=True)
class Place:
    """One tensor of a checkpoint, and where its values are in our parameters.

    Attributes:
        name: the tensor's name.
        paths: our parameters.
        layer: the index into stacked parameters; None: they are not stacked.
        parameters: their declarations, without the axis of layers.
        in_out: see `Tensor`.
    """

    name: str
    paths: tuple[str, ...]
    layer: int | None
    parameters: tuple[Parameter, ...]
    in_out: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape."""
        p = self.parameters[0]
        if p.kind == "embedding":
            return p.shape
        if p.kind != "weight":
            return (sum(p.size for p in self.parameters),)
        d_in = p.fan_in
        d_out = sum(p.size for p in self.parameters) // d_in
        return (d_in, d_out) if self.in_out else (d_out, d_in)

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Return the value of each of our parameters."""
        if self.parameters[0].kind == "weight" and not self.in_out:
            tensor = tensor.T
        sizes = [p.size // p.fan_in for p in self.parameters]
        parts = np.split(tensor, np.cumsum(sizes)[:-1], axis=-1) if len(sizes) > 1 else [tensor]
        return [part.reshape(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def join(self, values: list[np.ndarray]) -> np.ndarray:
        """Return the tensor; the inverse of `split`."""
        p = self.parameters[0]
        if p.kind != "weight":
            return values[0] if p.kind == "embedding" else np.concatenate([value.reshape(-1) for value in values])
        matrices = [value.reshape(p.fan_in, -1) for value in values]
        joined = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=1)
        return joined if self.in_out else joined.T


def places(family: Family, c: ResolvedModel) -> list[Place]:
    """Return the tensors that a checkpoint of this model has, in the order of the family's declaration."""
    table = parameters.parameter_table(c)
    found = []
    for tensor in family.tensors:
        if tensor.paths[0] in table:
            stacked = table[tensor.paths[0]].layers is not None
            found += [_place(tensor, table, layer) for layer in (range(c.n_layers) if stacked else [None])]
    return found


def _place(tensor: Tensor, table: parameters.Table, layer: int | None) -> Place:
    declared = [table[path].of_one_layer() for path in tensor.paths]
    in_out = tensor.in_out and declared[0].kind == "weight"
    return Place(tensor.name.format(layer), tensor.paths, layer, tuple(declared), in_out)


# ---- Import ------------------------------------------------------------------------------------------------------


def load_params(directory: str | Path, config: Resolved) -> dict:
    """Read the parameters of a checkpoint, as nested dicts of NumPy arrays.

    One copy of the parameters and one tensor are in memory at a time.

    Args:
        directory: the checkpoint's directory.
        config: as returned by `read_config`; the parameters are cast to its model.param_dtype.

    Raises:
        UserError: if tensors are missing, unexpected or of another shape, or files are damaged.
    """
    family, c = family_of(directory, read_fields(directory)), config.model
    table, dtype = parameters.parameter_table(c), np.dtype(c.param_dtype)
    with TensorFiles(directory) as files:
        names = _match(directory, family, c, files)
        values = {path: np.empty(p.shape, dtype) for path, p in table.items()}
        for place in places(family, c):
            for path, value, p in zip(
                place.paths, place.split(files.read(names[place.name])), place.parameters, strict=True
            ):
                if family.gain_offset and p.kind == "norm":
                    value = value.astype(np.float32) + np.float32(family.gain_offset)
                values[path][() if place.layer is None else place.layer] = value
    return parameters.nest(values)


def to_device(params: dict) -> dict:
    """Move parameters to the first device, one by one, and return them. `params` is empty afterwards.

    NumPy arrays would be copied all at once where a checkpoint is saved.
    """
    moved = {}
    for name in list(params):
        value = params.pop(name)
        moved[name] = to_device(value) if isinstance(value, dict) else jax.block_until_ready(jax.device_put(value))
    return moved


def _match(directory: str | Path, family: Family, c: ResolvedModel, files: TensorFiles) -> dict[str, str]:
    """Return the name in the files of each tensor of a model, by its usual name.

    Raises:
        UserError: tensors are missing, unexpected or of another shape.
    """
    short = {name.removeprefix(family.prefix): name for name in files.shapes}
    wanted = {place.name: place.shape for place in places(family, c)}
    names = {name: short.get(name.removeprefix(family.prefix)) for name in wanted}
    problems = []
    if missing := [name for name, found in names.items() if found is None]:
        problems.append(f"tensors are missing: {_some(missing)}")
    known = {*names.values(), *([] if not c.tie_embeddings else _tied_copies(directory, family, files))}
    if unexpected := [name for name in files.shapes if name not in known and not name.endswith(family.ignored)]:
        problems.append(f"tensors that no part of the model uses: {_some(unexpected)}")
    for name, found in names.items():
        if found is not None and files.shapes[found] != wanted[name]:
            problems.append(f"{found} has shape {files.shapes[found]}; config.json implies {wanted[name]}")
    if problems:
        more = [f"{len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise UserError(*(f"{directory}: {problem}" for problem in problems[:MAX_SHOWN] + more))
    return {name: found for name, found in names.items() if found is not None}


def _tied_copies(directory: str | Path, family: Family, files: TensorFiles) -> list[str]:
    """Return the name of a head that repeats a tied embedding; raises UserError if it differs from it."""
    head, embedding = "lm_head.weight", family.tensors[0].name
    embedding = embedding if embedding in files.shapes else embedding.removeprefix(family.prefix)
    if head not in files.shapes or embedding not in files.shapes:
        return []
    if not np.array_equal(files.read(head), files.read(embedding)):
        raise UserError(
            f"{directory}: lm_head.weight differs from the embedding that config.json ties it to; "
            'set "tie_word_embeddings": false in config.json to use it'
        )
    return [head]


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


# ---- Export ------------------------------------------------------------------------------------------------------


def planned_tensors(family: Family, c: ResolvedModel) -> list[Planned]:
    """Return the name, shape and dtype of each tensor of an exported model, in the order of `exported_tensors`.

    Raises:
        UserError: the family has no tensor for one of the model's parameters.
    """
    exported, found = fold(family, c)[0], []
    dtype, unclaimed = np.dtype(c.param_dtype), set(parameters.parameter_table(c))
    for place in places(family, exported):
        found.append(Planned(place.name, place.shape, dtype))
        unclaimed -= set(place.paths)
    if unclaimed:
        raise UserError(
            f"the model cannot be exported: {family.model_type} has no tensor for {_some(sorted(unclaimed))}"
        )
    return found


def exported_tensors(family: Family, c: ResolvedModel, params: dict) -> Iterator[np.ndarray]:
    """Yield the values of the tensors of an exported model, one at a time.

    Args:
        family, c: as returned by `export_fields`, and the model section of a resolved config.
        params: our parameters, as nested dicts.
    """
    flat, dtype = parameters.flat(params), np.dtype(c.param_dtype)
    order = _halves(c) if c.positions == "rope" and c.rope_pairing == "adjacent" else None
    exported, factors = fold(family, c)
    for place in places(family, exported):
        values = []
        for path, p in zip(place.paths, place.parameters, strict=True):
            if path not in flat:
                values.append(np.zeros(p.shape, dtype))
                continue
            value = np.asarray(flat[path] if place.layer is None else flat[path][place.layer])
            if order is not None and path.rpartition("/")[2].startswith(ROTATED):
                value = value[..., order]
            offset = family.gain_offset if p.kind == "norm" else 0.0
            if offset or path in factors:
                value = value.astype(np.float32) * np.float32(factors.get(path, 1)) - np.float32(offset)
            values.append(value.astype(dtype))
        yield place.join(values)


ROTATED = ("w_q_", "w_k_", "b_q_", "b_k_", "q_scale_", "k_scale_")  # parameters of queries and keys, by features


def _halves(c: ResolvedModel) -> np.ndarray:
    """Return the order of a head's features in which pairs (2k, 2k + 1) become pairs (k, k + K/2).

    Scores and QK-norm do not change if the features of queries and keys are permuted alike.
    """
    return np.concatenate([np.arange(0, c.d_head, 2), np.arange(1, c.d_head, 2)])
