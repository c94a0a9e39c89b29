"""From a config file and the command line's overrides to the frozen Config: everything that can be told without data.

The first of two stages of checking; it imports no jax. The second (`lm/train.py`) needs the data.
"""

import ast
import difflib
import importlib.util
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.config import MESH_AXES, SPLITS, Config, check, flatten, init_run, layer_windows, schema, suggestion
from lm.errors import UserError


def load(path: str, overrides: list[str]) -> Config:
    """The config of file `path` with `overrides` (each "model.d_model=256"); raises UserError with every mistake."""
    flat, problems, leaves = {}, {}, schema()
    try:
        flat = _get_config(path)
    except UserError as error:
        problems["--config"] = str(error)
    for override in overrides:
        name, equals, text = override.partition("=")
        if name not in leaves:
            problems[name] = f"config.{name}: unknown {suggestion(name)}"
        elif not equals:
            problems[name] = f"config.{name}: give its value with an equals sign, --config.{name}=VALUE"
        else:
            flat[name] = _parsed(text, leaves[name][0])
    return _judged(flat, problems)


def load_values(path: str, values: dict[str, Any]) -> Config:
    """The config of file `path` with values by dotted name; raises UserError with every mistake."""
    return _judged(_get_config(path) | values, {})


def _judged(flat: dict[str, Any], problems: dict[str, str]) -> Config:
    """The config of dotted names and values; raises UserError with these problems (by name) and all others."""
    config, unfit = check(flat)
    problems |= unfit
    contradictions = [text for keys, text in _contradictions(config) if not problems.keys() & {"--config", *keys}]
    if problems or contradictions:
        raise UserError(*problems.values(), *contradictions)
    return config


def _get_config(path: str) -> dict[str, Any]:
    """What get_config() of the file returns, by dotted name."""
    config = run_file(path, "get_config", "configs")
    try:
        return flatten(dict(config))
    except (TypeError, ValueError):
        raise UserError(f"{path}: get_config() returned {type(config).__name__}; it must return a ConfigDict") from None


def run_file(path: str, function: str, folder: str) -> Any:
    """What `function` of a Python file returns; `folder` is where such files usually are. Raises UserError."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(Path(path).name, [p.name for p in Path(folder).glob("*.py")], n=1)
        hint = f"; did you mean {folder}/{near[0]}?" if near else ""
        raise UserError(f"--config: there is no file {path}{hint}")
    if not path.endswith(".py"):
        raise UserError(f"--config: {path} is not a Python file; give one such as those in {folder}/")
    spec = importlib.util.spec_from_file_location("config_file", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, function)()
    except Exception as error:  # a config file is the user's own code: whatever it raises is theirs to mend
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error


def _parsed(text: str, type_: Any) -> Any:
    """A command-line value, read as the schema's type suggests; `check` judges it."""
    members = typing.get_args(type_) if isinstance(type_, types.UnionType) else (type_,)
    if types.NoneType in members and text.lower() == "none":
        return None
    kind = members[0]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind is str:
        return text.replace("\\n", "\n")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        words = [word.strip() for word in text.strip("()").split(",")]
        value = tuple(word for word in words if word) if typing.get_origin(kind) is tuple else text
    return (value,) if typing.get_origin(kind) is tuple and isinstance(value, int | float | str) else value


def _contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """What no single key can tell: pairs of (the keys involved, the message)."""
    yield from _model_contradictions(config)
    yield from _data_contradictions(config)
    yield from _schedule_contradictions(config)
    yield from _output_contradictions(config)
    yield from _mesh_contradictions(config)
    if (run := init_run(config)) is not None and not Path(run, "checkpoints").is_dir():
        yield ("init_from",), f"config.init_from: {run} holds no run's checkpoints; give a run's directory"


def _mesh_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    for axis, size in sizes.items():
        if size == 0:
            yield (f"mesh.{axis}",), f"config.mesh.{axis}: 0 devices are none; use 1, or -1 for the rest"
    if len(open_axes := [axis for axis, size in sizes.items() if size == -1]) > 1:
        keys = tuple(f"mesh.{axis}" for axis in open_axes)
        yield keys, f"config.mesh: {' and '.join(open_axes)} are both -1, and only one axis can take the rest; use 1"


def _model_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    m, t = config.model, config.train
    d_head, n_kv_heads = m.d_head or m.d_model // m.n_heads, m.n_kv_heads or m.n_heads
    if m.d_head is None and m.d_model % m.n_heads:
        fits = [n for n in range(1, m.d_model + 1) if m.d_model % n == 0]
        near = min(fits, key=lambda n: abs(n - m.n_heads))
        yield (
            ("model.d_model", "model.n_heads", "model.d_head"),
            f"config.model.d_model: {m.d_model} is not divisible by n_heads = {m.n_heads}; "
            f"use n_heads = {near}, or set d_head",
        )
    elif m.positions == "rope" and d_head % 2:
        yield (
            ("model.d_model", "model.n_heads", "model.d_head", "model.positions"),
            f"config.model.d_head: {d_head} is odd, and RoPE rotates pairs; use {d_head + 1}",
        )
    if m.positions == "sinusoidal" and m.d_model % 2:
        yield (
            ("model.d_model", "model.positions"),
            f"config.model.d_model: {m.d_model} is odd, and sinusoidal positions come in pairs; use {m.d_model + 1}",
        )
    if m.n_heads % n_kv_heads:
        fits = [n for n in range(1, m.n_heads + 1) if m.n_heads % n == 0]
        yield (
            ("model.n_kv_heads", "model.n_heads"),
            f"config.model.n_kv_heads: {n_kv_heads} does not divide n_heads = {m.n_heads}; use one of {fits}",
        )
    if m.parametrization == "mup" and config.optimizer.name == "muon":
        yield (
            ("model.parametrization", "optimizer.name"),
            "config.optimizer.name: muon has no rule of muP's for its learning rates; use adamw, lion or sgd",
        )
    if m.norm == "layer" and m.norm_algorithm == "running_mean" and m.norm_ddof:
        yield (
            ("model.norm", "model.norm_algorithm", "model.norm_ddof"),
            f"config.model.norm_ddof: {m.norm_ddof} with norm_algorithm running_mean, which has its own n - 1; use 0",
        )
    if m.norm == "layer" and m.norm_placement != "none" and m.d_model <= m.norm_ddof:
        yield (
            ("model.d_model", "model.norm_ddof"),
            f"config.model.norm_ddof: {m.norm_ddof} leaves nothing to divide by at d_model = {m.d_model}; use 0",
        )
    if m.norm == "layer" and m.norm_algorithm == "running_mean" and m.norm_placement != "none" and m.d_model == 1:
        yield (
            ("model.norm", "model.norm_algorithm", "model.norm_placement", "model.d_model"),
            "config.model.norm_algorithm: running_mean divides by d_model - 1, which is 0; use two_pass",
        )
    if m.tie_embeddings and m.head_bias:
        yield (
            ("model.tie_embeddings", "model.head_bias"),
            "config.model.head_bias: true, but a tied head is the embedding table alone; use false",
        )
    if m.attention in ("xla", "cudnn") and m.attn_softcap is not None:
        yield (
            ("model.attention", "model.attn_softcap"),
            f"config.model.attention: {m.attention} has no softcap, and attn_softcap is {m.attn_softcap}; "
            "use auto or einsum",
        )
    if m.attention == "cudnn" and m.compute_dtype != "bfloat16":
        yield (
            ("model.attention", "model.compute_dtype"),
            f"config.model.attention: cudnn needs compute_dtype = bfloat16, which is {m.compute_dtype}; use auto",
        )
    if m.attention == "cudnn" and m.scan_layers and len({*layer_windows(m)}) > 1:
        yield (
            ("model.attention", "model.scan_layers", "model.window_pattern", "model.n_layers"),
            f"config.model.attention: cudnn needs one window for all scanned layers, and window_pattern is "
            f"{m.window_pattern}; use auto, or scan_layers = false",
        )
    if m.positions == "learned" and m.max_positions is not None and m.max_positions < t.seq_len:
        yield (
            ("model.max_positions", "train.seq_len"),
            f"config.model.max_positions: {m.max_positions} is less than train.seq_len = {t.seq_len}; use {t.seq_len}",
        )
    if t.debug and m.scan_layers:
        yield (
            ("train.debug", "model.scan_layers"),
            "config.train.debug: true runs the layers one by one; use model.scan_layers = false with it",
        )


def _data_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    d = config.data
    if d.splits is not None and (len(d.splits) != 3 or abs(sum(d.splits) - 1) > 1e-6 or d.splits[0] == 0):
        yield (
            ("data.splits",),
            f"config.data.splits: {d.splits} must be three fractions (train, validation, test) whose sum is 1",
        )
    flat_tokens = d.source.startswith("tokens:")
    if d.tokenizer == "none" and not flat_tokens:
        yield (
            ("data.tokenizer", "data.source"),
            f"config.data.tokenizer: none, but {d.source} gives text; use char, byte, word, bpe:SIZE or hf:PATH",
        )
    if flat_tokens and d.tokenizer.partition(":")[0] not in ("none", "hf", "byte"):
        yield (
            ("data.tokenizer", "data.source"),
            f"config.data.tokenizer: {d.tokenizer} is made from text, but {d.source} gives ids; "
            "use none, byte or hf:PATH",
        )
    if d.packing == "documents" and flat_tokens:
        yield (
            ("data.packing", "data.source"),
            "config.data.packing: documents needs a source of documents, and token shards have no borders; use none",
        )
    if d.packing == "documents" and d.order == "crops":
        yield (
            ("data.packing", "data.order"),
            "config.data.order: crops cut across documents; packed rows are visited with order = epochs",
        )
    if d.packing == "documents" and d.stride is not None:
        yield (
            ("data.packing", "data.stride"),
            f"config.data.stride: {d.stride} has no meaning for packed rows, which are numbered; use none",
        )
    if d.splits is not None and flat_tokens:
        yield (
            ("data.splits", "data.source"),
            "config.data.splits: token shards name their splits in their file names; use none",
        )
    if d.order == "crops" and d.stride is not None:
        yield (
            ("data.stride", "data.order"),
            f"config.data.stride: {d.stride} has no meaning for order = crops; use order = epochs",
        )
    kind, _, size = d.tokenizer.partition(":")
    if kind == "bpe" and int(size) < 257:
        yield (
            ("data.tokenizer",),
            f"config.data.tokenizer: {d.tokenizer} is too small for 256 bytes and the end of text; use bpe:257 or more",
        )
    if config.eval.sample_tokens and not config.eval.sample_prompt:
        yield (
            ("eval.sample_tokens", "eval.sample_prompt"),
            "config.eval.sample_prompt: it is empty, and a sample continues at least one token; give a prompt, or use "
            "sample_tokens = 0",
        )


def _schedule_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    o, t = config.optimizer, config.train
    decay_steps = o.decay_steps or t.steps
    if decay_steps > t.steps and o.schedule != "constant":
        yield (
            ("optimizer.decay_steps", "train.steps"),
            f"config.optimizer.decay_steps: {decay_steps} is longer than train.steps = {t.steps}, "
            "so the decay would never end; shorten it or train longer",
        )
    if o.warmup_steps >= decay_steps and t.steps:
        yield (
            ("optimizer.warmup_steps", "optimizer.decay_steps", "train.steps"),
            f"config.optimizer.warmup_steps: {o.warmup_steps} leaves nothing of the schedule's {decay_steps} steps; "
            f"use less than {decay_steps}",
        )
    if t.profile is not None and (len(t.profile) != 2 or not t.profile[0] <= t.profile[1] <= t.steps):
        yield (
            ("train.profile", "train.steps"),
            f"config.train.profile: {t.profile} must be (first, last) with first <= last <= train.steps = {t.steps}",
        )
    if t.debug and t.steps_per_dispatch > 1:
        yield (
            ("train.debug", "train.steps_per_dispatch"),
            f"config.train.steps_per_dispatch: {t.steps_per_dispatch} with train.debug, which runs step by step; use 1",
        )


def _output_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    for name in config.eval.final_splits:
        if unknown := [part for part in name.split("+") if part not in SPLITS]:
            near = difflib.get_close_matches(unknown[0], SPLITS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SPLITS)}, and a+b joins two"
            yield ("eval.final_splits",), f"config.eval.final_splits: there is no split {unknown[0]!r}; {hint}"
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        yield (
            ("log.wandb",),
            "config.log.wandb: true, but the package wandb is not installed; pip install 'lm[wandb]', or use false",
        )
