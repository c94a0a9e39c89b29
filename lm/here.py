"""`here`: where an equation of the model is applied, the one environment of layers and ideas."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from lm.config import ResolvedModel, layer_windows, looped_layers
from lm.declarations import Table
from lm.layers.attention import UNLIMITED
from lm.layers.dropout import dropout
from lm.parallel import collectives
from lm.past import Past, last_vectors, running_sums, scan
from lm.system.errors import UserError


def unchanged(here, name: str, x):
    """Return x: the hook of a model that nobody observes."""
    return x


class Here(flax.struct.PyTreeNode):
    """Where an equation of the model is applied.

    An idea uses `c`, `p`, `x_BTD`, `layer`, `depth`, `stream`, `tokens_BT`, `positions`, `segments`,
    and the functions `tap`, `window`, `earlier`, `last`, `running_sum` and `recurrence`.

    Attributes:
        c: the model section of the config.
        tokens_BT: the token ids.
        past: how positions see earlier ones.
        rotation, window_rotation: cos and sin for queries and keys, and those of layers with a
            window; None: no rotation, and the same rotation.
        dropout_keys_B: one key for each example; None: no dropout.
        hook: called as hook(here, name, x) by `tap`.
        windows: the attention window of each layer; None: no window.
        p: the parameters by name of the module ("attention", "ffn", the block or the model).
        x_BTD: the input of the module, after its norm.
        layer: the number of the layer, traced under a scan; None outside of the blocks.
        prototype: the number of the layer whose program is traced: `layer`, or under a scan the
            first of the layers that share it. It is a Python number, so code may branch on it.
        turn: the number of the turn in which looped layers are applied, from 0.
        path: "", "layers/2", "layers/2/attention" or "layers/2/ffn", with the number `prototype`.
            After the first turn "turns/1/" and so on stands before it.
        stream: what goes from layer to layer, arrays by name: "x", the residual stream, and what
            ideas carry. The block owns it while it is traced, so ideas write to it.
        memory: what a layer keeps beside its output, arrays by path and name: the cache of
            decoding, or what a hook measures.
    """

    tokens_BT: Any
    past: Past
    rotation: tuple[jax.Array, jax.Array] | None = None
    window_rotation: tuple[jax.Array, jax.Array] | None = None
    dropout_keys_B: jax.Array | None = None
    p: Any = None
    x_BTD: Any = None
    layer: Any = None
    stream: Any = None
    memory: Any = None
    c: ResolvedModel = flax.struct.field(pytree_node=False, default=None)
    hook: Callable = flax.struct.field(pytree_node=False, default=unchanged)
    windows: tuple = flax.struct.field(pytree_node=False, default=())
    prototype: int = flax.struct.field(pytree_node=False, default=0)
    turn: int = flax.struct.field(pytree_node=False, default=0)
    path: str = flax.struct.field(pytree_node=False, default="")

    @property
    def positions(self):
        """The position of each token in its document, integers (T,) or (B, T)."""
        self._has_texts("positions")
        if self.past.positions is not None:
            return self.past.positions
        return collectives.local_positions(self.tokens_BT.shape[-1])

    @property
    def segments(self):
        """The document of each token, integers (B, T), 0 for padding; None: one document."""
        return self.past.segments

    @property
    def depth(self):
        """The number of layers that were applied before this one, which loops apply again."""
        return self.layer + self.turn * len(looped_layers(self.c))

    def named(self, name: str) -> str:
        """Return the full name of something in this module, such as "layers/2/attention/q"."""
        return f"{self.path}/{name}" if self.path else name

    def inside(self, module: str, p: Table, x_BTD) -> "Here":
        """Return the environment in a module of this one. It has the parameters of both."""
        return self.replace(p=p.with_outer(self.p), x_BTD=x_BTD, path=self.named(module))

    def keep(self, name: str, x) -> None:
        """Write to the memory of the layer."""
        self.memory[self.named(name)] = x

    def kept(self, name: str):
        """Read from the memory of the layer."""
        return self.memory[self.named(name)]

    def tap(self, name: str, x):
        """Return an intermediate, or what an observer (lm/interpret) puts in its place."""
        return self.hook(self, name, x)

    def earlier(self, name: str, x_BT, *, window=None):
        """Return an array of all positions that these may see, and which of them each one sees.

        Training and prefill see a whole text, decoding the new token and the cache.

        Args:
            name: the name of its cache, unique in the module.
            x_BT: an array (B, T, C) or (B, T, G, K).
            window: see `Mask`; `here.window()` is that of the layer. A cache keeps as many.

        Returns:
            The array (B, S, ...), and a `Mask` of lm/layers/attention.py; mask.visible() is bool
            (..., T, S).
        """
        self._has_texts(name)
        return self.past.earlier(self, name, x_BT, window)

    def last(self, name: str, x_BTC, n: int):
        """Return the last n vectors up to each position, oldest first: (B, T, n, C).

        They are 0 before the start of a document. `name` is unique in the module.
        """
        T, C = x_BTC.shape[-2:]
        return self.recurrence(name, last_vectors, jnp.zeros((n - 1, C), x_BTC.dtype), x_BTC, T)

    def running_sum(self, name: str, x_BTC):
        """Return the sum of a document up to each position, (B, T, C). `name` as for `last`."""
        T, C = x_BTC.shape[-2:]
        return self.recurrence(name, running_sums, jnp.zeros(C, x_BTC.dtype), x_BTC, T)

    def recurrence(self, name: str, chunk: Callable, state, inputs, size: int):
        """Return the outputs (B, T, ...) of a recurrence over the positions of each document.

        Training and prefill call `chunk` for `size` positions at a time, decoding for one. Padding
        does not reach a state.

        Args:
            name: the name of the state in the cache, unique in the module.
            chunk: (state, inputs of C positions of one text, document_C) -> (state after the last
                position, outputs of C positions), for any C. Numbers in document_C ascend.
                Positions with 0 continue the document of the state. Others see positions of their
                own number only, and start from the state before a document.
            state: the state before the first token of a document, a tree of arrays without B.
            inputs: a tree of arrays (B, T, ...).
            size: positions of a chunk.

        >>> def total(state, x_C, document_C):
        ...     same = jnp.tri(len(x_C), dtype=bool) & (document_C[:, None] == document_C)
        ...     sum_C = jnp.where(document_C == 0, state, 0) + same @ x_C
        ...     return sum_C[-1], sum_C
        >>> x_BT, segments_BT = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0]]), jnp.array([[1, 1, 1, 2, 2]])
        >>> Here(segments_BT, Past(segments=segments_BT)).recurrence("x", total, 0.0, x_BT, size=2)
        Array([[ 1.,  3.,  7.,  8., 24.]], dtype=float32)
        """
        self._has_texts(name)
        shape_B = self.tokens_BT.shape[:-1]
        run = functools.partial(scan, chunk, size)
        for _ in shape_B:
            run = jax.vmap(run)
        state_B = jax.tree.map(lambda x: jnp.broadcast_to(x, shape_B + jnp.shape(x)), state)
        return self.past.recurrence(self, name, run, state_B, inputs)

    def _has_texts(self, name: str) -> None:
        """Raise UserError at the site "logits", where some tokens of any texts come together."""
        if self.tokens_BT is None:
            raise UserError(
                f"{name}: the site logits sees some tokens at a time, without their positions and "
                "texts; use the site last_residual"
            )

    def dropout(self, x_BTD, place: int):
        """Apply dropout at a numbered place of the model; each example draws from its own key."""
        if self.dropout_keys_B is None or self.c.dropout == 0:
            return x_BTD
        keys_B = jax.vmap(lambda key: jax.random.fold_in(key, place))(self.dropout_keys_B)
        return dropout(x_BTD, keys_B, self.c.dropout)

    def window(self):
        """Return the window of the layer; None: no window.

        Traced layers have a static one if all are equal, as fused kernels need.
        """
        if isinstance(self.layer, int):
            return self.windows[self.layer]
        if len(set(self.windows)) == 1:
            return self.windows[0]
        return jnp.asarray([window or UNLIMITED for window in self.windows])[self.layer]

    def rotation_of_layer(self):
        """Return cos and sin of the layer, 1 and 0 where it does not rotate; None: no rotation."""
        rotation, pattern = self.rotation, self.c.rope_pattern
        if self.window_rotation is not None:
            windowed = jnp.asarray(layer_windows(self.c), bool)[self.layer]
            rotation = jax.tree.map(
                lambda a, b: jnp.where(windowed, a, b), self.window_rotation, rotation
            )
        if rotation is None or all(pattern):
            return rotation
        cos, sin = rotation
        rotates = jnp.asarray(pattern, bool)[self.layer % len(pattern)]
        return jnp.where(rotates, cos, 1), jnp.where(rotates, sin, 0)
