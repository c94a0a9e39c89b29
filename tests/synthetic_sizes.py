"""A synthetic sweep with sizes, as lm.sweep writes it: the loss is a power law of the compute."""

import json

import numpy as np
import synthetic_sweep

SIZES = ["32", "48", "64", "96"]
COMPUTE = {"32": 1e11, "48": 5e11, "64": 1.6e12, "96": 7e12}  # training FLOPs
STEPS = {"32": 100, "48": 200, "64": 300, "96": 800}
VARIANTS = ("gated", "plain")


def power_law(compute: float) -> float:
    return 1.4 + 60 * compute**-0.17


def sweep(multiplier: dict[str, float] | float, noise: float = 0.004, **changes) -> tuple[dict, list[dict]]:
    """Return sweep.json and the runs, where "gated" does as well as "plain" with `multiplier` times its compute."""
    draw, losses = np.random.default_rng(0), {}
    for size in SIZES:
        for name in VARIANTS:
            m = multiplier[size] if isinstance(multiplier, dict) else multiplier
            spent = COMPUTE[size] * (m if name == "gated" else 1)
            losses[f"{name}, {size}"] = (power_law(spent) + draw.normal(0, noise, 5)).tolist()
    synthetic_sweep.BLOCKS.update(dict.fromkeys(losses, np.array([5, -8, 3])))
    synthetic_sweep.FLOPS.update(dict.fromkeys(losses, 1.0))
    record, runs = synthetic_sweep.sweep(losses, **changes)
    for i, (name, variant) in enumerate(record["variants"].items()):
        size = name.split(", ")[1]
        train = variant["config"]["train"] | {"steps": STEPS[size]}
        tokens = train["steps"] * train["batch_size"] * train["seq_len"]
        variant["config"] = variant["config"] | {"train": train}
        variant |= {"n_params": 1000 * (i // 2 + 1), "flops_per_token": COMPUTE[size] / tokens, "rate_from": None}
    comparisons = [[f"gated, {size}", f"plain, {size}"] for size in SIZES]
    return record | {"sizes": SIZES, "baseline": "plain, 96", "comparisons": comparisons}, runs


def without_comparisons(noise: float = 0.0005, true_floor: float | None = 1.4, **changes) -> tuple[dict, list[dict]]:
    """Return sweep.json and the runs of "plain" alone, whose loss is 1.4 + 60 C^-0.17."""
    record, runs = sweep(1.0, noise=noise, **changes)
    runs = [run for run in runs if run["variant"].startswith("plain")]
    variants = {name: v for name, v in record["variants"].items() if name.startswith("plain")}
    for v in variants.values():
        train = v["config"]["train"]
        spent = v["flops_per_token"] * train["steps"] * train["batch_size"] * train["seq_len"]
        v["n_params"] = round((spent / 30) ** 0.5)  # FLOPs at 5 tokens per parameter
        v["without_embeddings"] = {"n_params": v["n_params"] - 5000, "flops_per_token": v["flops_per_token"] / 2}
        v["data"] = v["data"] | {"best_test_loss": true_floor}
    return record | {"comparisons": [], "variants": variants}, runs


def write(workdir, record: dict, runs: list[dict]):
    synthetic_sweep.write(workdir, record, runs)
    speeds = dict.fromkeys(record["variants"], 1000.0)
    quartiles = {name: [900.0, 1100.0] for name in record["variants"]}
    speeds = {"alone": 500.0, "at_once": 2, "variants": speeds, "quartiles": quartiles}
    (workdir / "speeds.json").write_text(json.dumps(speeds))
    return workdir
