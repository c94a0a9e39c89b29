"""Where in a block should the norms stand, and does post-norm need a warm-up?

    python -m lm.sweep --config configs/sweeps/pre_vs_post_norm.py --budget quick
    python -m lm.sweep --config configs/sweeps/pre_vs_post_norm.py --budget full

Pre- and post-norm are compared under Adam with and without a warm-up, and under SGD with one;
sandwich, parallel and no norms under Adam with a warm-up. Adam's grid extends to about 100 times
the best rate. The batch is half the base's: the effects show in the first steps.

Xiong et al. 2020 (arXiv:2002.04745) find that post-norm needs the warm-up and pre-norm does not.

Result (docs/results/pre_vs_post_norm.md): with Adam and a warm-up post-norm ends 0.029 nats per
token lower than pre-norm, and sandwich norm 0.019. Post-norm gets stuck at four times its best
learning rate, without a warm-up already at twice its best rate; pre-norm trains at these rates.
With SGD, half of the runs of pre-norm diverge at its best rate. The 218 runs took 44 minutes of one
CPU core.
"""

from lm.sweeps import LEARNING_RATE, Sweep, each, product

RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 0.1, 1.0)
SGD = {
    "pre": {"model.norm_placement": "pre", LEARNING_RATE: (0.5, 1.0, 2.0, 4.0, 8.0)},
    "post": {"model.norm_placement": "post", LEARNING_RATE: (0.125, 0.25, 0.5, 1.0, 2.0)},
}


def get_sweep():
    sgd = {"SGD": {"optimizer.name": "sgd"}}
    adam = {"Adam": {"optimizer.name": "adamw"}}
    warmup = {"warm-up": {"optimizer.warmup_steps": 40}}
    no_warmup = {"no warm-up": {"optimizer.warmup_steps": 0}}
    variants = product(each("model.norm_placement", "pre", "post"), adam, warmup | no_warmup)
    variants |= product(each("model.norm_placement", "sandwich", "parallel", "none"), adam, warmup)
    variants |= product(SGD, sgd, warmup)
    return Sweep(
        question=(
            "Does pre-norm reach a lower loss than post-norm, and does post-norm need a warm-up?"
        ),
        base="configs/shakespeare_small.py",
        values={"optimizer.clip_norm": None, "train.batch_size": 16},
        variants=variants,
        baseline="pre, Adam, warm-up",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(
            ("post, Adam, warm-up", "pre, Adam, warm-up"),
            ("post, Adam, no warm-up", "post, Adam, warm-up"),
            ("pre, Adam, no warm-up", "pre, Adam, warm-up"),
            ("post, SGD, warm-up", "pre, SGD, warm-up"),
            ("sandwich, Adam, warm-up", "pre, Adam, warm-up"),
            ("parallel, Adam, warm-up", "pre, Adam, warm-up"),
            ("none, Adam, warm-up", "pre, Adam, warm-up"),
        ),
        learning_rates=RATES,
    )
