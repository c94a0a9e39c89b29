"""Does SwiGLU still reach a lower loss than SiLU if more than the learning rate is tuned for each of them?

    python -m lm.sweep --config configs/sweeps/swiglu_search.py --budget quick
    python -m lm.sweep --config configs/sweeps/swiglu_search.py --budget full

configs/sweeps/swiglu_vs_silu.py tunes the learning rate alone, at b2 = 0.95, 20 steps of warm-up and no weight decay.
Here all four are tuned together, with the same random trials for each variant. A search makes no claim (docs/sweeps.md,
"Random search"): the report shows the difference of the best trials, and what fewer trials would have found.
"""

from lm.sweeps import Budget, Search, Sweep, choice, log_uniform, match_params


def get_sweep():
    return Sweep(
        question="Does SwiGLU beat SiLU when learning rate, b2, warm-up and weight decay are tuned for each?",
        base="configs/shakespeare_small.py",
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "SwiGLU": {"model.ffn": "glu", "model.d_ff": match_params("SiLU")},
        },
        baseline="SiLU",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(("SwiGLU", "SiLU"),),
        search=Search(
            trials=20,
            space={
                "optimizer.learning_rate": log_uniform(1e-3, 3.2e-2),
                "optimizer.b2": choice(0.95, 0.99),
                "optimizer.warmup_steps": choice(10, 40),
                "optimizer.weight_decay": log_uniform(0.01, 1.0),
            },
        ),
        budgets={
            "quick": Budget(tuning_seeds=1, seeds=2, trials=8, values={"train.steps": 60, "eval.every": 20}),
            "full": Budget(tuning_seeds=1, seeds=5),
        },
    )
