"""Properties of the equations: what the declared axes, keys and initial values promise."""

import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm import ideas, model, parameters, step
from lm.checking import plain
from lm.checking.subject import (
    Broken,
    Subject,
    difference,
    equal,
    random_parameters,
    replaced,
)
from lm.config import ModelConfig, branches_of, looped_layers, mixer_of, query_heads
from lm.config.checks import recurrences

LIMIT = 1e-4  # relative
RATE = 0.25  # of dropout
MOST_GROWTH = 1.6  # of an intermediate in a model four times as wide


# ---- The plain model, and what is on -------------------------------------------------------------


def without_ideas_it_is_the_plain_transformer(s: Subject) -> str:
    """In hidden states, logits and the loss of each target, which NumPy computes in float64."""
    c = plain.without_ideas(s.c)
    params = random_parameters(c)
    flat = parameters.flat(params)
    h_BTD, logits_BTV = plain.forward(flat, c, *s.packed)
    ours = s.run(c, params, *s.packed)
    inside = s.segments_BT > 0
    what = "the model without its ideas and the plain Transformer"
    error = equal(h_BTD[inside], ours["hidden"][inside], f"hidden states of {what}", LIMIT)
    equal(logits_BTV[inside], ours["logits"][inside], f"logits of {what}", LIMIT)

    place_BT = np.arange(s.tokens_BT.size).reshape(s.tokens_BT.shape)
    batch = {
        "tokens": s.tokens_BT,
        "segments": s.segments_BT,
        "is_target": (place_BT % 5 > 0).astype(int),
    }
    total, n = plain.loss(logits_BTV, *batch.values())
    config = dataclasses.replace(s.config, model=c)
    sums = jax.jit(step.loss_sum, static_argnums=2)(params, batch, config)
    if int(sums[1]) != n:
        raise Broken(f"the loss has {float(sums[1]):.0f} targets, but the batch {n}")
    mean = np.asarray(sums[0]) / n
    equal(np.float64(total / n), mean, "the loss, and that of each target", LIMIT)
    return f"{error:.1g}"


def ideas_of_the_config_are_on(s: Subject) -> str:
    """A key that differs from its default turns its idea on; the number 0 may be a layer."""
    present = ideas.everywhere(s.c)
    default = ModelConfig()
    names = []
    for site in ideas.SITES.values():
        for key, idea in site.items():
            value = getattr(s.c, key)
            if value == getattr(default, key) or key in names:
                continue
            names.append(key)
            if idea not in present:
                raise Broken(f"config.model.{key}: {value}, but its idea is off")
    return ", ".join(names) or "none"


# ---- Positions, heads and other axes -------------------------------------------------------------


def shifted_positions_change_nothing(s: Subject) -> str:
    """Unless a position is added to the embeddings, or an idea says that it needs its number."""
    present = ideas.everywhere(s.c)
    absolute = [idea for idea in present if hasattr(idea, "absolute") and idea.absolute(s.c)]
    if s.c.positions not in ("rope", "none") or absolute:
        return "not for absolute positions"
    tokens_BT, segments_BT, positions_BT = s.packed
    shifted = s.run(s.c, s.params, tokens_BT, segments_BT, positions_BT + 7)
    return same_outputs(s, shifted, "texts at positions from 7", limit=1e-3)


def same_outputs(s: Subject, others: dict, what: str, limit: float = LIMIT) -> str:
    """Compare with `s.outputs` in all documents; a failure names the intermediate where it starts."""
    inside = s.segments_BT > 0
    error = difference(s.outputs["hidden"][inside], others["hidden"][inside])
    if error <= limit:
        return f"{error:.1g}"
    raise Broken(f"{what} differ by {error:.2g} of the largest number", (s.outputs, others))


def axes_have_no_order(s: Subject) -> str:
    """Heads, features of the feed-forward layer, experts and tokens may be renumbered."""
    c = s.c
    draw = np.random.default_rng(3)
    groups = _cycle(c.n_kv_heads)
    n_shared = c.n_heads // c.n_kv_heads
    within = [_cycle(n_shared), *[np.arange(n_shared)] * (c.n_kv_heads - 1)]
    heads = np.concatenate([g * n_shared + order for g, order in zip(groups, within, strict=True)])
    per_head = query_heads(c) // c.n_heads
    queries = (heads[:, None] * per_head + np.arange(per_head)).ravel()
    orders = {"G": {c.n_kv_heads: groups}, "H": {c.n_heads: heads, query_heads(c): queries}}
    for letter, n in {"F": c.d_ff, "E": c.n_experts, "V": c.vocab_size}.items():
        orders[letter] = {n: draw.permutation(n)}

    def renumbered(path, p, x):
        of_heads = {"C"} if "H" in p.axes else set()  # a second axis of heads
        x = np.asarray(x)
        for i, (letter, n) in enumerate(zip(p.axes, p.shape, strict=True)):
            name = "H" if letter in of_heads and n == c.n_heads else letter
            if n in orders.get(name, {}):
                x = np.take(x, orders[name][n], axis=i)
        return x

    table = parameters.parameter_table(c)
    flat = parameters.flat(s.params)
    params = parameters.nest({path: renumbered(path, table[path], x) for path, x in flat.items()})
    tokens_V = np.argsort(orders["V"][c.vocab_size])
    tokens_BT, segments_BT, positions_BT = s.packed
    others = s.run(c, params, tokens_V[tokens_BT].astype(np.int32), segments_BT, positions_BT)
    logits_BTV = s.outputs["logits"][..., orders["V"][c.vocab_size]]
    inside = s.segments_BT > 0
    what = "models with renumbered heads, features, experts and tokens"
    measured = same_outputs(s, others, what, 1e-3)
    equal(logits_BTV[inside], others["logits"][inside], f"logits of {what}", 1e-3)
    return measured


def _cycle(n: int) -> np.ndarray:
    """Return an order that is neither the reverse one nor a shift, if there is one.

    >>> _cycle(4), _cycle(2)
    (array([2, 0, 1, 3]), array([1, 0]))
    """
    moved = n if n < 3 else n - 1
    return np.concatenate([np.roll(np.arange(moved), 1), np.arange(moved, n)])


def heads_are_independent(s: Subject) -> str:
    """The output of a head depends on its own queries, keys and values, in the first layer."""
    c = s.c
    if mixer_of(c, 0) != "attention" or (c.qk_norm and c.qk_norm_over == "all_heads"):
        return "not for other mixers"
    if any(getattr(idea, "MIXES_HEADS", False) for idea in ideas.everywhere(c)):
        return "not for ideas that mix heads"
    name = next(branch.name for branch in branches_of(c) if branch.kind == "attention")
    first = {}

    def of_head(params, h):
        def tap(here, tapped, x):
            if here.named(tapped) == f"layers/0/{name}/heads":
                first["heads"] = x
            return x

        s.observed(c, params, tap)
        heads_BTHK = jnp.where(s.segments_BT[..., None, None] > 0, first["heads"], 0)
        return jnp.sum(jnp.sin(jnp.take(heads_BTHK, h, axis=-2)))

    grad = jax.grad(of_head)
    # Not by vmap, which jax.lax.ragged_dot of experts does not have.
    of_heads = jax.jit(lambda params, h_H: jax.lax.map(functools.partial(grad, params), h_H))
    grads = of_heads(s.params, np.arange(c.n_heads))
    own = grads["layers"][name]
    for weight, axis in (("w_q_DHK", -2), ("w_k_DGK", -2), ("w_v_DGK", -2)):
        g = np.abs(np.asarray(own[weight])[:, 0])
        depends_HX = np.moveaxis(g, axis, 1).reshape(*g.shape[:1], g.shape[axis], -1).any(-1)
        per_head = depends_HX.shape[1] / c.n_heads
        for h, x in zip(*np.nonzero(depends_HX), strict=True):
            if per_head <= 1:  # heads share keys and values
                is_own = x == int(h * per_head)
            else:  # a head has several queries
                is_own = h == x // int(per_head)
            if not is_own:
                raise Broken(f"head {h} depends on {weight} of {x}, which is of another head")
    return f"{c.n_heads} heads"


def layers_see_all_that_their_windows_allow(s: Subject) -> str:
    """By derivatives: the first layer sees each earlier token of its document, in its window."""
    c = s.c
    pattern = c.window_pattern
    while any(pattern) and not pattern[0]:  # a layer with a window comes first
        pattern = (*pattern[1:], pattern[0])
    c = dataclasses.replace(c, window_pattern=pattern)
    names = [branch.name for branch in branches_of(c) if branch.kind == "attention"]
    if not names or branches_of(c)[0].kind != "attention":
        return "not where another branch is first"
    if any(getattr(idea, "SEES_LESS", False) for idea in ideas.everywhere(c)):
        return "an idea declares that it sees less"
    n = s.tokens_BT.shape[1]
    tokens_TT = np.arange(n * n).reshape(n, n)
    segments_TT = np.tile(s.segments_BT[:1], (n, 1))
    positions_TT = np.tile(s.packed[2][:1], (n, 1))
    first: dict = {}

    def diagonal(params):
        def tap(here, name, x):
            if here.named(name) == f"layers/0/{names[0]}/output":
                first["output"] = x
            return x

        inputs = {"segments": segments_TT, "positions": positions_TT, "tap": tap}
        model.hidden(params, c, tokens_TT, **inputs)
        rows = jnp.arange(n)
        return jnp.sum(jnp.sin(first["output"][rows, rows]) @ (1.0 + jnp.arange(c.d_model)))

    grads = jax.jit(jax.grad(diagonal))(s.params)
    sees_TS = (np.asarray(grads["embedding"]) != 0).any(-1)[: n * n].reshape(n, n)
    document_T = segments_TT[0]
    position_T = positions_TT[0]
    window = c.window_pattern[0] or n
    extends = bool(recurrences(c))  # such as a convolution of keys
    for i in range(n):
        for j in range(n):
            if not document_T[i] or document_T[i] != document_T[j]:
                continue
            if j > i and not c.masked_diffusion:
                continue
            distance = abs(position_T[i] - position_T[j])
            if distance < window and not sees_TS[i, j]:
                raise Broken(f"position {i} of the first layer does not see token {j}")
            if distance >= window and sees_TS[i, j] and not extends:
                raise Broken(f"position {i} sees token {j}, but its window has {window} tokens")
    return f"windows of {window}" if window < n else "all"


def loops_are_the_same_layers_again(s: Subject) -> str:
    """A model of n layers in k turns computes what one of k n layers with the same weights does."""
    c = s.c
    if c.loops == 1:
        return "no loop"
    if c.loop_input != "none" or len(looped_layers(c)) < c.n_layers:
        return "not compared: its turns are no plain repetition"
    longer = s.changed(loops=1, n_layers=c.loops * c.n_layers)
    table = parameters.parameter_table(c)
    flat = parameters.flat(s.params)
    repeated = {}
    for path, p in parameters.parameter_table(longer).items():
        repeated[path] = flat[path]
        if p.layers is not None:
            own = list(table[path].layers)
            again = [layer % c.n_layers for layer in p.layers]
            if again != c.loops * own:
                return f"not compared: {path} is of other layers in a deeper model"
            repeated[path] = jnp.stack([flat[path][own.index(layer)] for layer in again])
    deep = s.run(longer, parameters.nest(repeated), *s.packed)["hidden"]
    error = equal(s.outputs["hidden"], deep, f"{c.loops} turns and {c.loops} times the layers")
    return f"{error:.1g}"


# ---- Initial values ------------------------------------------------------------------------------


def starts_as_the_model_without_it(s: Subject) -> str:
    """Ideas with `same_at_start` leave the model of step 0 as it is without them."""
    c = s.c
    keys: dict[str, Any] = {}
    names = []
    for site in ideas.SITES.values():
        keys |= {key: idea for key, idea in site.items() if ideas.is_on(getattr(c, key))}
    for key, choices in (("residual", ideas.RESIDUALS), ("ffn", ideas.FEED_FORWARDS)):
        chosen = choices.get(getattr(c, key))
        if chosen:
            keys[key] = chosen
    default = ModelConfig()
    off = {}
    for key, idea in keys.items():
        if hasattr(idea, "same_at_start") and idea.same_at_start(c):
            names.append(key)
            value = getattr(default, key)
            off[key] = False if value is True else value
    mixers = []
    for kind in c.mixers:
        same = getattr(ideas.MIXERS.get(kind), "same_at_start", lambda c: False)
        mixers.append("attention" if same(c) else kind)
    if tuple(mixers) != c.mixers:
        names.append("mixers")
        off["mixers"] = tuple(mixers)
    if not names:
        return "none says so"
    without = dataclasses.replace(c, **off)
    ours = parameters.init_params(c, 0)
    flat = parameters.flat(ours)
    theirs = parameters.flat(parameters.init_params(without, 0))
    if "mixers" in off:  # the same weights under other names
        for path, x in theirs.items():
            rows = _rows_by_layer(path, dict(zip(c.mixers, mixers, strict=True)), c, flat)
            if rows:
                stack = jnp.stack([rows[layer] for layer in sorted(rows)])
                theirs[path] = stack if stack.shape == x.shape else x
    one = s.run(c, ours, *s.packed)
    other = s.run(without, parameters.nest(theirs), *s.packed)
    inside = s.segments_BT > 0
    error = difference(other["hidden"][inside], one["hidden"][inside])
    if not error <= LIMIT:
        what = " and ".join(names)
        raise Broken(f"at step 0 the model differs by {error:.2g} from the one without {what}")
    return f"{', '.join(names)}: {error:.1g}"


def _rows_by_layer(path: str, renamed: dict[str, str], c, flat: dict) -> dict:
    """Return the values of a mixer's parameter by layer, from mixers with other names in `flat`.

    `renamed` has the name in `path` for each mixer of the model.
    """
    rows: dict = {}
    for old, new in renamed.items():
        if path.startswith(f"layers/{new}"):
            stack = flat.get(path.replace(f"layers/{new}", f"layers/{old}", 1), ())
            rows |= zip(ideas.mixing_layers(c, old), stack, strict=False)
    return rows


def branches_that_add_nothing_leave_the_stream(s: Subject) -> str:
    """With projections into the stream of 0, each block returns its input."""
    c = s.changed(zero_init_residual=True)
    table = parameters.parameter_table(c)
    params = parameters.init_params(c, 0)
    flat = parameters.flat(params)
    if c.norm_placement == "post" or not any(
        p.init == "zeros" and p.kind == "weight" and p.matrix for p in table.values()
    ):
        return "not for norms after the sum"
    flat["embedding"] = 3 * flat["embedding"]
    outputs = s.run(s.c, parameters.nest(flat), *s.packed)
    inside = s.segments_BT > 0
    x_ND = outputs["embedding"][inside].astype(np.float64)
    changes = any(ideas.applied(site, s.c) for site in ("embedding", "turn_input", "block_input"))
    averages = any(getattr(idea, "AVERAGES", False) for idea in ideas.everywhere(s.c))
    for name, y in outputs.items():
        if not name.endswith("/residual"):
            continue
        y_ND = y[inside].astype(np.float64)
        x_square = (x_ND**2).sum()
        y_square = (y_ND**2).sum()
        ratio = math.sqrt(y_square / x_square)
        cosine = (x_ND * y_ND).sum() / math.sqrt(y_square * x_square + 1e-30)
        smallest = 1 / (4 * len(c.branches) * c.n_layers * c.loops)
        if not averages and not changes:
            smallest = 1 - 1e-3
        largest = 1 + 1e-3
        if changes:
            largest = 2 * (1 + c.n_layers * c.loops)
        is_same = cosine > 1 - 1e-5 or changes
        if not (smallest <= ratio <= largest and is_same):
            raise Broken(
                f"{name} has {ratio:.2f} times the size of the embedding and the cosine "
                f"{cosine:.3f} with it, although no branch adds anything",
                name,
            )
    return "equal"


def sizes_do_not_depend_on_the_width(s: Subject) -> str:
    """At step 0, RMS of intermediates at four times the width: in more heads, and in wider ones."""
    c = s.c
    if c.init == "gpt2" and c.parametrization != "mup":
        return "not for init = gpt2, whose standard deviations are constant"
    if any(getattr(idea, "OF_WIDTH", False) for idea in ideas.everywhere(c)):
        return "an idea declares that it depends on the width"

    # Glorot's standard deviations depend on outputs, too, whose number may not grow.
    c = dataclasses.replace(c, init="he" if c.init == "glorot" else c.init)

    def sizes(**keys):
        wide = dataclasses.replace(c, **keys)
        params = parameters.init_params(wide, 1)
        outputs = _observed(wide)(params, *s.packed)
        return {name: float(np.sqrt(np.mean(np.square(x)))) for name, x in outputs.items()}

    narrow = sizes()
    wider = {"d_model": 4 * c.d_model, "d_ff": 4 * c.d_ff}
    of_heads = {"n_heads": 4 * c.n_heads, "n_kv_heads": 4 * c.n_kv_heads}
    ratios = {"more heads": sizes(**wider, **of_heads)}
    if c.latent_width:
        wider["latent_width"] = 4 * c.latent_width
    if c.rope_width:
        wider["rope_width"] = 4 * c.rope_width
    ratios["wider heads"] = sizes(**wider, d_head=4 * c.d_head)
    worst = 1.0
    for kind, wide in ratios.items():
        for name, size in narrow.items():
            last = name.rpartition("/")[2]
            expected = 1.0
            if c.parametrization == "mup" and (last == "logits" or kind == "wider heads"):
                expected = {"scores": 0.5, "logits": 0.5}.get(last, 1.0)
            if c.parametrization != "mup" and last == "logits":
                expected = _head_ratio(c)
            ratio = wide[name] / max(size, 1e-30) / expected
            if size < 1e-6 and wide[name] < 1e-6:
                continue
            if not 1 / MOST_GROWTH <= ratio <= MOST_GROWTH:
                raise Broken(
                    f"{name} has {ratio:.2f} times its size at step 0 in a model of four times "
                    f"the width with {kind}",
                    name,
                )
            worst = max(worst, ratio, 1 / ratio)
    return f"up to {worst:.2f} times"


def sizes_do_not_explode_with_the_depth(s: Subject) -> str:
    """At step 0, what branches add to the stream in four times as many layers.

    Independent branches add twice as much; with init = gpt2, as much.
    """
    if s.c.norm_placement in ("post", "none"):
        return "not without a final norm"
    added = {}
    for times in (1, 4):
        c = s.changed(n_layers=times * s.c.n_layers, scan_layers=True)
        params = parameters.init_params(c, 1)

        def ends(params, c=c):
            """Return the embeddings and the stream that the final norm reads."""
            states: dict = {}

            def tap(here, name, x):
                if name == "embedding":
                    states["start"] = x
                return x

            def keep(here, x_BTD):
                states["end"] = x_BTD
                return x_BTD

            last = types.SimpleNamespace(apply=keep)
            with replaced(ideas.SITES["last_residual"], {"n_layers": last}):  # any key that is on
                s.observed(c, params, tap)
            return states["start"], states["end"]

        start_BTD, end_BTD = jax.jit(ends)(params)
        added[times] = float(jnp.sqrt(jnp.mean(jnp.square(end_BTD - start_BTD))))
    ratio = added[4] / max(added[1], 1e-30)
    largest = 1.5 if s.c.init == "gpt2" else 3.0
    if added[4] > 1e-6 and not ratio <= largest:
        raise Broken(f"branches add {ratio:.2f} times as much to the stream in 4 times the layers")
    return f"{ratio:.2f} times in 4 times the layers"


def _head_ratio(c) -> float:
    """Return how the initial logits grow with the width, as the head has the same tokens."""
    if c.tie_embeddings:
        return 2.0
    narrow = model.head_table(c)["head/w_DV"]
    wide = model.head_table(dataclasses.replace(c, d_model=4 * c.d_model))["head/w_DV"]
    return 2 * wide.std / narrow.std


def _observed(c):
    """Return a function with all intermediates, also the scores of attention."""

    class Observing(model.Past):
        def observed(self, here, q_BTHK, k_BSGK, mask, options):
            return options | {"tap": here.tap}

    def f(params, tokens_BT, segments_BT, positions_BT):
        outputs = {}

        def tap(here, name, x):
            if name != "weights":
                outputs[here.named(name)] = jnp.where(jnp.isfinite(x), x, 0)
            return x

        past = Observing(positions_BT, segments_BT)
        h_BTD = model.hidden(params, c, tokens_BT, past=past, tap=tap)
        outputs["logits"] = model.head_logits(h_BTD, model.head(params, c))
        return outputs

    return jax.jit(f)


# ---- Dropout -------------------------------------------------------------------------------------


def dropout_draws_anew_at_each_place(s: Subject) -> str:
    """For each branch, layer, turn and example; none in evaluation; what is kept is rescaled."""
    c = s.changed(dropout=RATE)
    tokens_BT = s.tokens_BT
    names: list[str] = []
    ends = tuple(f"{branch.name}/output" for branch in branches_of(c))

    def loss(added, params, keys_B):
        def tap(here, name, x):
            full = here.named(name)
            if name in ends or full == "embedding":
                names.append(full)
                x = x + added.get(full, jnp.zeros(())).astype(x.dtype)
            return x

        h_BTD = s.observed(c, params, tap, dropout_keys_B=keys_B)
        return jnp.sum(jnp.sin(h_BTD) @ (1.0 + jnp.arange(c.d_model))), h_BTD

    keys_B = jax.random.split(jax.random.key(0), len(tokens_BT))
    jax.eval_shape(loss, {}, s.params, keys_B)
    zeros = {name: jnp.zeros((*tokens_BT.shape, c.d_model)) for name in dict.fromkeys(names)}
    grads, dropped = jax.jit(jax.grad(loss, has_aux=True))(zeros, s.params, keys_B)
    inside = s.segments_BT > 0
    if difference(s.outputs["hidden"][inside], np.asarray(dropped)[inside]) < 0.01:
        raise Broken("with keys the model is that without dropout")
    masks = {name: np.asarray(g)[inside] == 0 for name, g in grads.items()}
    for name, mask in masks.items():
        if not abs(mask.mean() - RATE) < 0.08:
            raise Broken(f"{mask.mean():.2f} of {name} are dropped, but the rate is {RATE}", name)
        rows = (np.asarray(grads[name]) == 0)[:, :6]
        if (rows[0] == rows[1]).mean() > 0.9:
            raise Broken(f"{name} has the same mask in two examples", name)
    listed = list(masks)
    for i, one in enumerate(listed):
        for other in listed[:i]:
            if (masks[one] == masks[other]).mean() > 0.9:
                raise Broken(f"{one} has the same dropout mask as {other}", one)
    evaluated = s.run(c, s.params, *s.packed)
    error = equal(
        s.outputs["hidden"],
        evaluated["hidden"],
        "the model without dropout, and that of evaluation",
    )
    here = model.Here(tokens_BT[:2], model.Past(), dropout_keys_B=keys_B[:2], c=c)
    mean = float(jnp.mean(here.dropout(jnp.ones((2, 64, 64)), 0)))
    if not abs(mean - 1) < 0.05:
        raise Broken(f"dropout turns a mean of 1 into {mean:.2f}")
    return f"{len(masks)} masks, evaluation {error:.1g}"


def training_draws_anew_in_each_step(s: Subject) -> str:
    """Losses with dropout differ between steps, and do not depend on micro-batches."""
    config = dataclasses.replace(s.config, model=s.changed(dropout=RATE))
    parts = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=2))
    losses = {}
    for name, of, n in (("first", config, 0), ("second", config, 1), ("parts", parts, 0)):
        state = step.state_of_step_0(of, s.params, 0).replace(step=jnp.int32(n))

        def compiled(state, of=of):
            return step.losses_and_gradients(state, s.batch, of)[0]["loss"]

        losses[name] = float(jax.jit(compiled)(state))
    if losses["first"] == losses["second"]:
        raise Broken("two steps of training have the same dropout masks")
    error = abs(losses["parts"] / losses["first"] - 1)
    if not error < LIMIT:
        raise Broken(f"with dropout, the loss of micro-batches differs by {error:.2g}")
    return f"{error:.1g}"
