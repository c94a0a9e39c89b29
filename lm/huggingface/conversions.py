"""Config fields of Hugging Face whose values must be converted for our keys and back. Imports no jax."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lm.config import ModelConfig, layer_windows

Fields = dict[str, Any]  # of config.json


class Conversion(NamedTuple):
    """Keys and fields that are converted together.

    Attributes:
        keys: our keys.
        read: the fields -> our keys. Raises ValueError if we have no equivalent.
        write: our model section -> the fields. Raises ValueError if the family has no equivalent.
    """

    keys: tuple[str, ...]
    read: Callable[[Fields], Fields]
    write: Callable[[ModelConfig], Fields]


# ---- The activation ----------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu_squared", "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "sigmoid": "sigmoid",
}  # fmt: skip


def activation(field: str, default: str = "silu") -> Conversion:
    """Return the conversion of the activation's name, which `field` has."""

    def read(fields):
        name = fields.get(field) or default
        if name not in ACTIVATIONS:
            raise ValueError(f"{field} is {str(name)[:80]!r}; supported are {', '.join(ACTIVATIONS)}")
        return {"activation": ACTIVATIONS[name]}

    def write(c):
        for theirs, ours in ACTIVATIONS.items():
            if ours == c.activation:
                return {field: theirs}
        raise ValueError(f"config.model.activation: {c.activation}; there is none of this name")

    return Conversion(("activation",), read, write)


# ---- Rotary position embeddings ----------------------------------------------------------------------------------


def rope_fields(fields: Fields) -> Fields:
    """Return the parameters of RoPE in the spelling of transformers 5, whose dict is called `rope_parameters`.

    transformers 4 has rope_theta beside a dict `rope_scaling`, whose kind was once called "type".

    >>> rope_fields({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'rope_theta': 500000.0, 'type': 'linear', 'factor': 2.0, 'rope_type': 'linear'}
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"  # as transformers 5 prefers
    rope = fields.get(name) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{name} is not one set of parameters; RoPE that differs between layers is not supported")
    theta = fields.get("rope_theta")
    rope = {"rope_theta": 10_000.0 if theta is None else theta} | rope
    rope |= {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}
    if "original_max_position_embeddings" in fields:  # where both are given, transformers uses this one
        rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return rope


def _read_rope(fields):
    rope = rope_fields(fields)
    ours = {"rope_theta": rope["rope_theta"]}
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"partial_rotary_factor is {str(rope['partial_rotary_factor'])[:80]}; only 1 is supported")
    if rope["rope_type"] == "default":
        return ours
    names = ROPE_SCALINGS.get(rope["rope_type"])
    if names is None:
        kind = str(rope["rope_type"])[:80]
        raise ValueError(f"rope_type is {kind!r}; supported are default, {', '.join(ROPE_SCALINGS)}")
    if missing := [name for name in names.values() if name not in rope]:
        raise ValueError(f"the parameters of RoPE have no {' and no '.join(missing)}")
    return ours | {"rope_scaling": rope["rope_type"]} | {ours: rope[theirs] for ours, theirs in names.items()}


def _write_rope(c):
    if c.rope_scaling == "none":
        scaling = None
    else:
        scaling = {theirs: getattr(c, ours) for ours, theirs in ROPE_SCALINGS[c.rope_scaling].items()}
        scaling = {"rope_type": c.rope_scaling} | scaling
    # The spelling of transformers 4, which version 5 reads too.
    return {"rope_theta": c.rope_theta, "rope_scaling": scaling}


ROPE_SCALINGS = {
    "linear": {"rope_factor": "factor"},
    "llama3": {
        "rope_factor": "factor",
        "rope_low_freq_factor": "low_freq_factor",
        "rope_high_freq_factor": "high_freq_factor",
        "rope_original_max_positions": "original_max_position_embeddings",
    },
}
ROPE = Conversion(("rope_theta", "rope_scaling", *ROPE_SCALINGS["llama3"]), _read_rope, _write_rope)


# ---- Sliding windows ---------------------------------------------------------------------------------------------

DEFAULT_WINDOW = 4096  # where config.json has no sliding_window; null means no window


def windows(default_sliding: Callable[[Fields, int], bool], switch: bool = False) -> Conversion:
    """Return the conversion of families that name the kind of attention of each layer in `layer_types`.

    Args:
        default_sliding: (fields, layer) -> whether a layer has a window, for a config.json without layer_types.
        switch: whether `use_sliding_window` switches all windows on.
    """

    def read(fields):
        size, n = fields.get("sliding_window", DEFAULT_WINDOW), fields["num_hidden_layers"]
        if not size or (switch and not fields.get("use_sliding_window")):
            return {"window_pattern": (0,)}
        if not isinstance(size, int):
            raise ValueError(f"sliding_window is {str(size)[:80]}; expected an integer")
        kinds = fields.get("layer_types")
        if kinds is None:
            return {"window_pattern": shortest_pattern([size * default_sliding(fields, i) for i in range(n)])}
        if len(kinds) != n or set(kinds) - {"sliding_attention", "full_attention"}:
            raise ValueError(
                f"layer_types must have one of sliding_attention and full_attention for each of {n} layers"
            )
        return {"window_pattern": shortest_pattern([size * (kind == "sliding_attention") for kind in kinds])}

    def write(c):
        sizes, size = layer_windows(c), _one_window(c)
        kinds = ["sliding_attention" if size else "full_attention" for size in sizes]
        if switch:
            switches = {"use_sliding_window": size is not None, "max_window_layers": c.n_layers}
            return {"sliding_window": size, "layer_types": kinds} | switches
        return {"sliding_window": size or DEFAULT_WINDOW, "layer_types": kinds}  # transformers needs an integer

    return Conversion(("window_pattern",), read, write)


def _one_window(c: ModelConfig) -> int | None:
    sizes = sorted(set(layer_windows(c)) - {0})
    if len(sizes) > 1:
        raise ValueError(f"config.model.window_pattern: windows of several sizes ({', '.join(map(str, sizes))})")
    return sizes[0] if sizes else None


def _write_uniform_window(c):
    if len(set(layer_windows(c))) > 1:
        raise ValueError("config.model.window_pattern: not the same window in all layers")
    return {"sliding_window": _one_window(c)}


def shortest_pattern(sizes: list[int]) -> tuple[int, ...]:
    """Return the shortest pattern whose repetition gives the sizes.

    >>> shortest_pattern([4, 0, 4, 0, 4])
    (4, 0)
    """
    lengths = range(1, len(sizes) + 1)
    return tuple(next(sizes[:n] for n in lengths if all(size == sizes[i % n] for i, size in enumerate(sizes))))


ALL_LAYERS_SLIDE = Conversion(
    ("window_pattern",),
    lambda fields: {"window_pattern": (fields.get("sliding_window", DEFAULT_WINDOW) or 0,)},
    _write_uniform_window,
)
ALTERNATING_LAYERS_SLIDE = windows(lambda fields, layer: layer % 2 == 0)
LAST_LAYERS_SLIDE = windows(lambda fields, layer: layer >= fields.get("max_window_layers", 28), switch=True)


# ---- Scales ------------------------------------------------------------------------------------------------------


def attention_scale(field: str, default: int) -> Conversion:
    """Return the conversion of a scale of 1 / sqrt(field)."""

    def write(c):
        square = c.d_head if c.attn_scale is None else c.attn_scale**-2
        if abs(square - round(square)) > 1e-6 * square:
            raise ValueError(f"config.model.attn_scale: {c.attn_scale} is not 1 / sqrt(n) of an integer n")
        return {field: round(square)}

    return Conversion(("attn_scale",), lambda fields: {"attn_scale": fields.get(field, default) ** -0.5}, write)


def embedding_scale(field: str) -> Conversion:
    """Return the conversion of embeddings that are multiplied by sqrt(field)."""

    def write(c):
        if not math.isclose(c.embed_scale, math.sqrt(c.d_model)):
            raise ValueError(f"config.model.embed_scale: {c.embed_scale} is not sqrt(d_model)")
        return {}

    return Conversion(("embed_scale",), lambda fields: {"embed_scale": math.sqrt(fields[field])}, write)
