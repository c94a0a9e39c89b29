"""The schema: one frozen dataclass a section, and in it every key, its type, default and range, once.

A config file's `get_config()` starts from `default_config()` (an ml_collections ConfigDict) and states what differs.
All other code reads the frozen `Config`, which `lm/config/loading.py` makes from a file and overrides.
This module imports no jax: a misspelled key must not cost two seconds.
"""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any

import ml_collections

from lm.errors import UserError

MESH_AXES = ("replica", "fsdp", "tensor", "sequence")
SPLITS = ("train", "validation", "test")


def key(default, doc, *, low=None, above=None, high=None, below=None, choices=None, forms=None, execution=False):
    """A config key: default, meaning, range (low <= v <= high, above < v < below), choices, or forms ("name:ARGUMENT").

    execution=True marks what may change when a run is resumed, because it changes how the run is carried out, not
    what is computed (beyond rounding).
    """
    limits = {"low": low, "above": above, "high": high, "below": below, "choices": choices, "forms": forms}
    return dataclasses.field(default=default, metadata={"doc": doc, "execution": execution, **limits})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    d_model: int = key(256, "width of the residual stream", low=1)
    n_layers: int = key(4, "number of blocks", low=1)
    n_heads: int = key(4, "query heads", low=1)
    n_kv_heads: int | None = key(None, "key/value heads; none: n_heads", low=1)
    d_head: int | None = key(None, "width of a head; none: d_model / n_heads", low=1)
    vocab_size: int | None = key(None, "size of the vocabulary; none: the tokenizer's", low=2)
    norm: str = key("rms", "normalization", choices=("rms", "layer"))
    norm_eps: float = key(1e-5, "added to the variance inside the root", above=0.0)
    norm_bias: bool = key(True, "LayerNorm has a bias beside its gain (RMSNorm never has)")
    norm_algorithm: str = key(
        "two_pass",
        "how LayerNorm finds its variance",
        choices=("two_pass", "welford", "chan", "running_mean"),
    )
    norm_ddof: int = key(0, "LayerNorm divides by width - ddof", low=0, high=1)
    norm_placement: str = key(
        "pre", "where the norms stand in a block", choices=("pre", "post", "sandwich", "parallel", "none")
    )
    ffn: str = key("glu", "feed-forward layer", choices=("mlp", "glu"))
    activation: str = key(
        "silu", "feed-forward activation", choices=("relu", "silu", "gelu", "gelu_tanh", "relu_squared")
    )
    d_ff: int | None = key(None, "feed-forward width; none: 4 d (mlp), 8/3 d rounded to 64 (glu)", low=1)
    ffn_bias: bool = key(False, "biases in the feed-forward layer")
    attn_bias: bool = key(False, "biases of the query, key, value and output projections")
    head_bias: bool = key(False, "bias of the output head")
    positions: str = key("rope", "how positions enter", choices=("rope", "sinusoidal", "learned", "none"))
    rope_theta: float = key(10_000.0, "RoPE's base wavelength", above=0.0)
    rope_pairing: str = key("adjacent", "which features RoPE rotates together", choices=("adjacent", "halves"))
    sinusoidal_order: str = key(
        "sine_first",
        "which of each pair of sinusoidal features comes first",
        choices=("sine_first", "cosine_first"),
    )
    max_positions: int | None = key(None, "rows of the learned position table; none: train.seq_len", low=1)
    qk_norm: bool = key(False, "RMSNorm on each head's queries and keys, before RoPE")
    window_pattern: tuple[int, ...] = key(
        (0,), "keys a query sees (itself included), layer by layer, repeated over the depth; 0: all", low=0
    )
    attn_softcap: float | None = key(None, "scores become c tanh(scores / c)", above=0.0)
    logit_softcap: float | None = key(None, "logits become c tanh(logits / c)", above=0.0)
    tie_embeddings: bool = key(False, "the head is the embedding table")
    dropout: float = key(0.0, "rate, on the embeddings and each residual branch", low=0.0, below=1.0)
    init: str = key(
        "glorot",
        "weights: N(0, 2/(d_in+d_out)) cut at 3 sigma | N(0, 2/d_in) | N(0, 0.02^2), residual projections / sqrt(2N)",
        choices=("glorot", "he", "gpt2"),
    )
    embed_std: float | None = key(
        None, "std of the embeddings; none: 0.02 for gpt2, else 1 (too large for a tied head)", above=0.0
    )
    zero_init_residual: bool = key(False, "projections back into the residual stream start at zero")
    parametrization: str = key(
        "standard", "how initial values and learning rates follow the width: muP keeps the best rate where it is",
        choices=("standard", "mup"),
    )  # fmt: skip
    mup_base_d_model: int = key(
        64, "mup: the d_model at which both parametrizations are the same; d_ff must grow with it", low=1
    )
    mup_base_d_head: int = key(16, "mup: the d_head at which both are the same", low=1)
    param_dtype: str = key("float32", "dtype of parameters and optimizer state", choices=("float32", "bfloat16"))
    compute_dtype: str = key("float32", "dtype of activations and products", choices=("float32", "bfloat16"))
    scan_layers: bool = key(
        False, "one compiled block scanned over the depth: compiles faster, runs slower on CPU", execution=True
    )
    attention: str = key(
        "auto", "implementation of attention", choices=("auto", "einsum", "chunked", "xla", "cudnn"), execution=True
    )
    remat: str = key(
        "none", "what is recomputed in the backward pass: nothing | all but products with weights | the whole block",
        choices=("none", "dots", "block"), execution=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: str = key(
        "tfds:tiny_shakespeare", "where the text comes from",
        forms=("tfds:NAME", "text:PATH", "tokens:PATH", "python_docs", "markov"),
    )  # fmt: skip
    data_dir: str | None = key(
        None, "prepared TFDS directories; none: TFDS_DATA_DIR, then TFDS's default", execution=True
    )
    offline: str | None = key(
        None, "the text to fall back to, loudly, where the source cannot be reached",
        choices=("python_docs",), execution=True,
    )  # fmt: skip
    tokenizer: str = key("char", "how text becomes ids", forms=("char", "byte", "word", "bpe:SIZE", "hf:PATH", "none"))
    vocabulary_from: str = key("train", "the text whose characters or words are known", choices=("train", "all"))
    unk: bool = key(False, "char, word: what is not in the vocabulary becomes <unk>, not an error")
    splits: tuple[float, ...] | None = key(
        None,
        "fractions (train, validation, test) of the text, in order; none: the source's own",
        low=0.0,
        high=1.0,
    )
    order: str = key("crops", "independent random windows | every window once an epoch", choices=("crops", "epochs"))
    shuffle: bool = key(True, "epochs: visit the windows in random order")
    stride: int | None = key(None, "epochs: distance of two windows' starts; none: seq_len", low=1)
    packing: str = key("none", "documents: windows never mix documents", choices=("none", "documents"))
    cache_dir: str | None = key(
        None, "tokens, tokenizers and compiled programs; none: the user's cache directory", execution=True
    )
    device_bytes: int = key(2**29, "corpora up to this size are kept on the device", low=0, execution=True)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    name: str = key("adamw", "update rule", choices=("adamw", "sgd", "muon", "lion"))
    learning_rate: float = key(1e-3, "peak learning rate", above=0.0)
    schedule: str = key("cosine", "after the warm-up", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = key(0, "steps of linear warm-up", low=0)
    decay_steps: int | None = key(None, "step at which the decay ends; none: train.steps", low=1)
    decay_fraction: float = key(0.2, "wsd: the last part of decay_steps that decays", above=0.0, high=1.0)
    final_fraction: float = key(0.1, "final over peak learning rate", low=0.0, high=1.0)
    b1: float = key(0.9, "adamw (muon's too), lion: decay of the first moment", low=0.0, below=1.0)
    b2: float = key(0.95, "adamw (muon's too), lion: decay of the second moment", low=0.0, below=1.0)
    eps: float = key(1e-8, "adamw, muon: added to a denominator", above=0.0)
    momentum: float = key(0.0, "sgd: decay of the momentum; 0: none", low=0.0, below=1.0)
    nesterov: bool = key(True, "sgd with momentum, muon (also the AdamW beside it): look ahead")
    muon_beta: float = key(0.95, "muon: decay of the momentum", low=0.0, below=1.0)
    adam_learning_rate: float | None = key(
        None, "muon: peak rate of the parameters left to AdamW (embeddings, head, gains, biases); none: learning_rate",
        above=0.0,
    )  # fmt: skip
    weight_decay: float = key(
        0.1,
        "decoupled weight decay, times learning_rate and schedule (also where muon has AdamW do the update)",
        low=0.0,
    )
    decay_norms: bool = key(False, "weight decay on norm gains")
    decay_biases: bool = key(False, "weight decay on biases")
    decay_embeddings: bool = key(False, "weight decay on token and position embeddings")
    clip_norm: float | None = key(1.0, "global gradient norm is clipped to this; none: never", above=0.0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int = key(1000, "optimizer steps; 0: only evaluate, init_from for example", low=0)
    batch_size: int = key(32, "sequences a step, over all devices", low=1)
    seq_len: int = key(256, "tokens a sequence", low=1)
    seed: int = key(0, "initial values, data order and dropout follow from it", low=0, high=2**32 - 1)
    z_loss: float = key(0.0, "weight of the squared log-partition", low=0.0)
    micro_batch_size: int | None = key(
        None, "sequences per device at once, at most; gradients are summed over the micro-batches of a step; none: all",
        low=1, execution=True,
    )  # fmt: skip
    steps_per_dispatch: int = key(1, "steps the device makes before the host looks", low=1, execution=True)
    loss_chunk: int = key(0, "tokens whose logits exist at once; 0: all", low=0, execution=True)
    on_nonfinite: str = key("stop", "at a non-finite loss or gradient", choices=("stop", "skip"), execution=True)
    deterministic: bool = key(False, "GPU: slower kernels whose sums always add in one order", execution=True)
    profile: tuple[int, ...] | None = key(
        None, "(first, last) step of an xprof trace in the workdir", low=1, execution=True
    )
    debug: bool = key(False, "no jit, layers unrolled: for print and the debugger", execution=True)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    replica: int = key(-1, "copies of the model, each with its share of a batch; -1: the rest of the devices", low=-1,
                       execution=True)  # fmt: skip
    fsdp: int = key(1, "devices that share parameters, optimizer state and batch; -1: the rest", low=-1, execution=True)
    tensor: int = key(1, "devices that share heads, features and vocabulary; -1: the rest", low=-1, execution=True)
    sequence: int = key(1, "devices that share the positions of a sequence; -1: the rest", low=-1, execution=True)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, "steps between validations; 0: only at the end", low=0, execution=True)
    max_batches: int = key(0, "batches of a validation during training; 0: the whole split", low=0, execution=True)
    batch_size: int | None = key(None, "sequences a batch; none: train.batch_size", low=1, execution=True)
    final_splits: tuple[str, ...] = key(
        ("validation", "test"), "splits scored whole at the end; a+b joins two", execution=True
    )
    sample_tokens: int = key(300, "length of the sample written at the end; 0: none", low=0, execution=True)
    sample_prompt: str = key("\n", "what the sample continues", execution=True)
    sample_temperature: float = key(0.8, "of the sample; 0: the likeliest token", low=0.0, execution=True)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(1000, "steps between checkpoints (one is always made at the end); 0: only then", low=0,
                     execution=True)  # fmt: skip
    keep: int = key(2, "newest checkpoints kept, beside the best by validation loss", low=1, execution=True)


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every: int = key(10, "steps between metrics", low=1, execution=True)
    detail_every: int = key(0, "steps between RMS per layer of gradients, parameters, updates, activations; 0: never",
                            low=0, execution=True)  # fmt: skip
    tensorboard: bool = key(True, "write TensorBoard events", execution=True)
    wandb: bool = key(False, "log to Weights & Biases (needs the extra [wandb])", execution=True)
    wandb_project: str = key("lm", "project the run is filed under", execution=True)


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = key("run", "names the run's directory", execution=True)
    notes: str = key("", "a word to whoever ran it, printed at the end", execution=True)
    init_from: str | None = key(
        None, "a run's directory: its best parameters are the initial values where they fit; {seed} in it is train.seed"
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)


def schema() -> dict[str, tuple[Any, dataclasses.Field]]:
    """Every key by its dotted name, with its type and field."""
    leaves = {}
    for field in dataclasses.fields(Config):
        if not dataclasses.is_dataclass(field.type):
            leaves[field.name] = (field.type, field)
            continue
        hints = typing.get_type_hints(field.type)
        leaves |= {f"{field.name}.{f.name}": (hints[f.name], f) for f in dataclasses.fields(field.type)}
    return leaves


class _Sections(ml_collections.ConfigDict):
    """A ConfigDict in which a misspelled section comes into being, so that `check` reports it with all else."""

    def __getattr__(self, name):
        if name not in self and not name.startswith("_"):
            self[name] = ml_collections.ConfigDict(type_safe=False)
        return super().__getattr__(name)


def init_run(config: Config) -> str | None:
    """The run that init_from names, for this seed."""
    return config.init_from and config.init_from.replace("{seed}", str(config.train.seed))


def layer_windows(model: ModelConfig) -> list[int]:
    """The attention window of each layer (0: none), the pattern repeated over the layers."""
    return [model.window_pattern[i % len(model.window_pattern)] for i in range(model.n_layers)]


def default_config() -> ml_collections.ConfigDict:
    """The schema's defaults, for a config file to change. Its keys are checked later, all at once."""
    return _Sections(to_dict(Config()), type_safe=False)


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested plain dicts."""
    return dataclasses.asdict(config)


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted names."""
    flat = {}
    for name, value in nested.items():
        is_section = isinstance(value, dict | ml_collections.ConfigDict)
        flat |= flatten(dict(value), f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


def check(flat: dict[str, Any]) -> tuple[Config, dict[str, str]]:
    """The Config of dotted names and values, and what is wrong by name; a default stands in for a wrong value."""
    problems, leaves, sections = {}, schema(), {}
    for name, value in flat.items():
        if name not in leaves:
            problems[name] = f"config.{name}: unknown {suggestion(name)}"
            continue
        section, _, leaf = name.rpartition(".")
        try:
            sections.setdefault(section, {})[leaf] = _checked(value, *leaves[name])
        except ValueError as error:
            problems[name] = f"config.{name}: {error}"
    top = sections.pop("", {})
    classes = {f.name: f.type for f in dataclasses.fields(Config)}
    return Config(**top, **{name: classes[name](**values) for name, values in sections.items()}), problems


def from_dict(nested: dict[str, Any]) -> Config:
    """The Config that `to_dict` gave, also by way of JSON; raises UserError with everything that is wrong."""
    config, problems = check(flatten(nested))
    if problems:
        raise UserError(*problems.values())
    return config


def suggestion(name: str) -> str:
    """ "key; did you mean X?" or "section; ..." for a dotted name that is not in the schema."""
    leaves = schema()
    section, _, leaf = name.rpartition(".")
    sections = sorted({n.rpartition(".")[0] for n in leaves})
    if name in sections:
        return f"key; {name} is a section, set its keys one by one"
    if section not in sections:
        near = difflib.get_close_matches(section, [s for s in sections if s], n=1, cutoff=0.5)
        return f"section {section!r}; " + (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(sections[1:])}"
        )
    siblings = [n.rpartition(".")[2] for n in leaves if n.rpartition(".")[0] == section]
    if near := difflib.get_close_matches(leaf, siblings, n=1):
        return f"key; did you mean {near[0]}?"
    elsewhere = [n for n in leaves if n.rpartition(".")[2] == leaf]
    return "key; " + (f"did you mean {elsewhere[0]}?" if elsewhere else f"{section} has {', '.join(siblings)}")


def _checked(value: Any, type_: Any, field: dataclasses.Field) -> Any:
    """The value, if its type and range are the schema's (an int is a float, a list a tuple); raises ValueError."""
    members = typing.get_args(type_) if isinstance(type_, types.UnionType) else (type_,)
    if value is None and types.NoneType in members:
        return None
    kind = members[0]
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{value!r} is not a tuple; write it as (1, 2)")
        if not value:
            raise ValueError("() is empty; give at least one value")
        return tuple(_checked(item, typing.get_args(kind)[0], field) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        optional = " or none" if types.NoneType in members else ""
        raise ValueError(f"{value!r} is not {_article(kind.__name__)}{optional}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    limits = field.metadata
    if limits["choices"] and value not in limits["choices"]:
        near = difflib.get_close_matches(value, limits["choices"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{value!r} is not one of {', '.join(limits['choices'])}{hint}")
    if limits["forms"] and not any(_has_form(value, form) for form in limits["forms"]):
        near = difflib.get_close_matches(value.partition(":")[0], [f.partition(":")[0] for f in limits["forms"]], n=1)
        hint = "; did you mean " + next(f for f in limits["forms"] if f.startswith(near[0])) + "?" if near else ""
        raise ValueError(f"{value!r} is not one of {', '.join(limits['forms'])}{hint}")
    for name, sign, fits in (
        ("low", ">=", lambda v, bound: v >= bound),
        ("above", ">", lambda v, bound: v > bound),
        ("high", "<=", lambda v, bound: v <= bound),
        ("below", "<", lambda v, bound: v < bound),
    ):
        if limits[name] is not None and not fits(value, limits[name]):
            raise ValueError(f"{value!r} is out of range; it must be {sign} {limits[name]}")
    return value


def _has_form(value: str, form: str) -> bool:
    """Whether value is the form's name alone, or name, colon and argument (a whole number where it says SIZE)."""
    name, colon, argument = form.partition(":")
    given, given_colon, rest = value.partition(":")
    return (
        given == name
        and given_colon == colon
        and bool(rest) == bool(colon)
        and (argument != "SIZE" or rest.isdecimal())
    )


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
