r"""Can LayerNorm be computed in one pass? In a trained model, after fine-tuning, and from scratch.

    for seed in $(seq 469999000 469999014); do
        python -m lm.train --config configs/shakespeare_small.py --config.model.norm=layer \
            --config.train.seed=$seed --workdir runs/layernorm-$seed
    done
    python -m lm.sweep --config configs/sweeps/layernorm_algorithms.py --budget quick
    python -m lm.sweep --config configs/sweeps/layernorm_algorithms.py --budget full
    python -m benchmarks.layernorm_swap runs/layernorm-*        # deviation of the logits, error and speed of the layer

The algorithms differ in how they compute the statistics: one-pass recurrences, evaluated for all
rows at once (lm/layers/layer_norms.py). The normalization always reads the row again. All but
running_mean share a derivative. Welford's recurrence in a literal loop over the columns takes 15
times as long as two_pass forward, and 8 times forward and backward (benchmarks/NOTES.md, "Single
layers").

Result (docs/results/layernorm_algorithms.md): the recurrences of Welford and Chan change the loss
by less than 1e-7 nats per token in a trained model and not significantly from scratch; running_mean
adds 0.006 in a trained model. The page's runs are of the earlier method: 5 seeds at the best rate
of the grid and at its neighbors. They took 59 minutes on one CPU core.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep
from lm.sweeps.declare import QUICK

ALGORITHMS = ("two_pass", "welford", "chan", "running_mean")
TRAINED = {"init_from": "runs/layernorm-{seed}"}
WAYS = {
    "swap": TRAINED | {"train.steps": 0, LEARNING_RATE: 8e-3},
    "tune": TRAINED | {"train.steps": 100, "optimizer.warmup_steps": 10, LEARNING_RATE: 2e-3},
    "scratch": {},
}


def get_sweep():
    return Sweep(
        question="Does one-pass LayerNorm reach the same loss as two-pass LayerNorm?",
        base="configs/shakespeare_small.py",
        values={"model.norm": "layer"},
        variants={
            f"{way}: {a}": {"model.norm_algorithm": a} | changes
            for way, changes in WAYS.items()
            for a in ALGORITHMS
        },
        baseline="scratch: two_pass",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=tuple(
            (f"{way}: {a}", f"{way}: two_pass") for way in reversed(WAYS) for a in ALGORITHMS[1:]
        ),
        learning_rates=(4e-3, 8e-3, 1.6e-2),
        # No placebos: these runs follow those of their baseline up to rounding, which is therefore a
        # more precise control than a mean with other runs.
        budgets={"quick": QUICK, "full": Budget(tuning_seeds=2, seeds=15)},
    )
