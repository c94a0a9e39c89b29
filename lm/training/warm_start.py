"""Warm start: initialize a model with the parameters of another run that have its names and shapes."""

import dataclasses
import hashlib
from collections.abc import Callable

import jax

from lm import parameters
from lm.config import Config, init_run
from lm.data import Corpus
from lm.errors import UserError
from lm.parallel import sharding
from lm.training.checkpoints import restore_params
from lm.training.checksums import leaf_checksums
from lm.training.workdir import check_meta


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Parameters of another run.

    Attributes:
        run: its directory.
        step: the step of its checkpoint.
        values: the parameters that the new model takes, by path.
        initialized: paths of the new model that are initialized as in any other run.
        unused: paths of the other run that the new model does not have.
    """

    run: str
    step: int
    values: dict[str, jax.Array]
    initialized: list[str]
    unused: list[str]

    def into(self, params: dict) -> dict:
        """Return nested params with these values in their places."""
        return parameters.nest(parameters.flat(params) | self.values)

    def checksum(self) -> str:
        """Return one checksum of all values and their paths."""
        return hashlib.sha256(repr(sorted(leaf_checksums(self.values).items())).encode()).hexdigest()

    def describe(self) -> str:
        """Return a line for each group of parameters, so that nothing is dropped silently."""
        groups = {"loaded": list(self.values), "newly initialized": self.initialized, "not used": self.unused}
        lines = [f"  {group}: {', '.join(paths) or '-'}" for group, paths in groups.items()]
        return "\n".join([f"parameters of {self.run}, step {self.step}:", *lines])


def warm_start(config: Config, corpus: Corpus, say: Callable[[str], None]) -> WarmStart | None:
    """Read the parameters of the run that config.init_from names.

    Only parameters whose name and shape the model has are read, sharded over the mesh like the model's own.

    Args:
        config: a resolved config.
        corpus: the data of the new run, whose tokenizer must be that of the other run.
        say: called with a description of what was read.

    Returns:
        The parameters, or None if config.init_from is None.

    Raises:
        UserError: if the run has no usable checkpoint, another tokenizer, or no parameter that fits.
    """
    run = init_run(config)
    if run is None:
        return None
    table, stored = parameters.parameter_table(config.model), {}

    def choose(params: dict, meta: dict) -> dict:
        check_meta(meta, "its checkpoint")
        if meta["tokenizer"] != (corpus.tokenizer and corpus.tokenizer.to_json()):
            raise UserError("it has another tokenizer; use its config.data.tokenizer and its text")
        stored.update(parameters.flat(params))
        fitting = {path: x for path, x in stored.items() if path in table and x.shape == table[path].shape}
        if not fitting:
            raise UserError("no parameter has the name and shape of one of this model")
        return sharding.shard_state(parameters.nest(fitting), table)

    try:
        step, params, _ = restore_params(run, "best", choose=choose)
    except UserError as error:
        raise UserError(*(f"config.init_from: {run}: {problem}" for problem in error.problems)) from None
    values = {path: x.astype(config.model.param_dtype) for path, x in parameters.flat(params).items()}
    initialized = [path + _shapes(stored, table, path) for path in table if path not in values]
    unused = [path + _shapes(table, stored, path) for path in stored if path not in values]
    found = WarmStart(run, step, values, initialized, unused)
    say(found.describe())
    return found


def _shapes(others: dict, ours: dict, path: str) -> str:
    """Return both shapes of a path that both sides have, else an empty string."""
    return f" {others[path].shape} -> {ours[path].shape}" if path in others else ""
