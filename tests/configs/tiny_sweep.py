"""The smallest sweep that tunes, compares and reports; it is run where text.txt lies, with the tiny
base.
"""

from pathlib import Path

from lm.sweeps import Budget, Sweep, match_params


def get_sweep():
    return Sweep(
        question="Does the machinery work?",
        base=str(Path(__file__).parent / "tiny.py"),
        values={"data.source": "text:text.txt", "model.dropout": 0.0, "train.steps": 8, "optimizer.warmup_steps": 1},
        variants={
            "mlp": {"model.ffn": "mlp"},
            "glu": {"model.d_ff": match_params("mlp"), "optimizer.learning_rate": (0.02, 0.04, 0.08)},
            "wild": {
                "optimizer.name": "sgd", "optimizer.clip_norm": None, "optimizer.weight_decay": 0.0,
                "optimizer.learning_rate": (0.1, 0.2, 1e30),
            },
        },
        baseline="mlp",
        comparisons=(("glu", "mlp"), ("wild", "mlp")),
        learning_rates=(0.03, 0.1, 0.3),
        budgets={"quick": Budget(tuning_seeds=1, seeds=2), "full": Budget(tuning_seeds=2, seeds=5)},
    )  # fmt: skip
