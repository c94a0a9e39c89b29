"""Warm start: initialize a model with the parameters of a run or of a checkpoint of Hugging Face.

Parameters are loaded where the new model has one with the same name and shape.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from lm import parameters
from lm.config import Resolved, ResolvedModel, init_run, saved_config
from lm.data import Corpus, tokenizers
from lm.data.tokenizers import Tokenizer
from lm.errors import UserError
from lm.huggingface.config_files import is_checkpoint, normalized, read_config
from lm.huggingface.tokenizer_files import load_tokenizer
from lm.huggingface.weights import load_params
from lm.parallel import processes, sharding
from lm.workdir.checkpoints import restore_params
from lm.workdir.checksums import leaf_checksums
from lm.workdir.saved_run import check_meta


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Parameters of another model.

    Attributes:
        source: the directory, and the step of a run.
        values: the parameters that the new model takes, by path.
        initialized: paths of the new model that are initialized as in any other run.
        unused: paths of the other model that the new model does not have.
        differences: config keys by which the models compute different functions.
        warnings: what could not be checked.
    """

    source: str
    values: dict[str, jax.Array]
    initialized: list[str]
    unused: list[str]
    differences: list[str]
    warnings: list[str]

    def into(self, params: dict) -> dict:
        """Return nested params with these values in their places."""
        return parameters.nest(parameters.flat(params) | self.values)

    def checksum(self) -> str:
        """Return one checksum of all values and their paths."""
        return hashlib.sha256(repr(sorted(leaf_checksums(self.values).items())).encode()).hexdigest()

    def describe(self) -> str:
        """Return a line for each group of parameters, so that nothing is dropped silently."""
        groups = {"loaded": list(self.values), "newly initialized": self.initialized, "not used": self.unused}
        groups |= {"config.model differs": self.differences} if self.differences else {}
        lines = [f"  {group}: {', '.join(paths) or '-'}" for group, paths in groups.items()]
        return "\n".join([*self.warnings, f"parameters of {self.source}:", *lines])


class _Other(NamedTuple):
    """The other model: its parameters or their shapes by path, its config, and its tokenizer (None: unknown)."""

    stored: dict[str, Any]
    model: ResolvedModel
    tokenizer: Tokenizer | None


def warm_start(config: Resolved, corpus: Corpus, say: Callable[[str], None]) -> WarmStart | None:
    """Read the parameters that config.init_from names, sharded over the mesh like the model's own.

    Args:
        config: a resolved config.
        corpus: the data of the new run, whose tokenizer must be that of the other model.
        say: called with a description of what was read.

    Returns:
        The parameters, or None if config.init_from is None.

    Raises:
        UserError: if the directory has no usable checkpoint, if it has another tokenizer or no parameter that fits, or
            if it differs between processes.
    """
    directory = init_run(config)
    if directory is None:
        return None
    read = _read_checkpoint if processes.from_first(is_checkpoint, directory) else _read_run
    table = parameters.parameter_table(config.model)
    try:
        source, values, other = read(directory, config, corpus, table)
    except UserError as error:
        raise UserError(*(f"config.init_from: {directory}: {problem}" for problem in error.problems)) from None
    unchecked = read is _read_checkpoint and None in (other.tokenizer, corpus.tokenizer)
    found = WarmStart(
        source,
        values,
        initialized=[path + _shapes(other.stored, table, path) for path in table if path not in values],
        unused=[path + _shapes(table, other.stored, path) for path in other.stored if path not in values],
        differences=_differences(other.model, config.model),
        warnings=[f"WARNING: cannot check that {directory} has the tokenizer of the data"] * unchecked,
    )
    say(found.describe())
    return found


def _read_run(directory: str, config: Resolved, corpus: Corpus, table) -> tuple[str, dict[str, jax.Array], _Other]:
    """Return what was read, the fitting parameters by path, and the other model."""
    other: _Other | None = None

    def choose(params: dict, meta: dict) -> dict:
        nonlocal other
        check_meta(meta, "its checkpoint")
        tokenizer = None if meta["tokenizer"] is None else tokenizers.from_json(meta["tokenizer"])
        if not _same_ids(tokenizer, corpus.tokenizer):
            raise UserError("it has another tokenizer; use its config.data.tokenizer and its text")
        other = _Other(parameters.flat(params), saved_config(meta["config"]).model, tokenizer)
        return sharding.shard_state(parameters.nest(_fitting(other.stored, table)), table)

    step, params, _ = restore_params(directory, "best", choose=choose)
    values = {path: x.astype(config.model.param_dtype) for path, x in parameters.flat(params).items()}
    assert other, directory  # `choose` was called
    return f"{directory}, step {step}", values, other


def _read_checkpoint(
    directory: str, config: Resolved, corpus: Corpus, table
) -> tuple[str, dict[str, jax.Array], _Other]:
    """Return the same for a checkpoint of Hugging Face, which every process reads in full."""
    theirs = read_config(directory)
    tokenizer = load_tokenizer(directory, theirs)
    if tokenizer and corpus.tokenizer and not _same_ids(tokenizer, corpus.tokenizer):
        raise UserError(f"it has another tokenizer; use config.data.tokenizer = hf:{directory}/tokenizer.json")
    model = dataclasses.replace(theirs.model, param_dtype=config.model.param_dtype)
    other = _Other(parameters.parameter_table(model), model, tokenizer)
    _fitting(other.stored, table)  # raises before anything large is read
    stored = parameters.flat(load_params(directory, dataclasses.replace(theirs, model=model)))
    if jax.process_count() > 1:
        sums = {path: zlib.crc32(x.view(np.uint8)) for path, x in stored.items()}
        processes.check_equal("the checkpoint", repr(sums))
    fitting = _fitting(stored, table)
    places = parameters.flat(sharding.shard_state(parameters.nest(fitting), table))
    return f"{directory} (Hugging Face)", {path: _put(x, places[path]) for path, x in fitting.items()}, other


def _same_ids(a: Tokenizer | None, b: Tokenizer | None) -> bool:
    """Return whether two tokenizers are equal, except that one may encode special tokens as text."""
    if a is None or b is None:
        return a is b
    return a.with_special_tokens(False).fingerprint == b.with_special_tokens(False).fingerprint


def _fitting(stored: dict[str, Any], table: parameters.Table) -> dict[str, Any]:
    """Return the parameters whose path and shape the table has; raises UserError if there are none."""
    found = {path: x for path, x in stored.items() if path in table and x.shape == table[path].shape}
    if not found:
        raise UserError("no parameter has the name and shape of one of this model")
    return found


def _put(x: np.ndarray, place) -> jax.Array:
    """Return a host array on the devices of the sharding that `place` may have."""
    if not hasattr(place, "sharding"):
        return jax.numpy.asarray(x)
    return jax.make_array_from_callback(x.shape, place.sharding, lambda index: x[index])


def _differences(theirs: ResolvedModel, ours: ResolvedModel) -> list[str]:
    """Return the keys of config.model by which two models compute different functions, with both values."""

    def effective(c: ResolvedModel) -> dict[str, Any]:
        return normalized(c) | ({"rope_pairing": c.rope_pairing} if c.positions == "rope" else {})

    before, now = effective(theirs), effective(ours)
    return [f"{name} {before[name]} -> {now[name]}" for name in now if before[name] != now[name]]


def _shapes(others: dict, ours: dict, path: str) -> str:
    """Return both shapes of a path that both sides have, else an empty string."""
    return f" {others[path].shape} -> {ours[path].shape}" if path in others else ""
