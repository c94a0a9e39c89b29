"""Do Muon, value embeddings and token shift lower the loss at 10 million parameters, too?

    python -m lm.sweep --config configs/studies/changes_2026/changes_2026_10m.py --budget full

Four layers of width 448, 9.7 million parameters besides embeddings, on Tiny Shakespeare: one more cell of
changes_2026.py, with the same steps, batches and rules. It is secondary there. Its rows were chosen before its first
run, from the first three cells: the two changes of the model with the lowest means, and Muon; SOAP's mean is lower, but
its QR decompositions of matrices of this size would take most of the time. Heads have 64 channels, not 16. Meant for a
GPU, where JAX rounds the factors of float32 products to TF32.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_params

DECAY, DECAYS = "optimizer.weight_decay", (0.03, 0.1, 0.3)


def get_sweep():
    return Sweep(
        question="Do Muon, value embeddings and token shift lower the loss at 10 million parameters, too?",
        base="configs/studies/changes_2026/base.py",
        values={"model.d_model": 448, "model.d_ff": 1200, "model.n_heads": 7},
        variants={
            "base": {},
            "token shift": {"model.token_shift": True, "model.d_ff": match_params("base")},
            "value embeddings": {"model.value_embeddings": True},
            "wide for value embeddings": {"model.d_ff": match_params("value embeddings")},
            "AdamW": {DECAY: DECAYS},
            "Muon": {"optimizer.name": "muon", DECAY: DECAYS},
        },
        baseline="base",
        placebo={"model.rope_pairing": "adjacent"},
        comparisons=(
            ("token shift", "base"),
            ("value embeddings", "wide for value embeddings"),
            ("Muon", "AdamW"),
        ),
        tune={LEARNING_RATE: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), DECAY: (0.1,)},
        budgets={
            "quick": Budget(tuning_seeds=1, seeds=2, values={"train.steps": 40, "eval.every": 20}),
            "full": Budget(tuning_seeds=2, seeds=10),
        },
    )
