"""Where in a block should the norms stand, and does post-norm need a warm-up?

    python -m lm.sweep --config configs/sweeps/pre_vs_post_norm.py --budget quick
    python -m lm.sweep --config configs/sweeps/pre_vs_post_norm.py --budget full      # 42 minutes on 2 CPU cores

Pre- and post-norm are compared under SGD and Adam, with and without a warm-up; sandwich, parallel and no norms with a
warm-up only. The grids of learning rates extend until training diverges or is no better than the unigram baseline, or
at least a factor of 100 beyond the best rate. The batch is half the base's: the effects show in the first steps.

Result (docs/results/pre_vs_post_norm.md): under SGD, post-norm ends 0.109 nats per token higher than pre-norm. Under
Adam, neither post-norm nor the lack of a warm-up makes a significant difference, but one of 5 post-norm runs without a
warm-up got stuck. Xiong et al. 2020 (arXiv:2002.04745) find that post-norm needs the warm-up and pre-norm does not.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, each, product

SGD = {"optimizer.name": "sgd", LEARNING_RATE: (0.03, 0.125, 0.5, 2.0, 8.0)}
ADAM = {"optimizer.name": "adamw", LEARNING_RATE: (3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)}
NO_NORM = {"SGD": SGD | {LEARNING_RATE: (5e-4, 2e-3, 8e-3, 3e-2, 1.25e-1)}, "Adam": ADAM}


def get_sweep():
    optimizers, warmup = {"SGD": SGD, "Adam": ADAM}, {"warm-up": {"optimizer.warmup_steps": 40}}
    no_warmup = {"no warm-up": {"optimizer.warmup_steps": 0}}
    variants = product(each("model.norm_placement", "pre", "post"), optimizers, warmup | no_warmup)
    variants |= product(each("model.norm_placement", "sandwich", "parallel"), optimizers, warmup)
    variants |= product(each("model.norm_placement", "none"), NO_NORM, warmup)
    return Sweep(
        question="Does pre-norm reach a lower loss than post-norm, and does post-norm need a warm-up?",
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
        learning_rates=(1e-3, 3e-3, 1e-2),
        budgets={
            "quick": Budget(tuning_seeds=1, seeds=2, values={"train.steps": 50, "eval.every": 25}),
            "full": Budget(tuning_seeds=2, seeds=5),
        },
    )
