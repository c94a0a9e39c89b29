"""Types of a config whose open keys are filled in (`lm.parameters.resolve`): the widths are numbers, not None."""

import dataclasses
from typing import Any

from lm.config.convert import from_dict
from lm.config.schema import Config, ModelConfig, TrainConfig


class _SameFields:
    """Equality with any config of equal fields, whether it has the narrower type or not."""

    def __eq__(self, other: object) -> bool:
        return dataclasses.is_dataclass(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))  # that of a dataclass


class ResolvedModel(_SameFields, ModelConfig):
    """The model section of a resolved config."""

    n_kv_heads: int
    d_head: int
    vocab_size: int
    d_ff: int
    max_positions: int


class ResolvedTrain(_SameFields, TrainConfig):
    """The train section of a resolved config."""

    steps_per_dispatch: int


class Resolved(_SameFields, Config):
    """A resolved config. Each type only narrows annotations: the fields are those of its base."""

    model: ResolvedModel
    train: ResolvedTrain


def as_resolved(config: Config) -> Resolved:
    """Return a config whose open keys are filled in as one of the narrower type."""
    model, train = ResolvedModel(**vars(config.model)), ResolvedTrain(**vars(config.train))
    return Resolved(**vars(config) | {"model": model, "train": train})


def saved_config(nested: dict[str, Any]) -> Resolved:
    """Return the config of a checkpoint's record, which is resolved; raises UserError with every mistake."""
    return as_resolved(from_dict(nested))
