"""Measure how another LayerNorm algorithm changes a trained model with the same parameters.

    python -m benchmarks.layernorm_swap runs/layernorm-0 runs/layernorm-1 --publish docs/results

Over the first windows of the test split: the deviation of the logits from those of two_pass, and
the relative error of each layer's output (root mean square), averaged over the runs. Also the time
of the layer alone, forward and backward, relative to two_pass (medians of alternating rounds).
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare import alternate
from benchmarks.page import publish
from lm import data
from lm.data.batches import gather
from lm.interpret import capture
from lm.layers import layer_norms
from lm.system.errors import UserError, with_exit_code
from lm.system.malloc import retain_freed_memory
from lm.trained_model import TrainedModel, load
from lm.workdir.provenance import format_command

ALGORITHMS = ("two_pass", "welford", "chan", "running_mean")
N_WINDOWS = 64
ROUNDS = 21
SHAPE = (4096, 768)


@with_exit_code
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layernorm_swap", description=__doc__.split("\n")[0]
    )
    parser.add_argument("runs", nargs="+", metavar="WORKDIR", help="runs of a model with LayerNorm")
    parser.add_argument(
        "--publish", metavar="DIR", help="write layernorm_swap.md and its picture there"
    )
    a = parser.parse_args()
    retain_freed_memory()  # as in training: some algorithms need large temporary arrays
    swaps = [swapped(run) for run in a.runs]
    about = (
        f"Effect of another LayerNorm algorithm on {len(swaps)} models trained with two_pass, over "
        f"the first windows of the test split ({N_WINDOWS} at most): deviation of the logits, and "
        "relative error of each layer's output (root mean square, mean over models). Time: of the "
        "layer alone, forward and backward, relative to two_pass."
    )
    commands = [line for run in a.runs for line in training_commands(run)]
    commands += [
        format_command("benchmarks.layernorm_swap", [*a.runs, "--publish", "docs/results"])
    ]
    publish(
        a.publish, "layernorm_swap", about, commands, table(swaps, speeds()), lambda: draw(swaps)
    )
    return 0


def training_commands(run: str) -> list[str]:
    """Return the command that trained a run, or several if it was resumed with other options."""
    record = json.loads((Path(run) / "run.json").read_text(encoding="utf-8"))
    return list(
        dict.fromkeys(format_command("lm.train", start["argv"][1:]) for start in record["starts"])
    )


def swapped(run: str) -> dict[str, dict]:
    """Compare all algorithms with the parameters of the run in a workdir.

    Returns:
        By algorithm: {"mean", "max"} of |logit - logit of two_pass|, and "layers", the relative
        error of each layer's output.

    Raises:
        UserError: if the model has another norm, or its test split is shorter than a window.
    """
    trained = load(run)
    config = trained.config
    c = trained.config.model
    if (c.norm, c.norm_algorithm, c.norm_ddof) != ("layer", "two_pass", 0):
        raise UserError(
            f"{run}: the model must have norm=layer, norm_algorithm=two_pass and norm_ddof=0, but "
            f"has norm={c.norm}, norm_algorithm={c.norm_algorithm}, norm_ddof={c.norm_ddof}"
        )
    split = data.open_corpus(
        config.data, seq_len=config.train.seq_len, say=lambda text: None
    ).split("test")
    n_windows = min(N_WINDOWS, (len(split.tokens) - 1) // config.train.seq_len)
    if n_windows < 1:
        raise UserError(
            f"{run}: the test split is shorter than a window of {config.train.seq_len} tokens"
        )
    starts = np.arange(n_windows) * config.train.seq_len
    tokens_BT = gather(split.arrays, starts, config.train.seq_len)["tokens"][:, :-1]
    outputs = {a: forward(trained, a, tokens_BT) for a in ALGORITHMS}
    logits, layers = outputs["two_pass"]
    return {
        a: {
            "mean": float(jnp.mean(jnp.abs(theirs - logits))),
            "max": float(jnp.max(jnp.abs(theirs - logits))),
            "layers": [
                float(rms(x - y) / rms(y)) for x, y in zip(their_layers, layers, strict=True)
            ],
        }
        for a, (theirs, their_layers) in outputs.items()
    }


def forward(run: TrainedModel, algorithm: str, tokens_BT):
    """Return logits (B, T, V) and each layer's output (B, T, D) with another LayerNorm."""
    config = dataclasses.replace(
        run.config, model=dataclasses.replace(run.config.model, norm_algorithm=algorithm)
    )
    logits_BTV, acts = capture(
        dataclasses.replace(run, config=config), tokens_BT, "layers/*/residual"
    )
    return logits_BTV, list(acts.values())


def rms(x):
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def speeds() -> dict[str, float]:
    """Return the time of each algorithm, forward and backward, relative to two_pass."""
    x = jax.random.normal(jax.random.key(0), SHAPE)
    scale = jnp.ones(SHAPE[1])
    bias = jnp.zeros(SHAPE[1])

    def timed(algorithm: str):
        def loss(*arrays):
            return jnp.sum(jnp.square(layer_norms.layer_norm(*arrays, algorithm=algorithm)))

        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        jax.block_until_ready(step(x, scale, bias))

        def once() -> float:
            began = time.perf_counter()
            jax.block_until_ready(step(x, scale, bias))
            return time.perf_counter() - began

        return once

    medians = [statistics.median(times) for times in alternate(ROUNDS, *map(timed, ALGORITHMS))]
    return {a: seconds / medians[0] for a, seconds in zip(ALGORITHMS, medians, strict=True)}


def table(swaps: list[dict], relative: dict[str, float]) -> list[list[str]]:
    n_layers = len(swaps[0]["two_pass"]["layers"])
    layers = [f"layer {i}" for i in range(n_layers)]
    rows = [
        [
            "algorithm",
            "mean abs. deviation of logits",
            "largest",
            *layers,
            f"time of the layer {SHAPE}",
        ]
    ]
    for a in ALGORITHMS:
        mean = np.mean([f[a]["mean"] for f in swaps])
        largest = max(f[a]["max"] for f in swaps)
        errors = np.mean([f[a]["layers"] for f in swaps], axis=0)
        rows.append(
            [
                a,
                f"{mean:.2g}",
                f"{largest:.2g}",
                *(f"{e:.2g}" for e in errors),
                f"{relative[a]:.2f}",
            ]
        )
    return rows


def draw(swaps: list[dict]):
    from lm.sweeps.figures import COLORS, plt

    figure, axes = plt.subplots(figsize=(6, 3.2))
    for i, a in enumerate(ALGORITHMS[1:]):
        errors = np.array([f[a]["layers"] for f in swaps])
        look = {
            "marker": "os^"[i],
            "linestyle": ("-", "--", "-.")[i],
            "color": COLORS[i],
            "markerfacecolor": "none",
        }
        axes.plot(range(errors.shape[1]), errors.mean(axis=0), label=a, **look)
    axes.set(
        yscale="log",
        xlabel="layer",
        ylabel="relative error of its output",
        xticks=range(errors.shape[1]),
    )
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
