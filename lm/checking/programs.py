"""Properties of the traced program: dtypes, kernels, operations and memory."""

import dataclasses
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from lm import ideas, model, parameters, step
from lm.checking.source import all_equations, inner_programs, line_of
from lm.checking.subject import (
    LARGE,
    LONG,
    Broken,
    Subject,
    T,
    V,
    equal,
    parameter_shapes,
    quickly,
    replaced,
)
from lm.cost import flops, memory
from lm.cost.devices import DEVICES
from lm.huggingface import code_export
from lm.huggingface.config_files import export_fields, read_config
from lm.huggingface.weights import load_params
from lm.huggingface.writing import write_checkpoint
from lm.kernels.platform import compiling_for
from lm.layers import attention
from lm.system.errors import UserError

# Operations that lose too much in 16 bits: of a softmax, a norm, a running sum.
WIDE = {
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "rsqrt",
    "sqrt",
    "cumsum",
    "cumprod",
    "cumlogsumexp",
}
ANGLES = {"sin", "cos"}
MOVES = {"broadcast_in_dim", "reshape", "slice", "squeeze", "transpose", "concatenate", "select_n"}
ONE = {"replica": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
N_KEYS = 64  # a whole chunk of a recurrence


def traced_loss(s: Subject, n_tokens: int, **keys):
    """Return the jaxpr of the objective of a batch, forward only."""
    config = dataclasses.replace(s.config, model=s.changed(**keys))
    batch = {"tokens": jax.ShapeDtypeStruct((1, n_tokens + 1), jnp.int32)}

    def loss(params, batch):
        fields = step.batch_fields(batch)
        if config.model.positions == "learned":
            fields["positions"] = jnp.arange(n_tokens)[None] % LONG
        return step.objective(params, fields, config, 1.0, 0.5)[0]

    return jax.make_jaxpr(loss)(parameter_shapes(config.model), batch).jaxpr


# ---- 16 bits -------------------------------------------------------------------------------------


def exponentials_and_logits_are_wide(s: Subject) -> str:
    """In a model in bfloat16, the operations of WIDE are in float32, and so are logits.

    Gradients of embeddings, too: they are sums over all places of a token.
    """
    c = s.changed(compute_dtype="bfloat16")
    config = dataclasses.replace(s.config, model=c)
    some = {name: x[:3] for name, x in s.batch.items()}  # no array but the embeddings has V rows

    def loss(params, batch):
        return step.objective(params, step.batch_fields(batch), config, 1.0, 0.5)[0]

    n = 0
    angles: set[int] = set()
    for eqn in all_equations(jax.make_jaxpr(loss)(s.params, some).jaxpr):
        name = eqn.primitive.name
        if name in WIDE:
            n += 1
            if any(map(_is_narrow, eqn.invars)):
                raise Broken(f"{name} of {eqn.invars[0].aval.dtype.name}: {line_of(eqn)}")
        of_angles = name in ANGLES or any(id(x) in angles for x in eqn.invars)
        if of_angles and (name in ANGLES | MOVES or name == "convert_element_type"):
            angles.update(map(id, eqn.outvars))
            if any(map(_is_narrow, eqn.outvars)):
                raise Broken(f"a sine or cosine is rounded to 16 bits: {line_of(eqn)}")
    for eqn in all_equations(jax.make_jaxpr(jax.grad(loss))(s.params, some).jaxpr):
        if eqn.primitive.name == "scatter-add":
            (out,) = eqn.outvars
            if out.aval.shape[:1] == (V,) and _is_narrow(out):
                raise Broken("gradients of embeddings are summed in 16 bits")
    tokens = s.batch["tokens"][:, :-1]
    logits = jax.make_jaxpr(lambda p: model.logits(p, c, tokens))(s.params)
    if any(map(_is_narrow, logits.jaxpr.outvars)) and not c.round_logits:
        raise Broken("logits are in 16 bits")
    return f"{n} operations"


def _is_narrow(x) -> bool:
    dtype = getattr(x.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


# ---- What is read --------------------------------------------------------------------------------


def what_is_carried_is_read(s: Subject) -> str:
    """An array that goes from layer to layer, and that the loss does not depend on, is a mistake."""
    names = list(jax.eval_shape(lambda: ideas.carried(s.c, jnp.zeros((1, 1, s.c.d_model)))))
    if not names:
        return "nothing is carried"
    carried = ideas.carried

    def loss(added: dict):
        def more(c, x_BTD):
            arrays = carried(c, x_BTD)
            return {name: x + added[name].astype(x.dtype) for name, x in arrays.items()}

        ideas.carried = more
        try:
            fields = step.batch_fields(s.batch)
            return step.objective(s.params, fields, s.config, 1.0, 0.5)[0]
        finally:
            ideas.carried = carried

    program = jax.make_jaxpr(loss)({name: jnp.float32(0) for name in names}).jaxpr
    _, reads = dce_jaxpr(program, [True])
    if unread := [name for name, read in zip(sorted(names), reads, strict=True) if not read]:
        raise Broken(f"the loss does not depend on what is carried as {unread[0]}")
    return ", ".join(names)


# ---- Kernels -------------------------------------------------------------------------------------


def implementations_compute_the_same(s: Subject) -> str:
    """Each implementation of attention that runs here, and the equations of GPUs and TPUs, which are
    finite for large weights, too.
    """
    n = 160  # more than a chunk of queries
    draw = np.random.default_rng(4)
    long_BT = draw.integers(0, V, (1, n)).astype(np.int32)
    short_BT = long_BT[:, :T]
    # a table of learned positions has LONG rows
    positions_T = np.arange(n) % LONG if s.c.positions == "learned" else None

    def hidden(params, c):
        return model.hidden(params, c, long_BT, positions=positions_T)

    def gradients(params, c):
        return jax.grad(lambda p: jnp.sum(jnp.sin(model.hidden(p, c, short_BT))))(params)

    def outputs(f, **keys):
        c = s.changed(**keys)
        return quickly(lambda params: f(params, c), s.params)

    plain = outputs(hidden, attention="einsum")
    results = []
    for name in ("chunked", "xla"):
        try:
            others = outputs(hidden, attention=name)
        except ValueError as error:
            if "attention" not in str(error):
                raise
            continue
        measured = equal(plain, others, f"{name} and einsum", 1e-3)
        results.append(f"{name} {measured:.1g}")
    plain = outputs(gradients)
    both = jax.tree.map(lambda *x: jnp.stack(x), s.params, s.large_params)  # compiled once
    with compiling_for("gpu"):
        of_both = quickly(lambda both: jax.lax.map(lambda p: gradients(p, s.c), both), both)
    others = jax.tree.map(lambda x: x[0], of_both)
    of_large = jax.tree.map(lambda x: x[1], of_both)
    is_finite = all(np.isfinite(x).all() for x in jax.tree.leaves(of_large))
    if not is_finite and s.c.norm_placement != "none":
        raise Broken(f"gradients for a GPU are not finite with weights times {LARGE}")
    what = "gradients of the equations for a GPU and for a CPU"
    results.append(f"GPU {equal(plain, others, what, 1e-3):.1g}")
    return ", ".join(results)


# ---- Operations ----------------------------------------------------------------------------------


def flops_are_those_of_the_traced_program(s: Subject) -> str:
    """Counted from declarations, and the products of the trace of the loss, for two lengths."""
    ratios = []
    for n in (N_KEYS, 2 * N_KEYS):
        c = s.changed(attention="einsum")
        traced = product_flops(traced_loss(s, n, attention="einsum")) / n
        counted = flops.flops_per_token(c, n, full_square=True) / 3
        ratios.append(counted / traced)
        if not abs(ratios[-1] - 1) <= 0.003:  # a sink is one more key, which is not declared
            raise Broken(
                f"declared are {ratios[-1]:.3f} of the traced operations of {n} tokens; see "
                "`products` and `loss_products`"
            )
    return f"{ratios[0]:.3f} and {ratios[1]:.3f} of the traced operations"


def product_flops(program) -> int:
    """Return the operations of all products in a jaxpr, with the trip counts of its scans."""
    total = 0
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        elif name.startswith("ragged_dot"):  # every row with the matrix of one group
            total += 2 * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
        times = eqn.params["length"] if name == "scan" else 1
        for inner in inner_programs(eqn):
            total += times * product_flops(inner)
    return total


# ---- The plan ------------------------------------------------------------------------------------


def the_plan_has_the_memory_of_the_traced_program(s: Subject) -> str:
    """What the backward pass keeps: with remat = block of more layers, and with none and dots
    beside that.
    """
    n_layers = s.c.n_layers
    more = _kept_bytes(s, remat="block", n_layers=3 * n_layers)
    block, none, dots = (_kept_bytes(s, remat=remat) for remat in ("block", "none", "dots"))
    kept = {
        "block": (more - block, 0.4, 1.15),
        "none": (none - block, 0.9, 2.1),  # XLA keeps less
        "dots": (dots - block, 0.8, 1.25),
    }
    ratios = []
    for remat, (both, low, high) in kept.items():
        traced, planned = both
        ratios.append(traced / planned)
        if not low <= ratios[-1] <= high:
            raise Broken(
                f"with remat = {remat} the traced program keeps {ratios[-1]:.2f} times the planned "
                "numbers for the backward pass; see `activations` and `carried`"
            )
    return (
        f"{ratios[0]:.2f}, {ratios[1]:.2f}, {ratios[2]:.2f} of the plan (remat block, none, dots)"
    )


def _kept_bytes(s: Subject, **keys) -> np.ndarray:
    """Return the bytes that the derivative of the loss keeps, before XLA's optimizations and without
    parameters, and those of the plan.
    """
    n_tokens = 128
    wide = {"d_model": 64, "d_ff": 192, "d_head": 16, "attention": "einsum"}
    m = s.changed(**wide, max_positions=n_tokens, **keys)
    train = dataclasses.replace(s.config.train, batch_size=2, seq_len=n_tokens)
    config = dataclasses.replace(s.config, model=m, train=train)
    batch = {"tokens": jax.ShapeDtypeStruct((config.train.batch_size, n_tokens + 1), jnp.int32)}

    def derivative(params, batch):
        fields = step.batch_fields(batch)
        return jax.vjp(lambda p: step.objective(p, fields, config, 1.0, 0.5)[0], params)[1]

    kept = jax.eval_shape(derivative, parameter_shapes(m), batch)
    traced = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    traced -= 4 * parameters.count(parameters.parameter_table(m))
    return np.array([traced, memory.activation_bytes(config, DEVICES["h100"], ONE)])


def the_plan_has_the_kernels_of_the_program(s: Subject) -> str:
    """In bfloat16 on a GPU and a TPU, where attention has kernels of its own."""
    n_tokens = 256
    wide = {"d_model": 512, "d_head": 128, "compute_dtype": "bfloat16", "max_positions": n_tokens}
    train = dataclasses.replace(s.config.train, seq_len=n_tokens)
    config = dataclasses.replace(s.config, model=s.changed(**wide), train=train)
    shapes = parameter_shapes(config.model)
    tokens_BT = np.zeros((1, n_tokens), np.int32)
    kernels = []
    einsum = attention.IMPLEMENTATIONS["einsum"]
    for platform, device in (("gpu", "h100"), ("tpu", "v5e")):
        ran: list[str] = []

        def recorder(name, ran=ran):
            def run(*arguments):
                ran.append(name)
                return einsum(*arguments)

            return run

        instead = {name: recorder(name) for name in attention.IMPLEMENTATIONS}
        with compiling_for(platform), replaced(attention.IMPLEMENTATIONS, instead):
            jax.eval_shape(lambda p: model.hidden(p, config.model, tokens_BT), shapes)
        planned, why = memory.attention_implementation(config, DEVICES[device], ONE)
        others = [name for name in dict.fromkeys(ran) if name != planned and name not in why]
        if others or (not ran) != (planned == "none"):
            raise Broken(
                f"the plan for {device} has the attention {planned}, but the program runs "
                f"{others[0] if others else 'none'}"
            )
        kernels.append(f"{device} {planned}")
    return ", ".join(kernels)


# ---- Export --------------------------------------------------------------------------------------


def is_exported_to_the_same_logits_or_refused(s: Subject) -> str:
    """What is written is read again; tests/huggingface compare it with transformers."""
    try:
        _, fields = export_fields(s.config)
    except UserError:
        return _with_code_or_refused(s)
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), s.config, s.params)
        read = read_config(directory)
        config = parameters.resolve(read, V)
        in_float32 = dataclasses.replace(config.model, compute_dtype="float32")
        config = dataclasses.replace(config, model=in_float32)
        params = load_params(directory, config)
        exported = s.run(config.model, params, *s.packed)
    inside = s.segments_BT > 0
    what = "logits of the model and of its export"
    error = equal(s.outputs["logits"][inside], exported["logits"][inside], what, 1e-3)
    return f"as {fields['model_type']}, {error:.1g}"


def _with_code_or_refused(s: Subject) -> str:
    try:
        code_export.export(s.config)
    except UserError:
        return "refused: no family of Hugging Face has this model, nor lm/huggingface/modeling.py"
    return "with its code in PyTorch: no family of Hugging Face has this model"
