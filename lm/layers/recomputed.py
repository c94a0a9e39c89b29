"""Functions whose backward pass computes them again, so that only their inputs are saved."""

import jax


def recomputed(f):
    """Return f, a function of arrays alone, whose derivative saves only the arguments.

    Reverse mode only. Unlike jax.checkpoint it does so inside another jax.checkpoint too, whose
    policy would hold for the inner one.

    >>> _, vjp = jax.vjp(recomputed(lambda x: jax.numpy.exp(jax.numpy.sin(x))), jax.numpy.zeros(2))
    >>> jax.tree.leaves(vjp)  # not sin(x) and exp(sin(x))
    [Array([0., 0.], dtype=float32)]
    """

    def forward(*arguments):
        return f(*arguments), arguments

    def backward(arguments, g):
        # jax.checkpoint has a barrier. Without it XLA would keep and reuse what the forward pass
        # computed.
        _, vjp = jax.vjp(jax.checkpoint(f), *arguments)
        return vjp(g)

    saving = jax.custom_vjp(f)
    saving.defvjp(forward, backward)
    return saving
