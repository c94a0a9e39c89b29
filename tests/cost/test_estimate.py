"""The estimate behind --plan, against figures derived by hand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from lm.cost import flops
from lm.cost.estimate import step_time

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
D, LAYERS, F, V, T = 4096, 32, 11_008, 50_257, 4096
WEIGHTS = LAYERS * (4 * D * D + 3 * D * F)  # of the layers, sharded
VECTORS = LAYERS * (4 * D + 2 * F + D + 4 * D) + 2 * D  # biases and gains, replicated
EMBEDDINGS = (V + T) * D
STEPS, TOKENS = 600_000, 512 * T


def number(text: str) -> float:
    """Read a number with an SI prefix: "3.36 GB" is 3.36e9."""
    value, prefix = re.fullmatch(r"([\d.,]+) ?([kMGT]?)B?", text.strip()).groups()
    return float(value.replace(",", "")) * 1000 ** " kMGT".index(prefix or " ")


DOCUMENT = ROOT / "docs" / "scaling.md"


def plan_of_documented_command() -> str:
    """Return what the --plan command of docs/scaling.md prints."""
    text = re.sub(r"\\\n\s*", "", DOCUMENT.read_text())
    (command,) = re.findall(r"^python3? -m (lm.train .* --plan .*)$", text, re.M)
    done = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_plan_of_a_7b_model_on_64_h100s():
    """Replica 8 x fsdp 8, 4 micro-batches of 2 sequences per device, bfloat16 products of float32 parameters."""
    plan = plan_of_documented_command()
    assert f"```\n{plan}```" in DOCUMENT.read_text()
    assert f"{WEIGHTS + VECTORS + EMBEDDINGS:,} parameters" in plan
    assert "4 micro-batches of 2 sequences per device" in plan
    parameters = 4 * ((WEIGHTS + EMBEDDINGS) / 8 + VECTORS)
    expected = {
        "parameters (float32)": parameters,
        "optimizer state (adamw)": 2 * parameters,
        "gradients (float32, and their float32 sum over micro-batches)": 2 * parameters,
        "parameters of the layers, forward and backward": 4 * 2 * (2 * WEIGHTS) * 7 / 8,
        "gradients of these parameters": 4 * 4 * (WEIGHTS + EMBEDDINGS + V * D) * 7 / 8,  # a tied table is used twice
        "gradients, once per step": 4 * (WEIGHTS + EMBEDDINGS) / 8 * 2 * 7 / 8,
    }
    for what, n_bytes in expected.items():
        (found,) = re.findall(rf"^  {re.escape(what)} .*?([\d.]+ [kMGT]?B)", plan, re.M)
        assert number(found) == pytest.approx(n_bytes, rel=5e-3), what

    # The first line compares the total of the memory table with 80 GB.
    memory = plan.partition("Memory per device\n")[2].partition("  total")[0]
    total = sum(number(row[-10:]) for row in memory.splitlines())
    fits, used = re.match(r"(\w+): ([\d.]+ GB) of 80.0 GB per device", plan).groups()
    assert fits == "Fits"
    assert number(used) == pytest.approx(total, rel=5e-3)

    # The second line is time: days are steps x seconds per step, and tokens per second follow from them.
    line = plan.splitlines()[1]
    days = [number(n) for n in re.search(r"([\d.]+) to ([\d.]+) days", line).groups()]
    seconds = [number(n) for n in re.search(r"([\d.]+) to ([\d.]+) s per step", line).groups()]
    speeds = [number(n) for n in re.search(r"([\d.]+ k) to ([\d.]+ M) tokens/s", line).groups()]
    assert days == pytest.approx([STEPS * s / 86400 for s in seconds], rel=5e-3)
    assert speeds == pytest.approx([TOKENS / s for s in reversed(seconds)], rel=5e-3)


def test_step_time_overlaps_communication_with_compute_or_adds_it():
    """A batch of 4 x 8 tokens on 2 devices of 1e9 FLOP/s."""
    config = tiny()
    compute = flops.flops_per_token(config.model, 8) * 32 / 2 / 1e9
    assert step_time(config, 1e9, communication=compute / 2, update=1.0, n_devices=2) == pytest.approx(
        (compute + 1, compute / 0.4 + compute / 2 + 1)
    )
    faster, _ = step_time(config, 1e9, communication=3 * compute, update=0.0, n_devices=2)
    assert faster == pytest.approx(3 * compute)
    recomputed, _ = step_time(tiny(model={"remat": "block"}), 1e9, communication=0.0, update=0.0, n_devices=2)
    assert recomputed == pytest.approx(4 / 3 * compute)


def test_the_plan_reports_what_it_omits_and_what_does_not_fit():
    job = """
import jax; jax.config.update("jax_num_cpu_devices", 2)
from tiny import tiny
from lm.cost.estimate import estimate
for name, d_ff in (("muon", 24), ("adamw", 10**9)):
    print(estimate(tiny(optimizer={"name": name}, model={"compute_dtype": "bfloat16", "d_ff": d_ff}), "h100", 2))
    print("=====")
try:
    estimate(tiny(model={"compute_dtype": "float32"}), "v5e", 2)
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", job], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    muon, large, unknown = done.stdout.split("=====\n")
    assert muon.startswith("Fits: ")
    assert "Muon's own communication is not counted" in muon
    assert large.startswith("DOES NOT FIT: ")
    assert "Muon" not in large
    assert unknown == "config.model.compute_dtype: no float32 peak is published for v5e; use bfloat16\n"
