"""A small synthetic sweep in memory: the record and the runs that lm.sweep would write. Nothing is
trained.
"""

import copy
import dataclasses
import itertools

from lm.sweeps.results import Run

RATE = "optimizer.learning_rate"
GRID = (0.001, 0.002, 0.004)
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (1_000_000_001, 1_000_000_002)
PLAIN = (2.00, 2.03, 1.98, 2.05, 1.95)  # test losses by seed
# mean test loss minus that of "plain"
GAPS = {
    "plain": 0.0,
    "gated": -0.1,
    "wide": 0.02,
    "placebo": 0.001,
}
NOISE = (0.002, -0.003, 0.004, -0.001, -0.002)
TOKENS = 20_480
START = {
    "time": "2026-11-25T00:00:00+0000", "platform": "Linux", "processor": "cpu A", "device": "1 x cpu",
    "argv": ["/somewhere/lm/sweep.py", "--config", "/somewhere/configs/sweeps/gates.py", "--workdir=/elsewhere/gates"],
    "versions": {"python": "3.11", "jax": "0.10.2"}, "git": {"commit": "abc", "dirty": True},
}  # fmt: skip


def about(arm: str, cell: str = "", size: int = 100) -> dict:
    """Return the entry of a variant in sweep.json; size: its parameters, and its FLOPs per token."""
    data = {"name": "text", "fingerprint": "f" * 20, "notices": [], "test_bytes_per_token": 1.0,
            "unigram": {"validation": 2.5, "test": 2.75}}  # fmt: skip
    config = {"model": {"d_ff": 8}, "optimizer": {"name": "adamw", "schedule": "cosine"},
              "train": {"steps": 10, "batch_size": 32, "seq_len": 64},
              "eval": {"every": 5, "max_batches": 0, "batch_size": None}}  # fmt: skip
    return {
        "arm": arm, "cell": cell, "changes": {} if arm == "plain" else {"model.ffn": arm}, "tune": {RATE: list(GRID)},
        "seeds": list(SEEDS), "tuning_seeds": list(TUNING_SEEDS), "n_params": size, "flops_per_token": 6.0 * size,
        "tokens": TOKENS * size, "data": data, "config": config, "warm_starts": {},
    }  # fmt: skip


def sweep(
    cells: dict[str, tuple[int, float]] | None = None, axis: str | None = None, budget: str = "full"
):
    """Return (record, runs) of a sweep with three variants and a placebo.

    Args:
        cells: by name, the parameters and the loss of "plain" above the losses of PLAIN; None: no
            cells.
        axis: "size" or "text" if there are cells.
        budget: "full" or "quick".
    """
    cells = cells or {"": (100, 0.0)}
    full = {
        (arm, cell): f"{arm}, {cell}" if cell else arm
        for arm, cell in itertools.product(GAPS, cells)
    }
    variants = {name: about(arm, cell, cells[cell][0]) for (arm, cell), name in full.items()}
    for i, cell in enumerate(cells if axis else ()):  # the seeds of a cell are its own
        for arm in GAPS:
            variants[full[arm, cell]]["seeds"] = [seed + 100 * (i + 1) for seed in SEEDS]
    pairs = [[full[arm, cell], full["plain", cell]] for arm in ("gated", "wide") for cell in cells]
    record = {
        "name": "gates", "budget": budget, "question": "Do gates help?", "background": "One line.\n\n    code",
        "base": "configs/x.py", "baseline": "plain", "axis": axis, "cells": list(cells),
        "comparisons": pairs, "placebos": [[full["placebo", cell], full["plain", cell]] for cell in cells],
        "margin": 0.005, "tune": [RATE], "values": {}, "variants": variants, "starts": [START],
    }  # fmt: skip
    runs = []
    for (arm, cell), name in full.items():
        runs += runs_of(name, variants[name], GAPS[arm], cells[cell][1])
    return copy.deepcopy(record), runs


def runs_of(name: str, entry: dict, gap: float, above: float) -> list[Run]:
    """Return the tuning runs of a variant, lowest at 0.002, the vertex, and its final runs there."""
    tuned = [run("tuning", name, rate, seed, 2.0 + gap + 0.05 * (rate != 0.002))
             for rate in GRID for seed in entry["tuning_seeds"]]  # fmt: skip
    noise = (
        [scale * x for scale, x in zip([(len(name) % 3 + 1) / 2] * 5, NOISE, strict=True)]
        if gap
        else [0.0] * 5
    )
    final = [run("final", name, 0.002, seed, loss + above + gap + e)
             for seed, loss, e in zip(entry["seeds"], PLAIN, noise, strict=True)]  # fmt: skip
    return tuned + final


def run(phase: str, variant: str, rate: float, seed: int, loss: float) -> Run:
    return Run(phase=phase, variant=variant, point={RATE: rate}, seed=seed, status="finished", diverged_step=None,
               steps=10, tokens=TOKENS, val_loss=loss, test_loss=loss, curve=((5, loss + 0.2), (10, loss)), seconds=6.0,
               tokens_per_second=1000.0, processor="cpu A", device="1 x cpu", commit="abc")  # fmt: skip


DIVERGED = {
    "status": "diverged",
    "diverged_step": 3,
    "val_loss": None,
    "test_loss": None,
    "curve": (),
}


def changed(runs: list[Run], what: dict, **where) -> list[Run]:
    """Return the runs, those with these fields changed."""
    return [
        dataclasses.replace(r, **what)
        if all(getattr(r, key) == value for key, value in where.items())
        else r
        for r in runs
    ]
