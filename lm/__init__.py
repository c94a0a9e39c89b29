"""Train decoder-only Transformer language models in JAX, and use them: `lm.load("runs/mine")`.

Importing this package alone imports neither jax nor flax.
"""


def load(path, step="best"):
    """Load the model of a run, or of a checkpoint of Hugging Face; see `lm.trained_model.load`.

    Args:
        path: the directory of the run or of the checkpoint.
        step: a step of the run, "latest", "best" by validation loss, "ema" (the average of
            config.train.ema), or "mean:N" (the mean of the newest N checkpoints).
    """
    from lm.system import runtime

    runtime.start_jax()
    runtime.require_platform(None)
    from lm import trained_model

    return trained_model.load(path, step)
