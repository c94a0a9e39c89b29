r"""Compare the loss on a text with the loss of the best possible model of that very text.

Synthetic text (`lm/data/markov.py`) knows P(x_t | x_<t), and so the surprisal S = -sum_t ln P(x_t |
x_<t) of a split. Let L = -sum_t ln q(x_t | x_<t) be the total loss of any model that is causal and
has not seen the split. Its likelihood ratio prod_t q / P is a martingale with mean 1, whatever q
is, so by Markov's inequality

    Pr(L < S - c) = Pr(prod_t q / P > e^c) <= e^-c.

Both sums are over the same text, so no standard error is needed: the mean surprisal of 50,000
letters has a standard error of 0.004 about the entropy rate, but a mean loss that is 0.0004 below
the mean surprisal (c = 20.7 in total) has a probability of at most 1e-9, as a deviation of six
standard errors has.
"""

import math

import numpy as np

from lm.data.corpus import Split
from lm.system.errors import UserError

MARGIN = -math.log(1e-9)  # c: nats in total
ROUNDING = 1e-5  # nats per token: float32 sums and softmaxes


class BelowEntropy(UserError):
    """An error for a loss that no causal model can have."""

    code = 3


def check_loss(
    split: Split, loss: float, n_predicted: int, *, is_estimate: bool = False
) -> float | None:
    """Compare the mean loss over n_predicted predictions with that of the best possible model.

    An estimate, such as the bound of masked diffusion, has noise and is not refused.

    Returns:
        The mean surprisal of the predicted tokens, in nats per token. None if the true source of
        the text is not known, if the split is packed, or if it has training text, which a model may
        know by heart.

    Raises:
        BelowEntropy: the loss is lower by more than the margin.
    """
    if split.surprisal is None or split.packed or "train" in split.name.split("+"):
        return None
    best = float(split.surprisal(np.asarray(split.tokens[: n_predicted + 1]))[1:].mean())
    if not is_estimate and loss < best - MARGIN / n_predicted - ROUNDING:
        raise BelowEntropy(
            f"the {split.name} loss is {loss:.4f} nats per token, but a causal model cannot get "
            f"below {best:.4f} on this text: the model sees the tokens that it predicts (a mask "
            "that is not causal, targets among the inputs, statistics over positions), or it has "
            "trained on this text"
        )
    return best
