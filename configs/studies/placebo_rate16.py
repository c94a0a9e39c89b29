"""Does the placebo differ from SiLU? 100 fresh pairs at the learning rate 0.016.

    python -m lm.sweep --config configs/studies/placebo_rate16.py --budget full

Cost: about 60 minutes of one core of an AMD EPYC.
Result: no: -0.0005 (95 % interval -0.0030 to 0.0020, p = 0.67), and 0 of 20 blocks of 5 pairs with
p < 0.05 (docs/results/placebo.md).
"""

from lm.sweeps import Budget, Sweep


def get_sweep():
    return Sweep(
        question=(
            "Does a placebo (another pairing of RoPE's features) differ from SiLU at the "
            "learning rate 0.016?"
        ),
        base="configs/shakespeare_small.py",
        variants={
            "SiLU": {"model.ffn": "mlp"},
            "relabeled": {"model.ffn": "mlp", "model.rope_pairing": "adjacent"},
        },
        baseline="SiLU",
        comparisons=(("relabeled", "SiLU"),),
        learning_rates=(1.6e-2,),
        budgets={"full": Budget(tuning_seeds=1, seeds=100)},
    )
