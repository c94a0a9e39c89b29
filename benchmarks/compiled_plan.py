"""Compare the estimate of --plan with the compilers of TPUs and GPUs.

    python -m benchmarks.compiled_plan --out FILE

Compiles the training step of each row until buffers are assigned, with the extras [tpu] and [cuda],
and prints the Markdown table of benchmarks/NOTES.md. FILE keeps the compilers' figures: its rows
are not compiled again, only planned.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from benchmarks.published_runs import planned_config
from lm.config import MESH_AXES, Resolved
from lm.cost.compiled import compile_step
from lm.cost.estimate import estimate
from lm.cost.units import si
from lm.system.errors import UserError
from lm.system.text_tables import markdown_table

# Model, device, mesh (replica, fsdp, tensor, sequence), sequences of a micro-batch per device,
# micro-batches, tokens per sequence, remat, optimizer, whether layers are scanned.
ROWS = [
    ("MPT 125M", "v5e", (8, 1, 1, 1), 8, 1, 1024, "none", "adamw", True),
    ("MPT 125M", "v5e", (1, 8, 1, 1), 8, 1, 1024, "dots", "adamw", True),
    ("MPT 125M", "v5e", (1, 8, 1, 1), 8, 1, 1024, "block", "adamw", False),
    ("MPT 125M", "v5e", (1, 8, 1, 1), 8, 1, 1024, "block", "muon", True),
    ("MPT 125M", "v5e", (1, 4, 2, 1), 8, 4, 1024, "block", "adamw", True),
    ("MPT 125M", "v5e", (1, 4, 1, 2), 8, 1, 1024, "block", "adamw", True),
    ("MPT 125M", "h100", (8, 1, 1, 1), 16, 1, 1024, "none", "adamw", True),
    ("MPT 125M", "h100", (1, 8, 1, 1), 16, 1, 1024, "block", "muon", True),
    ("MPT 1B", "v4", (1, 16, 1, 1), 4, 1, 2048, "block", "adamw", True),
    ("MPT 1B", "v5e", (1, 16, 1, 1), 4, 1, 2048, "block", "adamw", True),
    ("MPT 1B", "v5e", (1, 16, 1, 1), 4, 1, 2048, "block", "muon", True),
    ("MPT 1B", "v6e", (1, 16, 1, 1), 4, 1, 2048, "dots", "adamw", True),
    ("MPT 1B", "v5p", (2, 8, 1, 1), 4, 2, 2048, "none", "adamw", True),
    ("MPT 1B", "tpu7x", (1, 8, 1, 1), 4, 1, 2048, "block", "adamw", True),
    ("MPT 1B", "h100", (1, 8, 1, 1), 8, 1, 2048, "dots", "adamw", True),
    ("MPT 1B", "h100", (1, 4, 2, 1), 8, 2, 2048, "block", "adamw", True),
    ("Llama 2 7B", "v4", (1, 64, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v5e", (1, 64, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v5e", (1, 16, 4, 1), 1, 2, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v5p", (1, 64, 1, 1), 2, 1, 4096, "dots", "adamw", True),
    ("Llama 2 7B", "v5p", (1, 64, 1, 1), 1, 1, 4096, "none", "adamw", True),
    ("Llama 2 7B", "v6e", (1, 64, 1, 1), 2, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v6e", (1, 32, 1, 2), 2, 1, 8192, "block", "adamw", True),
    ("Llama 2 7B", "tpu7x", (1, 64, 1, 1), 2, 1, 4096, "dots", "adamw", True),
    ("Llama 2 7B", "h100", (1, 8, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "h100", (1, 64, 1, 1), 1, 1, 4096, "none", "adamw", True),
    ("Llama 2 7B", "h100", (1, 64, 1, 1), 2, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "h100", (8, 8, 1, 1), 1, 2, 4096, "block", "adamw", True),
    ("Llama 3 8B", "v5p", (1, 64, 1, 1), 1, 1, 8192, "block", "adamw", True),
    ("Llama 3 8B", "tpu7x", (1, 8, 4, 1), 1, 1, 8192, "block", "adamw", True),
    ("Llama 3 8B", "h100", (1, 16, 4, 1), 1, 1, 8192, "block", "adamw", True),
    ("Llama 2 13B", "v5e", (1, 64, 1, 1), 1, 1, 2048, "block", "adamw", True),
    ("Llama 2 13B", "h100", (1, 64, 1, 1), 1, 1, 4096, "dots", "adamw", True),
    ("Llama 2 70B", "v5e", (1, 256, 1, 1), 1, 1, 2048, "block", "adamw", True),
    ("Llama 2 70B", "v5p", (1, 64, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 70B", "h100", (1, 64, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 70B", "h100", (1, 16, 4, 1), 1, 4, 4096, "block", "adamw", True),
]
HEADER = [
    "model", "devices", "mesh", "remat", "optimizer", "memory: plan", "compiler", "ratio", "sent: plan", "compiler",
    "ratio",
]  # fmt: skip


def config_of(row: tuple) -> Resolved:
    """Return the config of a row."""
    model, _, mesh, sequences, micro_batches, seq_len, remat, optimizer, scan = row
    values = {
        "model.remat": remat,
        "model.scan_layers": scan,
        "train.seq_len": seq_len,
        "train.loss_chunk": 2048,
        "optimizer.name": optimizer,
    }
    return planned_config(model, mesh, sequences, micro_batches, values)


def compiled(row: tuple) -> dict:
    """Return the compiler's figures of a row."""
    try:
        c = compile_step(config_of(row), row[1], dict(zip(MESH_AXES, row[2], strict=True)))
    except UserError as error:
        return {"row": row, "error": str(error)}
    return {"row": row, "peak": c.peak, "sent": sum(c.sent.values()), "seconds": c.seconds}


def table_line(row: tuple, figures: dict) -> list[str]:
    """Return the line of benchmarks/NOTES.md for a row and the compiler's figures."""
    model, device, mesh, _, _, _, remat, optimizer, scan = row
    e = estimate(config_of(row), device, math.prod(mesh))
    axes = [f"{axis} {size}" for axis, size in zip(MESH_AXES, mesh, strict=True) if size > 1]
    devices = f"{math.prod(mesh)} {device}"
    line = [model + ", unrolled" * (not scan), devices, " x ".join(axes), remat, optimizer]
    plan = {"peak": e.memory.total, "sent": sum(transfer.sent for transfer in e.sent)}
    for name, planned in plan.items():
        if name not in figures:
            line += [si(planned, "B"), "does not compile", ""]
            continue
        compiled = figures[name]
        ratio = f"{planned / compiled:.2f}" if compiled else ""
        line += [si(planned, "B"), si(compiled, "B"), ratio]
    return line


def main(argv: list[str] | None = None) -> int:
    """Compile the rows that the file does not have, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the compilers' figures, one JSON object per line",
    )
    path = Path(parser.parse_args(argv).out)
    by_row = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            by_row[json.dumps(record["row"])] = record
    for row in ROWS:
        if json.dumps(row) not in by_row:
            by_row[json.dumps(row)] = record = compiled(row)
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
            print(record, file=sys.stderr, flush=True)
    print(markdown_table(HEADER, [table_line(row, by_row[json.dumps(row)]) for row in ROWS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
