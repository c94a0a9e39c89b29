"""An idea beside all others: each is right or refused. Few models, in which many ideas meet."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from lm import ideas, model
from lm.checking import properties
from lm.checking.subject import Broken, Subject, parameter_shapes
from lm.config import Config, ModelConfig, checks
from lm.system.errors import UserError

Choice = tuple[str, Any]  # a key of config.model and its value
ALSO = {"norm": ("dyt",), "rope_pattern": ((1, 0),), "window_pattern": ((0, 3),)}


def choices() -> list[Choice]:
    """Return the ideas that there are, one or more values of each key that turns one on."""
    by_key: dict[str, tuple] = {}
    for field in dataclasses.fields(ModelConfig):
        of_site = any(field.name in site for site in ideas.SITES.values())
        values: tuple = ()
        if field.name == "mixers":
            values = tuple((kind, "attention") for kind in ideas.MIXERS)
        elif field.name in ("residual", "ffn"):
            of_ideas = ideas.RESIDUALS if field.name == "residual" else ideas.FEED_FORWARDS
            values = tuple(name for name, idea in of_ideas.items() if idea is not None)
        elif of_site and field.metadata["choices"]:
            values = tuple(x for x in field.metadata["choices"] if ideas.is_on(x))[-1:]
        elif of_site:
            values = (True,) if field.default is False else (0.3,)
        by_key[field.name] = values or ALSO.get(field.name, ())
    return [(key, value) for key, values in by_key.items() for value in values]


def with_choices(config: Config, chosen: Iterable[Choice]) -> Config:
    """Return the config with these ideas on, and positions that they allow."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **dict(chosen)))


def is_refused(config: Config) -> bool:
    """Return whether a config is refused, by its checks or when its parameters are declared."""
    if any(checks.problems(config, checks.OF_THE_MODEL)) or any(checks.unread(config.model)):
        return True
    try:
        c = Subject(config).c
        tokens_BT = np.zeros((1, 2), np.int32)
        jax.eval_shape(lambda p: model.hidden(p, c, tokens_BT), parameter_shapes(c))
    except (UserError, ValueError):
        return True
    return False


def groups(base: Config, refused: Callable[[Config], bool] = is_refused) -> list[list[Choice]]:
    """Return sets of ideas that go together with those of a config, so that each one is in one.

    Those that the config refuses alone are in none.
    """
    sets: list[list[Choice]] = []
    default = ModelConfig()
    for key, value in choices():
        if getattr(base.model, key) != getattr(default, key):  # the config has its own
            continue
        for group in sets:
            keys = {name for name, _ in group}
            if key not in keys and not refused(with_choices(base, [*group, (key, value)])):
                group.append((key, value))
                break
        else:
            if not refused(with_choices(base, [(key, value)])):
                sets.append([(key, value)])
    return sets


def pairs(base: Config, refused: Callable[[Config], bool] = is_refused) -> tuple[list, list]:
    """Return sets in which each two ideas meet, and the pairs that are refused."""
    every = choices()
    missing = {pair for pair in itertools.combinations(every, 2) if pair[0][0] != pair[1][0]}
    apart = sorted(
        (pair for pair in missing if refused(with_choices(base, pair))), key=every_index(every)
    )
    missing -= set(apart)
    sets = []
    while missing:
        chosen = list(min(missing, key=every_index(every)))
        for choice in every:
            keys = {key for key, _ in chosen}
            gains = any({choice, other} <= set(pair) for other in chosen for pair in missing)
            if choice[0] in keys or not gains:
                continue
            if not refused(with_choices(base, [*chosen, choice])):
                chosen.append(choice)
        missing -= set(itertools.combinations([c for c in every if c in chosen], 2))
        sets.append(chosen)
    return sets, apart


def every_index(every: list) -> Callable:
    return lambda pair: [every.index(choice) for choice in pair]


def _battery(s: Subject) -> None:
    """What holds of a model and takes a few seconds; raises Broken."""
    properties.sees_earlier_tokens_of_its_document(s)
    properties.layers_read_all_their_parameters(s)
    properties.a_packed_document_is_the_same_alone(s)
    properties.cached_decoding_is_the_full_pass(s)


def check_together(base: Config, group: list[Choice], smaller: Iterable[int] = (1,)) -> None:
    """Raise Broken if the ideas of a group are not right together.

    It names as many of them as are enough: one of the numbers in `smaller`, else all.
    """
    try:
        _battery(Subject(with_choices(base, group)))
    except Broken as error:
        for n in smaller:
            for part in itertools.combinations(group, n):
                config = with_choices(base, part)
                try:
                    if not is_refused(config):
                        _battery(Subject(config))
                except Broken as enough:
                    raise Broken(f"beside {_names(part)}: {enough}") from None
        raise Broken(f"beside {_names(group)} together: {error}") from None


def _names(group: Iterable[Choice]) -> str:
    return ", ".join(f"{key}={value}" for key, value in group)


def every_other_idea_is_right_beside_it_or_refused(s: Subject) -> str:
    """In few models, in which many meet; a failure names the one that it takes."""
    tried = groups(s.original)
    for group in tried:
        check_together(s.original, group)
    n = sum(map(len, tried))
    return f"{n} of {len(choices())} ideas in {len(tried)} models, others refused"
