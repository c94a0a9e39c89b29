"""Encodings of token positions: rotary (RoPE) and sinusoidal, for any given integer positions."""

import functools
import math

import jax.numpy as jnp


def _neighbors(x):
    return x[..., 0::2], x[..., 1::2]


def _halves(x):
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


# How the features of all pairs are taken apart, and joined again.
PAIRINGS = {
    "adjacent": (_neighbors, functools.partial(jnp.stack, axis=-1)),
    "halves": (_halves, functools.partial(jnp.concatenate, axis=-1)),
}
SINUSOID_ORDERS = {"sine_first": 1, "cosine_first": -1}


def llama3(frequencies, *, factor, low_freq_factor, high_freq_factor, original_max_positions, **_):
    """Divide low frequencies by `factor`, as Llama 3.1 does (Grattafiori et al. 2024).

    A frequency that makes n turns in the original context is divided if n is at most
    low_freq_factor, unchanged if it is at least high_freq_factor, and interpolated in between.

    >>> factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 100}
    >>> frequencies = 2 * jnp.pi * jnp.array([0.5, 2.5, 4.0]) / 100  # half a turn, 2.5 and 4 turns in 100 positions
    >>> llama3(frequencies, **factors) / frequencies
    Array([0.125 , 0.5625, 1.    ], dtype=float32)
    """
    turns = original_max_positions * frequencies / (2 * jnp.pi)
    unchanged = jnp.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return frequencies * (unchanged + (1 - unchanged) / factor)


def yarn(frequencies, *, theta, factor, original_max_positions, beta_fast, beta_slow, **_):
    """Divide low frequencies by `factor`, as YaRN does (Peng et al. 2023, arXiv:2309.00071).

    Of d features, pair k = d ln(L / 2 pi n) / (2 ln theta) makes n turns in the original context L.
    The pairs before that of beta_fast turns, rounded down, are unchanged, those after that of
    beta_slow turns, rounded up, are divided, and those in between are interpolated.

    >>> frequencies = 100.0 ** (-jnp.arange(0, 8, 2) / 8)  # pairs 0.6 and 2.8 make 8 and 0.65 turns in 100 positions
    >>> factors = {"theta": 100.0, "factor": 4.0, "original_max_positions": 100, "beta_fast": 8.0, "beta_slow": 0.65}
    >>> (yarn(frequencies, **factors) / frequencies).round(2)
    Array([1.  , 0.75, 0.5 , 0.25], dtype=float32)
    """
    width = 2 * frequencies.shape[-1]

    def pair_of(turns):
        L = original_max_positions
        return width * math.log(L / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), width - 1)
    length = (high - low) or 0.001  # as in the authors' code, which so avoids a division by 0
    divided = jnp.clip((jnp.arange(width // 2) - low) / length, 0, 1)
    return frequencies * (1 - divided + divided / factor)


def dynamic(frequencies, *, factor, max_positions, original_max_positions, **_):
    """Raise the base for a context longer than the original one: NTK-aware scaling (bloc97 2023).

    The base is multiplied by s^(d / (d - 2)) for d features, s = factor L / L_0 - (factor - 1). L
    and L_0 are the numbers of positions of both contexts, L >= L_0. The longest wavelengths grow by
    s and the shortest ones stay. transformers takes the length of each text for L, which would make
    a cache of keys wrong.

    >>> frequencies = 100.0 ** (-jnp.arange(0, 6, 2) / 6)
    >>> longer = dynamic(frequencies, factor=2.0, max_positions=200, original_max_positions=100)  # s = 3
    >>> (longer / frequencies).round(3)
    Array([1.   , 0.577, 0.333], dtype=float32)
    """
    n = frequencies.shape[-1]
    longest = max(max_positions, original_max_positions)
    stretch = factor * longest / original_max_positions - (factor - 1)
    return frequencies * stretch ** (-jnp.arange(n) / max(n - 1, 1))


# Frequencies for a longer context than the model was trained with: (frequencies, **factors) ->
# frequencies.
ROPE_SCALINGS = {
    "none": lambda f, **_: f,
    "linear": lambda f, factor, **_: f / factor,
    "llama3": llama3,
    "yarn": yarn,
    "dynamic": dynamic,
}


def rope_table(positions, d_head, *, theta=10000.0, scaling="none", amplitude=None, **factors):
    """Return cos and sin of position * theta^(-2k / d_head) (Su et al. 2021, arXiv:2104.09864).

    k = 0 .. d_head/2 - 1 is a pair of features.

    Args:
        positions: integers (..., T), starting anywhere.
        d_head: width of a head, or of the part of it that is rotated.
        theta: base of the wavelengths, which grow from 2 pi to almost 2 pi theta positions.
        scaling, factors: a key of ROPE_SCALINGS, applied to the frequencies theta^(-2k / d_head),
            and its arguments.
        amplitude: yarn: factor of cos and sin, which multiplies scores by its square; None: 0.1
            ln(factor) + 1.

    Returns:
        Two float32 arrays (..., T, d_head / 2).

    Raises:
        ValueError: `d_head` is odd, or `positions` are not integers.

    >>> cos, sin = rope_table(jnp.array([0, 1]), 4)
    >>> cos.round(3)
    Array([[1.  , 1.  ],
           [0.54, 1.  ]], dtype=float32)
    """
    scaled = functools.partial(ROPE_SCALINGS[scaling], theta=theta, **factors)
    angles = _angles(positions, d_head, theta, "rope_table: d_head", scaled)
    if scaling != "yarn":
        return jnp.cos(angles), jnp.sin(angles)
    if amplitude is None:
        amplitude = 0.1 * math.log(factors["factor"]) + 1
    return amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)


def apply_rope(x, cos, sin, *, pairing="adjacent"):
    """Rotate pairs of features by the angle of their position, in float32 (Su et al. 2021, eq. 34).

    Args:
        x: queries or keys (..., T, H, K).
        cos, sin: (..., T, R / 2) from `rope_table`, the same for all heads. Only the first R <= K
            features are rotated.
        pairing: which features form pair k: "adjacent" (2k, 2k + 1) as in the paper, "halves" (k, k
            + R/2) as in Hugging Face's Llama. They are equal up to a permutation of the features of
            w_q and w_k.

    Returns:
        The shape and dtype of `x`.

    >>> x_THK = jnp.array([[[1.0, 0.0]], [[1.0, 0.0]]])
    >>> apply_rope(x_THK, *rope_table(jnp.array([0, 1]), 2))[:, 0].round(3)  # position 1 is rotated by 1 radian
    Array([[1.   , 0.   ],
           [0.54 , 0.841]], dtype=float32)
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        rotated = apply_rope(x[..., :width], cos, sin, pairing=pairing)
        return jnp.concatenate([rotated, x[..., width:]], axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    split, join = PAIRINGS[pairing]
    first, second = split(x)
    rotated = first * cos - second * sin, first * sin + second * cos
    return join(rotated).reshape(x.shape).astype(x.dtype)


def sinusoidal(positions, d_model, *, order="sine_first"):
    """Return position embeddings: pair k has sin and cos of position * 10000^(-2k / d_model).

    Args:
        positions: integers (..., T).
        d_model: width of the embeddings.
        order: "sine_first" interleaves sin, cos (Vaswani et al. 2017, arXiv:1706.03762, section
            3.5), "cosine_first" cos, sin.

    Returns:
        float32 (..., T, d_model).

    Raises:
        ValueError: `d_model` is odd, or `positions` are not integers.

    >>> sinusoidal(jnp.array([0, 1]), 2).round(3)
    Array([[0.   , 1.   ],
           [0.841, 0.54 ]], dtype=float32)
    """
    angles = _angles(positions, d_model, 10000.0, "sinusoidal: d_model")
    pair = (jnp.sin(angles), jnp.cos(angles))[:: SINUSOID_ORDERS[order]]
    return jnp.stack(pair, axis=-1).reshape(*angles.shape[:-1], d_model)


def _angles(positions, width, theta, name, scaling=lambda f: f):
    if width % 2:
        raise ValueError(f"{name} is {width}; features are paired, so it must be even")
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions are {positions.dtype}; expected integers")
    frequencies = scaling(theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width))
    return positions[..., None].astype(jnp.float32) * frequencies
