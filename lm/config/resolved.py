"""Types of a config whose open keys are filled in (`lm.parameters.resolve`): the widths are
numbers, not None.

Only the type checker sees them: a resolved config is a `Config`.
"""

from typing import Any, cast

from lm.config.convert import from_dict
from lm.config.schema import Config, ModelConfig, TrainConfig
from lm.system.errors import UserError


class ResolvedModel(ModelConfig):
    """The model section of a resolved config."""

    n_kv_heads: int
    d_head: int
    vocab_size: int
    d_ff: int
    max_positions: int


class ResolvedTrain(TrainConfig):
    """The train section of a resolved config."""

    steps_per_dispatch: int


class Resolved(Config):
    """A resolved config. Each type only narrows annotations: the fields are those of its base."""

    model: ResolvedModel
    train: ResolvedTrain


def as_resolved(config: Config) -> Resolved:
    """Return a config whose open keys are filled in as one of the narrower type."""
    return cast(Resolved, config)


def saved_config(nested: dict[str, Any]) -> Resolved:
    """Return the config of a checkpoint's record, which is resolved; raises UserError with every
    mistake.
    """
    config = from_dict(nested)
    # An import leaves max_positions open; the shape of a table of positions, if there is one, says
    # what it is.
    keys = ResolvedModel.__annotations__.keys() - {"max_positions"}
    if lacking := sorted(key for key in keys if getattr(config.model, key) is None):
        raise UserError(
            *(f"config.model.{key}: none; a checkpoint has an integer" for key in lacking)
        )
    return as_resolved(config)
