"""Capture and patch named intermediates of a model, as pure functions.

lm/model.py calls `here.tap(name, x)` with its intermediates, and lets positions see each other
through a `Past`, which is replaced here. Without a hook these calls return their argument, so they
leave no trace in a compiled program.

The layers are unrolled here, whether the run scanned over them or not, so that each has names of
its own.
"""

import dataclasses
import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from lm import model, parameters
from lm.config import ResolvedModel
from lm.config.values import close_match
from lm.layers.losses import head_logits
from lm.past import Past
from lm.system.errors import UserError
from lm.trained_model import TrainedModel

# The axes of the intermediates by the last part of their names; see lm/layers/__init__.py for the
# letters.
AXES = {
    "embedding": "TD",
    "q": "THK",
    "k": "SGK",
    "v": "SGK",
    "scores": "HTS",
    "weights": "HTS",
    "heads": "THK",
    "hidden": "TF",
    "output": "TD",
    "residual": "TD",
    "logits": "TV",
}


def capture(
    run: TrainedModel,
    ids,
    names: str | Iterable[str],
    patches: Mapping[str, jax.Array | Callable] | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the logits of a text and named intermediates.

    A pure function, which can be jitted and differentiated in reverse mode (products have no
    forward mode). It is compiled for each new length of the text and set of names. With functions
    as patches it is compiled on every call, unless it is called inside a jitted function.

    Args:
        run: a trained model, as returned by `lm.load`.
        ids: a text, or token ids (T,) or (B, T).
        names: names of intermediates, as returned by `names`, or patterns, in which * stands for
            any characters.
        patches: see `patch`. Intermediates are captured after their patch.

    Returns:
        Logits (T, V) in float32, and the intermediates by name, in the order of the computation.
        With ids (B, T), every array has a first axis B.

    Raises:
        UserError: if a name is unknown, no layer reads a patched intermediate, or the ids do not
            fit the model.
    """
    c = run.config.model
    functions = {}
    arrays = {}
    for pattern, value in (patches or {}).items():
        for name in _matches(pattern, c):
            if name in _unread(c):
                raise UserError(
                    f"{name}: a patch has no effect, because no layer reads it; patch for example "
                    f"layers/0/ffn/output or {applied_layers(run)[-1]}/residual"
                )
            if callable(value):
                # A partial object is a new static argument: a function may depend on a variable
                # that has changed.
                functions[name] = functools.partial(value)
            else:
                arrays[name] = jnp.asarray(value)
    patterns = [names] if isinstance(names, str) else names
    wanted = frozenset(itertools.chain.from_iterable(_matches(pattern, c) for pattern in patterns))
    static = {"c": c, "wanted": wanted, "functions": tuple(functions.items())}
    logits_TV, acts = _capture(run.params, _token_ids(run, ids), arrays, **static)
    return logits_TV, {name: acts[name] for name in _axes(c) if name in acts}  # jit sorts the names


def patch(run: TrainedModel, ids, patches: Mapping[str, jax.Array | Callable]) -> jax.Array:
    """Return the logits of a text with some intermediates replaced.

    Args:
        run, ids: see `capture`.
        patches: what replaces an intermediate, by name or pattern: an array, which is broadcast to
            its shape, or a function of it. The functions `lambda x: 0 * x` and `lambda x: x + v`
            ablate it and add v to it.

    Raises:
        UserError: if a name is unknown, a patch has the wrong shape or no effect, or the ids do not
            fit the model.
    """
    return capture(run, ids, (), patches)[0]


def logit_lens(run: TrainedModel, residual_TD) -> jax.Array:
    """Return the logits (T, V) of a residual stream, as if it were the last layer's output.

    This applies the final norm and the output head (nostalgebraist 2020, "interpreting GPT: the
    logit lens"), for example to the intermediate "layers/0/residual".
    """
    # the output of the last layer is replaced for all tokens
    ids_T = jnp.zeros(residual_TD.shape[:-1], jnp.int32)
    return patch(run, ids_T, {f"{applied_layers(run)[-1]}/residual": residual_TD})


def applied_layers(run: TrainedModel) -> list[str]:
    """Return the names of the layers in the order in which they are applied.

    They are "layers/0", "layers/1", ..., and in later turns of a loop "turns/1/layers/0".
    """
    end = "/residual"
    return [name.removesuffix(end) for name in names(run) if name.endswith(end)]


def names(run: TrainedModel) -> dict[str, str]:
    """Return the names of all intermediates, in the order of the computation, and their axes.

    The letters are those of lm/layers/__init__.py; "" stands for unknown axes.
    """
    return dict(_axes(run.config.model))


@functools.partial(jax.jit, static_argnames=("c", "wanted", "functions"))
def _capture(
    params, ids_T, arrays: dict, *, c: ResolvedModel, wanted: frozenset[str], functions: tuple
):
    """Return what `capture` returns; patches are arrays by name, and pairs of name and function."""
    acts = {}
    patches = arrays | dict(functions)
    touched = wanted | patches.keys()

    def tap(name, x):
        if name in patches:
            new = patches[name]
            if callable(new):
                new = new(x)
            try:
                x = jnp.broadcast_to(jnp.asarray(new, x.dtype), x.shape)
            except ValueError:
                raise UserError(
                    f"{name}: the patch has shape {jnp.shape(new)}; expected {x.shape}"
                ) from None
        if name in wanted:
            acts[name] = x
        return x

    def materializes(name):
        return not touched.isdisjoint({f"{name}/scores", f"{name}/weights"})

    return _forward(params, c, ids_T, tap, materializes), acts


def _forward(params: dict, c: ResolvedModel, ids_T, tap: Callable, materializes: Callable):
    """Return the logits of an unrolled model.

    tap(name, x) returns what takes the place of an intermediate. materializes(name): whether the
    attention of this name computes its scores and weights.
    """

    def hook(here, name, x):
        return tap(here.named(name), x)

    @flax.struct.dataclass
    class Tapped(Past):
        def observed(self, here, q_THK, k_SGK, mask, options):
            return options | {"tap": here.tap} if materializes(here.path) else options

    c = dataclasses.replace(c, scan_layers=False, remat="none")
    h_TD = model.hidden(params, c, ids_T, past=Tapped(), tap=hook)
    return tap("logits", head_logits(h_TD, model.head(params, c)))


@functools.lru_cache
def _axes(c: ResolvedModel) -> dict[str, str]:
    """Return the names of all intermediates and their axes, by tracing the model."""
    axes = {}

    def tap(name, x):
        if name in axes:
            raise ValueError(f"two intermediates have the name {name}; rename one")
        axes[name] = AXES.get(name.rpartition("/")[2], "")
        return x

    jax.eval_shape(lambda params: _trace(params, c, tap), _shapes(c))
    return axes


def _trace(params, c: ResolvedModel, tap: Callable):
    """Return the logits of two tokens, with scores and weights of attention."""
    return _forward(params, c, jnp.zeros(2, jnp.int32), tap, lambda name: True)


def _shapes(c: ResolvedModel) -> dict:
    """Return the shapes of the parameters, nested."""
    shapes = {}
    for path, p in parameters.parameter_table(c).items():
        shapes[path] = jax.ShapeDtypeStruct(p.shape, c.param_dtype)
    return parameters.nest(shapes)


@functools.lru_cache
def _unread(c: ResolvedModel) -> frozenset[str]:
    """Return the names of the intermediates that the logits do not depend on, by tracing the model."""
    names = sorted(_axes(c))  # JAX flattens the dict of `added` in this order

    def changed(added: dict, params):
        return _trace(params, c, lambda name, x: x + added[name].astype(x.dtype))

    scalars = dict.fromkeys(names, jax.ShapeDtypeStruct((), np.float32))
    program = jax.make_jaxpr(changed)(scalars, _shapes(c))
    _, reads = dce_jaxpr(program.jaxpr, [True])
    return frozenset(name for name, is_read in zip(names, reads, strict=False) if not is_read)


def _matches(pattern: str, c: ResolvedModel) -> list[str]:
    """Return the names of the intermediates that match a pattern; raises UserError if none does."""
    if matching := fnmatch.filter(_axes(c), pattern):
        return matching
    known = dict.fromkeys(re.sub(r"(layers|turns)/\d+", r"\1/*", name) for name in _axes(c))
    close = close_match(pattern, [*_axes(c), *known])
    raise UserError(
        f"{pattern}: the model has no intermediate of this name{close}",
        f"available (* is a layer, 0 to {c.n_layers - 1}): {', '.join(known)}",
    )


def _token_ids(run: TrainedModel, ids) -> jax.Array:
    """Return token ids (T,) or (B, T), checked (traced ones not against the vocabulary)."""
    if isinstance(ids, str):
        ids = run.encode(ids)
    elif not isinstance(ids, jax.core.Tracer):
        ids = np.asarray(ids)
        run.encode(ids.ravel())  # checks the range
    if ids.ndim not in (1, 2) or not 0 < ids.shape[-1] <= run.seq_len:
        raise UserError(
            f"ids: shape {ids.shape}; expected (T,) or (B, T) with T from 1 to {run.seq_len}"
        )
    return jnp.asarray(ids, jnp.int32)
