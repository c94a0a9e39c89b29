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

from lm import ideas, model, parameters, step
from lm.checking import structure
from lm.checking.subject import (
    LARGE,
    LONG,
    ROUNDING,
    B,
    Broken,
    Subject,
    T,
    V,
    difference,
    equal,
    positions_of,
)
from lm.config import MESH_AXES, MeshConfig, Resolved
from lm.config.checks import recurrences
from lm.generation import decoding
from lm.generation.kv_cache import Prefill, decode
from lm.layers.losses import head_logits
from lm.parallel import sharding
from lm.parallel.mesh import check_mesh, make_mesh
from lm.system.errors import UserError

ROUNDING_16 = 0.1  # relative, of a model in bfloat16
MESHES = {
    "8 replicas": (8, 1, 1, 1),
    "fsdp 4, tensor 2": (1, 4, 2, 1),
    "sequence 2": (1, 1, 1, 2),
}


def sees_earlier_tokens_of_its_document(s: Subject) -> str:
    """By derivatives: position i of row i depends on tokens 0 .. i of its document, and no others.

    In masked diffusion it depends on all tokens of its document.
    """
    ahead = s.c.masked_diffusion
    depends_TT = np.asarray(s.diagonal_grads["embedding"] != 0).any(-1).reshape(T, T)
    document_T = s.segments_BT[0]
    for i, j in zip(*np.nonzero(depends_TT), strict=True):
        if document_T[i] == 0:  # padding may see anything
            continue
        # i ascends, so this is the shortest text
        text = f"in a text of {max(i, j) + 1} tokens, position {i} depends on"
        if j > i and not ahead:
            raise Broken(f"{text} the later token {j}", (i, j))
        if document_T[i] != document_T[j]:
            raise Broken(f"{text} token {j} of another document", (i, j))
    if missing := [i for i in range(T) if document_T[i] and not depends_TT[i, i]]:
        raise Broken(f"position {missing[0]} does not depend on its own token")
    if ahead and not np.triu(depends_TT, 1).any():
        raise Broken("no position depends on a later token")
    both = ", in both directions" if ahead else ""
    return f"derivatives of {T} positions by {T} tokens{both}"


def layers_read_all_their_parameters(s: Subject) -> str:
    """By the same derivatives; the loss is another property."""
    table = parameters.parameter_table(s.c)
    of_loss = {path for path, p in table.items() if p.layers is None}
    _check_read(s, {path: x for path, x in _flat_grads(s).items() if path not in of_loss})
    return f"{len(table)} parameters"


def _flat_grads(s: Subject) -> dict:
    return {path: np.abs(np.asarray(g)) for path, g in parameters.flat(s.diagonal_grads).items()}


def examples_are_independent(s: Subject) -> str:
    """Other texts of a batch change nothing."""
    tokens_BT, *documents = s.packed
    tokens_BT = tokens_BT.copy()
    tokens_BT[1:] = (tokens_BT[1:] + 1) % V
    others = s.run(s.c, s.params, tokens_BT, *documents)
    first = {name: x[:1] for name, x in s.outputs.items()}
    beside = {name: x[:1] for name, x in others.items()}
    error = difference(first["hidden"], beside["hidden"])
    if not error <= 1e-5:
        raise Broken(f"a text changes by {error:.2g} if the other texts do", (first, beside))
    return f"{error:.1g}"


def padding_changes_nothing(s: Subject) -> str:
    """The ids of padding do not reach a document."""
    tokens_BT, segments_BT, positions_BT = s.packed
    padded = np.where(segments_BT == 0, (tokens_BT + 1) % V, tokens_BT)
    others = s.run(s.c, s.params, padded, segments_BT, positions_BT)
    return structure.same_outputs(s, others, "documents beside other padding")


def a_packed_document_is_the_same_alone(s: Subject) -> str:
    """Positions start again, and nothing of the row is kept."""
    tokens_BT, segments_BT, positions_BT = s.packed
    if not np.array_equal(step.batch_fields(s.with_next())["positions"], positions_BT):
        raise Broken("positions of a batch do not start at 0 in each document")
    own = segments_BT[0] == 3
    n = own.sum()
    alone_BT = np.zeros_like(tokens_BT)
    alone_BT[:, :n] = tokens_BT[:, own]
    only_BT = np.zeros_like(segments_BT)
    only_BT[:, :n] = 1
    alone = s.run(s.c, s.params, alone_BT, only_BT, positions_of(only_BT))
    packed = {name: x[:, own] for name, x in s.outputs.items() if x.shape[1:2] == own.shape}
    alone = {name: alone[name][:, :n] for name in packed}
    error = difference(packed["hidden"], alone["hidden"])
    if not error <= ROUNDING:
        raise Broken(f"a packed document and the same alone differ by {error:.2g}", (packed, alone))
    plain = s.hidden_BTD
    whole = s.run(s.c, s.params, tokens_BT, np.ones_like(segments_BT), _count(tokens_BT))
    equal(plain, whole["hidden"], "a text with documents and positions, and without,")
    return f"{error:.1g}"


def _count(tokens_BT):
    return np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)


def documents_of_several_chunks_are_the_same_alone(s: Subject) -> str:
    """Recurrences compute some positions at a time; a document may begin in any chunk."""
    if not recurrences(s.c):
        return "no recurrence"
    n = LONG
    tokens_BT = np.random.default_rng(5).integers(0, V, (2, n)).astype(np.int32)
    segments_T = np.repeat([1, 2, 3], [9, 60, n - 69])
    segments_BT = np.tile(segments_T, (2, 1)).astype(np.int32)

    @jax.jit
    def run(params, tokens_BT, segments_BT, positions_BT):
        inputs = {"segments": segments_BT, "positions": positions_BT}
        return model.hidden(params, s.c, tokens_BT, **inputs)

    packed = np.asarray(run(s.params, tokens_BT, segments_BT, positions_of(segments_BT)))
    own = segments_BT[0] >= 2
    alone_BT = np.zeros_like(tokens_BT)
    alone_BT[:, : own.sum()] = tokens_BT[:, own]
    documents_BT = np.zeros_like(segments_BT)
    documents_BT[:, : own.sum()] = segments_BT[:, own] - 1
    alone = np.asarray(run(s.params, alone_BT, documents_BT, positions_of(documents_BT)))
    what = "documents in another chunk"
    return f"{equal(packed[:, own], alone[:, : own.sum()], what, 1e-3):.1g}"


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
        errors.append(equal(expected_B1D, h_B1D, what))
    return f"{max(errors):.1g} over {n_new} tokens after prompts of {sorted(lengths_B.tolist())}"


def _of_batch(s: Subject, model=None, **keys) -> tuple:
    """Return losses and gradients with other keys of the section train, or another model."""
    train = dataclasses.replace(s.config.train, **keys)
    config = dataclasses.replace(s.config, train=train, model=model or s.c)
    return _gradients(config)(s.params, s.batch)


def _gradients(config: Resolved) -> Callable:
    """Return (params, batch) -> losses and gradients, compiled once."""
    compiled = jax.jit(functools.partial(step.losses_and_gradients, config=config))
    return lambda params, batch: jax.device_get(
        compiled(step.state_of_step_0(config, params, 0), batch)
    )


def _of_whole_batch(s: Subject) -> tuple:
    """Return losses and gradients of the model as it is, which several properties read."""
    if "whole" not in s.programs:
        s.programs["gradients"] = _gradients(s.config)
        s.programs["whole"] = s.programs["gradients"](s.params, s.batch)
    return s.programs["whole"]


def large_weights_stay_finite(s: Subject) -> str:
    """An exponential without its largest exponent, or a root or quotient of 0, is not."""
    if s.c.norm_placement == "none":
        return "not without norms"
    _of_whole_batch(s)
    losses, grads = s.programs["gradients"](s.large_params, s.batch)
    for name, x in (losses | parameters.flat(grads)).items():
        if not np.isfinite(x).all():
            what = name if name in losses else f"the gradient of {name}"
            raise Broken(f"{what} is not finite with weights times {LARGE}")
    return f"weights times {LARGE}"


def scanned_and_rematerialized_are_unrolled(s: Subject) -> str:
    """In losses and gradients."""
    plain = _of_whole_batch(s)
    scan = s.changed(scan_layers=True, remat="block")
    scanned = equal(plain, _of_batch(s, scan), "scanned and unrolled layers")
    dots = _of_batch(s, s.changed(remat="dots"))
    measured = max(scanned, equal(plain, dots, "layers with and without remat = dots"))
    return f"{measured:.1g}"


def micro_batches_and_loss_chunks_are_the_whole_batch(s: Subject) -> str:
    """In all losses and gradients: a term that is a mean depends on how a batch is cut."""
    whole = _of_whole_batch(s)
    parts = equal(whole, _of_batch(s, micro_batch_size=1), "micro-batches and the whole batch")
    chunks = equal(whole, _of_batch(s, loss_chunk=24), "loss chunks and the whole batch")
    return f"{max(parts, chunks):.1g}"


def losses_are_means_over_the_targets(s: Subject) -> str:
    """In training and in evaluation: padding and tokens that are no targets do not count."""
    if s.c.masked_diffusion:
        return "of the tokens that it hides"
    loss = _means(s, s.batch)["loss"]
    equal(loss, _of_whole_batch(s)[0]["loss"], "the loss of a step, and the mean over its targets,")
    total, n_targets = jax.jit(step.eval_step, static_argnames="config")(
        s.params, None, s.batch, s.config
    )
    equal(loss, total / n_targets, "the losses of a batch in training and in evaluation")
    return f"{float(n_targets):.0f} of {s.batch['tokens'][:, 1:].size} tokens"


def the_loss_reads_every_parameter_of_every_layer(s: Subject) -> str:
    """A layer of a stack, a head or a feature that no equation reads has the gradient 0."""
    _, grads = _of_whole_batch(s)
    table = parameters.parameter_table(s.c)
    flat = {path: np.abs(np.asarray(g)) for path, g in parameters.flat(grads).items()}
    _check_read(s, flat)
    return f"{len(table)} parameters"


def _check_read(s: Subject, flat: dict) -> None:
    """Raise Broken for a parameter, or a part of it, without a gradient."""
    table = parameters.parameter_table(s.c)
    known: dict = {}
    for idea in ideas.everywhere(s.c):
        known |= idea.unread(s.c) if hasattr(idea, "unread") else {}
    typical = np.median([g.max() for g in flat.values()])
    for path, g in flat.items():
        p = table[path]
        # A bias of keys adds the same to all scores of a query, unless keys are rotated.
        smallest = 0 if p.kind == "bias" else 1e-5 * typical
        if not g.max() > smallest:
            raise Broken(f"the loss does not depend on {path}")
        for i, letter in enumerate(p.axes):
            others = tuple(axis for axis in range(g.ndim) if axis != i)
            unread = list(np.nonzero(~(g.max(axis=others) > 0))[0])
            if letter == "N":
                layers = known.get(path.rpartition("/")[2], ())
                unread = [i for i in unread if p.layers[i] not in layers]
            if letter in "VT" or not unread:
                continue
            what = f"{letter} = {unread[0]}"
            if letter == "N":
                what = f"layer {p.layers[unread[0]]}"
            raise Broken(f"the loss does not depend on {path} of {what}")


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
    narrow_error = equal(grads, narrow, "gradients in float32 and in float64", 1e-3)
    return f"{narrow_error:.1g}; finite differences {error:.1g}"


def bfloat16_is_within_its_error(s: Subject) -> str:
    """And is computed: results in float32 would be equal."""
    narrow = s.hidden(s.changed(compute_dtype="bfloat16"), s.tokens_BT)
    root_mean_square = math.sqrt(np.mean(s.hidden_BTD**2))
    error = math.sqrt(np.mean((narrow - s.hidden_BTD) ** 2)) / root_mean_square
    if not 0 < error <= ROUNDING_16:
        raise Broken(f"bfloat16 differs from float32 by {error:.2g} (limit {ROUNDING_16})")
    return f"{error:.1g}"


def losses_of_packed_documents_are_those_of_documents_alone(s: Subject) -> str:
    """Of cross-entropies: no target is padding, or of another document than its position."""
    packed = s.with_next()
    parts: dict[str, list] = {name: [] for name in packed}
    for document in (1, 2, 3):
        own = packed["segments"][0] == document
        for name, x in packed.items():
            row = np.zeros_like(x)
            row[:, : own.sum()] = x[:, own]
            parts[name].append(row)
    alone = {name: np.concatenate(rows) for name, rows in parts.items()}
    alone["segments"] = np.minimum(alone["segments"], 1)
    names = ["loss", *_cross_entropies(s)]
    means_packed = _means(s, packed)
    means_alone = _means(s, alone)
    for name in names:
        what = f"{name} of packed documents and of the same alone"
        equal(means_packed[name], means_alone[name], what)
    return ", ".join(names)


def _cross_entropies(s: Subject) -> list[str]:
    """Return the names of the terms of the loss that are cross-entropies."""
    names = []
    for idea in ideas.everywhere(s.c):
        if hasattr(idea, "losses"):
            terms = idea.losses(step.batch_fields(s.batch), lambda *_, **__: None)
            names += [f"loss/{name}" for name in terms]
    return names


def _means(s: Subject, batch: dict, params=None) -> dict:
    """Return the means of all terms of the loss; what is minimized must be their weighted sum."""
    fields = {name: jnp.asarray(x) for name, x in step.batch_fields(batch).items()}
    n_targets = jnp.sum(fields["weights"])

    def terms(params):
        return step.objective(params, fields, s.config, n_targets, 0.5)

    minimized, means = jax.jit(terms)(s.params if params is None else params)
    t = s.config.train
    weights = {"loss/z_loss": t.z_loss}
    for name, weight in ideas.loss_weights(s.c, 0.5).items():
        weights[f"loss/{name}"] = weight
    total = means["loss"] + sum(weights[name] * means[name] for name in means if name != "loss")
    if not t.label_smoothing:
        equal(total, minimized, "what is minimized, and the sum of its terms")
    return means


def the_loss_at_step_0_is_that_of_equal_probabilities(s: Subject) -> str:
    """With the initial values of the config, within 1 nat of ln V and the spread of its logits."""
    params = parameters.init_params(s.c, 0)
    inputs = s.batch["tokens"][:, :-1]
    logits_BTV = jax.jit(lambda params: model.logits(params, s.c, inputs))(params)
    log_p_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    targets = s.batch["tokens"][:, 1:, None]
    loss = -float(np.take_along_axis(log_p_BTV, targets, axis=-1).mean())
    spread = float(np.var(np.asarray(logits_BTV), axis=-1).mean())
    allowed = 1.0 + spread * s.c.tie_embeddings  # embeddings may have any size
    if not abs(loss - math.log(V)) <= allowed:
        raise Broken(f"the loss is {loss:.2f}, but ln V is {math.log(V):.2f}")
    for name, other in _means(s, s.batch, params).items():
        if name in ("loss", *_cross_entropies(s)) and not abs(other - math.log(V)) <= allowed:
            raise Broken(f"{name} is {other:.2f}, but ln V is {math.log(V):.2f}")
    return f"{loss:.2f}, ln V = {math.log(V):.2f}"


def training_resumes_to_the_bit(s: Subject) -> str:
    """The state is all that changes: two steps and two more are four steps."""
    config = s.config
    take = jax.jit(step.train_step, static_argnames="config")
    state = step.init_state(config, 0)
    states = []
    for _ in range(4):
        states.append(state)
        state, metrics = take(state, s.batch, config)
    first, second, *_ = states
    for name in ("params", "opt_state"):
        before, after = jax.device_get((getattr(first, name), getattr(second, name)))
        if not difference(before, after) > 0:
            raise Broken(f"a step does not change {name}")
    if int(second.step) != int(first.step) + 1:
        raise Broken("a step is not counted")
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
    # Positions count from 0 in documents, and without them from the first token of a sequence.
    texts = {name: x for name, x in s.batch.items() if name != "segments"}
    packed = _of_whole_batch(s)
    plain = s.programs["gradients"](s.params, texts)
    cases = [(name, shape, packed, s.batch) for name, shape in MESHES.items()]
    cases.append(("texts over sequence 4", (1, 1, 1, 4), plain, texts))
    results = []
    for name, shape, whole, batch in cases:
        sizes = dict(zip(MESH_AXES, shape, strict=True))
        devices = jax.devices()[: math.prod(shape)]
        if len(devices) < math.prod(shape):
            return "not run: it needs eight devices; python -m lm.check simulates them"
        config = dataclasses.replace(s.config, mesh=MeshConfig(**sizes))
        try:
            check_mesh(config, len(devices))
            ours = _on_mesh(s, batch, sizes, devices)
        except UserError as error:
            results.append(f"{name} refused")
            if "mesh" not in str(error):
                raise
            continue
        results.append(f"{name} {equal(whole, ours, f'one device and {name}', 1e-3):.1g}")
    return ", ".join(results)


def _on_mesh(s: Subject, batch: dict, sizes: dict, devices) -> tuple:
    # as many examples as devices share the batch
    state = step.state_of_step_0(s.config, s.params, 0)
    mesh = make_mesh(sizes, devices)
    with jax.set_mesh(mesh):
        table = parameters.parameter_table(s.c)
        abstract = sharding.shard_state(jax.eval_shape(lambda: state), table)
        state = jax.device_put(state, jax.tree.map(lambda a: a.sharding, abstract))
        batch = {
            name: sharding.shard_examples(mesh, x.shape, 0, x.__getitem__)
            for name, x in batch.items()
        }
        compiled = jax.jit(functools.partial(step.losses_and_gradients, config=s.config))
        return jax.device_get(compiled(state, batch))
