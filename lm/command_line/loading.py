"""Load a config: a file, overrides, and the checks that need neither data nor devices.

What depends on the text or on the devices is checked later, in lm/training/run.py. This module
imports no jax.
"""

import dataclasses
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm
from lm.config import checks
from lm.config.convert import flatten, from_flat, suggestion, to_dict
from lm.config.schema import Config, OptimizerConfig, schema
from lm.config.values import parse
from lm.huggingface.config_files import read_training_config
from lm.system.errors import UserError
from lm.system.files import expanded
from lm.system.text_tables import say

COMMANDS = {"get_config": "python -m lm.train", "get_sweep": "python -m lm.sweep"}


def print_note(text: str) -> None:
    say(text, sys.stderr)


def load(
    path: str,
    overrides: list[str],
    note: Callable[[str], None] = print_note,
    *,
    resuming: bool = False,
) -> Config:
    """Return the config of a file with overrides.

    An override without effect is refused. In a file it only causes a warning, and so it does when a
    run is resumed, because earlier code may have accepted it.

    Where an override shortens train.steps, a warm-up or decay that no longer fits is shortened in
    proportion, with a note. In the same way log.every is shortened, without a note: it changes no
    result. The file's `notes` are about the experiment of the file: an override that makes another
    one removes them.

    Args:
        path: a config file, or hf:DIR for the architecture of a Hugging Face checkpoint.
        overrides: strings such as "model.d_model=256".
        note: receives the line of each warning and note, after all checks.
        resuming: whether the config belongs to a run that exists.

    Raises:
        UserError: with every mistake.
    """
    in_file: dict[str, Any] = {}
    problems: dict[str, str] = {}
    warnings: list[str] = []
    try:
        in_file = _get_config(path, warnings.append)
    except UserError as error:
        problems["--config"] = str(error)
    given, wrong = parse_settings(overrides, "--config.")
    problems |= {name: f"config.{name[:200]}: {problem}" for name, problem in wrong.items()}
    config, wrong = from_flat(in_file | given)
    for (name, *others), text in checks.problems(config, (checks.unused,)):
        if {"--config", name, *others} & {*problems, *wrong}:
            continue
        if name in given and not resuming:
            problems[name] = text
        else:
            warnings.append(f"WARNING: {text}")
    if any(name in schema() and not schema()[name][1].metadata["execution"] for name in given):
        in_file.pop("notes", None)
    return _merged(in_file, given, note, problems, warnings)


def overrides_of(rest: list[str]) -> tuple[list[str], list[str]]:
    """Return the overrides among the arguments that a parser does not know, and what is wrong."""
    overrides = []
    problems = []
    for argument in rest:
        if argument.startswith("--config."):
            overrides.append(argument.removeprefix("--config."))
            continue
        advice = "config keys are set with --config.SECTION.KEY=VALUE"
        if os.path.exists(argument[:200]):
            option = "--config" if argument.endswith(".py") else "--workdir"
            advice = f"did you mean {option} {argument[:200]}?"
        problems.append(f"{argument[:200]}: unexpected argument; {advice}")
    return overrides, problems


def parse_settings(settings: list[str], flag: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of settings such as "model.d_model=256" by key, and the problems by key.

    `flag` is what stands before a key on the command line.
    """
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    leaves = schema()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name in values:
            problems[name] = "given twice; give it once"
        elif name not in leaves:
            problems[name] = f"unknown {suggestion(name)}"
        elif not equals:
            problems[name] = f"give its value with an equals sign, {flag}{name}=VALUE"
        else:
            values[name] = parse(text, leaves[name][0])
    return values, problems


def load_values(
    path: str, values: dict[str, Any], note: Callable[[str], None] = print_note
) -> Config:
    """Return the config of a file with values by dotted name; raises UserError as `load` does.

    Keys without effect are not reported: the variants of a sweep share them, and a sweep compares
    their programs.
    """
    warnings: list[str] = []
    in_file = _get_config(path, warnings.append)
    return _merged(in_file, values, note, {}, warnings)


def _merged(
    in_file: dict,
    given: dict,
    note: Callable[[str], None],
    problems: dict[str, str],
    warnings: list[str],
) -> Config:
    """Return the config of a file with values by dotted name.

    Its schedule is shortened if they shorten train.steps. Raises UserError with these problems by
    key, those of the values, and those across other keys. Without any, `note` receives these
    warnings and a note for each key that was shortened.
    """
    config, wrong = from_flat(in_file | given)
    before = in_file.get("train.steps")
    now = config.train.steps
    log = config.log
    shortened: dict[str, Any] = {}
    if "train.steps" in given and isinstance(before, int) and 0 < now < before:
        shortened = _shortened_schedule(config.optimizer, before, now, given)
        if log.every > now and "log.every" not in given:
            log = dataclasses.replace(log, every=max(1, log.every * now // before))
    optimizer = dataclasses.replace(config.optimizer, **shortened)
    config = dataclasses.replace(config, optimizer=optimizer, log=log)
    problems = problems | wrong
    across = []
    for keys, text in checks.problems(config):
        if not problems.keys() & {"--config", *keys}:  # else it follows from what is reported
            across.append(text)
    if problems or across:
        raise UserError(*problems.values(), *across)
    for line in warnings:
        note(line)
    for name, value in shortened.items():
        note(
            f"config.optimizer.{name}={value} in place of {in_file[f'optimizer.{name}']}, to fit "
            f"train.steps={now}"
        )
    return config


def locate(path: str) -> str:
    """Return where a config file is: at this path, else, of `configs/...`, with the package.

    A wheel has the folder `configs` of the repository within the package.
    """
    path = expanded(path)
    first, *others = Path(path).parts or [""]
    if first != "configs" or os.path.exists(path):
        return path
    package = Path(lm.__file__).parent
    in_wheel = package / "configs"
    folder = in_wheel if in_wheel.is_dir() else package.parent / "configs"
    shipped = str(folder.joinpath(*others))
    return shipped if os.path.exists(shipped) else path


def run_file(
    path: str, function: str, folder: str, note: Callable[[str], None] = print_note
) -> Any:
    """Return what a function of a Python file, whose name is a key of COMMANDS, returns.

    Args:
        path: of the file; see `locate`.
        function: a key of COMMANDS.
        folder: where such files usually are; an error suggests one with a similar name.
        note: receives a line if the file is that of the package.

    Raises:
        UserError: there is no such file or function, or it raises an exception.
    """
    given = expanded(path)
    path = locate(path)
    if path != given:
        note(f"--config: there is no {given} in this folder; {path} is used")
    if not os.path.isfile(path):
        names = [file.name for file in Path(locate(folder)).glob("*.py")]
        hint = ""
        if os.path.isfile(os.path.join(path, "config.json")):
            hint = f"; did you mean hf:{path}?"
        elif near := difflib.get_close_matches(Path(path).name[:200], names, n=1):
            hint = f"; did you mean {folder}/{near[0]}?"
        raise UserError(f"--config: there is no file {path[:200]}{hint}")
    if not path.endswith(".py"):
        raise UserError(
            f"--config: {path} is not a Python file; give one such as those in {folder}/"
        )
    spec = importlib.util.spec_from_file_location("config_file", path)
    assert spec, path
    assert spec.loader, path  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        if hasattr(module, function):
            return getattr(module, function)()
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise UserError(
            f"{path}: it called sys.exit({error.code!r}); a config file must define {function}()"
        ) from None
    except BaseException as error:  # a config file is the user's own code, and may raise anything
        raise UserError(f"{path}: {type(error).__name__}: {_message(error)}") from error
    for other, command in COMMANDS.items():
        if hasattr(module, other):
            raise UserError(
                f"--config: {path} defines {other}(), not {function}(); use {command} --config "
                f"{path}"
            )
    raise UserError(f"--config: {path} has no function {function}(); see the files in {folder}/")


def _message(error: BaseException) -> str:
    """Return an error's message, shortened; an error of the user's own type may fail to give one."""
    try:
        text = str(error)
    except Exception:
        return "no message"
    return text if len(text) <= 2000 else f"{text[:2000]}..."


def _get_config(path: str, note: Callable[[str], None]) -> dict[str, Any]:
    """Return what get_config() of the file returns, or the config in hf:DIR, by dotted name.

    `note` receives a line if the file is that of the package.
    """
    if path.startswith("hf:"):
        try:
            return flatten(to_dict(read_training_config(expanded(path.removeprefix("hf:")))))
        except UserError as error:
            raise UserError(*(f"--config: {problem}" for problem in error.problems)) from None
    config = run_file(path, "get_config", "configs", note)
    try:
        return flatten(dict(config))
    except (TypeError, ValueError, RecursionError):  # the last of a dict that contains itself
        raise UserError(
            f"{path}: get_config() returned {type(config).__name__}; it must return a ConfigDict"
        ) from None


def _shortened_schedule(
    o: OptimizerConfig, before: int, now: int, given: dict[str, Any]
) -> dict[str, int]:
    """Return the new warmup_steps and decay_steps of a run with `now` steps, in place of the
    `before` of its file.

    Both are scaled in proportion, but only where they no longer fit and were not given on the
    command line. The config keeps numbers of steps, not fractions of train.steps, so that a run
    that is resumed with more steps keeps the learning rates of the steps it trained.
    """
    shortened = {}
    end = now if o.schedule == "constant" else o.decay_steps or now
    if end > now and "optimizer.decay_steps" not in given:
        shortened["decay_steps"] = end = min(now, max(1, end * now // before))
    if o.warmup_steps >= end and "optimizer.warmup_steps" not in given:
        shortened["warmup_steps"] = min(end - 1, max(1, o.warmup_steps * now // before))
    return shortened
