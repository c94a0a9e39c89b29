"""What a sweep file declares: variants and their axes, sizes, texts, searched hyperparameters, seeds and budgets."""
