"""Train decoder-only Transformer language models in JAX, and use them: `lm.load("runs/mine")`.

Importing this package alone imports neither jax nor flax.
"""


def load(path, step="best"):
    """Load the model of a run; see `lm.trained_model.load`.

    Args:
        path: the run's directory.
        step: a step, "latest", or "best" by validation loss.
    """
    from lm import runtime

    runtime.start_jax()
    runtime.require_platform(None)
    from lm import trained_model

    return trained_model.load(path, step)
