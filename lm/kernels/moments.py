"""Mean and sum of squared deviations over the last axis, in two passes over the features or one.

The algorithms take x (..., D) in float32 or wider and a block size, and return the mean (..., 1)
and the sum of squared deviations (..., 1). None uses E[x^2] - E[x]^2, which cancels: in float32
with an offset of 1000 and unit variance it is off by up to 29 % (2000 rows of 768), and can be
negative. LayerNorm (lm/layers/layer_norms.py) chooses between them.
"""

import jax
import jax.numpy as jnp


def two_pass(x, block_size):
    """Take the mean first, then the squared deviations from it (the definition).

    The mean is off by its own rounding, eps |mean|, so the relative error of the variance is about
    (eps mean / sigma)^2.

    >>> [float(moment[0]) for moment in two_pass(jnp.array([1.0, 2.0, 6.0]), 32)]
    [3.0, 14.0]
    """
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean, jnp.sum(jnp.square(x - mean), axis=-1, keepdims=True)


def welford(x, block_size):
    """Evaluate the exact one-pass recurrence (Welford 1962, Technometrics 4:419) without its loop.

    The recurrence adds (x_i - m_(i-1)) (x_i - m_i) for feature i, where m_i is the mean of the
    first i features. As x_i - m_(i-1) = i/(i-1) (x_i - m_i), the i-th increment is i/(i-1) (x_i -
    m_i)^2 (0 for i = 1), and all m_i follow from one running sum. All increments are positive, so
    nothing cancels. For the rounding see `_running_means`.

    >>> [round(float(moment[0]), 4) for moment in welford(jnp.array([1.0, 2.0, 6.0]), 32)]
    [3.0, 14.0]
    """
    shift, x, running_mean, i = _running_means(x, block_size)
    weights = i / jnp.maximum(i - 1, 1)  # at i = 1 the deviation is 0, so any weight will do
    total = jnp.sum(weights * jnp.square(x - running_mean), axis=-1, keepdims=True)
    return shift + running_mean[..., -1:], total


def chan(x, block_size):
    """Merge the moments of blocks in one pass (Chan et al. 1983, Am. Stat. 37:242), all at once.

    Each block of n_b features has a mean m_b and a sum of squared deviations M_b. Merged, mean =
    sum n_b m_b / n and M = sum M_b + sum n_b (m_b - mean)^2. The last block may be shorter. Rounds
    like `two_pass` with shorter sums, and is `two_pass` if there is one block.

    >>> [round(float(moment[0]), 4) for moment in chan(jnp.array([1.0, 2.0, 6.0]), 2)]
    [3.0, 14.0]
    """
    n = x.shape[-1]
    n_whole = n // block_size * block_size
    blocks = x[..., :n_whole].reshape(*x.shape[:-1], -1, block_size)
    means, totals = two_pass(blocks, block_size)
    mean = jnp.sum(means, axis=-2) * (block_size / n)
    if n_whole < n:
        tail_mean, tail_total = two_pass(x[..., n_whole:], block_size)
        mean = mean + tail_mean * ((n - n_whole) / n)
    between = jnp.sum(jnp.square(means - mean[..., None]), axis=-2)
    total = jnp.sum(totals, axis=-2) + block_size * between
    if n_whole < n:
        total = total + tail_total + (n - n_whole) * jnp.square(tail_mean - mean)
    return mean, total


MOMENTS = {"two_pass": two_pass, "welford": welford, "chan": chan}


def running_mean(x, block_size):
    """Return x - mean and the *biased* variance sum_i (x_i - m_i)^2 / (n - 1), m_i running means.

    People write this when they mean Welford's recurrence, whose factor i/(i-1) it lacks. For
    independent features E[var] / sigma^2 = (n - H_n) / (n - 1), with H_n the n-th harmonic number
    (0.90 at n = 32, 0.99 at n = 768), and the variance depends on the order of the features.

    >>> centered, var = running_mean(jnp.array([1.0, 2.0, 6.0]), 32)
    >>> float(var[0])  # (0.5^2 + 3^2) / 2 instead of 14 / 3
    4.625
    """
    _, shifted, running_mean, _ = _running_means(x, block_size)
    var = jnp.sum(jnp.square(shifted - running_mean), axis=-1, keepdims=True) / (x.shape[-1] - 1)
    return shifted - running_mean[..., -1:], var


def _running_means(x, block_size):
    """Return x_1, x - x_1, the running means m_i of x - x_1, and the indices i = 1..D as floats.

    Deviations do not depend on the origin. With the first feature as origin, a common offset never
    enters the running sum, whose rounding would otherwise grow with it. The first feature is always
    close enough to the mean: it lies within sqrt(D) sigma, because its own square is part of the
    variance.
    """
    shift = jax.lax.stop_gradient(x[..., :1])
    x = x - shift
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    return shift, x, _running_sum(x, block_size) / i, i


def _running_sum(x, block_size):
    """Return the cumulative sum over the last axis by triangular products: tiles, then totals.

    Several times faster than jnp.cumsum on a CPU, with a smaller error, since no sum is longer than
    a tile.
    """
    n = x.shape[-1]
    if n <= block_size:
        triangle = jnp.triu(jnp.ones((n, n), x.dtype))
        return jnp.matmul(x, triangle, precision=jax.lax.Precision.HIGHEST)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % block_size)])
    tiles = padded.reshape(*x.shape[:-1], -1, block_size)
    within = _running_sum(tiles, block_size)
    totals = within[..., -1]
    before = _running_sum(totals, max(block_size, 2)) - totals
    return (within + before[..., None]).reshape(padded.shape)[..., :n]
