"""Multi-token prediction: the logits of position t also predict tokens t+2 and t+3.

As in modded-nanogpt (November 2025). The terms "mtp_2" and "mtp_3" have the weights 1/2 and 1/4,
which fall linearly to 0 over the training (there in stages). The same head predicts all; nothing
changes in evaluation. Other methods have a head or a block for each distance (Gloeckle et al. 2024,
arXiv:2404.19737).

The logits are those of the cross-entropy. In chunks (loss_chunk > 0) they are computed again for
each distance.
"""

import jax.numpy as jnp

from lm.parallel import collectives

WEIGHTS = {2: 0.5, 3: 0.25}


def loss_weights(c, fraction):
    return {f"mtp_{distance}": weight * (1 - fraction) for distance, weight in WEIGHTS.items()}


def losses(fields, cross_entropy):
    terms = {}
    targets_BT = fields["targets"]
    weights_BT = fields["weights"]
    for distance in WEIGHTS:
        # One token further. A target counts only if all nearer ones do, so that they are of one
        # document or answer.
        targets_BT = _next(targets_BT)
        weights_BT = _next(weights_BT)
        weights_BT *= fields["weights"]
        terms[f"mtp_{distance}"] = cross_entropy(targets_BT, weights_BT)
    return terms


def _next(x_BT):
    """Return the value of the next position, 0 after the last one."""
    after_B1 = collectives.from_neighbor(x_BT[:, :1], 1)
    return jnp.concatenate([x_BT[:, 1:], after_B1], axis=1)
