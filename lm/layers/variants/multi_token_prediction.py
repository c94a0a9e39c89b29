"""Multi-token prediction: the logits of position t also predict tokens t+2 and t+3 (modded-nanogpt, November 2025).

The terms "mtp_2" and "mtp_3" have the weights 1/2 and 1/4, which fall linearly to 0 over the training. The same head
predicts all; nothing changes in evaluation. Other methods have a head or a block for each distance (Gloeckle et al.
2024, arXiv:2404.19737).

The logits are those of the cross-entropy, which the compiler computes once if they are not chunked: loss_chunk = 0.
"""

import jax.numpy as jnp

from lm.errors import UserError
from lm.layers.losses import head_logits, token_losses
from lm.parallel import collectives

WEIGHTS = {2: 0.5, 3: 0.25}


def loss_weights(c, progress):
    return {f"mtp_{distance}": weight * (1 - progress) for distance, weight in WEIGHTS.items()}


def losses(c, stream, head, fields):
    if collectives.global_seq_len(1) > 1:
        raise UserError("config.mesh.sequence: multi-token targets need whole sequences on a device; use sequence = 1")
    found = {}
    for distance in WEIGHTS:
        # Targets distance - 1 to the right; a chain of targets of one document has no weight 0 in between.
        targets, weights = fields["targets"], fields["weights"]
        for _ in range(distance - 1):
            targets = jnp.pad(targets[:, 1:], ((0, 0), (0, 1)))
            weights = fields["weights"] * jnp.pad(weights[:, 1:], ((0, 0), (0, 1)))
        nll_BT, _ = token_losses(head_logits(stream["x"], head), targets)
        found[f"mtp_{distance}"] = jnp.sum(weights * nll_BT)
    return found
