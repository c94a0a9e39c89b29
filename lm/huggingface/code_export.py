"""Export a model with its code: a modelling file in PyTorch that has the equations of its config.

The file is modeling.py beside this one, in which each decision about the config is taken and what
is then unused left out. Its parameters have our names and axes, so the weights are written as they
are. Imports no torch.
"""

import ast
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm import model, parameters
from lm.config import (
    Resolved,
    ResolvedModel,
    applied_layers,
    branches_of,
    layer_windows,
    mixer_of,
    present_mixers,
    width_factor,
)
from lm.config.values import show
from lm.huggingface.config_files import WITH_CODE, normalized
from lm.huggingface.conversions import over_layers
from lm.huggingface.families import WITHOUT_EFFECT
from lm.huggingface.safetensors_files import Planned
from lm.huggingface.specialized import names_of_keys, specialized
from lm.ideas.latent_attention import widths
from lm.system.errors import UserError
from lm.system.text_tables import some

TEMPLATE = Path(__file__).with_name("modeling.py")
FILE = "modeling_lm.py"  # in the exported directory
ROOT = "LanguageModel"

# Which of our keys the template has. What is in no table must have its default; WITHOUT_EFFECT does
# not change what a trained model computes.
# Keys that it has with any value:
WITH_ANY_VALUE = frozenset({
    "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size", "norm_eps", "norm_bias",
    "norm_ddof", "n_experts", "experts_per_token", "normalize_experts", "shared_expert", "moe_first_layer", "ffn_bias",
    "attn_bias", "attn_out_bias", "head_bias", "rope_theta", "rope_window_theta", "rope_pattern", "rope_width",
    "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow",
    "rope_amplitude", "rope_original_max_positions", "max_positions", "qk_norm", "attn_sink", "attn_forget",
    "attn_differential", "value_embeddings", "residual_multiplier", "residual_scalars", "conv_keys", "conv_values",
    "conv_stream", "token_shift", "latent_width", "branches", "loops", "loop_layers", "window_pattern", "attn_scale",
    "attn_softcap", "logit_softcap", "logit_divisor", "embed_scale", "tie_embeddings",
})  # fmt: skip
# and with these:
WITH_VALUES = {
    "norm": ("rms", "layer", "dyt"),
    "norm_algorithm": ("two_pass", "welford", "chan"),  # the same function
    "norm_placement": ("pre", "post", "sandwich", "output", "parallel", "none"),
    "ffn": ("mlp", "glu", "moe"),
    "activation": ("relu", "silu", "gelu", "gelu_tanh", "relu_squared", "sigmoid"),
    "positions": ("rope", "sinusoidal", "learned", "none"),
    "rope_pairing": ("adjacent", "halves"),
    "rope_scaling": ("none", "linear", "llama3", "yarn", "dynamic"),
    "sinusoidal_order": ("sine_first", "cosine_first"),
    "qk_norm_over": ("head", "all_heads"),
    "attn_gate": ("none", "head", "element", "head_identity", "element_identity"),
    "attn_exclusive": ("none", "full", "learned"),
    "query_scale": ("none", "learned", "log_n"),
    "gated_delta": ("none", "all", "three_of_four"),
    "value_residual": ("none", "half", "learned"),
    "residual": ("sum", "depth_attention", "hyper_connections", "parallel"),
    "mixers": ("attention", "latent", "talking_heads", "rg_lru"),
    "parametrization": ("standard", "mup"),
}


def problems(c: ResolvedModel) -> list[str]:
    """Return what the template does not have of a model, by key."""
    found = []
    defaults = {field.name: field.default for field in dataclasses.fields(c)}
    for key, value in normalized(c).items():
        if key in WITH_ANY_VALUE:
            continue
        supported = WITH_VALUES.get(key, (defaults[key],))
        values = value if isinstance(value, tuple) else (value,)
        if not set(values) <= {*supported, defaults[key]}:
            known = " or ".join(map(show, supported))
            found.append(f"config.model.{key}: {show(value)}; the code in PyTorch has {known}")
    return found


def keys_of_equations(c: ResolvedModel) -> dict[str, Any]:
    """Return what the template reads as `c`: our keys, with one value for each layer, and with
    what follows from several keys.
    """
    keys = dataclasses.asdict(c)
    keys["attn_out_bias"] = c.attn_bias if c.attn_out_bias is None else c.attn_out_bias
    keys["attn_scale"] = model.score_scale(c)
    keys["logit_divisor"] = width_factor(c) * c.logit_divisor
    keys["max_positions"] = max(1, c.max_positions or 1)
    keys["latent_width"] = widths(c)[0]
    if c.rope_amplitude is None:
        keys["rope_amplitude"] = 0.1 * math.log(c.rope_factor) + 1
    keys["mixers"] = [mixer_of(c, layer) for layer in range(c.n_layers)]
    keys["window_pattern"] = layer_windows(c)
    keys["rope_pattern"] = list(over_layers(c.rope_pattern, c))
    keys["applied_layers"] = [layer for _, layer in applied_layers(c)]
    keys["branches"] = [
        [branch.name, branch.kind, branch.factor * c.residual_multiplier]
        for branch in branches_of(c)
    ]
    return keys


def export(config: Resolved, params: dict | None = None) -> tuple[dict, list[Planned], dict]:
    """Return the fields of config.json, the tensors and the texts of other files, by name.

    params = None: the values of tensors are not needed.

    Raises:
        UserError: the template lacks something of the model, with all reasons.
    """
    c = config.model
    if found := problems(c):
        raise UserError(
            "the model cannot be exported with its code, which lm/huggingface/modeling.py lacks:",
            *(f"  {problem}" for problem in found),
        )
    code, keys = modeling_file(config)
    table = parameters.parameter_table(c)
    declared = _declared(code)
    if lacking := [path for path in table if path.rpartition("/")[2] not in declared]:
        raise UserError(
            "the model cannot be exported with its code: lm/huggingface/modeling.py has no "
            f"parameter {some(lacking)}"
        )
    fields = {
        "architectures": [ROOT],
        "model_type": WITH_CODE,
        "auto_map": {
            "AutoConfig": f"{FILE.removesuffix('.py')}.{ROOT}Config",
            "AutoModelForCausalLM": f"{FILE.removesuffix('.py')}.{ROOT}",
        },
        "dtype": c.param_dtype,
        "torch_dtype": c.param_dtype,  # the name in transformers 4
        # read by other programs
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "max_position_embeddings": config.train.seq_len,
        "tie_word_embeddings": False,  # a tied model has one tensor here
        "model": keys,
    }
    tensors = list(_tensors(c, parameters.flat(params or {})))
    return fields, tensors, {FILE: code, "README.md": _readme(config)}


def _tensors(c: ResolvedModel, flat: dict) -> Iterator[Planned]:
    dtype = np.dtype(c.param_dtype)

    def value_of(path: str, row: int | None, shape: tuple) -> np.ndarray:
        if path not in flat:
            return np.zeros(shape, dtype)
        value = flat[path] if row is None else flat[path][row]
        return np.asarray(value).astype(dtype)

    # the mixer of a layer has the name of its branch: "attention"
    modules = {
        model.mixer_module(branch, kind): branch.name
        for branch in branches_of(c)
        for kind in present_mixers(c)
        if branch.kind == "attention"
    }
    for path, p in parameters.parameter_table(c).items():
        name = ".".join(modules.get(part, part) for part in path.split("/"))
        if p.layers is None:
            value = functools.partial(value_of, path, None, p.shape)
            yield Planned(name, p.shape, dtype, value)
            continue
        for row, layer in enumerate(p.layers):
            of_layer = f"layers.{layer}.{name.removeprefix('layers.')}"
            value = functools.partial(value_of, path, row, p.shape[1:])
            yield Planned(of_layer, p.shape[1:], dtype, value)


README = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model of {count:,} parameters with a context of {seq_len} tokens, trained with lm. The config, where it
differs from the defaults of lm:

{keys}

`{file}` has the model in PyTorch, with these equations alone. Read it before you run it: `trust_remote_code`
allows it to do anything.

```python
import transformers

name = "."  # this directory
model = transformers.AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=True)
ids = tokenizer("To be", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=20)[0]))
```

To be added by its author: the data and its licence, the licence of the model, and what it is good for.
"""


def _readme(config: Resolved) -> str:
    c = config.model
    return README.format(
        name=config.name,
        count=parameters.count(parameters.parameter_table(c)),
        seq_len=config.train.seq_len,
        keys=_changed(c),
        file=FILE,
    )


# ---- The modelling file --------------------------------------------------------------------------

HEADER = '''"""A language model in PyTorch, with the equations of one config.

transformers loads it with trust_remote_code=True. It was written by `lm hf export --code` from this
config, where it differs from the defaults of lm:

{keys}

The last letters of a name are the axes of an array: B texts, T new tokens, S all tokens so far, D
model width, H query heads, G key and value heads, K width of a head, F feed-forward width, V
vocabulary. c has the keys of `model` in config.json.
"""'''


def modeling_file(config: Resolved) -> tuple[str, dict[str, Any]]:
    """Return the modelling file of a model, and the keys that it reads."""
    keys = keys_of_equations(config.model)
    code = specialized(TEMPLATE.read_text(encoding="utf-8"), keys, root=ROOT)
    _, _, after_docstring = code.split('"""', 2)
    code = HEADER.format(keys=_changed(config.model)) + after_docstring
    read = names_of_keys(code)
    return code, {key: value for key, value in keys.items() if key in read}


def _changed(c: ResolvedModel) -> str:
    """Return the keys without their defaults, as indented lines."""
    changed = []
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.name not in WITHOUT_EFFECT and value != field.default:
            changed.append(f"    {field.name} = {show(value)}")
    return "\n".join(changed)


def _declared(code: str) -> set[str]:
    """Return the names of all parameters that the modelling file declares."""
    return {
        ast.unparse(node.targets[0]).removeprefix("self.")
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("parameter(")
    }
