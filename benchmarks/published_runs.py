"""Compare the estimate of --plan with published runs: python -m benchmarks.published_runs

Prints all runs, and the Markdown table of benchmarks/NOTES.md. Nothing is run: lm/cost predicts
memory and speed of this code with the same sizes. The sources reported their figures for other
software.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from lm import parameters
from lm.config import MESH_AXES, Resolved
from lm.config.convert import from_flat
from lm.cost import flops
from lm.cost.devices import DEVICES
from lm.cost.estimate import Estimate, estimate
from lm.system.text_tables import markdown_table
from lm.system.text_tables import table as text_table

SOURCES = {
    "foundry": "https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md",
    "fms": "https://github.com/foundation-model-stack/fms-fsdp/blob/0d31998/README.md",
    "titan A100": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
    "titan H100": "https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md",
    "MaxText v5e": "https://github.com/AI-Hypercomputer/maxtext/blob/0ed7bd5/MaxText/configs/v5e/README.md",
    "MaxText v5p": "https://github.com/AI-Hypercomputer/maxtext/blob/0ed7bd5/MaxText/configs/v5p/README.md",
}


def _mpt(d_model: int, n_layers: int, n_heads: int) -> dict:
    """Return the sizes of an MPT model, a GPT with a tied head."""
    sizes = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, "vocab_size": 50_368}
    return sizes | {"norm": "layer", "ffn": "mlp", "tie_embeddings": True, "positions": "learned"}


def _llama(
    d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, vocab_size: int = 32_000
) -> dict:
    sizes = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return sizes | {"d_ff": d_ff, "vocab_size": vocab_size, "d_head": 128}


MODELS = {
    "MPT 125M": _mpt(768, 12, 12),
    "MPT 1B": _mpt(2048, 24, 16),
    "MPT 3B": _mpt(2560, 32, 20),
    "MPT 7B": _mpt(4096, 32, 32),
    "MPT 13B": _mpt(5120, 40, 40),
    "MPT 30B": _mpt(7168, 48, 56),
    "MPT 70B": _mpt(8192, 80, 64),
    "Llama 2 7B": _llama(4096, 32, 32, 32, 11_008),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13_824),
    "Llama 2 34B": _llama(8192, 48, 64, 8, 22_016),
    "Llama 2 70B": _llama(8192, 80, 64, 8, 28_672),
    "Llama 3 8B": _llama(4096, 32, 32, 8, 14_336, 128_256),
    "Llama 3 70B": _llama(8192, 80, 64, 8, 28_672, 128_256),
    "MaxText 16B": _llama(
        4096, 32, 64, 64, 28_672
    ),  # base.yml with global_parameter_scale=16, and so on
    "MaxText 32B": _llama(8192, 32, 64, 64, 28_672),
    "MaxText 64B": _llama(8192, 64, 64, 64, 28_672),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One published run."""

    source: str  # a key of SOURCES
    model: str  # a key of MODELS
    device: str  # a key of DEVICES
    mesh: tuple[int, int, int]  # sizes of replica, fsdp and tensor
    sequences: int  # of a micro-batch per device
    micro_batches: int  # per step
    remat: str  # the value of config.model.remat that recomputes most nearly what the source does
    seq_len: int
    speed: float = 0.0  # reported tokens/s per device; 0 if the source reports tflops instead
    tflops: float = 0.0  # reported model TFLOP/s per device, with all keys counted for every query
    mfu: float | None = None  # reported, in percent
    memory: float | None = None  # reported peak per device in GiB
    # whether `attained` of the device was fitted to this run: its error is 0 by construction
    anchor: bool = False


RUNS = [
    # LLM Foundry: activation checkpointing of whole blocks, or none; sharding FULL_SHARD.
    Run("foundry", "MPT 1B", "h100", (1, 64, 1), 20, 1, "none", 2048, 44_402, mfu=40.85),
    Run("foundry", "MPT 3B", "h100", (1, 64, 1), 6, 3, "none", 2048, 22_525, mfu=40.8),
    Run("foundry", "MPT 7B", "h100", (1, 8, 1), 6, 1, "none", 2048, 10_643, mfu=46.44),
    Run("foundry", "MPT 13B", "h100", (1, 8, 1), 2, 1, "none", 2048, 4792, mfu=39.79, anchor=True),
    Run("foundry", "MPT 13B", "h100", (1, 16, 1), 2, 1, "none", 2048, 4767, mfu=39.58),
    Run("foundry", "MPT 13B", "h100", (1, 32, 1), 2, 1, "none", 2048, 4811, mfu=39.95),
    Run("foundry", "MPT 13B", "h100", (1, 64, 1), 2, 1, "none", 2048, 4800, mfu=39.86),
    Run("foundry", "MPT 30B", "h100", (1, 8, 1), 3, 21, "block", 2048, 2002, mfu=38.11),
    Run("foundry", "MPT 30B", "h100", (1, 32, 1), 14, 3, "block", 2048, 2308, mfu=43.92),
    Run("foundry", "MPT 70B", "h100", (1, 32, 1), 2, 16, "block", 2048, 882, mfu=36.15),
    Run("foundry", "MPT 70B", "h100", (1, 64, 1), 8, 4, "block", 2048, 1039, mfu=42.57),
    Run("foundry", "MPT 125M", "a100", (1, 8, 1), 32, 2, "none", 2048, 141_737, mfu=44.45),
    Run("foundry", "MPT 1B", "a100", (1, 8, 1), 14, 4, "none", 2048, 20_513, mfu=59.86),
    Run("foundry", "MPT 7B", "a100", (1, 8, 1), 6, 2, "none", 2048, 4641, mfu=64.23),
    Run("foundry", "MPT 13B", "a100", (1, 8, 1), 2, 3, "none", 2048, 2262, mfu=59.57, anchor=True),
    Run("foundry", "MPT 30B", "a100", (1, 8, 1), 3, 21, "block", 2048, 916, mfu=55.3),
    Run("foundry", "MPT 70B", "a100", (1, 64, 1), 8, 4, "block", 2048, 410, mfu=53.33),
    Run("foundry", "MPT 13B", "a100-40gb", (1, 128, 1), 16, 1, "block", 2048, 1972, mfu=51.93),
    Run("foundry", "MPT 70B", "a100-40gb", (1, 128, 1), 4, 1, "block", 2048, 376, mfu=48.91),
    # IBM's fms-fsdp: "HSDP" shards within a node and replicates across nodes.
    Run("fms", "Llama 2 7B", "a100", (16, 8, 1), 2, 1, "none", 4096, 3760),
    Run("fms", "Llama 2 13B", "a100", (16, 8, 1), 1, 1, "none", 4096, 1700),
    Run("fms", "Llama 2 34B", "a100", (1, 128, 1), 8, 1, "block", 4096, 772),
    Run("fms", "Llama 2 70B", "a100", (1, 128, 1), 6, 1, "block", 4096, 380),
    # torchtitan: "selective op" keeps half of the products, "full" the inputs of blocks.
    Run("titan A100", "Llama 2 13B", "a100", (1, 64, 1), 2, 1, "none", 4096, 2162, mfu=61.1),
    Run("titan A100", "Llama 2 70B", "a100", (1, 64, 1), 2, 1, "block", 4096, 353, mfu=50.5),
    Run("titan A100", "Llama 3 8B", "a100", (1, 64, 1), 1, 1, "dots", 8192, 2973, mfu=58.2),
    Run("titan A100", "Llama 3 70B", "a100", (1, 64, 1), 1, 1, "block", 8192, 331, mfu=51.7),
    # With torch.compile. These H100s have 96 GB and a power limit of 500 W.
    Run("titan H100", "Llama 3 8B", "h100", (1, 8, 1), 2, 1, "dots", 8192, 6667, memory=77.0),
    Run("titan H100", "Llama 3 8B", "h100", (1, 128, 1), 2, 1, "dots", 8192, 6514, memory=62.0),
    # MaxText: the batch per device and the sharding are those of configs/v5e/*.sh and v5p/*.sh.
    Run(
        "MaxText v5e",
        "MaxText 16B",
        "v5e",
        (1, 256, 1),
        6,
        1,
        "block",
        2048,
        tflops=120,
        mfu=61.10,
        anchor=True,
    ),
    Run(
        "MaxText v5e", "MaxText 16B", "v5e", (2, 256, 1), 6, 1, "block", 2048, tflops=117, mfu=59.37
    ),
    Run(
        "MaxText v5e",
        "MaxText 16B",
        "v5e",
        (32, 256, 1),
        6,
        1,
        "block",
        2048,
        tflops=108,
        mfu=54.65,
    ),
    Run(
        "MaxText v5e", "MaxText 32B", "v5e", (1, 256, 1), 4, 1, "block", 2048, tflops=132, mfu=66.86
    ),
    Run(
        "MaxText v5p",
        "MaxText 32B",
        "v5p",
        (1, 16, 4),
        28,
        1,
        "dots",
        2048,
        tflops=328,
        mfu=71.47,
        anchor=True,
    ),
    Run(
        "MaxText v5p", "MaxText 64B", "v5p", (1, 16, 4), 12, 1, "dots", 2048, tflops=323, mfu=70.31
    ),
]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A run beside its prediction. Speeds are in tokens/s per device, MFU is in percent.

    The MFU uses the source's count of operations. If the source has none, operations are counted as
    in PaLM, with all keys for every query (Chowdhery et al. 2022, appendix B).
    """

    run: Run
    predicted: Estimate
    speed: float
    mfu: float

    @property
    def predicted_speed(self) -> float:
        return self.predicted.tokens_per_step / self.predicted.seconds / self.predicted.n_devices

    @property
    def error(self) -> float:
        """Return the relative error of the predicted speed."""
        return self.predicted_speed / self.speed - 1


def config_of(run: Run) -> Resolved:
    values = {"model.remat": run.remat, "train.seq_len": run.seq_len}
    return planned_config(run.model, (*run.mesh, 1), run.sequences, run.micro_batches, values)


def planned_config(
    model: str, mesh: tuple[int, ...], sequences: int, micro_batches: int, values: dict[str, Any]
) -> Resolved:
    """Return the resolved config of a model of MODELS in bfloat16, with these values.

    `mesh` has the sizes of MESH_AXES; for the batch see `Run`.
    """
    values = values | {f"model.{key}": value for key, value in MODELS[model].items()}
    values |= {f"mesh.{axis}": size for axis, size in zip(MESH_AXES, mesh, strict=True)}
    values |= {
        "train.batch_size": sequences * micro_batches * mesh[0] * mesh[1],
        "train.micro_batch_size": sequences,
        "model.compute_dtype": "bfloat16",
    }
    config, problems = from_flat(values)
    assert not problems, problems
    return parameters.resolve(config, MODELS[model]["vocab_size"])


def compare(run: Run) -> Comparison:
    config = config_of(run)
    speed, mfu = reported(run, config)
    return Comparison(run, estimate(config, run.device, math.prod(run.mesh)), speed, run.mfu or mfu)


def reported(run: Run, config: Resolved) -> tuple[float, float]:
    """Return the reported tokens/s per device, and the MFU in percent by PaLM's count."""
    per_token = flops.flops_per_token(config.model, run.seq_len, full_square=True)
    speed = run.speed or run.tflops * 1e12 / per_token
    return speed, 100 * flops.mfu(speed, per_token, 1, DEVICES[run.device].peak["bfloat16"])


def table(comparisons: list[Comparison]) -> str:
    """Return the table of benchmarks/NOTES.md: the runs of each source on each kind of device."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault((c.run.source, c.run.device), []).append(c)
    header = ["source", "runs", "devices", "models", "MFU", "error of the predicted speed"]
    return markdown_table(header, [_row(*key, group) for key, group in groups.items()])


def _row(source: str, device: str, group: list[Comparison]) -> list[str]:
    counts = [math.prod(c.run.mesh) for c in group]
    errors = [c.error for c in group if not c.run.anchor]
    models = dict.fromkeys(c.run.model for c in group)
    return [
        f"[{source}]({SOURCES[source]})",
        str(len(group)),
        f"{_range(min(counts), max(counts), '{:,}')} {device}",
        " to ".join(dict.fromkeys([next(iter(models)), list(models)[-1]])),
        _range(min(c.mfu for c in group), max(c.mfu for c in group), "{:.0f} %"),
        _range(min(errors), max(errors), "{:+.0%}"),
    ]


def _range(low: float, high: float, form: str) -> str:
    return " to ".join(dict.fromkeys([form.format(low), form.format(high)]))


def details(comparisons: list[Comparison]) -> str:
    """Return a table of all runs for a terminal."""
    head = (
        "model",
        "devices",
        "mesh",
        "batch",
        "remat",
        "tokens/s",
        "predicted",
        "error",
        "GiB",
        "predicted",
    )
    rows = []
    for c in comparisons:
        run = c.run
        mesh = " x ".join(map(str, c.run.mesh))
        devices = f"{math.prod(run.mesh)} {run.device}"
        batch = f"{run.micro_batches} x {run.sequences} x {run.seq_len}"
        row = [run.model, devices, mesh, batch, run.remat]
        row += [f"{c.speed:,.0f}", f"{c.predicted_speed:,.0f}"]
        row.append("anchor" if run.anchor else f"{c.error:+.0%}")
        row.append(f"{run.memory:.0f}" if run.memory else "")
        row.append(f"{c.predicted.memory.total / 2**30:.0f}")
        rows.append(row)
    return text_table([head, *rows], right=[5, 6, 7, 8, 9])


def summary(comparisons: list[Comparison]) -> Iterator[str]:
    """Yield lines with the errors of all runs but anchors, and how many should not fit."""
    errors = [c.error for c in comparisons if not c.run.anchor]
    yield (
        f"{len(comparisons)} runs. Errors of the predicted speed without the {len(comparisons) - len(errors)} "
        f"anchors: median {statistics.median(map(abs, errors)):.0%}, from {min(errors):+.0%} to "
        f"{max(errors):+.0%}."
    )
    short = [c for c in comparisons if not c.predicted.fits]
    yield f"Predicted not to fit, although they ran: {len(short)} of {len(comparisons)}."


def main() -> int:
    comparisons = [compare(run) for run in RUNS]
    print("\n\n".join([details(comparisons), table(comparisons), *summary(comparisons)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
