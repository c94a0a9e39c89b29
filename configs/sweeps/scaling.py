"""How does the loss fall with the size, and does the fit find the entropy of the text?

    python -m lm.sweep --config configs/sweeps/scaling.py --budget quick
    python -m lm.sweep --config configs/sweeps/scaling.py --budget full --dry-run

One model at five sizes with 50 training tokens per parameter, on Markov text of order 3, whose entropy is known. A
sweep with sizes and without comparisons reports exponents and the irreducible loss, over parameters and FLOPs, each
counted with embeddings and without (Pearce and Song 2024, arXiv:2406.12907). The best learning rate falls about as
1 / d_model; at the largest size it is extrapolated. The full budget takes 19 minutes on one CPU core.

With 8 tokens per parameter there was no fit: the smallest models stayed at 2.31, the loss of a model that knows one
letter of the context, and the loss then fell faster at larger sizes.

Result (docs/results/scaling.md): the fitted irreducible loss is 1.754, the lowest possible one 1.797; the losses do not
lie on the fitted curve.

For another text, replace the Markov text in `values`: "data.source": "tfds:tiny_shakespeare".
The page's runs are of the earlier method: 5 seeds at the best rate of the grid and at its neighbors.
"""

from lm.sweeps import LEARNING_RATE, Budget, Sweep, match_tokens

WIDTHS = (12, 16, 24, 32, 48)
RATES = (5e-3, 1e-2, 2e-2, 4e-2)  # at width 32


def get_sweep():
    sizes = {
        str(d): {"model.d_model": d, "model.d_ff": 3 * d, LEARNING_RATE: tuple(rate * 32 / d for rate in RATES)}
        for d in WIDTHS
    }
    sizes["48"][LEARNING_RATE] = sizes["48"][LEARNING_RATE][:3]
    return Sweep(
        question="How does the loss fall from 4,000 to 62,000 parameters, and does the fit find the entropy of the "
        "text?",
        base="configs/shakespeare_small.py",
        values={
            "data.source": "markov:3",
            "eval.sample_prompt": "a",
            "model.n_layers": 2,
            "model.n_heads": 2,
            "train.batch_size": 8,
            "train.steps": match_tokens(50),
        },
        variants={"Transformer": {}},
        sizes=sizes,
        baseline="Transformer",
        comparisons=(),
        learning_rates=RATES,
        budgets={
            "quick": Budget(tuning_seeds=1, seeds=2, values={"train.steps": match_tokens(20)}),
            "full": Budget(tuning_seeds=2, seeds=10),
        },
    )
