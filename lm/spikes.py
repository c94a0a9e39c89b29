"""Spikes of the loss and of the gradient norm: robust z-scores over the last steps.

They are computed within the step. The window is a part of the train state, so the z-scores of a
step are a function of (config, seed, step): a resumed run, and every process of a run, decides
alike.
"""

import jax.numpy as jnp

# steps, and the z-score from which a step is a spike; OLMo's, there with mean and deviation
WINDOW = 128
LIMIT = 6.0


def empty_window():
    """Return the losses and gradient norms (2, WINDOW) before step 0, which are infinite."""
    return jnp.full((2, WINDOW), jnp.inf, jnp.float32)


def z_scores(window, values):
    """Return how many robust standard deviations each value is above the median of its window.

    The standard deviation is 1.4826 times the median absolute deviation, as for normally
    distributed numbers. Up to half of a window may be spikes without much effect. A z-score is 0
    until more than half of the window is finite. The window is (2, WINDOW); the values (2,) are the
    loss and the gradient norm.

    >>> window = empty_window().at[:, :100].set(jnp.linspace(1.0, 3.0, 100))
    >>> [round(float(z), 1) for z in z_scores(window, jnp.array([2.0, 9.0]))]  # what is missing counts as large
    [-0.3, 7.0]
    """
    median = jnp.median(window, axis=1)
    deviation = 1.4826 * jnp.median(jnp.abs(window - median[:, None]), axis=1)
    return jnp.where(jnp.isfinite(median), (values - median) / jnp.maximum(deviation, 1e-6), 0.0)
