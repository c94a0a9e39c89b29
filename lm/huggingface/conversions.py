"""Config fields whose values must be converted for our keys and back. Imports no jax."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lm.config import ResolvedModel, layer_windows

Fields = dict[str, Any]  # of config.json


class Conversion(NamedTuple):
    """Keys and fields that are converted together."""

    keys: tuple[str, ...]  # our keys
    # the fields -> our keys; raises ValueError if we have no equivalent
    read: Callable[[Fields], Fields]
    # an export is refused if its fields read back as another model
    write: Callable[[ResolvedModel], Fields]


# ---- The activation ------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu_squared", "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "sigmoid": "sigmoid",
}  # fmt: skip


def activation(
    field: str, default: str = "silu", names: dict[str, str] = ACTIVATIONS
) -> Conversion:
    """Return the conversion of the activation's name in `field`; `names` are theirs and ours."""

    def read(fields):
        name = fields.get(field) or default
        if name not in names:
            raise ValueError(f"{field} is {str(name)[:80]!r}; supported are {', '.join(names)}")
        return {"activation": names[name]}

    def write(c):
        theirs = [name for name, ours in names.items() if ours == c.activation]
        return {field: theirs[0] if theirs else None}

    return Conversion(("activation",), read, write)


# ---- Rotary position embeddings ------------------------------------------------------------------

# The parameters of each kind of scaling: our keys and theirs.
ROPE_SCALINGS = {
    "linear": {"rope_factor": "factor"},
    "llama3": {
        "rope_factor": "factor",
        "rope_low_freq_factor": "low_freq_factor",
        "rope_high_freq_factor": "high_freq_factor",
        "rope_original_max_positions": "original_max_position_embeddings",
    },
    "yarn": {
        "rope_factor": "factor",
        "rope_original_max_positions": "original_max_position_embeddings",
        "rope_beta_fast": "beta_fast",
        "rope_beta_slow": "beta_slow",
        "rope_amplitude": "attention_factor",
    },
    "dynamic": {
        "rope_factor": "factor",
        "rope_original_max_positions": "original_max_position_embeddings",
    },
}
EVERY_ROPE = (
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")  # whose defaults are ours
ROPE_KEYS = (
    "rope_scaling",
    *dict.fromkeys(key for names in ROPE_SCALINGS.values() for key in names),
)


def rope(
    theta: float = 10_000.0,
    *,
    window_theta: float | None = None,
    scalings: dict = ROPE_SCALINGS,
    partial: float | None = None,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
) -> Conversion:
    """Return the conversion of the parameters of RoPE.

    transformers 5 has them in a dict `rope_parameters`. transformers 4 has the base beside a dict
    `rope_scaling`, whose kind was once called "type". Both are read, and the spelling of 4 is
    written, which version 5 reads, too.

    Args:
        theta: the base in a config.json without one.
        window_theta: that of layers with a window, in families where they have their own and no
            scaling (0: as in the others); None: all layers are alike.
        scalings: the kinds of scaling that the family has.
        partial: the fraction of the features that is rotated in a config.json without one; None:
            always all.
        names: the fields of the base and of the fraction in transformers 4.
    """

    theta_name, fraction_name = names

    def read(fields):
        parameters, windowed = _rope_parameters(fields, window_theta is not None)
        parameters = {"rope_theta": _given(fields.get(theta_name), theta)} | parameters
        original = "original_max_position_embeddings"
        if original in fields:  # where both are given, transformers uses this one
            parameters[original] = fields[original]
        if "dynamic" in (parameters.get("rope_type"), parameters.get("type")):
            parameters[original] = fields.get("max_position_embeddings", 1024)
        base = parameters["rope_theta"]
        ours = {"rope_theta": base} | _read_scaling(parameters, scalings)
        if window_theta is not None:
            ours["rope_window_theta"] = _given(
                windowed.get("rope_theta"), fields.get("rope_local_base_freq"), window_theta or base
            )
            ours |= _read_scaling(windowed, {})
        fraction = _given(
            parameters.get("partial_rotary_factor"), fields.get(fraction_name), partial, 1.0
        )
        if partial is not None:
            d_head = (
                fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
            )
            width = int(d_head * fraction)
            ours["rope_width"] = None if width == d_head else width
        elif fraction != 1:
            raise ValueError(f"{fraction_name} is {str(fraction)[:80]}; only 1.0 is supported")
        return ours

    def write(c):
        scaling = {}
        if c.rope_scaling != "none":
            scaling["rope_type"] = c.rope_scaling
            for ours, theirs in ROPE_SCALINGS[c.rope_scaling].items():
                if getattr(c, ours) is not None:
                    scaling[theirs] = getattr(c, ours)
        fields = {theta_name: c.rope_theta, "rope_scaling": scaling or None}
        if c.rope_scaling == "dynamic":
            fields["max_position_embeddings"] = c.rope_original_max_positions
        if window_theta is not None:
            windowed = c.rope_theta if c.rope_window_theta is None else c.rope_window_theta
            fields["rope_local_base_freq"] = windowed
            fields["rope_parameters"] = {
                "full_attention": {"rope_type": "default", "rope_theta": c.rope_theta} | scaling,
                "sliding_attention": {"rope_type": "default", "rope_theta": windowed},
            }
        if partial is not None:
            fields[fraction_name] = _fraction(c.rope_width or c.d_head, c.d_head)
        return fields

    keys = ["rope_theta"]
    if scalings:
        keys += ROPE_KEYS
    if partial is not None:
        keys.append("rope_width")
    if window_theta is not None:
        keys.append("rope_window_theta")
    return Conversion(tuple(keys), read, write)


def _given(*values):
    return next((value for value in values if value is not None), None)


def _fraction(width: int, d_head: int) -> float:
    """Return a fraction whose product with d_head, rounded down, is `width`.

    >>> 98 * (2 / 98), int(98 * _fraction(2, 98))
    (1.9999999999999998, 2)
    """
    fraction = width / d_head
    return fraction if int(d_head * fraction) == width else math.nextafter(fraction, 1)


def _rope_parameters(fields: Fields, by_window: bool) -> tuple[Fields, Fields]:
    """Return the parameters of layers without and with a window."""
    if by_window:
        both = fields.get("rope_parameters") or {}
        if not isinstance(both, dict) or both.keys() - {"full_attention", "sliding_attention"}:
            raise ValueError("rope_parameters must have full_attention and sliding_attention only")
        if "sliding_window" in fields and not fields["sliding_window"]:
            raise ValueError(
                "sliding_window is null; the base of RoPE in layers with a window needs one"
            )
        full = (both.get("full_attention") or {}) | (fields.get("rope_scaling") or {})
        return _without_null(full), _without_null(both.get("sliding_attention") or {})
    # as transformers 5 prefers
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    shared = fields.get(name) or {}
    if not isinstance(shared, dict) or any(isinstance(value, dict) for value in shared.values()):
        raise ValueError(
            f"{name} is not one set of parameters; RoPE that differs between layers is not "
            "supported"
        )
    return _without_null(shared), {}


def _without_null(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _read_scaling(parameters: Fields, scalings: dict) -> Fields:
    """Return our keys for the kind of scaling and its parameters."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return {}
    if kind not in scalings:
        raise ValueError(
            f"rope_type is {str(kind)[:80]!r}; supported are {', '.join(['default', *scalings])}"
        )
    names = scalings[kind]
    if missing := [name for name in names.values() if name not in {*parameters, *OPTIONAL}]:
        raise ValueError(f"the parameters of RoPE have no {' and no '.join(missing)}")
    if unknown := sorted(parameters.keys() - {*names.values(), *EVERY_ROPE}):
        raise ValueError(
            f"the parameters of RoPE have {', '.join(unknown)}, which is not supported with {kind}"
        )
    ours = {key: parameters[name] for key, name in names.items() if name in parameters}
    return {"rope_scaling": kind} | ours


def rotating_layers(fields: Fields) -> list[int]:
    """Return 1 for each layer of SmolLM3 with RoPE, and 0 for the others."""
    n = fields["num_hidden_layers"]
    interval = fields.get("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % interval != 0) for i in range(n)]
    rotates = rotates[:n]
    if len(rotates) != n or set(rotates) - {0, 1}:
        raise ValueError(f"no_rope_layers must have 1 (RoPE) or 0 for each of {n} layers")
    return rotates


ROTATING_LAYERS = Conversion(
    ("rope_pattern",),
    lambda fields: {"rope_pattern": shortest_pattern(rotating_layers(fields))},
    lambda c: {"no_rope_layers": over_layers(c.rope_pattern, c)},
)


# ---- Sliding windows -----------------------------------------------------------------------------

# where config.json of most families has no sliding_window; null means no window
DEFAULT_WINDOW = 4096


KINDS = ("full_attention", "sliding_attention")  # of a layer without and with a window


def windows(
    slides: Callable[[Fields, int], bool] | None = None,
    *,
    switch: bool = False,
    default: int | None = DEFAULT_WINDOW,
) -> Conversion:
    """Return the conversion of the windows of layers.

    Args:
        slides: (fields, layer) -> whether a layer has a window, for a config.json without
            `layer_types`, which names the kind of attention of each layer; None: the family has no
            such field, and its layers are alike.
        switch: whether `use_sliding_window` switches all windows on.
        default: the window in a config.json without `sliding_window`.
    """

    def read(fields):
        n = fields["num_hidden_layers"]
        size = fields.get("sliding_window", default)
        if switch and not fields.get("use_sliding_window"):
            size = None
        if slides is None:
            _refuse_other_kinds(fields, KINDS[size is not None])
        if size is None:
            return {"window_pattern": (0,)}
        if not isinstance(size, int) or size is True or size < 1:
            raise ValueError(
                f"sliding_window is {str(size)[:80]}; expected a positive integer, or null for no "
                "window"
            )
        if slides is None:
            return {"window_pattern": (size,)}
        kinds = fields.get("layer_types")
        if kinds is None:
            kinds = [KINDS[slides(fields, i)] for i in range(n)]
        if len(kinds) != n or set(kinds) - {*KINDS}:
            raise ValueError(
                "layer_types must have one of sliding_attention and full_attention for each of "
                f"{n} layers"
            )
        return {"window_pattern": shortest_pattern([size * KINDS.index(kind) for kind in kinds])}

    def write(c):
        sizes = layer_windows(c)
        fields = {"sliding_window": max(sizes) or None}
        if slides:
            fields["layer_types"] = [KINDS[size > 0] for size in sizes]
        if switch:
            fields["use_sliding_window"] = any(sizes)
        if slides and switch:
            fields["max_window_layers"] = c.n_layers
        if slides and not switch:
            # transformers needs an integer
            fields["sliding_window"] = fields["sliding_window"] or DEFAULT_WINDOW
        return fields

    return Conversion(("window_pattern",), read, write)


def _refuse_other_kinds(fields: Fields, kind: str) -> None:
    """Refuse `layer_types` in a family without this field: transformers' cache reads it."""
    if set(fields.get("layer_types") or ()) - {kind}:
        raise ValueError(
            f"layer_types is {str(fields['layer_types'])[:80]}; all layers of this family have "
            f"{kind}"
        )


def _read_no_windows(fields):
    if fields.get("sliding_window") is not None:
        size = str(fields["sliding_window"])[:80]
        raise ValueError(
            f"sliding_window is {size}; only null is supported, as this family has no windows"
        )
    _refuse_other_kinds(fields, "full_attention")
    return {}


NO_WINDOWS = Conversion((), _read_no_windows, lambda c: {})


def over_layers(pattern: tuple[int, ...], c: ResolvedModel) -> list[int]:
    """Return the value of a pattern in each layer."""
    return [pattern[i % len(pattern)] for i in range(c.n_layers)]


def shortest_pattern(sizes: list[int]) -> tuple[int, ...]:
    """Return the shortest pattern whose repetition gives the sizes.

    >>> shortest_pattern([4, 0, 4, 0, 4])
    (4, 0)
    """
    length = 1
    while any(size != sizes[i % length] for i, size in enumerate(sizes)):
        length += 1
    return tuple(sizes[:length])


# ---- Scales, branches and experts ----------------------------------------------------------------

# Of Gemma: 1 / sqrt(n), and sqrt(d_model). Granite has the factor itself.
QUERY_SCALE = Conversion(
    ("attn_scale",),
    lambda fields: {"attn_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5},
    lambda c: {
        "query_pre_attn_scalar": c.d_head if c.attn_scale is None else round(c.attn_scale**-2)
    },
)
EMBEDDING_SCALE = Conversion(
    ("embed_scale",), lambda fields: {"embed_scale": math.sqrt(fields["hidden_size"])}, lambda c: {}
)
ATTENTION_MULTIPLIER = Conversion(
    ("attn_scale",),
    lambda fields: {"attn_scale": fields.get("attention_multiplier", 1.0)},
    lambda c: {"attention_multiplier": c.d_head**-0.5 if c.attn_scale is None else c.attn_scale},
)
PARALLEL_BRANCHES = Conversion(
    ("residual",),
    lambda fields: {"residual": "parallel" if fields.get("use_parallel_residual", True) else "sum"},
    lambda c: {"use_parallel_residual": c.residual == "parallel"},
)


def _read_dense_layers(fields):
    dense = fields.get("mlp_only_layers") or []
    width = fields.get("intermediate_size")
    expert = fields["moe_intermediate_size"]
    if sorted(dense) != list(range(len(dense))) or len(dense) >= fields["num_hidden_layers"]:
        raise ValueError(
            f"mlp_only_layers is {str(dense)[:80]}; only the first layers may be without experts, "
            "not all"
        )
    if dense and width != expert:
        raise ValueError(
            f"intermediate_size is {width}; only moe_intermediate_size, {expert}, is supported"
        )
    return {"moe_first_layer": len(dense)}


DENSE_LAYERS = Conversion(
    ("moe_first_layer",),
    _read_dense_layers,
    lambda c: {"mlp_only_layers": list(range(c.moe_first_layer)), "intermediate_size": c.d_ff},
)
