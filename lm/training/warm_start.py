"""Warm start: initialize a model with the parameters of a run or of a checkpoint of Hugging Face.

Parameters are loaded where the new model has one with the same name and shape.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lm import parameters
from lm.config import Resolved, ResolvedModel, init_run, saved_config
from lm.data import Corpus, tokenizers
from lm.data.tokenizers import Tokenizer
from lm.errors import UserError
from lm.huggingface.config_files import is_checkpoint, normalized, read_config
from lm.huggingface.tokenizer_files import load_tokenizer, read_settings
from lm.huggingface.weights import read_params
from lm.parallel import processes, sharding
from lm.workdir.checkpoints import restore_params
from lm.workdir.checksums import leaf_checksums
from lm.workdir.saved_run import SETTINGS, check_meta

_Found = tuple[str, dict[str, jax.Array], ResolvedModel, bool, dict[str, str]]  # see `_read_run`


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Parameters of another model that take the place of initial values."""

    values: dict[str, jax.Array]  # by path
    title: str  # where they come from
    groups: str  # a line for each group of parameters of both models
    settings: dict[str, str]  # files of the Hugging Face checkpoint they come from, for an export; {}: none

    def into(self, params: dict) -> dict:
        """Return nested params with these values in their places."""
        return parameters.nest(parameters.flat(params) | self.values)

    def checksum(self) -> str:
        """Return one checksum of all values and their paths."""
        return hashlib.sha256(repr(sorted(leaf_checksums(self.values).items())).encode()).hexdigest()


def warm_start(config: Resolved, corpus: Corpus, say: Callable[[str], None]) -> WarmStart | None:
    """Read the parameters that config.init_from names, sharded over the mesh like the model's own; None without one.

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
        source, values, model, is_checked, settings = read(directory, config, corpus, table)
    except UserError as error:
        raise UserError(*(f"config.init_from: {directory}: {problem}" for problem in error.problems)) from None
    warning = "" if is_checked else f"WARNING: cannot check that {directory} has the tokenizer of the data\n"
    groups, kept = _groups(values, model, config.model), settings if is_checked else {}  # with ids of its tokenizer
    found = WarmStart(values, f"{warning}parameters of {source}:", groups, kept)
    say(f"{found.title}\n{found.groups}")
    return found


def _read_run(directory: str, config: Resolved, corpus: Corpus, table: parameters.Table) -> _Found:
    """Return the source, the parameters that fit, the other model, whether both tokenizers are known, its settings."""

    def choose(params: dict, meta: dict) -> dict:
        check_meta(meta, "its checkpoint")
        tokenizer = None if meta["tokenizer"] is None else tokenizers.from_json(meta["tokenizer"])
        if not _same_ids(tokenizer, corpus.tokenizer):
            raise UserError("it has another tokenizer; use its config.data.tokenizer and its text")
        return sharding.shard_state(parameters.nest(_fitting(parameters.flat(params), table)), table)

    step, params, meta = restore_params(directory, "best", choose=choose)
    values = {path: x.astype(config.model.param_dtype) for path, x in parameters.flat(params).items()}
    model, settings = saved_config(meta["config"]).model, meta.get(SETTINGS, {})
    return f"{directory}, step {step}", values, model, corpus.tokenizer is not None, settings


def _read_checkpoint(directory: str, config: Resolved, corpus: Corpus, table: parameters.Table) -> _Found:
    """Return the same for a checkpoint of Hugging Face, which every process reads in full, one parameter at a time."""
    theirs = read_config(directory)
    tokenizer = load_tokenizer(directory, theirs)
    if tokenizer and corpus.tokenizer and not _same_ids(tokenizer, corpus.tokenizer):
        raise UserError(f"it has another tokenizer; use config.data.tokenizer = hf:{directory}/tokenizer.json")
    dtype = config.model.param_dtype
    model = dataclasses.replace(theirs.model, param_dtype=dtype)
    stored = {path: jax.ShapeDtypeStruct(p.shape, dtype) for path, p in parameters.parameter_table(model).items()}
    places = parameters.flat(sharding.shard_state(parameters.nest(_fitting(stored, table)), table))
    values, sums = {}, {}
    for path, x in read_params(directory, dataclasses.replace(theirs, model=model)):
        if path in places:
            if (place := places[path].sharding) is None:
                values[path] = jax.numpy.asarray(x)
            else:  # after the transfer, so that one parameter at a time is on the host
                values[path] = jax.block_until_ready(jax.make_array_from_callback(x.shape, place, x.__getitem__))
        if jax.process_count() > 1:
            sums[path] = zlib.crc32(x.view(np.uint8).data)
    processes.check_equal("the checkpoint", repr(sums))
    is_checked = None not in (tokenizer, corpus.tokenizer)
    return f"{directory} (Hugging Face)", values, model, is_checked, read_settings(directory)


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


def _groups(values: dict, theirs: ResolvedModel, ours: ResolvedModel) -> str:
    """Return a line for each group of parameters, so that nothing is dropped silently, and one for the config.

    The last has the keys of config.model by which two models compute different functions.
    """
    before, now = map(parameters.parameter_table, (theirs, ours))
    shapes = {path: f" {before[path].shape} -> {now[path].shape}" for path in before.keys() & now.keys()}
    names = lambda table: [path + shapes.get(path, "") for path in table if path not in values]  # noqa: E731
    groups = {"loaded": list(values), "newly initialized": names(now), "not used": names(before)}

    def function(c: ResolvedModel) -> dict[str, Any]:
        found = normalized(c)
        keys = ["rope_pairing"] * (c.positions == "rope") + ["max_positions"] * (found["rope_scaling"] == "dynamic")
        keys += ["mup_base_d_model", "mup_base_d_head"] * (c.parametrization == "mup")
        return found | {key: getattr(c, key) for key in keys}

    old, new = function(theirs), function(ours)
    if changed := [f"{key} {old[key]} -> {new[key]}" for key in new if old.get(key, new[key]) != new[key]]:
        groups["config.model differs"] = changed
    return "\n".join(f"  {group}: {', '.join(members) or '-'}" for group, members in groups.items())
