"""Find parameters that the loss does not read. Counts, and so matched widths, include them."""

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from lm.step import TrainState
from lm.workdir.checksums import leaves_by_path


def unused_parameters(traced: jax.stages.Traced, state: TrainState) -> str | None:
    """Return a sentence on the parameters that the losses of traced `train_steps` do not read.

    It is None if they read all.
    The state, or its shapes, is its first argument. Parameters that pass through an optimization
    barrier, as in micro-batches over fsdp, all count as read.
    """
    program = traced.jaxpr.jaxpr
    # over the steps
    loop = next(equation for equation in program.eqns if equation.primitive.name == "while")
    results = zip(leaves_by_path(traced.out_info), program.outvars, strict=True)
    losses = {id(x) for name, x in results if name == "1/loss" or name.startswith("1/loss/")}
    _, reads = dce_jaxpr(loop.params["body_jaxpr"].jaxpr, [id(x) in losses for x in loop.outvars])
    inputs = loop.invars[loop.params["cond_nconsts"] :]
    read = {id(x) for x, is_read in zip(inputs, reads, strict=True) if is_read}
    arguments = zip(leaves_by_path(state), program.invars, strict=False)
    unused = [name for name, x in arguments if name.startswith("params/") and id(x) not in read]
    if not unused:
        return None
    paths = ", ".join(name.removeprefix("params/") for name in unused)
    return (
        f"the loss does not depend on {paths}: they are included in counts of parameters and "
        "FLOPs, and in match_params, but do not change the model; use them, or do not declare them "
        "(lm/parameters.py)"
    )
