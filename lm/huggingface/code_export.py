"""Export a model with its code: a modelling file in PyTorch that has the equations of its config.

The file is modeling.py beside this one, in which each decision about the config is taken and what
is then unused left out. Its parameters have our names and axes, so the weights are written as they
are. Imports no torch.
"""

import ast
import builtins
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
    width_factor,
)
from lm.config.values import show
from lm.huggingface.config_files import normalized
from lm.huggingface.conversions import over_layers
from lm.huggingface.families import WITHOUT_EFFECT
from lm.huggingface.safetensors_files import Planned
from lm.ideas.latent_attention import widths
from lm.system.errors import UserError
from lm.system.text_tables import some

TEMPLATE = Path(__file__).with_name("modeling.py")
FILE = "modeling_lm.py"  # in the exported directory
MODEL_TYPE = "lm"
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
    names = {path.rpartition("/")[2]: path for path in table}
    if lacking := [path for name, path in names.items() if not declared.fullmatch(name)]:
        raise UserError(
            "the model cannot be exported with its code: lm/huggingface/modeling.py has no "
            f"parameter {some(sorted(lacking))}"
        )
    fields = {
        "architectures": [ROOT],
        "model_type": MODEL_TYPE,
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

    for path, p in parameters.parameter_table(c).items():
        name = path.replace("/", ".")
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
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
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
    code = specialized(TEMPLATE.read_text(encoding="utf-8"), keys)
    docstring = ast.parse(code).body[0]
    lines = code.splitlines()[docstring.end_lineno :]
    code = "\n".join([HEADER.format(keys=_changed(config.model)), *lines]) + "\n"
    read = {node.attr for node in ast.walk(ast.parse(code)) if _is_key(node)}
    return code, {key: value for key, value in keys.items() if key in read}


def _changed(c: ResolvedModel) -> str:
    """Return the keys without their defaults, as indented lines."""
    changed = []
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.name not in WITHOUT_EFFECT and value != field.default:
            changed.append(f"    {field.name} = {show(value)}")
    return "\n".join(changed)


def specialized(source: str, keys: dict[str, Any]) -> str:
    """Return a program in which all conditions on `c` alone are decided, without what is unused.

    A condition may begin with a part on `c` alone, as in `if c.moe and layer > 0`.

    >>> source = "if c.wide:" + chr(10) + "    n = 4" + chr(10) + "else:" + chr(10) + "    n = 2"
    >>> specialized(source + chr(10) + "class LanguageModel: size = n", {"wide": False}).split(chr(10))
    ['n = 2', 'class LanguageModel: size = n', '']
    """
    c = SimpleNamespace(**keys)
    lines = source.splitlines()
    while decisions := _decisions(ast.parse("\n".join(lines))):
        for decision in reversed(decisions):
            _decide(lines, decision, c)
    while unused := list(_unused(ast.parse("\n".join(lines)))):
        for node in sorted(unused, key=lambda node: -node.lineno):
            del lines[node.lineno - 1 : node.end_lineno]
    text = "\n".join(lines).strip() + "\n"
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return re.sub(r"\n{3,}(?= )", "\n\n", text)


def _is_key(node: ast.AST) -> bool:
    """Return whether an expression is c.KEY."""
    return isinstance(node, ast.Attribute) and _name(node.value) == "c"


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_decided(test: ast.expr) -> bool:
    names = {name for node in ast.walk(test) if (name := _name(node))}
    return "c" in names and names <= {"c", *dir(builtins)}


def _decisions(node: ast.AST) -> list[ast.If]:
    """Return each `if` whose condition begins with a part on `c` alone, in the order of the lines.

    Those inside of another one are left for later.
    """
    if isinstance(node, ast.If):
        first = node.test.values[0] if _is_and(node.test) else node.test
        if _is_decided(node.test) or _is_decided(first):
            return [node]
    return [found for child in ast.iter_child_nodes(node) for found in _decisions(child)]


def _is_and(test: ast.expr) -> bool:
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)


def _decide(lines: list[str], node: ast.If, c: SimpleNamespace) -> None:
    """Put the branch that is taken in the place of a statement, or leave out the decided part."""
    first = node.test if _is_decided(node.test) else node.test.values[0]
    holds = eval(ast.unparse(first), {"c": c})
    start = node.lineno - 1
    end = node.end_lineno
    first_of_body = node.body[0].lineno - 1
    while not lines[first_of_body - 1].endswith(":"):  # comments
        first_of_body -= 1
    if holds and first is not node.test:
        indent = lines[start][: node.col_offset]
        rest = ast.unparse(ast.BoolOp(ast.And(), node.test.values[1:]))
        lines[start:first_of_body] = [f"{indent}if {rest}:"]
    elif holds:
        body = lines[first_of_body : node.body[-1].end_lineno]
        lines[start:end] = _dedented(body)
    elif not node.orelse:
        del lines[start:end]
    else:
        line = node.orelse[0].lineno - 1
        if lines[line].lstrip().startswith("elif "):
            lines[start:end] = [lines[line].replace("elif", "if", 1), *lines[line + 1 : end]]
        else:
            while lines[line].strip() != "else:":
                line -= 1
            lines[start:end] = _dedented(lines[line + 1 : end])


def _dedented(lines: list[str]) -> list[str]:
    return [line.removeprefix("    ") for line in lines]


def _unused(tree: ast.Module) -> Iterator[Any]:
    """Yield definitions, methods of modules and assignments to `c` that nothing reads."""
    used = {ROOT} | {node.id for node in ast.walk(tree) if _is_load(node)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        loaded = {node.id for node in ast.walk(function) if _is_load(node)}
        for statement in function.body:
            if _assigned(statement) == "c" and "c" not in loaded:
                yield statement
    for node in tree.body:
        name = _assigned(node) or getattr(node, "name", None)
        if isinstance(node, ast.Import):
            name = node.names[0].name
        if name is not None and name not in used:
            yield node
        elif isinstance(node, ast.ClassDef) and [*map(ast.unparse, node.bases)] == ["nn.Module"]:
            methods = {function.name: function for function in node.body if function in functions}
            called_by_torch = {"__init__", "forward"}
            for unread in methods.keys() - attributes - called_by_torch:
                yield methods[unread]


def _assigned(node: ast.stmt) -> str | None:
    return _name(node.targets[0]) if isinstance(node, ast.Assign) else None


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _declared(code: str) -> re.Pattern:
    """Return a pattern of the names of all parameters that the modelling file declares."""
    patterns = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign) and _calls(node.value, "parameter"):
            patterns.append(re.escape(node.targets[0].attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_parameter":
            parts = node.args[0].values
            constants = [re.escape(p.value) if isinstance(p, ast.Constant) else "*" for p in parts]
            patterns.append("".join(".+" if part == "*" else part for part in constants))
    return re.compile("|".join(patterns))


def _calls(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == name
