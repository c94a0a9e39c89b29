"""Warm start: initialize a model with the parameters of a run or of a checkpoint of Hugging Face.

Parameters are loaded where the new model has one with the same name and shape. Of stacks of layers,
the rows of the layers that both models have are loaded: the other model may be deeper, or have an
idea in other layers.
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
from lm.data import Corpus
from lm.data.tokenizers import Tokenizer
from lm.huggingface.config_files import is_checkpoint, normalized, read_config
from lm.huggingface.tokenizer_files import load_tokenizer, read_settings
from lm.huggingface.weights import read_params
from lm.parallel import processes, sharding
from lm.system.errors import UserError
from lm.trained_model import read_meta
from lm.workdir.checkpoints import restore_params
from lm.workdir.checksums import leaf_checksums
from lm.workdir.saved_run import SETTINGS


class _Source(NamedTuple):
    """What another model offers."""

    title: str
    values: dict[str, jax.Array]  # the parameters that fit, by path
    model: ResolvedModel
    is_checked: bool  # whether both tokenizers are known
    settings: dict[str, str]  # of its Hugging Face checkpoint


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Parameters of another model that take the place of initial values."""

    values: dict[str, jax.Array]  # by path
    # the rows that are loaded, by path, of stacks that are loaded in part
    rows: dict[str, list[int]]
    title: str  # where they come from
    groups: str  # a line for each group of parameters of both models
    # files of the Hugging Face checkpoint they come from, for an export; {}: none
    settings: dict[str, str]

    def into(self, params: dict) -> dict:
        """Return nested params with these values in their places."""
        initial = parameters.flat(params)
        merged = initial | self.values
        for path, rows in self.rows.items():
            stack = jax.numpy.asarray(initial[path])
            merged[path] = stack.at[jax.numpy.asarray(rows)].set(self.values[path])
        return parameters.nest(merged)

    def checksum(self) -> str:
        """Return one checksum of all values and their places."""
        text = repr(sorted(leaf_checksums(self.values).items()))
        if self.rows:
            text += repr(sorted(self.rows.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def warm_start(config: Resolved, corpus: Corpus, say: Callable[[str], None]) -> WarmStart | None:
    """Read the parameters that config.init_from names, sharded like the model's own.

    Raises:
        UserError: if the directory has no usable checkpoint, if it has another tokenizer or no
            parameter that fits, or if it differs between processes.
    """
    directory = init_run(config)
    if directory is None:
        return None
    read = _read_checkpoint if processes.from_first(is_checkpoint, directory) else _read_run
    table = parameters.parameter_table(config.model)
    try:
        source = read(directory, config, corpus, table)
    except UserError as error:
        raise UserError(
            *(f"config.init_from: {directory}: {problem}" for problem in error.problems)
        ) from None
    title = f"parameters of {source.title}:"
    if not source.is_checked:
        title = f"WARNING: cannot check that {directory} has the tokenizer of the data\n{title}"
    rows = _partial_rows(source.model, config.model)
    groups = _groups(source.values, source.model, config.model)
    settings = source.settings if source.is_checked else {}  # they have ids of its tokenizer
    say(f"{title}\n{groups}")
    return WarmStart(source.values, rows, title, groups, settings)


def _read_run(directory: str, config: Resolved, corpus: Corpus, table: parameters.Table) -> _Source:
    """Read what fits of a run of this package."""

    def choose(params: dict, meta: dict) -> dict:
        _, tokenizer = read_meta(meta, params, "its checkpoint")
        if not _same_ids(tokenizer, corpus.tokenizer):
            raise UserError("it has another tokenizer; use its config.data.tokenizer and its text")
        theirs = parameters.parameter_table(saved_config(meta["config"]).model)
        fitting = _fitting(parameters.flat(params), theirs, table)
        return sharding.shard_state(parameters.nest(fitting), theirs)

    step, params, meta = restore_params(directory, "best", choose=choose)
    model = saved_config(meta["config"]).model
    shared = _shared_rows(parameters.parameter_table(model), table)
    values = {}
    for path, x in parameters.flat(params).items():
        values[path] = _chosen(x, shared, path).astype(config.model.param_dtype)
    is_checked = corpus.tokenizer is not None
    settings = meta.get(SETTINGS, {})
    return _Source(f"{directory}, step {step}", values, model, is_checked, settings)


def _read_checkpoint(
    directory: str, config: Resolved, corpus: Corpus, table: parameters.Table
) -> _Source:
    """Read what fits of a Hugging Face checkpoint: in every process, one parameter at a time."""
    theirs = read_config(directory)
    tokenizer = load_tokenizer(directory, theirs)
    if tokenizer and corpus.tokenizer and not _same_ids(tokenizer, corpus.tokenizer):
        raise UserError(
            f"it has another tokenizer; use config.data.tokenizer = hf:{directory}/tokenizer.json"
        )
    dtype = config.model.param_dtype
    model = dataclasses.replace(theirs.model, param_dtype=dtype)
    other = parameters.parameter_table(model)
    shared = _shared_rows(other, table)
    stored = {path: jax.ShapeDtypeStruct(p.shape, dtype) for path, p in other.items()}
    fitting = parameters.nest(_fitting(stored, other, table))
    places = parameters.flat(sharding.shard_state(fitting, other))
    values = {}
    sums = {}
    for path, x in read_params(directory, dataclasses.replace(theirs, model=model)):
        if path in places:
            part = _chosen(x, shared, path)
            place = places[path].sharding
            if place is None:
                values[path] = jax.numpy.asarray(part)
            else:
                values[path] = jax.make_array_from_callback(part.shape, place, part.__getitem__)
                # Wait for the transfer, so that one parameter at a time is on the host.
                jax.block_until_ready(values[path])
        if jax.process_count() > 1:
            sums[path] = zlib.crc32(x.view(np.uint8).data)
    processes.check_equal("the checkpoint", repr(sums))
    is_checked = None not in (tokenizer, corpus.tokenizer)
    title = f"{directory} (Hugging Face)"
    return _Source(title, values, model, is_checked, read_settings(directory))


def _same_ids(a: Tokenizer | None, b: Tokenizer | None) -> bool:
    """Return whether two tokenizers are equal, except that one may encode special tokens as text."""
    if a is None or b is None:
        return a is b
    return a.with_special_tokens(False).fingerprint == b.with_special_tokens(False).fingerprint


def _shared_rows(
    theirs: parameters.Table, ours: parameters.Table
) -> dict[str, tuple[list[int], list[int]]]:
    """Return by path which rows of two stacks are of the same layers; ([], []) without layers.

    A path is missing if nothing of it fits.
    """
    shared: dict[str, tuple[list[int], list[int]]] = {}
    for path in theirs.keys() & ours.keys():
        a, b = theirs[path], ours[path]
        if a.layers is None or b.layers is None:
            if a.shape == b.shape:
                shared[path] = [], []
            continue
        both = [layer for layer in b.layers if layer in a.layers]
        if both and a.shape[1:] == b.shape[1:]:
            of_a = [a.layers.index(layer) for layer in both]
            of_b = [b.layers.index(layer) for layer in both]
            shared[path] = of_a, of_b
    return shared


def _partial_rows(theirs: ResolvedModel, ours: ResolvedModel) -> dict[str, list[int]]:
    """Return by path the rows of the new model's stacks that are loaded, where some rows are not."""
    table = parameters.parameter_table(ours)
    rows = {}
    for path, (_, own) in _shared_rows(parameters.parameter_table(theirs), table).items():
        if len(own) < len(table[path].layers or ()):
            rows[path] = own
    return rows


def _chosen(x: Any, shared: dict[str, tuple[list[int], list[int]]], path: str) -> Any:
    """Return the rows of a parameter of the other model that are loaded."""
    rows = shared[path][0]
    is_whole = not rows or rows == list(range(len(x)))
    return x if is_whole else x[np.array(rows)]


def _fitting(
    stored: dict[str, Any], theirs: parameters.Table, ours: parameters.Table
) -> dict[str, Any]:
    """Return the stored parameters that fit at least in part; raises UserError if there are none."""
    shared = _shared_rows(theirs, ours)
    fitting = {}
    for path, x in stored.items():
        if path in shared and x.shape == theirs[path].shape:
            fitting[path] = x
    if not fitting:
        raise UserError("no parameter has the name and shape of one of this model")
    return fitting


def _groups(values: dict, theirs: ResolvedModel, ours: ResolvedModel) -> str:
    """Return a line for each group of parameters, so that nothing is dropped silently.

    The last line has the keys of config.model by which the two models compute other functions.
    """
    before = parameters.parameter_table(theirs)
    now = parameters.parameter_table(ours)

    def lacking(table: parameters.Table, other: parameters.Table) -> list[str]:
        """Return what one model has and the other has not: parameters, and layers of parameters."""
        names = []
        for path, p in table.items():
            if path in values:
                of_other = other[path].layers or ()
                layers = [str(layer) for layer in p.layers or () if layer not in of_other]
                if layers:
                    names.append(f"{path} of layer{'s' * (len(layers) > 1)} {' '.join(layers)}")
            elif path in other:
                kind = "shape" if before[path].shape != now[path].shape else "layers"
                names.append(f"{path} {getattr(before[path], kind)} -> {getattr(now[path], kind)}")
            else:
                names.append(path)
        return names

    groups = {
        "loaded": list(values),
        "newly initialized": lacking(now, before),
        "not used": lacking(before, now),
    }
    old = _function(theirs)
    new = _function(ours)
    changed = [key for key in new if old.get(key, new[key]) != new[key]]
    if changed:
        groups["config.model differs"] = [f"{key} {old[key]} -> {new[key]}" for key in changed]
    return "\n".join(f"  {group}: {', '.join(members) or '-'}" for group, members in groups.items())


def _function(c: ResolvedModel) -> dict[str, Any]:
    """Return the keys that decide which function a model computes of its parameters."""
    function = normalized(c)
    keys = []
    if c.positions == "rope":
        keys.append("rope_pairing")
    if function["rope_scaling"] == "dynamic":
        keys.append("max_positions")
    if c.parametrization == "mup":
        keys += ["mup_base_d_model", "mup_base_d_head"]
    return function | {key: getattr(c, key) for key in keys}
