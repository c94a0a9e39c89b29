"""Which keys of a config differ between a run and its resumption, and whether they may."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator

from lm.config import Config, flatten
from lm.system.files import to_json
from lm.system.text_tables import without_secrets


def _leaves(
    config, path: str = "config", execution: bool = False
) -> Iterator[tuple[str, object, bool]]:
    """Yield (path, value, execution) of every key; a marked section marks all of its keys."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        here = f"{path}.{field.name}"
        marked = execution or bool(field.metadata.get("execution", False))
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, here, marked)
        else:
            yield here, without_secrets(json.loads(to_json(value))), marked


def experiment_digest(config) -> str:
    """Return the sha256 of the keys that decide what is computed: equal ones train the same model."""
    kept = {path: value for path, value, execution in _leaves(config) if not execution}
    return hashlib.sha256(to_json(dict(sorted(kept.items()))).encode()).hexdigest()


def compare_configs(
    old: dict, config, steps_made: int | None = None
) -> tuple[list[str], list[str]]:
    """Compare the dict of a run's config.json with a new Config.

    `steps_made`, the steps that the run has taken, decides whether `train.steps` may differ; None:
    it may.

    Returns:
        Lines on the keys that decide what is computed, and lines on the others.
    """
    # A key that is newer than the run had its default.
    was = {path: value for path, value, _ in _leaves(Config())}
    was |= without_secrets(flatten(old, "config."))
    problems: list[str] = []
    notices: list[str] = []
    for path, now, execution in _leaves(config):
        before = was.pop(path)
        if before != now and path != "config.train.steps":
            lines = notices if execution else problems
            lines.append(f"{path}: {before} -> {now} (run -> now)")
    problems += [f"{path}: {before} -> absent (run -> now)" for path, before in was.items()]
    steps = old["train"]["steps"]
    now = config.train.steps
    if steps_made is not None and steps != now:
        if refusal := refuse_growth(steps, now, config, steps_made):
            problems.append(refusal)
        else:
            notices.append(f"config.train.steps: {steps} -> {now} (run -> now)")
    return problems, notices


def stable_steps(steps: int, optimizer) -> int:
    """Return in how many of its first steps a run has the learning rates of every longer run.

    >>> from lm.config import OptimizerConfig
    >>> stable_steps(1000, OptimizerConfig(schedule="wsd", warmup_steps=10, decay_fraction=0.2))
    800
    """
    if optimizer.schedule != "wsd":
        return optimizer.warmup_steps
    return max(optimizer.warmup_steps, math.floor(steps * (1 - optimizer.decay_fraction)))


def depends_on_steps(config) -> str:
    """Return what of a step changes with train.steps besides the learning rate; "": nothing."""
    from lm import ideas  # imports jax

    if config.optimizer.name == "ademamix" and config.optimizer.slow_warmup_steps is None:
        return "the slow average of ademamix (set optimizer.slow_warmup_steps from the first step)"
    changing = ideas.changing_terms(config.model)
    return changing and f"the weights in the loss of {changing}"


def refuse_growth(old: int, new: int, config, steps_made: int) -> str | None:
    """Return why a run of `old` steps cannot become one of `new` steps, or None if it can.

    It can if the learning rate, and what else `depends_on_steps`, stays what it was in each of the
    `steps_made` steps.
    """
    if new == old:
        return None
    line = f"config.train.steps: {old} -> {new} (run -> now)"
    optimizer = config.optimizer
    if steps_made and (changing := depends_on_steps(config)):
        return f"{line}: {changing} in the steps already trained would change"
    ends_with_run = optimizer.schedule != "constant" and optimizer.decay_steps is None
    if new < old and not (
        ends_with_run and optimizer.schedule == "wsd" and steps_made <= stable_steps(new, optimizer)
    ):
        return f"{line}: a run can grow but not shrink; start a new one in another workdir"
    decay_start = stable_steps(old, optimizer)
    if not ends_with_run or steps_made <= decay_start:
        return None
    return (
        f"{line}: the {optimizer.schedule} schedule ends at train.steps, so the learning rate of "
        f"steps {decay_start + 1} to {steps_made}, already trained, would change. To be extended, "
        "a run needs optimizer.schedule = 'constant' or a fixed optimizer.decay_steps from its "
        "first step"
    )
