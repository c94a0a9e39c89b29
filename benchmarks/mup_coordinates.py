"""Check muP's scaling: measure how far the first steps of Adam move activations, by width.

    python -m benchmarks.mup_coordinates --publish docs/results

The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1): under muP, the change of
the last hidden states and of the logits does not depend on width; under the standard
parametrization it grows. Models of configs/sweeps/mup.py at one learning rate; root mean squares
over a batch of validation text, mean of three seeds.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.page import publish
from lm import data
from lm.command_line.loading import load_values
from lm.config import Config
from lm.data.batches import gather, train_batch
from lm.interpret import capture
from lm.step import init_state, train_step
from lm.system.errors import with_exit_code
from lm.trained_model import TrainedModel
from lm.training.run import resolve_config

WIDTHS = (32, 64, 128, 256, 512)
STEPS = 10
SEEDS = (0, 1, 2)
RATE = 8e-3
BASE = "configs/shakespeare_small.py"


@with_exit_code
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mup_coordinates", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--publish", metavar="DIR", help="write mup_coordinates.md and its picture there"
    )
    a = parser.parse_args()
    by_name = {name: [moved(name, width) for width in WIDTHS] for name in ("mup", "standard")}
    about = (
        f"Change of the last hidden states and of the logits in {STEPS} steps of Adam at {RATE:g}: "
        f"root mean square over a batch of validation text, mean of {len(SEEDS)} seeds. The "
        "exponent is the slope of a line fitted in log-log axes: 0 means independent of width. "
        f"Models of `configs/sweeps/mup.py`; at width {WIDTHS[0]} both parametrizations are the "
        "same."
    )
    command = "python -m benchmarks.mup_coordinates --publish docs/results"
    publish(a.publish, "mup_coordinates", about, [command], table(by_name), lambda: draw(by_name))
    return 0


def config_of(parametrization: str, width: int) -> Config:
    return load_values(
        BASE,
        {
            "model.parametrization": parametrization,
            "model.d_model": width,
            "model.d_ff": 3 * width,
            "model.mup_base_d_model": WIDTHS[0],
            "model.mup_base_d_head": 8,
            "train.steps": STEPS,
            "optimizer.learning_rate": RATE,
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 0,
        },
    )


def moved(parametrization: str, width: int) -> dict[str, float]:
    """Return the root mean square change of hidden states and logits, mean over seeds."""
    config = config_of(parametrization, width)
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=lambda text: None)
    config = resolve_config(config, corpus)
    t = config.train
    seen = gather(
        corpus.split("validation").arrays, np.arange(t.batch_size) * t.seq_len, t.seq_len
    )["tokens"][:, :-1]
    step, outputs = (jax.jit(f, static_argnames="config") for f in (train_step, outputs_of))
    changes = []
    for seed in SEEDS:
        state = jax.jit(init_state, static_argnums=0)(config, seed)
        before = outputs(state.params, seen, config=config)
        for i in range(STEPS):
            state, _ = step(state, train_batch(corpus.split("train"), config, i), config=config)
        after = outputs(state.params, seen, config=config)
        changes.append([float(jnp.sqrt(jnp.mean((after[k] - before[k]) ** 2))) for k in before])
    return dict(zip(before, np.mean(changes, axis=0), strict=True))


def outputs_of(params, tokens_BT, config: Config) -> dict:
    """Return the residual stream after the last layer, and the logits."""
    residual = f"layers/{config.model.n_layers - 1}/residual"
    logits, acts = capture(TrainedModel(Path(), 0, config, params, None), tokens_BT, residual)
    return {"hidden states": acts[residual], "logits": logits}


def table(by_name: dict) -> list[list[str]]:
    rows = [["change of", "parametrization", *(f"width {width}" for width in WIDTHS), "exponent"]]
    for what in by_name["mup"][0]:
        for name, by_width in by_name.items():
            changes = [moves[what] for moves in by_width]
            exponent, _ = np.polyfit(np.log(WIDTHS), np.log(changes), 1)  # of a power law in width
            rows.append([what, name, *(f"{change:.3f}" for change in changes), f"{exponent:+.2f}"])
    return rows


def draw(by_name: dict):
    from lm.sweeps.figures import COLORS, plt

    figure, pictures = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for axes, what in zip(pictures, by_name["mup"][0], strict=True):
        for i, (name, by_width) in enumerate(by_name.items()):
            changes = [moves[what] for moves in by_width]
            axes.plot(
                WIDTHS,
                changes,
                marker="os"[i],
                linestyle=("-", "--")[i],
                color=COLORS[i],
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel="width (d_model)", title=what)
        axes.minorticks_off()
        axes.set_xticks(WIDTHS, map(str, WIDTHS))
    pictures[0].set_ylabel(f"root mean square change in {STEPS} steps")
    pictures[1].legend()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    sys.exit(main())
