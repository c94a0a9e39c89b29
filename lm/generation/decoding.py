"""Generate tokens: prefill the prompts, then decode one at a time with a cache.

A model sees at most seq_len tokens, the length of its training windows. If a text is longer, the
window slides by half its length: it starts at a multiple of seq_len / 2, and is prefilled again at
positions from 0. Positions are therefore used as in training, and the model sees at least the last
seq_len / 2 tokens.

The random key of a token depends on the seed, the index of its sample and the index of the token.
It does not depend on the other texts of the batch.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from lm import layer_stack, model, parameters
from lm.config import Resolved, ResolvedModel
from lm.generation.filters import Sampling, draw
from lm.generation.kv_cache import Prefill, decode
from lm.generation.log_probabilities import padded
from lm.ideas import masked_diffusion
from lm.layers.losses import head_logits
from lm.parallel.sharding import replicate_inside
from lm.past import OwnPosition, Past
from lm.system.errors import UserError

_static = functools.partial(flax.struct.field, pytree_node=False)


@flax.struct.dataclass
class State:
    """The state of decoding between two tokens."""

    cache: dict  # keys and values of each layer
    time: jax.Array  # number of cached tokens of the longest text
    starts_B: jax.Array  # the time of the first token of each text
    tokens_B: jax.Array  # the newest token of each text, not yet in the cache
    n_drawn: jax.Array  # number of tokens drawn for each text


@flax.struct.dataclass
class Decoder:
    """A model prepared for generation by `make_decoder`."""

    params: dict  # unstacked, in the dtype of computation
    config: ResolvedModel = _static()
    seq_len: int = _static()  # the length of the context
    # only ids below are drawn: config.model.vocab_size can exceed that of the tokenizer
    n_ids: int = _static()

    def generate(
        self, prompts: Sequence, n_tokens: int, sampling: Sampling, **options
    ) -> np.ndarray:
        """Return n_tokens ids for each prompt, int32 (B, n_tokens). Arguments as for `stream`."""
        return np.concatenate(list(self.stream(prompts, n_tokens, sampling, **options)), axis=1)

    def stream(
        self,
        prompts: Sequence,
        n_tokens: int,
        sampling: Sampling,
        *,
        seed: int = 0,
        samples=None,
        every: int = 2**30,
    ) -> Iterator[np.ndarray]:
        """Yield n_tokens ids for each prompt, in arrays int32 (B, n) with n at most `every`.

        Args:
            prompts: sequences of at least one id each, of any lengths.
            n_tokens: number of ids to draw for each prompt.
            samples: sample indices (B,), which give equal prompts different texts; None: all 0.
            every: number of ids to draw between two yields.

        Raises:
            ValueError: if a prompt is empty.
            UserError: if the logits of a token are not finite.
        """
        if not all(len(prompt) for prompt in prompts):
            raise ValueError(
                "generate: a prompt is empty; a model needs at least one token to continue"
            )
        texts = [list(prompt) for prompt in prompts]
        n_slots = min(padded(max(map(len, texts)) + n_tokens - 1), self.seq_len)
        if samples is None:
            samples = np.zeros(len(texts))
        draws = (sampling, np.uint32(seed), np.asarray(samples, np.uint32))
        n_drawn = 0
        while n_drawn < n_tokens:
            prompts_BT, lengths_B = self._windows(texts)
            state = _prefill(self, prompts_BT, lengths_B, np.int32(n_drawn), draws, n_slots=n_slots)
            ids_BT = np.asarray(state.tokens_B)[:, None]
            # Decode until the longest text fills the cache.
            n_more = min(n_tokens - n_drawn - 1, self.seq_len - max(lengths_B))
            while True:
                check_finite(ids_BT)
                n_drawn += ids_BT.shape[1]
                for text, ids in zip(texts, ids_BT.tolist(), strict=True):
                    text.extend(ids)
                yield ids_BT
                if not n_more:
                    break
                n = min(n_more, every)
                state, ids_BT = _decode(self, state, np.int32(n), draws)
                ids_BT = np.asarray(ids_BT)[:, :n]
                n_more -= n

    def _windows(self, texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the window of each text that the model sees, padded, and the lengths."""
        half = max(1, self.seq_len // 2)
        visible = []
        for text in texts:
            n_halves = -(-max(0, len(text) - self.seq_len) // half)
            visible.append(text[n_halves * half :])
        lengths_B = np.array([len(ids) for ids in visible], np.int32)
        prompts_BT = np.zeros((len(texts), min(padded(max(lengths_B)), self.seq_len)), np.int32)
        for row, ids in zip(prompts_BT, visible, strict=True):
            row[: len(ids)] = ids
        return prompts_BT, lengths_B


def check_finite(ids_BT) -> None:
    """Raise UserError if a token could not be drawn."""
    if (ids_BT < 0).any():
        raise UserError(
            "the model's logits are not finite: its weights are NaN, infinite or too large; use "
            "the checkpoint of an earlier step (--step N)"
        )


class CachedText:
    """One text that grows by given and by drawn tokens; the model reads each of them once.

    Attributes:
        ids: the tokens so far. Tokens may be appended, and the last one, if it was just drawn, may
            be removed.
    """

    def __init__(self, decoder: Decoder, ids: Sequence[int], sampling: Sampling, seed: int = 0):
        self.decoder = decoder
        self.ids = list(ids)
        self._draws = sampling, np.uint32(seed), np.zeros(1, np.uint32)
        self._state: State | None = None
        self._n_read = 0  # tokens in the cache

    @property
    def is_full(self) -> bool:
        """Return whether the model cannot see all tokens, so that none can be drawn."""
        return len(self.ids) > self.decoder.seq_len

    def draw(self) -> int:
        """Draw the next token, append it, and return it. Raises ValueError if the text is full."""
        if self.is_full:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, and the model sees {self.decoder.seq_len}"
            )
        if self._state is None:
            prompt = self.decoder._windows([self.ids])
            n_slots = self.decoder.seq_len
            self._state = _prefill(self.decoder, *prompt, np.int32(0), self._draws, n_slots=n_slots)
        else:
            # of one shape, for one compiled program
            new_T = np.zeros(self.decoder.seq_len, np.int32)
            new = self.ids[self._n_read :]
            new_T[: len(new)] = new
            state = _read(self.decoder, self._state, new_T, np.int32(len(new)))
            self._state, _ = _decode(self.decoder, state, np.int32(1), self._draws)
        self._n_read = len(self.ids)
        token_B = np.asarray(self._state.tokens_B)
        check_finite(token_B)
        self.ids.append(int(token_B[0]))
        return self.ids[-1]


def make_decoder(
    params: dict, c: ResolvedModel, *, seq_len: int, n_ids: int | None = None
) -> Decoder:
    """Prepare a model for generation: unstack and cast its parameters once, not for each token.

    The context has seq_len tokens. Only ids below n_ids are drawn; None: all of the vocabulary.
    Raises UserError if the model mixes positions in a way that has no cache.
    """
    masked_diffusion.refuse(c, "a cache of earlier tokens")
    c = generating(c)
    params = unstacked(params, c)
    _check_positions(params, c, seq_len)
    return Decoder(params, c, seq_len, n_ids or c.vocab_size)


def abstract_programs(params: dict, config: Resolved, n_texts: int) -> dict[str, tuple]:
    """Return the programs that generate n_texts texts of full context, with their arguments.

    `params` are the shapes and dtypes of the parameters.

    Returns:
        {"prefill" or "decode": (a jitted function, its arguments, its static arguments)}.
    """
    masked_diffusion.refuse(config.model, "a plan of decoding")
    c = generating(config.model)
    T = config.train.seq_len
    decoder = Decoder(jax.eval_shape(functools.partial(unstacked, c=c), params), c, T, c.vocab_size)
    array = jax.ShapeDtypeStruct
    sampling = Sampling(array((), np.float32))  # type: ignore[arg-type]
    draws = (sampling, array((), np.uint32), array((n_texts,), np.uint32))
    prompts_BT = array((n_texts, T), np.int32)
    lengths_B = array((n_texts,), np.int32)
    n = array((), np.int32)
    prefill = (decoder, prompts_BT, lengths_B, n, draws)
    state = jax.eval_shape(functools.partial(_prefill, n_slots=T), *prefill)
    return {
        "prefill": (_prefill, prefill, {"n_slots": T}),
        "decode": (_decode, (decoder, state, n, draws), {}),
    }


def generating(c: ResolvedModel) -> ResolvedModel:
    """Return the config of a model that generates."""
    return dataclasses.replace(c, scan_layers=False, remat="none", dropout=0.0, attention="auto")


@functools.partial(jax.jit, static_argnames="c")
def unstacked(params: dict, c: ResolvedModel) -> dict:
    """Return the parameters layer by layer, in the dtype of computation."""
    table = parameters.parameter_table(c)
    flat = parameters.flat(params)
    for path, x in flat.items():
        if not table[path].small:
            flat[path] = x.astype(c.compute_dtype)
    return layer_stack.split_layers(parameters.nest(flat), c, model.block_table(c))


def _check_positions(params: dict, c: ResolvedModel, seq_len: int) -> None:
    """Raise UserError if positions see each other, or where they are, in a way that has no cache.

    Generation would be wrong in silence.
    """
    n = min(seq_len, 64)
    tokens_T = np.arange(n) % c.vocab_size
    positions_T = np.arange(n)
    # looks back or ahead see changes at the ends
    same_T = ~np.isin(positions_T, (0, n - 1))
    changed_T = np.where(same_T, tokens_T, (tokens_T + 1) % c.vocab_size)
    one, changed, reversed_ = (
        np.asarray(_alone(params, tokens[None], positions, c=c))[0]
        for tokens, positions in (
            (tokens_T, positions_T),
            (changed_T, positions_T),
            (tokens_T[::-1], positions_T[::-1]),
        )
    )
    if not np.array_equal(one[same_T], changed[same_T], equal_nan=True):
        raise UserError(
            "config.model: positions see each other outside of attention, here.earlier, here.last, "
            "here.running_sum and here.recurrence, so the model has no cache to generate with; use "
            "one of these (docs/changing-the-model.md)"
        )
    # Rounding may depend on the place in the array.
    error = np.abs(one - reversed_[::-1]).max()
    if error > 0.05 * np.abs(one).max():
        raise UserError(
            "config.model: what a token gives depends on its place in the array of tokens, so it "
            "would differ in generation; use here.positions (docs/changing-the-model.md)"
        )


@functools.partial(jax.jit, static_argnames="c")
def _alone(params: dict, tokens_BT, positions_T, c: ResolvedModel):
    """Return the last hidden states of all positions, if each sees itself only."""
    h_BTD = model.hidden(params, c, tokens_BT, past=OwnPosition(positions_T))
    return replicate_inside(h_BTD.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="n_slots")
def _prefill(decoder: Decoder, prompts_BT, lengths_B, n_drawn, draws, *, n_slots: int) -> State:
    """Run the model on the prompts, fill a cache of n_slots, and draw each text's first token."""
    h_BTD, cache = _apply(decoder, {}, prompts_BT, Prefill(lengths_B=lengths_B, n_slots=n_slots))
    h_BD = jnp.take_along_axis(h_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    time = jnp.max(lengths_B)
    return State(
        cache, time, time - lengths_B, draw_tokens(decoder, h_BD, n_drawn, draws), n_drawn + 1
    )


@functools.partial(jax.jit, donate_argnames="state")
def _decode(decoder: Decoder, state: State, n_tokens, draws) -> tuple[State, jax.Array]:
    """Draw n_tokens (traced) more of each text, in the first columns of an array (B, seq_len)."""

    def step(i, carry):
        state, ids_BT = carry
        past = decode(state.time, state.starts_B)
        h_B1D, cache = _apply(decoder, state.cache, state.tokens_B[:, None], past)
        tokens_B = draw_tokens(decoder, h_B1D[:, 0], state.n_drawn, draws)
        state = State(cache, state.time + 1, state.starts_B, tokens_B, state.n_drawn + 1)
        return state, jax.lax.dynamic_update_slice_in_dim(ids_BT, tokens_B[:, None], i, axis=1)

    ids_BT = jnp.zeros((len(state.tokens_B), decoder.seq_len), jnp.int32)
    return jax.lax.fori_loop(0, n_tokens, step, (state, ids_BT))


@functools.partial(jax.jit, donate_argnames="state")
def _read(decoder: Decoder, state: State, tokens_T, n_tokens) -> State:
    """Put the first n_tokens - 1 (traced) given tokens of a text into the cache."""

    def step(i, state):
        token_11 = jax.lax.dynamic_slice_in_dim(tokens_T, i, 1)[None]
        _, cache = _apply(decoder, state.cache, token_11, decode(state.time, state.starts_B))
        return dataclasses.replace(state, cache=cache, time=state.time + 1)

    state = jax.lax.fori_loop(0, n_tokens - 1, step, state)
    newest_B = jax.lax.dynamic_slice_in_dim(tokens_T, n_tokens - 1, 1)
    return dataclasses.replace(state, tokens_B=newest_B)


def _apply(decoder: Decoder, cache: dict, tokens_BT, past: Past):
    """Return the last hidden states (B, T, D) and the new cache."""
    memory = dict(cache)
    h_BTD = model.hidden(decoder.params, decoder.config, tokens_BT, past=past, memory=memory)
    return h_BTD, memory


def draw_tokens(decoder: Decoder, h_BD, n_drawn, draws):
    """Draw one token per text, int32 (B,), with a key from seed, sample index and token index.

    It is -1 if the largest logit is not finite.
    """
    sampling, seed, samples_B = draws
    logits_BV = head_logits(h_BD, model.head(decoder.params, decoder.config))[:, : decoder.n_ids]
    key = jax.random.key(seed)

    def key_of(sample):
        return jax.random.fold_in(jax.random.fold_in(key, sample), n_drawn)

    keys_B = jax.vmap(key_of)(samples_B)
    is_finite_B = jnp.isfinite(jnp.max(logits_BV, axis=-1))
    return replicate_inside(jnp.where(is_finite_B, draw(keys_B, logits_BV, sampling), -1))
