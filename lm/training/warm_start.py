"""Starting from another run's parameters: what has the same name and shape is carried over, and all else is told."""

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


@dataclasses.dataclass(frozen=True)
class CarriedOver:
    """Parameters by path, and the paths of those that the new model draws afresh and of those it has no place for."""

    run: str
    step: int
    values: dict[str, jax.Array]
    fresh: list[str]
    left: list[str]

    def into(self, params: dict) -> dict:
        """The nested params with these values in their places."""
        return parameters.nest(parameters.flat(params) | self.values)

    def checksum(self) -> str:
        """One for all values, by path."""
        return hashlib.sha256(repr(sorted(leaf_checksums(self.values).items())).encode()).hexdigest()

    def describe(self) -> str:
        """One line for each kind of parameter; nothing is dropped in silence."""
        kinds = {"carried over": list(self.values), "freshly initialized": self.fresh, "left behind": self.left}
        lines = [f"  {kind}: {', '.join(paths) or 'nothing'}" for kind, paths in kinds.items()]
        return "\n".join([f"parameters of {self.run}, step {self.step}:", *lines])


def carry_over(config: Config, corpus: Corpus, say: Callable[[str], None]) -> CarriedOver | None:
    """What config.init_from gives to the model of a resolved config; None where it names no run.

    Only what fits is read, spread over the mesh as the model's own parameters are. Raises UserError if the run has no
    whole checkpoint, another tokenizer, or nothing that fits.
    """
    run = init_run(config)
    if run is None:
        return None
    table, source = parameters.parameter_table(config.model), {}

    def what_fits(params: dict, meta: dict) -> dict:
        if meta["tokenizer"] != (corpus.tokenizer and corpus.tokenizer.to_json()):
            raise UserError("another tokenizer made its ids; use its config.data.tokenizer and its text")
        source.update(parameters.flat(params))
        fits = {path: x for path, x in source.items() if path in table and x.shape == table[path].shape}
        if not fits:
            raise UserError("none of its parameters has a name and shape of this model's")
        return sharding.shard_state(parameters.nest(fits), table)

    try:
        step, params, _ = restore_params(run, "best", choose=what_fits)
    except UserError as error:
        raise UserError(*(f"config.init_from: {run}: {problem}" for problem in error.problems)) from None
    values = {path: x.astype(config.model.param_dtype) for path, x in parameters.flat(params).items()}
    fresh = [path + _shapes(source, table, path) for path in table if path not in values]
    left = [path + _shapes(table, source, path) for path in source if path not in values]
    found = CarriedOver(run, step, values, fresh, left)
    say(found.describe())
    return found


def _shapes(others: dict, ours: dict, path: str) -> str:
    """A remark where the path is there on both sides, in different shapes."""
    return f" {others[path].shape} -> {ours[path].shape}" if path in others else ""
