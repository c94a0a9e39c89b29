"""Compare the estimate of --plan with the compilers of TPUs and GPUs: python -m benchmarks.compiled_plan --out FILE

Compiles the training step of each row until buffers are assigned, with the extras [tpu] and [cuda], and prints the
Markdown table of docs/plan.md. Rows that FILE has already are not compiled again.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

from benchmarks.published_runs import MODELS
from lm import parameters
from lm.config import MESH_AXES, Config, MeshConfig
from lm.cost.compiled import compile_step
from lm.cost.estimate import estimate
from lm.errors import UserError
from lm.text_tables import markdown_table

# Model, device, mesh (replica, fsdp, tensor, sequence), sequences of a micro-batch per device, micro-batches, tokens
# per sequence, remat, optimizer, whether layers are scanned.
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
    ("MPT 1B", "h100", (1, 8, 1, 1), 8, 1, 2048, "dots", "adamw", True),
    ("MPT 1B", "h100", (1, 4, 2, 1), 8, 2, 2048, "block", "adamw", True),
    ("Llama 2 7B", "v4", (1, 64, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v5e", (1, 64, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v5e", (1, 16, 4, 1), 1, 2, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v5p", (1, 64, 1, 1), 2, 1, 4096, "dots", "adamw", True),
    ("Llama 2 7B", "v6e", (1, 64, 1, 1), 2, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "v6e", (1, 32, 1, 2), 2, 1, 8192, "block", "adamw", True),
    ("Llama 2 7B", "h100", (1, 8, 1, 1), 1, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "h100", (1, 64, 1, 1), 2, 1, 4096, "block", "adamw", True),
    ("Llama 2 7B", "h100", (8, 8, 1, 1), 1, 2, 4096, "block", "adamw", True),
    ("Llama 3 8B", "v5p", (1, 64, 1, 1), 1, 1, 8192, "block", "adamw", True),
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


def compare(row: tuple) -> dict:
    """Return the bytes of the plan and of the compiler for a row."""
    model, device, mesh, sequences, micro_batches, seq_len, remat, optimizer, scan = row
    n, default, batch_size = math.prod(mesh), Config(), sequences * micro_batches * mesh[0] * mesh[1]
    changes = {"remat": remat, "compute_dtype": "bfloat16", "scan_layers": scan}
    config = dataclasses.replace(
        default,
        model=dataclasses.replace(default.model, **MODELS[model] | changes),
        train=dataclasses.replace(
            default.train, batch_size=batch_size, seq_len=seq_len, micro_batch_size=sequences, loss_chunk=2048
        ),
        optimizer=dataclasses.replace(default.optimizer, name=optimizer),
        mesh=MeshConfig(*mesh),
    )
    config = parameters.resolve(config, MODELS[model]["vocab_size"])
    e = estimate(config, device, n)
    found = {"row": row, "plan": e.memory.total, "plan_sent": sum(t.sent for t in e.sent)}
    try:
        c = compile_step(config, device, e.sizes)
    except UserError as error:
        return found | {"error": str(error)}
    return found | {"peak": c.peak, "sent": sum(c.sent.values()), "seconds": c.seconds}


def table(records: list[dict]) -> str:
    """Return the Markdown table of rows that were compiled."""
    rows = []
    for r in records:
        model, device, mesh, _, _, _, remat, optimizer, scan = r["row"]
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, mesh, strict=True) if size > 1)
        line = [model + ("" if scan else ", unrolled"), f"{math.prod(mesh)} {device}", axes, remat, optimizer]
        line.append(f"{r['plan'] / 1e9:.3g} GB")
        if "error" in r:
            rows.append([*line, "does not compile", "", "", "", ""])
            continue
        line += [f"{r['peak'] / 1e9:.3g} GB", f"{r['plan'] / r['peak']:.2f}", f"{r['plan_sent'] / 1e9:.3g} GB"]
        rows.append([*line, f"{r['sent'] / 1e9:.3g} GB", f"{r['plan_sent'] / r['sent']:.2f}" if r["sent"] else ""])
    return markdown_table(HEADER, rows)


def main(argv: list[str] | None = None) -> int:
    """Compile the rows that the file does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FILE", help="records, one JSON object per line")
    path = Path(parser.parse_args(argv).out)
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {json.dumps(r["row"]) for r in records}
    for row in ROWS:
        if json.dumps(row) not in done:
            records.append(compare(row))
            with open(path, "a") as file:
                file.write(json.dumps(records[-1]) + "\n")
            print(records[-1], file=sys.stderr, flush=True)
    order = [json.dumps(row) for row in ROWS]
    print(table(sorted(records, key=lambda r: order.index(json.dumps(r["row"])))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
