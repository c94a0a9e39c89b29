"""A small synthetic sweep directory, as lm.sweep writes it, for the tests of the report."""

import json
import math

import numpy as np
from scipy import stats

from lm.sweeps.storage.results import neighbors

BASE = [2.00, 2.03, 1.98, 2.05, 1.95]
LOSSES = {
    "plain": BASE,
    "gated": [b - d for b, d in zip(BASE, [0.10, 0.11, 0.09, 0.10, 0.12], strict=True)],
    "wide": [b + d for b, d in zip(BASE, [0.010, -0.008, 0.012, -0.015, 0.002], strict=True)],
}
FLOPS = {"plain": 100.0, "gated": 125.0, "wide": 300.0}
GRID = [0.001, 0.002, 0.004]
EVAL = {"every": 50, "max_batches": 0, "batch_size": None}
TUNING_SEEDS = [1_000_000, 1_000_001]
OPTIMIZER = {"name": "adamw", "schedule": "cosine", "b2": 0.95, "warmup_steps": 20, "weight_decay": 0.1}
COUNTS = [100, 100, 50]
BLOCKS = {"plain": np.array([5, -8, 3]), "gated": np.array([4, -6, 2]), "wide": np.array([9, -1, -8])}  # sums: 0
STARTED = ["/somewhere/lm/sweep.py", "--config", "/somewhere/configs/sweeps/gates.py", "--workdir=/elsewhere/gates"]


def speeds_json(plain: float, gated: float, wide: float) -> str:
    """Return speeds.json; one run at a time has half of the baseline's speed."""
    speeds = {"plain": plain, "gated": gated, "wide": wide}
    quartiles = {name: [0.75 * speed, 1.5 * speed] for name, speed in speeds.items()}
    return json.dumps({"alone": plain / 2, "at_once": 4, "variants": speeds, "quartiles": quartiles})


def run(phase: str, variant: str, rate: float, seed: int, loss: float) -> dict:
    return {
        "phase": phase,
        "variant": variant,
        "learning_rate": rate,
        "seed": seed,
        "status": "finished",
        "diverged_at": None,
        "validation": [[50, loss + 0.6], [100, loss + 0.1]],
        "val_loss": loss + 0.1,
        "test_loss": loss,
        "test_sums": (loss * np.array(COUNTS) + BLOCKS[variant]).tolist(),
        "test_counts": COUNTS,
        "steps": 100,
        "seconds": 30.0,
    }


def diverge(r: dict, validations: int = 1) -> None:
    nothing = dict.fromkeys(["val_loss", "test_loss", "test_sums", "test_counts"])
    r |= {"status": "diverged", "diverged_at": 60, "steps": 59, "validation": r["validation"][:validations]} | nothing


def sweep(losses=LOSSES, *, budget="full", grid=GRID, best=0.002, n=5) -> tuple[dict, list[dict]]:
    """Return sweep.json and all runs: the losses at the best rate, and 0.2 more for every factor of 2 from it."""
    train = {"steps": 100, "batch_size": 8, "seq_len": 16}
    variants = {
        name: {
            "changes": {"model.ffn": name},
            "grid": grid,
            "n_params": 1000 * i,
            "flops_per_token": FLOPS[name],
            "data": {
                "name": "text",
                "fingerprint": "0123456789abcdef",
                "notices": [],
                "test_bytes_per_token": 4.0,
                "unigram": {"validation": 2.5, "test": 2.75},
            },
            "config": {"model": {"d_ff": 8}, "optimizer": OPTIMIZER, "train": train, "eval": EVAL},
        }
        for i, name in enumerate(losses, start=1)
    }
    record = {
        "name": "gates",
        "budget": budget,
        "baseline": "plain",
        "comparisons": [["gated", "plain"], ["wide", "plain"]],
        "tuning_seeds": TUNING_SEEDS,
        "seeds": list(range(n)),
        "question": "Do gates help?",
        "background": "Whether <gates> help.\n\n    python -m lm.sweep --config configs/sweeps/gates.py",
        "base": "configs/shakespeare.py",
        "values": {"optimizer.clip_norm": "None"},
        "variants": variants,
        "device": "1 x cpu",
        "starts": [
            {
                "time": "2026-01-01T00:00:00+0000",
                "platform": "Linux",
                "processor": "a 2 GHz processor",
                "argv": STARTED,
                "versions": {"python": "3.11.0", "jax": None},
                "git": {"commit": "abc123", "dirty": False},
            }
        ],
    }
    runs = []
    for name in losses:
        for rate in grid:
            worse = 0.2 * abs(math.log2(rate / best))
            runs += [run("tuning", name, rate, seed, 2 + worse) for seed in TUNING_SEEDS]
            if rate in neighbors(grid, best):
                runs += [run("final", name, rate, seed, losses[name][seed] + worse) for seed in range(n)]
    return record, runs


def write(workdir, record: dict, runs: list[dict], *, per_file: int = 4):
    (workdir / "results").mkdir(parents=True)
    (workdir / "sweep.json").write_text(json.dumps(record))
    (workdir / "speeds.json").write_text(speeds_json(1000.0, 800.0, 1000.0))
    for i in range(0, len(runs), per_file):
        (workdir / "results" / f"{i:03}.json").write_text(json.dumps(runs[i : i + per_file]))
    return workdir


def select(runs: list[dict], phase: str, variant: str, rate: float = 0.002) -> list[dict]:
    return [r for r in runs if (r["phase"], r["variant"], r["learning_rate"]) == (phase, variant, rate)]


def moderated(name: str) -> tuple[float, float, float, float]:
    """Return mean, standard error, p-value and degrees of freedom of a variant's difference from plain."""
    # The three variances vary less than chance would: the prior has its largest df, 4. A larger variance reduces it.
    pairs = [("gated", "plain"), ("wide", "plain"), ("gated", "wide")]
    variances = {a + b: stats.tvar(np.subtract(LOSSES[a], LOSSES[b])) for a, b in pairs}
    prior, own = np.mean(list(variances.values())), variances[name + "plain"]
    df = 4 * min(1, stats.f.sf(own / prior, 4, 4) / 0.5) ** 2
    mean = np.mean(LOSSES[name]) - np.mean(BASE)
    error = math.sqrt((df * prior + 4 * own) / (df + 4) / 5)
    return mean, error, 2 * stats.t.sf(abs(mean) / error, df + 4), df + 4
