"""Checks across keys: what is wrong with a config although each value is in range. Imports no jax
and reads no data.

Each check yields the keys involved, separated by spaces, and a text that says what is wrong and
what would be right. The text is reported at the first key; if it starts with a space or a comma,
after the value of that key. What depends on the data or on the devices is checked later, in
lm/training/run.py and lm/parallel/mesh.py.
"""

import dataclasses
import importlib.util
import operator
import re
from collections.abc import Callable, Iterator

from lm.config.schema import (
    MESH_AXES,
    SPLITS,
    Config,
    ModelConfig,
    branches_of,
    layer_windows,
    looped_layers,
    mixer_of,
    n_applied_layers,
    n_mixing_branches,
    present_mixers,
    schema,
)
from lm.config.values import checked, close_match, divisors, short, show
from lm.system.files import MAX_NAME, is_name

MAX_UNROLLED = 1000  # layers; each one takes about 0.2 s to compile
# values of model.residual whose layers do not read one sum
OTHER_STREAMS = (
    "depth_attention",
    "hyper_connections",
)
WITHOUT_MUP = ("latent", "talking_heads")  # mixers whose scores and rates muP here does not scale
OF_ONE_STREAM = (
    "residual_scalars",
    "conv_stream",
    "loop_input",
)  # ideas that change it before each block
Problem = tuple[str, str]


def problems(
    config: Config, checks: tuple[Callable, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every problem, by default of all checks, between the keys of a config whose single
    values are in range.

    Yields:
        The keys involved, and the message.
    """
    for check in checks or CHECKS:
        for keys, text in check(config):
            names = tuple(keys.split())
            value = show(operator.attrgetter(names[0])(config)) if text[0] in " ," else ""
            yield names, f"config.{names[0]}: {value}{text}"


def unused(config: Config) -> Iterator[Problem]:
    """Yield the keys that differ from their default and have no effect because of the value of
    another key.

    Such a config is valid: a file may set keys of several update rules. lm/command_line/loading.py
    refuses or warns.
    """
    for key, (_, field) in schema().items():
        if field.metadata["only"] and operator.attrgetter(key)(config) != field.default:
            name, needed, kinds = field.metadata["only"]
            other = f"{key.partition('.')[0]}.{name}"
            value = operator.attrgetter(other)(config)
            if other == "data.source":
                values = sources(config)
            elif isinstance(value, tuple) and isinstance(value[0], str):
                values = [show(item) for item in value]
            else:
                values = [show(value)]
            if needed != any(value.partition(":")[0] in kinds for value in values):
                use = f"{other} = {' or '.join(kinds)}" if needed else f"another {other}"
                use += f", or leave {key} at {show(field.default)}"
                yield (
                    f"{key} {other}",
                    f" has no effect with {other} = {', '.join(values)}; use {use}",
                )
    m = config.model
    yield from unread(m)
    if m.ffn_bias and m.ffn == "moe" and not m.moe_first_layer:
        text = " has no effect with model.ffn = moe; use ffn_bias = false, or moe_first_layer = 1"
        yield "model.ffn_bias model.ffn model.moe_first_layer", text
    if m.ffn == "moe" and m.experts_per_token == 1 and m.normalize_experts:
        text = (
            " expert has the weight 1 with normalize_experts = true, so the cross-entropy does "
            "not train the router"
        )
        yield (
            "model.experts_per_token model.normalize_experts",
            f"{text}; use normalize_experts = false, or 2 experts",
        )
    if m.positions == "rope" and m.rope_window_theta is not None and not any(layer_windows(m)):
        text = (
            f" has no effect with model.window_pattern = {m.window_pattern}; use none, or a "
            "window in some layers"
        )
        yield "model.rope_window_theta model.window_pattern model.n_layers", text
    if m.max_positions is not None and not reads_max_positions(m):
        text = (
            f" has no effect with model.positions = {m.positions}; use none, or model.positions "
            "= learned"
        )
        yield "model.max_positions model.positions model.rope_scaling", text
    first_layers = range(min(m.n_layers, 2 * len(m.mixers)))  # there may be 2^31
    attending = [layer for layer in first_layers if mixer_of(m, layer) == "attention"]
    n_attending = n_applied_layers(m, attending) * n_mixing_branches(m)
    if m.value_residual != "none" and n_attending == 1:
        text = " has no effect with one layer of attention; use none, or more layers of attention"
        yield "model.value_residual model.mixers model.n_layers", text


def unread(m: ModelConfig) -> Iterator[Problem]:
    """Yield the changed keys of parts of a layer that no layer has."""
    kinds = {branch.partition("*")[0] for branch in m.branches}
    present = kinds & {"ffn"}
    if "attention" in kinds:
        present.update(present_mixers(m))
    for field in dataclasses.fields(m):
        readers = field.metadata["read_by"]
        if readers and getattr(m, field.name) != field.default and present.isdisjoint(readers):
            text = f" has no effect, as no layer has {' or '.join(readers)}; use "
            text += f"{show(field.default)}, or other mixers or branches"
            yield f"model.{field.name} model.mixers model.branches model.n_layers", text


def reads_max_positions(m: ModelConfig) -> bool:
    """Return whether the function of a model depends on model.max_positions."""
    return m.positions == "learned" or m.rope_scaling == "dynamic" or m.query_scale == "log_n"


# ---- The model -----------------------------------------------------------------------------------


def heads(config: Config) -> Iterator[Problem]:
    m = config.model
    n_kv_heads = m.n_kv_heads or m.n_heads
    if m.d_head is None and m.d_model % m.n_heads:
        near = min(divisors(m.d_model), key=lambda n: abs(n - m.n_heads))
        text = f" is not divisible by n_heads = {m.n_heads}; use n_heads = {near}, or set d_head"
        yield "model.d_model model.n_heads model.d_head", text
    if m.n_heads % n_kv_heads:
        text = f" does not divide n_heads = {m.n_heads}; use one of {divisors(m.n_heads)}"
        yield "model.n_kv_heads model.n_heads", text


def position_encoding(config: Config) -> Iterator[Problem]:
    m = config.model
    seq_len = config.train.seq_len
    if m.positions == "rope":
        yield from rope(m)
    if m.positions == "sinusoidal" and m.d_model % 2:
        yield (
            "model.d_model model.positions",
            f" is odd, but sinusoidal features come in pairs; use {m.d_model + 1}",
        )
    if m.positions == "learned" and m.max_positions is not None and m.max_positions < seq_len:
        yield (
            "model.max_positions train.seq_len",
            f" is less than train.seq_len = {seq_len}; use {seq_len}",
        )


def rope(m: ModelConfig) -> Iterator[Problem]:
    # 0: `heads` reports it
    d_head = m.d_head or (0 if m.d_model % m.n_heads else m.d_model // m.n_heads)
    keys = "model.d_head model.d_model model.n_heads model.positions"
    if d_head % 2 and m.rope_width is None:
        yield (
            keys,
            f"{d_head} is odd, but RoPE rotates pairs of features; use {d_head + 1}, or set "
            "rope_width",
        )
    if m.rope_width is not None and (m.rope_width % 2 or 0 < d_head < m.rope_width):
        text = " must be even and at most the width of a head" + (f", {d_head}" if d_head else "")
        yield f"model.rope_width {keys}", text
    if m.rope_scaling == "llama3" and m.rope_low_freq_factor >= m.rope_high_freq_factor:
        text = (
            f" is not less than rope_high_freq_factor = {m.rope_high_freq_factor}; Llama 3.1 "
            "has 1 and 4"
        )
        yield "model.rope_low_freq_factor model.rope_high_freq_factor model.rope_scaling", text
    if m.rope_scaling == "yarn" and (m.rope_beta_slow >= m.rope_beta_fast or m.rope_theta <= 1):
        yield (
            "model.rope_beta_fast model.rope_beta_slow model.rope_theta model.rope_scaling",
            f" must be more than rope_beta_slow = {m.rope_beta_slow}, and rope_theta = "
            f"{m.rope_theta} more than 1; YaRN has 32 and 1",
        )


def layer_norm(config: Config) -> Iterator[Problem]:
    m = config.model
    if m.norm != "layer":
        return
    running_mean = m.norm_algorithm == "running_mean"
    used = m.norm_placement != "none"
    if running_mean and m.norm_ddof:
        text = ", but norm_algorithm = running_mean already divides by d_model - 1; use 0"
        yield "model.norm_ddof model.norm model.norm_algorithm", text
    if used and m.d_model <= m.norm_ddof:
        yield "model.norm_ddof model.d_model", f" would divide by 0 at d_model = {m.d_model}; use 0"
    if used and running_mean and m.d_model == 1:
        text = " divides by d_model - 1, which is 0; use two_pass"
        yield "model.norm_algorithm model.norm model.norm_placement model.d_model", text


def attention(config: Config) -> Iterator[Problem]:
    m = config.model
    if m.attention in ("xla", "cudnn") and m.attn_softcap is not None:
        text = f" does not support attn_softcap = {m.attn_softcap}; use auto or einsum"
        yield "model.attention model.attn_softcap", text
    if m.attention == "cudnn" and m.compute_dtype != "bfloat16":
        yield (
            "model.attention model.compute_dtype",
            f" needs compute_dtype = bfloat16, not {m.compute_dtype}; use auto",
        )
    if (
        m.attention in ("cudnn", "splash")
        and m.scan_layers
        and len(set(m.window_pattern[: m.n_layers])) > 1
    ):
        yield (
            "model.attention model.scan_layers model.window_pattern model.n_layers",
            f" needs one window for all scanned layers, but window_pattern is {m.window_pattern}; "
            "use auto, or scan_layers = false",
        )


def depth(config: Config) -> Iterator[Problem]:
    m = config.model
    if m.n_layers > MAX_UNROLLED and not (m.scan_layers or config.train.debug):
        text = " layers, compiled one by one, would take minutes to days; use scan_layers = true"
        yield "model.n_layers model.scan_layers train.debug", text


def head_and_width(config: Config) -> Iterator[Problem]:
    m = config.model
    if m.tie_embeddings and m.head_bias:
        yield (
            "model.head_bias model.tie_embeddings",
            ", but a tied head is the embedding table only; use false",
        )
    if m.parametrization == "mup" and m.attn_scale is not None:
        text = ", but muP scales attention scores by sqrt(mup_base_d_head) / d_head; use none"
        yield "model.attn_scale model.parametrization", text


# ---- The data ------------------------------------------------------------------------------------


def sources(config: Config) -> list[str]:
    """Return the sources of a config: those of its mixture, or its only one."""
    return [source for _, source, _ in config.data.mixture or ((None, config.data.source, 1.0),)]


def has_shards(config: Config) -> bool:
    return any(source.startswith("tokens:") for source in sources(config))


def small_weights(given: list[float], temperature: float) -> list[float]:
    """Return the weights of a mixture that are above 0, but with the temperature less than a
    millionth of all.
    """
    largest = max(*given, 1e-300)
    shares = [(max(weight, 0.0) / largest) ** (1 / temperature) for weight in given]
    return [
        weight
        for weight, share in zip(given, shares, strict=True)
        if weight > 0 and share < 1e-6 * sum(shares)
    ]


def names(config: Config) -> Iterator[Problem]:
    if not is_name(config.name) or re.search(r"^\.|[/\\]", config.name):
        text = (
            f"{short(config.name)} must be one line of printable text, at most {MAX_NAME} "
            "bytes, without / and \\"
        )
        yield "name", f"{text}, and not begin with a dot: it becomes a part of a folder's name"


def mixture(config: Config) -> Iterator[Problem]:
    d = config.data
    if d.mixture is None:
        return
    called = [name for name, *_ in d.mixture]
    n = len(d.mixture)
    if len({*called}) < n or not all(
        is_name(name) and re.fullmatch(r"[\w.-]+", name) for name in called
    ):
        yield "data.mixture", f"{called} must be different names of letters, digits and _ . -"
    small = small_weights([weight for *_, weight in d.mixture], d.mixture_temperature)
    for _, source, weight in d.mixture:
        try:
            checked(source, str, schema()["data.source"][1])
        except ValueError as error:
            yield "data.mixture", str(error)
        if weight <= 0 or weight in small:
            text = (
                f"the weight {weight} of {source} must be above 0, and a millionth of all at least"
            )
            yield "data.mixture data.mixture_temperature", text
    if d.order != "epochs":
        yield (
            "data.order data.mixture",
            ", but a mixture visits every window once per epoch; use epochs",
        )
    if d.packing != "none":
        yield "data.packing data.mixture", ", but weights are by token; use none"
    if d.max_epochs is not None and len(d.max_epochs) not in (1, n):
        yield "data.max_epochs data.mixture", f" must have one number, or {n} for the sources"
    steps = [first for first, *_ in d.mixture_stages or ()]
    if steps != sorted({*steps}) or any(first < 1 or first % 1 for first in steps):
        yield "data.mixture_stages", f"the first steps {steps} must be whole, above 0 and ascending"
    for first, *weights in d.mixture_stages or ():
        if len(weights) != n or min(weights) < 0 or not sum(weights):
            text = (
                f"the stage from step {first:g} has the weights {weights}; use {n} of them, at "
                "least 0 and not all 0"
            )
            yield "data.mixture_stages data.mixture", text
        elif small := small_weights(weights, d.mixture_temperature):
            text = (
                f"the weight {small[0]} of the stage from step {first:g} must be 0, or a "
                "millionth of all at least"
            )
            yield "data.mixture_stages data.mixture_temperature", text
    if joined := [name for name in config.eval.final_splits if "+" in name]:
        text = (
            f"{joined[0]} joins splits, but a mixture keeps them apart; use "
            f"{joined[0].replace('+', ',')}"
        )
        yield "eval.final_splits data.mixture", text


def source_and_tokenizer(config: Config) -> Iterator[Problem]:
    d = config.data
    shards = has_shards(config)
    named = ", ".join(sources(config))
    kind, _, size = d.tokenizer.partition(":")
    if kind == "none" and not all(source.startswith("tokens:") for source in sources(config)):
        yield (
            "data.tokenizer data.source",
            f", but {named} is text; use char, byte, word, bpe:SIZE or hf:PATH",
        )
    if shards and kind not in ("none", "hf", "byte"):
        text = f" is learned from text, but {named} holds token ids; use none, byte or hf:PATH"
        yield "data.tokenizer data.source", text
    if kind == "bpe" and int(size) < 257:
        yield (
            "data.tokenizer",
            " is too small for 256 bytes and the end-of-text token; use bpe:257 or more",
        )


def splits(config: Config) -> Iterator[Problem]:
    d = config.data
    if d.splits is None:
        return
    if len(d.splits) != 3 or abs(sum(d.splits) - 1) > 1e-6 or d.splits[0] == 0:
        yield (
            "data.splits",
            " must be three fractions (train, validation, test) that add up to 1, with train "
            "above 0",
        )
    if has_shards(config):
        yield (
            "data.splits data.source",
            "token shards name their splits in their file names; use none",
        )


def order_and_packing(config: Config) -> Iterator[Problem]:
    d = config.data
    packed = d.packing == "documents"
    if packed and has_shards(config):
        text = (
            " needs a source with documents, but token shards do not mark where a document "
            "ends; use none"
        )
        yield "data.packing data.source", text
    if packed and d.order == "crops":
        yield (
            "data.order data.packing",
            " cut across documents; use order = epochs with packing = documents",
        )
    if packed and d.stride is not None:
        yield "data.stride data.packing", " has no effect with packing = documents; use none"


# ---- Training ------------------------------------------------------------------------------------


def update_rule(config: Config) -> Iterator[Problem]:
    o = config.optimizer
    m = config.model
    if o.name == "ademamix" and m.param_dtype != "float32":
        text = " is too coarse for the slow average of ademamix; use float32"
        yield "model.param_dtype optimizer.name", text
    if o.name == "ademamix" and o.b3 < o.b1:
        text = f" is less than b1 = {o.b1}, but the slow average is slower; use 0.9999"
        yield "optimizer.b3 optimizer.b1 optimizer.name", text
    if o.name != "schedule_free":
        return
    if o.schedule != "constant" and config.train.steps:
        yield (
            "optimizer.schedule optimizer.name",
            ", but schedule_free averages instead of a decay; use constant",
        )
    if config.train.ema is not None:
        yield "train.ema optimizer.name", ", but schedule_free is an average; use none"
    if o.b1 == 0:
        yield (
            "optimizer.b1 optimizer.name",
            ", but schedule_free takes gradients near its average; use 0.9",
        )
    if m.param_dtype != "float32":
        yield (
            "model.param_dtype optimizer.name",
            " is too coarse for the average of schedule_free; use float32",
        )


def schedule(config: Config) -> Iterator[Problem]:
    o = config.optimizer
    steps = config.train.steps
    decay_steps = steps if o.schedule == "constant" else o.decay_steps or steps
    if steps == 0:  # nothing is trained
        return
    if decay_steps > steps:
        text = (
            f" is more than train.steps = {steps}, so the decay would not end; use at most "
            f"{steps}, or train longer"
        )
        yield "optimizer.decay_steps train.steps", text
    if o.warmup_steps >= decay_steps:
        text = f" is not less than the schedule of {decay_steps} steps; use less than {decay_steps}"
        yield "optimizer.warmup_steps optimizer.decay_steps train.steps", text


def debugging(config: Config) -> Iterator[Problem]:
    t = config.train
    if t.profile is not None and (
        len(t.profile) != 2 or not t.profile[0] <= t.profile[1] <= t.steps
    ):
        yield (
            "train.profile train.steps",
            f" must be (first, last) with first <= last <= train.steps = {t.steps}",
        )
    if t.debug and (t.steps_per_dispatch or 1) > 1:
        yield (
            "train.steps_per_dispatch train.debug",
            ", but train.debug runs one step at a time; use 1",
        )
    if t.debug and config.model.scan_layers:
        yield (
            "train.debug model.scan_layers",
            " runs one layer at a time; use model.scan_layers = false with it",
        )


def mesh(config: Config) -> Iterator[Problem]:
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    for axis, size in sizes.items():
        if size == 0:
            yield (
                f"mesh.{axis}",
                " is not a number of devices; use 1, or -1 for all remaining devices",
            )
    if len(rest := [axis for axis, size in sizes.items() if size == -1]) > 1:
        keys = " ".join(["mesh", *(f"mesh.{axis}" for axis in rest)])
        yield keys, f"{' and '.join(rest)} are both -1, but only one axis can take the rest; use 1"


def need_whole_sequences(m: ModelConfig) -> list[str]:
    """Return the keys whose values need whole sequences on a device."""
    return _keys_declared(m, "whole")


def recurrences(m: ModelConfig) -> list[str]:
    """Return the keys with which positions see earlier ones by a recurrence."""
    return _keys_declared(m, "recurrent")


def _keys_declared(m: ModelConfig, what: str) -> list[str]:
    names = []
    for field in dataclasses.fields(m):
        value = getattr(m, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if any(item in field.metadata.get(what, ()) for item in values):
            names.append(field.name)
    return names


def blocks(config: Config) -> Iterator[Problem]:
    m = config.model
    for written in m.branches:
        if not re.fullmatch(r"(attention|ffn)(\*\d*\.?\d+)?", written):
            text = f" has the branch {short(written)}; use attention or ffn, with a factor as in ffn*0.5"
            yield "model.branches", text
            return
    for branch in branches_of(m):
        if not branch.factor:
            text = f" multiplies {branch.kind} by 0, so it adds nothing; leave it out, or use another factor"
            yield "model.branches", text
        if branch.factor != 1 and m.norm_placement in ("sandwich", "output"):
            text = f" has a factor, which has no effect before the norms of {m.norm_placement}; "
            yield "model.branches model.norm_placement", f"{text}leave it out, or use pre"
    if m.loop_layers is not None:
        first, end = (*m.loop_layers, -1, -1)[:2]
        if len(m.loop_layers) != 2 or not 0 <= first < end <= m.n_layers:
            text = f" must be (first, end) with 0 <= first < end <= n_layers = {m.n_layers}"
            yield "model.loop_layers model.n_layers", text
            return
    # of layers that are scanned, each turn is compiled
    n_compiled = m.loops * (1 if m.scan_layers else len(looped_layers(m)))
    if m.loops > 1 and n_compiled > MAX_UNROLLED and not config.train.debug:
        text = " turns, compiled one by one, would take minutes to days; use fewer"
        text += "" if m.scan_layers or m.loops > MAX_UNROLLED else ", or scan_layers = true"
        yield "model.loops model.loop_layers model.n_layers model.scan_layers train.debug", text


def ideas(config: Config) -> Iterator[Problem]:
    m = config.model
    if m.residual_multiplier != 1 and m.norm_placement in ("sandwich", "output"):
        text = f" has no effect before the norms of {m.norm_placement}; use 1, or pre"
        yield "model.residual_multiplier model.norm_placement", text
    if m.residual != "sum" and m.norm_placement in ("post", "parallel"):
        text = f" normalizes the plain sum, which residual = {m.residual} replaces; use pre"
        yield "model.norm_placement model.residual", text
    for name in OF_ONE_STREAM:
        if m.residual in OTHER_STREAMS and getattr(m, name) not in (False, "none"):
            text = (
                f"it changes the one stream of residual = sum; with {m.residual} few layers "
                "read it; use one of both"
            )
            yield f"model.{name} model.residual", text
    if m.attn_sink and m.attn_forget:
        yield (
            "model.attn_sink model.attn_forget",
            ", but the gates of attn_forget would close it; use one of both",
        )
    changed = [f for f in dataclasses.fields(m) if getattr(m, f.name) != f.default]
    mixers = [f.name for f in changed if f.metadata["attention"] == "replaced"]
    of_scores = [f.name for f in changed if f.metadata["attention"] == "scores"]
    for name in of_scores if mixers else ():
        text = f", but layers of {mixers[0]} have no attention scores; use one of both"
        yield f"model.{name} model.{mixers[0]}", text
    kinds = {*present_mixers(m)}
    for field in changed if "latent" in kinds and m.positions == "rope" else ():
        readers = {*field.metadata["read_by"]}
        if field.name.startswith("rope_") and kinds & readers and "latent" not in readers:
            text = ", but latent attention rotates by rope_theta alone, in all its layers; use "
            yield f"model.{field.name} model.mixers", f"{text}{show(field.default)}"
    if m.parametrization == "mup" and kinds & {*WITHOUT_MUP}:
        text = f", but muP here has no factor of the scores of {' and '.join(WITHOUT_MUP)}; use "
        text += "attention or rg_lru, or parametrization = standard"
        yield "model.mixers model.parametrization", text
    if m.residual in OTHER_STREAMS and m.parametrization == "mup":
        text = (
            ", but muP here has no rate for weights of the streams; use parametrization = standard"
        )
        yield "model.residual model.parametrization", text
    if (whole := need_whole_sequences(m)) and config.mesh.sequence not in (0, 1):
        yield (
            f"mesh.sequence model.{whole[0]}",
            f", but model.{whole[0]} needs whole sequences on a device; use 1",
        )


def diffusion(config: Config) -> Iterator[Problem]:
    m = config.model
    if not m.masked_diffusion:
        return
    later_targets = ["multi_token_prediction"] if m.multi_token_prediction else []
    for name in recurrences(m) + later_targets:
        text = ", but masked_diffusion reads tokens before and after; use one of both"
        yield f"model.{name} model.masked_diffusion", text
    if m.value_embeddings:
        text = ", but tokens that masked_diffusion hides have no such embedding; use one of both"
        yield "model.value_embeddings model.masked_diffusion", text
    for name in ("probes", "harness_tasks"):
        if getattr(config.eval, name):
            text = " are of the next token, which masked_diffusion does not predict; use none"
            yield f"eval.{name} model.masked_diffusion", text


# ---- Input and output ----------------------------------------------------------------------------


def final_evaluation(config: Config) -> Iterator[Problem]:
    if config.eval.patience and not config.eval.every:
        yield "eval.patience eval.every", " counts evaluations during training; set eval.every"
    for name in config.eval.final_splits:
        if unknown := [part for part in name.split("+") if part not in SPLITS]:
            hint = (
                close_match(unknown[0], list(SPLITS))
                or f"; there are {', '.join(SPLITS)}, and a+b for a mean"
            )
            yield "eval.final_splits", f"there is no split {unknown[0][:80]!r}{hint}"
    if config.eval.probes and config.train.seq_len < 3:
        yield (
            "eval.probes train.seq_len",
            "a probe has 4 tokens; use train.seq_len = 3 or more, or no probes",
        )
    if bool(config.eval.harness_every) != bool(config.eval.harness_tasks):
        text = (
            "the steps between scores and the tasks belong together; set both, such as "
            "harness_tasks=hellaswag"
        )
        yield "eval.harness_every eval.harness_tasks", text
    if config.eval.sample_tokens and not config.eval.sample_prompt:
        text = (
            "empty, but a sample continues at least one token; give a prompt, or use "
            "sample_tokens = 0"
        )
        yield "eval.sample_prompt eval.sample_tokens", text


def compiler_options(config: Config) -> Iterator[Problem]:
    for option in config.train.compiler_options or ():
        if not all(option.partition("=")):
            yield (
                "train.compiler_options",
                f"{option[:80]!r} is not NAME=VALUE, such as xla_dump_to=DIR",
            )


def packages(config: Config) -> Iterator[Problem]:
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        yield (
            "log.wandb",
            ", but the package wandb is not installed; pip install -e '.[wandb]', or use false",
        )
    if (
        config.eval.harness_every
        and config.eval.harness_tasks
        and importlib.util.find_spec("lm_eval") is None
    ):
        yield (
            "eval.harness_every",
            "the package lm-eval is not installed; pip install -e '.[eval]', or use 0",
        )


OF_THE_MODEL = (
    blocks,
    heads,
    position_encoding,
    layer_norm,
    attention,
    depth,
    head_and_width,
    ideas,
    diffusion,
)
CHECKS = (
    *OF_THE_MODEL, names, mixture, source_and_tokenizer, splits, order_and_packing, update_rule, schedule, debugging,
    mesh, final_evaluation, compiler_options, packages,
)  # fmt: skip
