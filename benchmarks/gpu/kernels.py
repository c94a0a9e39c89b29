"""A table of a profile: where the time of a GPU goes.

    python -m benchmarks.gpu.kernels TRACE PROGRAM

TRACE is NAME.trace.json.gz of `jax.profiler.trace`, PROGRAM the text of the compiled program, which
says what each kernel computes.
"""

import collections
import gzip
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

KINDS = {
    "attention": "fmha|flash|sdpa|cudnn",
    "products": "gemm|nvjet|cutlass|xmma|cublas|dot",
    "copies": "memcpy|memset",
    "collectives": "nccl",
}
SHOWN = 40


def table(trace: Path, program: Path) -> str:
    """Return the span, the idle time, and the milliseconds by kind of kernel and by operation."""
    with gzip.open(trace, "rt") as file:
        kernels = on_streams(json.load(file)["traceEvents"])
    if not kernels:
        return "no kernels of a GPU in this trace"
    names = operations(program.read_text())
    by_kind: collections.Counter[str] = collections.Counter()
    by_operation: collections.Counter[tuple[str, str]] = collections.Counter()
    runs: collections.Counter[tuple[str, str]] = collections.Counter()
    for event in kernels:
        instruction = event.get("args", {}).get("hlo_op", "?")
        operation = re.sub(r"layers/\d+", "layers/*", names.get(instruction, instruction))
        group = kind(event["name"]), operation[-90:]
        by_kind[group[0]] += event["dur"]
        by_operation[group] += event["dur"]
        runs[group] += 1
    start = min(event["ts"] for event in kernels)
    span = max(event["ts"] + event["dur"] for event in kernels) - start
    idle = 100 * (1 - busy(kernels) / span)
    lines = [f"{span / 1e3:.2f} ms, {len(kernels)} kernels, idle {idle:.1f} %"]
    for name, us in by_kind.most_common():
        lines.append(f"{us / 1e3:9.2f} ms {100 * us / span:5.1f} %  {name}")
    for group, us in by_operation.most_common(SHOWN):
        lines.append(f"{us / 1e3:9.3f} ms {runs[group]:5d} x  {group[0]:11s} {group[1]}")
    return "\n".join(lines)


def on_streams(events: list[dict]) -> list[dict]:
    """Return the kernels among the events of a trace: what runs on a stream of a GPU."""
    gpus = set()
    threads = {}
    for event in events:
        if event.get("name") == "process_name" and "GPU" in event["args"].get("name", ""):
            gpus.add(event["pid"])
        if event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    complete = [event for event in events if event.get("ph") == "X" and event["pid"] in gpus]
    return [e for e in complete if "Stream" in threads.get((e["pid"], e["tid"]), "")]


def operations(program: str) -> dict[str, str]:
    """Return JAX's name of each instruction of a compiled program."""
    named = re.finditer(r'^ *(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', program, re.MULTILINE)
    return {match[1]: match[2] for match in named}


def kind(kernel: str) -> str:
    """Return the kind of a kernel by its name.

    >>> kind("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT"), kind("loop_add_fusion_3")
    ('products', 'fusions')
    """
    for name, pattern in KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "fusions"


def busy(kernels: Iterable[dict]) -> float:
    """Return the microseconds in which at least one kernel runs."""
    total = end = 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    print(table(Path(sys.argv[1]), Path(sys.argv[2])))
