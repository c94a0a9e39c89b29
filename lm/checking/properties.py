"""Properties that hold for every model, as functions of a `Subject`.

A property returns what was measured, and raises `Broken` with what is wrong. PROPERTIES lists them
in the order of the card.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lm import model, parameters, step
from lm.checking.subject import B, Subject, T, V, difference
from lm.config import MESH_AXES
from lm.cost import flops
from lm.generation import decoding
from lm.generation.kv_cache import Prefill, decode
from lm.huggingface import code_export
from lm.huggingface.config_files import export_fields
from lm.ideas import loss_products
from lm.layers.losses import head_logits
from lm.parallel import sharding
from lm.parallel.mesh import make_mesh
from lm.system.errors import UserError

ROUNDING = 1e-4  # relative, of float32 results in another order
ROUNDING_16 = 0.1  # relative, of a model in bfloat16
MESHES = {
    "8 replicas": (8, 1, 1, 1),
    "fsdp 4, tensor 2": (1, 4, 2, 1),
    "sequence 2": (1, 1, 1, 2),
}


class Broken(Exception):
    """A property does not hold; the text says where."""


def _equal(a, b, what: str, limit: float = ROUNDING) -> float:
    """Return the relative difference; raises Broken if it is more than the limit, or not a number."""
    error = difference(a, b)
    if not error <= limit:
        raise Broken(f"{what} differ by {error:.2g} of the largest number (limit {limit:.0e})")
    return error


def sees_earlier_tokens_of_its_document(s: Subject) -> str:
    """By derivatives: position i of row i depends on tokens 0 .. i of its document, and no others.

    In masked diffusion it depends on all tokens of its document.
    """
    ahead = s.c.masked_diffusion
    tokens_TT = np.arange(T * T).reshape(T, T)
    segments_TT = np.tile(s.segments_BT[:1], (T, 1))

    def diagonal(params):
        h_TTD = model.hidden(params, s.c, tokens_TT, segments=segments_TT)
        rows = jnp.arange(T)
        return jnp.sum(jnp.sin(h_TTD[rows, rows]) @ (1.0 + jnp.arange(s.c.d_model)))

    grads = jax.jit(jax.grad(diagonal))(s.params)
    depends_TT = np.asarray(grads["embedding"] != 0).any(-1).reshape(T, T)
    document_T = s.segments_BT[0]
    for i, j in zip(*np.nonzero(depends_TT), strict=True):
        if document_T[i] == 0:  # padding may see anything
            continue
        if j > i and not ahead:
            raise Broken(f"position {i} depends on the later token {j}")
        if document_T[i] != document_T[j]:
            raise Broken(
                f"position {i} of document {document_T[i]} depends on token {j} of another"
            )
    if missing := [i for i in range(T) if document_T[i] and not depends_TT[i, i]]:
        raise Broken(f"position {missing[0]} does not depend on its own token")
    if ahead and not np.triu(depends_TT, 1).any():
        raise Broken("no position depends on a later token")
    both = ", in both directions" if ahead else ""
    return f"derivatives of {T} positions by {T} tokens{both}"


def examples_are_independent(s: Subject) -> str:
    """Other texts of a batch change nothing."""
    others = s.tokens_BT.copy()
    others[1:] = (others[1:] + 1) % V
    change = _equal(s.hidden_BTD[:1], s.hidden(s.c, others)[:1], "a text beside other texts")
    return f"{change:.1g}"


def padding_changes_nothing(s: Subject) -> str:
    """The ids of padding do not reach a document."""
    padding_BT = s.segments_BT == 0
    others = np.where(padding_BT, (s.tokens_BT + 1) % V, s.tokens_BT)
    one, other = (
        s.hidden(s.c, tokens, segments=s.segments_BT)[~padding_BT]
        for tokens in (s.tokens_BT, others)
    )
    return f"{_equal(one, other, 'documents beside other padding'):.1g}"


def a_packed_document_is_the_same_alone(s: Subject) -> str:
    """Positions start again, and nothing of the row is kept."""
    fields = step.batch_fields(
        {
            "tokens": np.pad(s.tokens_BT, ((0, 0), (0, 1))),
            "segments": np.pad(s.segments_BT, ((0, 0), (0, 1))),
        }
    )
    given = {name: fields[name] for name in ("segments", "positions")}
    packed = s.hidden(s.c, s.tokens_BT, **given)
    own = s.segments_BT[0] == 3
    alone = s.hidden(s.c, s.tokens_BT[:, own])
    return f"{_equal(packed[:, own], alone, 'a packed document and the same alone'):.1g}"


def cached_decoding_is_the_full_pass(s: Subject) -> str:
    """With prompts of mixed lengths, and at the doors that generation itself checks."""
    if s.c.masked_diffusion:
        return "no cache: all positions see each other"
    try:
        decoding.make_decoder(s.params, s.c, seq_len=T)
    except UserError as error:
        raise Broken(str(error)) from None
    n_new = 4
    lengths_B = np.array([T - n_new, 3, 7, 1])
    memory: dict = {}
    past = Prefill(lengths_B=jnp.asarray(lengths_B), n_slots=T)
    prompts_BT = np.zeros((B, T), np.int32)
    for row, text, n in zip(prompts_BT, s.tokens_BT, lengths_B, strict=True):
        row[:n] = text[:n]

    @jax.jit
    def prefill(params, prompts_BT):
        memory: dict = {}
        model.hidden(params, s.c, prompts_BT, past=past, memory=memory)
        return memory

    @jax.jit
    def one(params, memory, new_B1, time, starts_B):
        memory = dict(memory)
        seen = decode(time, starts_B)
        return model.hidden(params, s.c, new_B1, past=seen, memory=memory), memory

    memory = prefill(s.params, prompts_BT)
    errors = []
    for i in range(n_new):
        index_B1 = (lengths_B + i)[:, None]
        new_B1 = np.take_along_axis(s.tokens_BT, index_B1, axis=1)
        time = jnp.int32(T - n_new + i)
        starts_B = jnp.asarray(T - n_new - lengths_B, jnp.int32)
        h_B1D, memory = one(s.params, memory, new_B1, time, starts_B)
        expected_B1D = np.take_along_axis(s.hidden_BTD, index_B1[..., None], axis=1)
        what = f"token {i + 1} after the prompts, decoded and in the full pass,"
        errors.append(_equal(expected_B1D, h_B1D, what))
    return f"{max(errors):.1g} over {n_new} tokens after prompts of {sorted(lengths_B.tolist())}"


def scanned_and_rematerialized_are_unrolled(s: Subject) -> str:
    """In hidden states and gradients."""

    def loss(params, c):
        return jnp.sum(jnp.sin(model.hidden(params, c, s.tokens_BT)))

    def gradients(**keys):
        compiled = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        return compiled(s.params, s.changed(**keys))

    plain = gradients()
    scanned = _equal(
        plain, gradients(scan_layers=True, remat="block"), "scanned and unrolled layers"
    )
    dots = _equal(plain, gradients(remat="dots"), "layers with and without remat = dots")
    return f"{max(scanned, dots):.1g}"


@functools.lru_cache(maxsize=1)
def _losses_and_gradients(config):
    return jax.jit(functools.partial(step.losses_and_gradients, config=config))


def _of_batch(s: Subject, **keys) -> tuple:
    config = dataclasses.replace(s.config, train=dataclasses.replace(s.config.train, **keys))
    state = step.state_of_step_0(config, s.params, 0)
    return _losses_and_gradients(config)(state, s.batch)


def micro_batches_and_loss_chunks_are_the_whole_batch(s: Subject) -> str:
    """In all losses and gradients: a term that is a mean depends on how a batch is cut."""
    whole = _of_batch(s)
    parts = _equal(whole, _of_batch(s, micro_batch_size=1), "micro-batches and the whole batch")
    chunks = _equal(whole, _of_batch(s, loss_chunk=8), "loss chunks and the whole batch")
    return f"{max(parts, chunks):.1g}"


def the_loss_reads_every_parameter_of_every_layer(s: Subject) -> str:
    """A layer of a stack that no equation reads has the gradient 0."""
    _, grads = _of_batch(s)
    table = parameters.parameter_table(s.c)
    for path, g in parameters.flat(grads).items():
        g = np.abs(np.asarray(g))
        if table[path].layers is None:
            if not g.any():
                raise Broken(f"the loss does not depend on {path}")
            continue
        read = g.reshape(len(g), -1).any(axis=1)
        if unread := [table[path].layers[i] for i in np.nonzero(~read)[0]]:
            raise Broken(f"the loss does not depend on {path} of layer {unread[0]}")
    return f"{len(table)} parameters"


def gradients_are_those_of_float64(s: Subject) -> str:
    """And the derivative along a random direction is that of finite differences in float64."""

    def loss(params, c):
        h_BTD = model.hidden(params, c, s.tokens_BT)
        logits_BTV = head_logits(h_BTD, model.head(params, c))
        return jnp.sum(jnp.sin(logits_BTV)) / logits_BTV.size

    narrow = jax.jit(jax.grad(loss), static_argnums=1)(s.params, s.c)
    with jax.enable_x64(True):
        c = s.changed(param_dtype="float64", compute_dtype="float64")
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), s.params)
        value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        _, grads = value_and_grad(wide, c)
        draw = np.random.default_rng(2)
        v = jax.tree.map(lambda x: jnp.asarray(draw.standard_normal(x.shape)), wide)

        def at(distance):
            moved = jax.tree.map(lambda x, d: x + distance * d, wide, v)
            return float(value_and_grad(moved, c)[0])

        # Small ones drown in the rounding of equations that are always in float32, large ones in
        # curvature.
        finite = [(at(size) - at(-size)) / (2 * size) for size in (1e-3, 1e-4, 1e-5)]
        products = jax.tree.map(lambda g, d: float(jnp.sum(g * d)), grads, v)
        derivative = sum(jax.tree.leaves(products))
        norms = [float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)]
    error = min(abs(x - derivative) for x in finite) / math.sqrt(sum(norms))
    if not error <= 2e-3:
        raise Broken(f"the gradient differs from finite differences by {error:.2g} of its norm")
    narrow_error = _equal(grads, narrow, "gradients in float32 and in float64", 1e-3)
    return f"{narrow_error:.1g}; finite differences {error:.1g}"


def bfloat16_is_within_its_error(s: Subject) -> str:
    """And is computed: results in float32 would be equal."""
    narrow = s.hidden(s.changed(compute_dtype="bfloat16"), s.tokens_BT)
    root_mean_square = math.sqrt(np.mean(s.hidden_BTD**2))
    error = math.sqrt(np.mean((narrow - s.hidden_BTD) ** 2)) / root_mean_square
    if not 0 < error <= ROUNDING_16:
        raise Broken(f"bfloat16 differs from float32 by {error:.2g} (limit {ROUNDING_16})")
    return f"{error:.1g}"


def the_loss_at_step_0_is_that_of_equal_probabilities(s: Subject) -> str:
    """With the initial values of the config, within 1 nat of ln V and the spread of its logits."""
    params = parameters.init_params(s.c, 0)
    logits_BTV = jax.jit(lambda params: model.logits(params, s.c, s.batch["tokens"][:, :-1]))(
        params
    )
    log_p_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    targets = s.batch["tokens"][:, 1:, None]
    loss = -float(np.take_along_axis(log_p_BTV, targets, axis=-1).mean())
    spread = float(np.var(np.asarray(logits_BTV), axis=-1).mean())
    if not abs(loss - math.log(V)) <= 1 + spread:
        raise Broken(f"the loss is {loss:.2f}, but ln V is {math.log(V):.2f}")
    return f"{loss:.2f}, ln V = {math.log(V):.2f}"


def flops_are_those_of_the_traced_program(s: Subject) -> str:
    """Counted from declarations, and the products of the trace."""
    c = s.changed(attention="einsum")
    n = 64  # tokens, a whole chunk of a recurrence
    shapes = jax.eval_shape(lambda: s.params)
    tokens = jax.ShapeDtypeStruct((1, n), jnp.int32)
    positions = np.arange(n) % T  # a table of learned positions has T rows
    logits = functools.partial(model.logits, c=c, positions=positions)
    program = jax.make_jaxpr(lambda p, tokens: logits(p, tokens_BT=tokens))(shapes, tokens)
    traced = product_flops(program.jaxpr) / n
    counted = flops.flops_per_token(c, n, full_square=True) / 3 - 2 * loss_products(c)
    ratio = counted / traced
    if not abs(ratio - 1) <= 0.01:
        raise Broken(f"declared are {ratio:.3f} of the traced operations; see `products`")
    return f"{ratio:.3f} of the traced operations"


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
        for inner in jax.tree.leaves(eqn.params, is_leaf=_is_program):
            if _is_program(inner):
                total += times * product_flops(getattr(inner, "jaxpr", inner))
    return total


def _is_program(x) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def training_resumes_to_the_bit(s: Subject) -> str:
    """The state is all that changes: two steps and two more are four steps."""
    config = s.config
    take = jax.jit(step.train_step, static_argnames="config")
    state = step.init_state(config, 0)
    states = []
    for _ in range(4):
        states.append(state)
        state, metrics = take(state, s.batch, config)
    restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), states[2])
    for _ in range(2):
        restored, _ = take(restored, s.batch, config)
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b, equal_nan=True)), state, restored)
    if not all(jax.tree.leaves(same)):
        raise Broken("four steps differ from two steps and, from a copy of the state, two more")
    if not bool(metrics["finite"]):
        raise Broken("a step from the initial values is not finite")
    return "equal"


def devices_compute_the_same(s: Subject) -> str:
    """Losses and gradients over each axis of eight simulated devices, or a refusal."""
    whole = _of_batch(s)
    results = []
    for name, shape in MESHES.items():
        sizes = dict(zip(MESH_AXES, shape, strict=True))
        devices = jax.devices()[: math.prod(shape)]
        if len(devices) < math.prod(shape):
            return "not run: it needs eight devices; python -m lm.check simulates them"
        try:
            ours = _on_mesh(s, sizes, devices)
        except UserError as error:
            results.append(f"{name} refused")
            if "mesh" not in str(error):
                raise
            continue
        results.append(f"{name} {_equal(whole, ours, f'one device and {name}', 1e-3):.1g}")
    return ", ".join(results)


def _on_mesh(s: Subject, sizes: dict, devices) -> tuple:
    # as many examples as devices share the batch
    state = step.state_of_step_0(s.config, s.params, 0)
    mesh = make_mesh(sizes, devices)
    with jax.set_mesh(mesh):
        table = parameters.parameter_table(s.c)
        abstract = sharding.shard_state(jax.eval_shape(lambda: state), table)
        state = jax.device_put(state, jax.tree.map(lambda a: a.sharding, abstract))
        batch = {
            name: sharding.shard_examples(mesh, x.shape, 0, x.__getitem__)
            for name, x in s.batch.items()
        }
        compiled = jax.jit(functools.partial(step.losses_and_gradients, config=s.config))
        return jax.device_get(compiled(state, batch))


def is_exported_or_refused(s: Subject) -> str:
    """tests/huggingface compare exports with transformers."""
    try:
        _, fields = export_fields(s.config)
        return f"as {fields['model_type']}"
    except UserError:
        pass
    try:
        code_export.export(s.config)
    except UserError:
        return "refused: no family of Hugging Face has this model, nor lm/huggingface/modeling.py"
    return "with its code in PyTorch: no family of Hugging Face has this model"


PROPERTIES: dict[str, Callable[[Subject], str]] = {
    "looks back only, within its document": sees_earlier_tokens_of_its_document,
    "texts of a batch are independent": examples_are_independent,
    "padding changes nothing": padding_changes_nothing,
    "a packed document is the same alone": a_packed_document_is_the_same_alone,
    "cached decoding = full pass": cached_decoding_is_the_full_pass,
    "scanned = unrolled = rematerialized": scanned_and_rematerialized_are_unrolled,
    "micro-batches, loss chunks = whole batch": micro_batches_and_loss_chunks_are_the_whole_batch,
    "the loss reads each parameter and layer": the_loss_reads_every_parameter_of_every_layer,
    "gradients = float64, finite differences": gradients_are_those_of_float64,
    "bfloat16 is within its error": bfloat16_is_within_its_error,
    "the loss of step 0 is near ln V": the_loss_at_step_0_is_that_of_equal_probabilities,
    "FLOPs = traced program": flops_are_those_of_the_traced_program,
    "training resumes to the bit": training_resumes_to_the_bit,
    "devices compute the same": devices_compute_the_same,
    "export": is_exported_or_refused,
}
