"""A small synthetic sweep with a random search, as lm.sweep writes it, for the tests of the report."""

from synthetic_sweep import LOSSES, TUNING_SEEDS, run, sweep

TRIALS = [
    {"optimizer.learning_rate": 0.00412345678, "optimizer.b2": 0.95, "train.batch_size": 8},
    {"optimizer.learning_rate": 0.00198765432, "optimizer.b2": 0.99, "train.batch_size": 4},
    {"optimizer.learning_rate": 0.012, "optimizer.b2": 0.99, "train.batch_size": 8},
]
SPACE = {
    "optimizer.learning_rate": "log-uniform from 0.001 to 0.03",
    "optimizer.b2": "one of 0.95, 0.99",
    "train.batch_size": "one of 4, 8",
}
BEST = {"plain": 0, "gated": 1, "wide": 1}  # the index of the best trial


def search_sweep(losses=LOSSES, *, budget="full", n=5) -> tuple[dict, list[dict], list[float]]:
    """Return sweep.json, all runs, and the learning rate of each trial; every other trial loses 0.1 more."""
    record, _ = sweep(losses, budget=budget, n=n)
    rates = [trial["optimizer.learning_rate"] for trial in TRIALS]
    record |= {"search": {"space": SPACE, "trials": TRIALS}}
    runs = []
    for name, variant in record["variants"].items():
        variant["grid"] = rates
        for i, rate in enumerate(rates):
            worse = 0.1 * abs(i - BEST[name])
            runs += [run("tuning", name, rate, seed, 2 + worse) for seed in TUNING_SEEDS]
        runs += [run("final", name, rates[BEST[name]], seed, losses[name][seed]) for seed in range(n)]
    return record, runs, rates
