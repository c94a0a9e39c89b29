"""Translate config.json of a checkpoint to our config and back. Imports no jax."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from lm.config import Config, Resolved, ResolvedModel, as_resolved, checks, layer_windows
from lm.config.convert import from_flat
from lm.config.values import MAX_INT
from lm.huggingface.conversions import ROPE_KEYS, ROPE_SCALINGS, over_layers, shortest_pattern
from lm.huggingface.families import (
    FAMILIES,
    IN_ALL_FAMILIES,
    REQUIRED,
    USUAL,
    WITHOUT_EFFECT,
    Family,
)
from lm.huggingface.folding import fold
from lm.system.errors import UserError
from lm.system.files import open_regular, read_json

MAX_BYTES = 2**20  # of config.json and the like
MAX_TOKENIZER_BYTES = 2**27  # of tokenizer.json
# of a config made from a checkpoint: a cache of keys for 128k tokens may not fit in memory
MAX_SEQ_LEN = 2048
WITH_CODE = "lm"  # model_type of a model that was exported with its code
# theirs -> param_dtype
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


# ---- From config.json ----------------------------------------------------------------------------


def find_file(directory: str | Path, name: str, limit: int | None = None) -> Path | None:
    """Return the path of a checkpoint's file, None without one. Others may have made it.

    Raises:
        UserError: it is a pipe or a device, a pointer of Git LFS, has more bytes than the limit, or
            is a link out of the directory. Links to the blobs beside a snapshot in the cache of
            huggingface_hub are followed.
    """
    path = Path(directory) / name
    if not os.path.lexists(path):
        return None
    # unlike resolve(), this does not raise for a link to itself
    target = Path(os.path.realpath(path))
    inside = Path(directory).resolve()
    allowed = [inside]
    if inside.parent.name == "snapshots":
        allowed.append(inside.parents[1] / "blobs")
    if target.parent not in allowed:
        raise UserError(
            f"{path} is a link that leads out of the directory; replace it by a copy of {target}"
        )
    if not target.is_file():
        problem = "not a file" if target.exists() else "missing"
        raise UserError(f"{path} is {problem}; download it again")
    if limit is not None and target.stat().st_size > limit:
        raise UserError(
            f"{path} has {target.stat().st_size:,} bytes, more than the {limit:,} that it may have"
        )
    open_regular(path).close()
    return path


def read_fields(directory: str | Path) -> dict[str, Any]:
    """Return the fields of config.json in a directory.

    Raises:
        UserError: if the directory or its config.json is missing or damaged.
    """
    if not Path(directory).is_dir():
        raise UserError(
            f"{directory}: there is no such directory; give one with a checkpoint of Hugging Face"
        )
    path = find_file(directory, "config.json", MAX_BYTES)
    if path is None:
        raise UserError(
            f"{directory} has no config.json; give a directory with a checkpoint of Hugging Face"
        )
    return read_json(path, advice="download it again")


def is_checkpoint(directory: str | Path) -> bool:
    """Return whether a directory's config.json has a `model_type`: a checkpoint of Hugging Face.

    A run's directory has a config.json, too, without this field. A damaged config.json beside
    weights counts, so that reading it says what is wrong.
    """
    try:
        return "model_type" in read_fields(directory)
    except (OSError, UserError):
        return any(Path(directory).glob("*.safetensors"))


def find_tokenizer(directory: str | Path) -> Path | None:
    """Return the path of a checkpoint's tokenizer.json, or None if it has none."""
    return find_file(directory, "tokenizer.json", MAX_TOKENIZER_BYTES)


def family_of(directory: str | Path, fields: dict[str, Any]) -> Family:
    """Return the family of a config.json; raises UserError if it is not supported."""
    name = str(fields.get("model_type"))
    if "model_type" not in fields and "train" in fields:
        raise UserError(f"{directory} is the directory of a run, not a checkpoint of Hugging Face")
    if name == WITH_CODE:
        raise UserError(
            f"{directory} was exported with its code, which lm does not read; use the run that it "
            "came from"
        )
    if name not in FAMILIES:
        raise UserError(
            f"{directory}/config.json: model_type is {name[:80]!r}; supported are "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def read_config(
    directory: str | Path, *, seq_len: int | None = None, dtype: str | None = None
) -> Resolved:
    """Return our resolved config for the config.json of a checkpoint.

    Args:
        seq_len: train.seq_len; None: the checkpoint's number of positions, at most MAX_SEQ_LEN.
        dtype: dtype of parameters and computation; None: the checkpoint's.

    Raises:
        UserError: with every field that is missing, wrong or not supported.
    """
    fields = read_fields(directory)
    if dtype:
        fields["dtype"] = dtype
    family = family_of(directory, fields)
    model, problems = _read_model(family, fields)
    values = {f"model.{key}": value for key, value in model.items()}
    positions = fields.get(family.context, 1024)
    is_fixed = family.fixed.get("positions") == "learned" or model["rope_scaling"] == "dynamic"
    if not isinstance(positions, int) or positions < 1:
        problems.append(f"{family.context} is {positions!r}, not a number of positions")
    elif is_fixed and (seq_len or 1) > positions:
        problems.append(f"{family.context} is {positions}, but {seq_len} positions are needed")
    else:
        values["train.seq_len"] = seq_len or min(positions, MAX_SEQ_LEN)
    values["name"] = Path(directory).resolve().name or family.model_type
    if tokenizer := find_tokenizer(directory):
        values |= {"data.tokenizer": f"hf:{tokenizer}", "data.special_tokens": True}
    config, wrong = from_flat(values)
    names = {f"model.{key}": field.name for key, field in family.fields.items()}
    problems += [f"{names.get(key, key)}: {text.partition(': ')[2]}" for key, text in wrong.items()]
    if not problems:
        for _, text in checks.problems(config, (checks.heads, checks.position_encoding)):
            problems.append(text.removeprefix("config.model."))
    if problems:
        raise UserError(*(f"{directory}/config.json: {problem}" for problem in problems))
    return as_resolved(config)


def _read_model(family: Family, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of our model section, and the problems of the fields."""
    problems: list[str] = []
    ours: dict[str, Any] = USUAL | family.fixed
    if ours["positions"] != "rope":
        del ours["rope_pairing"]
    for name, supported in (IN_ALL_FAMILIES | family.requires).items():
        if fields.get(name) not in supported:
            # without the field (None) a model is as lm computes it
            known = [str(value).lower() for value in supported if value is not None]
            allowed = " or ".join(known) or "none"
            problems.append(f"{name} is {str(fields[name])[:80]}; only {allowed} is supported")
    required = {field.name for field in family.fields.values() if field.default is REQUIRED}
    for name in sorted(required):
        value = fields.get(name)
        limit = checks.MAX_UNROLLED if name == family.fields["n_layers"].name else MAX_INT
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            problems.append(
                f"{name} is {str(value)[:80]}; expected a positive integer, at most {limit}"
            )
    if problems:
        return ours, problems
    for key, field in family.fields.items():
        value = fields.get(field.name)
        if value is None:
            value = field.default(fields) if callable(field.default) else field.default
        ours[key] = value
    if "d_head" not in ours and ours["d_model"] % ours["n_heads"] == 0:
        ours["d_head"] = ours["d_model"] // ours["n_heads"]
    if ours["attn_out_bias"] == ours["attn_bias"]:
        ours["attn_out_bias"] = None
    for conversion in family.conversions:
        try:
            ours |= conversion.read(fields)
        except ValueError as error:
            problems.append(str(error))
        except (TypeError, AttributeError, ArithmeticError, LookupError):
            problems.append(
                f"the fields for {', '.join(conversion.keys)} have values of a wrong type"
            )
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        problems.append(f"dtype is {dtype[:80]!r}; supported are {', '.join(DTYPES)}")
    else:
        # In bfloat16 a gain of 1 + w would be rounded.
        ours["param_dtype"] = "float32" if family.gain_offset else DTYPES[dtype]
        ours["compute_dtype"] = DTYPES[dtype]
    return ours, problems


def read_training_config(directory: str | Path) -> Config:
    """Return our config that trains the architecture of a checkpoint, with parameters in float32.

    In bfloat16, small updates of parameters would be lost to rounding.
    """
    config = read_config(directory)
    model = dataclasses.replace(config.model, param_dtype="float32")
    return dataclasses.replace(config, model=model)


# ---- To config.json ------------------------------------------------------------------------------


def export_fields(
    config: Resolved, settings: dict[str, str] | None = None
) -> tuple[Family, dict[str, Any]]:
    """Return the family that has an equivalent of a model, and the fields of its config.json.

    `settings` are the files of the checkpoint that the model came from, by name; the family of its
    config.json is tried first.

    Raises:
        UserError: if no family has one, with the reasons of the closest.
    """
    reasons = {}  # by model_type
    before = json.loads((settings or {}).get("config.json", "{}")).get("model_type")

    def order(family):  # factors in weights are rounded
        return family.model_type != before, bool(fold(family, config.model)[1])

    for family in sorted(FAMILIES.values(), key=order):
        fields, problems = _write_model(family, config.model)
        if not problems:
            return family, _write_common(family, config) | fields
        reasons[family.model_type] = problems
    closest = min(reasons, key=lambda name: len(reasons[name]))
    raise UserError(
        "no supported family of Hugging Face computes what this model does (with --code, hf export "
        f"writes it with its own code in PyTorch); {closest} comes closest, but:",
        *(f"  {problem}" for problem in reasons[closest]),
    )


def normalized(c: ResolvedModel) -> dict[str, Any]:
    """Return the model section with usual values where they are equivalent or have no effect."""
    ours = {key: value for key, value in dataclasses.asdict(c).items() if key not in WITHOUT_EFFECT}
    if ours["attn_out_bias"] is None:
        ours["attn_out_bias"] = c.attn_bias
    if c.attn_scale is not None and math.isclose(c.attn_scale, c.d_head**-0.5):
        ours["attn_scale"] = None
    ours["window_pattern"] = shortest_pattern(layer_windows(c))
    ours["rope_pattern"] = shortest_pattern(over_layers(c.rope_pattern, c))
    same_base = c.rope_window_theta == c.rope_theta and c.rope_scaling == "none"
    if same_base or not any(layer_windows(c)):
        ours["rope_window_theta"] = None
    ours["rope_pairing"] = "halves"  # the other one is equal up to the order of features
    if c.rope_width == c.d_head:
        ours["rope_width"] = None
    unused = {*ROPE_KEYS} - {"rope_scaling"}
    if c.positions == "rope":
        unused -= {*ROPE_SCALINGS.get(c.rope_scaling, ())}
    else:
        unused |= {"rope_theta", "rope_window_theta", "rope_width", "rope_scaling", "rope_pattern"}
    if c.norm != "layer" or c.norm_placement == "none":
        unused |= {"norm_bias", "norm_algorithm", "norm_ddof"}
    if c.norm_algorithm != "running_mean":
        unused.add("norm_algorithm")
    if c.positions != "sinusoidal":
        unused.add("sinusoidal_order")
    if c.positions != "learned" and c.query_scale != "log_n":
        unused.add("max_positions")
    if not c.qk_norm:
        unused.add("qk_norm_over")
    if c.ffn != "moe":
        unused |= {"n_experts", "experts_per_token", "normalize_experts", "shared_expert"}
        unused.add("moe_first_layer")
    elif not c.moe_first_layer:  # experts have no biases
        unused.add("ffn_bias")
    return ours | {key: USUAL[key] for key in unused}


def _write_model(family: Family, c: ResolvedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a model, and what of it they cannot say: what reads back as another."""
    c, _ = fold(family, c)
    ours = normalized(c)
    name = family.model_type
    fields: dict[str, Any] = {}
    if c.positions != "rope":  # keys without an effect are no difference
        usual = {key: value for key, value in ours.items() if key.startswith("rope_")}
        c = dataclasses.replace(c, **usual)
    for key, field in family.fields.items():
        fields.setdefault(field.name, ours[key])  # two of our keys may have one field
    for conversion in family.conversions:
        fields |= conversion.write(c)
    values, problems = _read_model(family, fields)
    theirs = normalized(dataclasses.replace(c, **{"d_head": c.d_model // c.n_heads} | values))
    for key, value in ours.items():
        if not _equal(value, theirs[key]):
            problems.append(
                f"config.model.{key}: {_shown(value)}; {name} has {_shown(theirs[key])}"
            )
    if ours["rope_scaling"] == "dynamic" and (c.max_positions or 0) > c.rope_original_max_positions:
        problems.append(
            f"config.model.max_positions: {c.max_positions} is more than "
            "rope_original_max_positions; transformers changes the base with the length of each "
            "text then"
        )
    if family.divisible and c.d_model % c.n_heads:
        problems.append(
            f"config.model.d_model: {c.d_model} is not divisible by n_heads, as {name} requires"
        )
    return fields, problems


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _shown(value: Any) -> str:
    return str(value).lower() if value in (None, True, False) else str(value)


def _write_common(family: Family, config: Resolved) -> dict[str, Any]:
    """Return the fields that do not describe the model's layers."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": config.model.param_dtype,
        "torch_dtype": config.model.param_dtype,  # the name in transformers 4
        family.context: config.train.seq_len,
        **family.writes,
        # Their defaults are ids of the family's own tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
