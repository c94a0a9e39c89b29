"""Does the placebo differ from SiLU at width 32? 400 fresh pairs, also read as 80 sweeps of 5
pairs.

    python -m lm.sweep --config configs/studies/placebo_width32.py --budget full
    python -m benchmarks.placebo --add sweeps/placebo_width32-full --name placebo_width32

Cost: about 40 minutes of one CPU core.
Result (docs/results/placebo.md): +0.0002 nats per token (95 % CI -0.0014 to 0.0018).
"""

from lm.sweeps import Budget, Sweep


def get_sweep():
    return Sweep(
        question=(
            "Does a placebo (another pairing of RoPE's features) differ from SiLU at width 32?"
        ),
        base="configs/shakespeare_small.py",
        values={"model.d_model": 32, "model.d_ff": 96, "train.steps": 141},
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "relabeled": {"model.ffn": "mlp", "model.rope_pairing": "adjacent"},
        },
        baseline="SiLU",
        comparisons=(("relabeled", "SiLU"),),
        learning_rates=(3.2e-2,),
        budgets={"full": Budget(tuning_seeds=1, seeds=400)},
    )
