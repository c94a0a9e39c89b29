"""README's plan of a 7B run on 64 chips, against numbers made by hand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from lm.cost import estimate as plan
from lm.cost import flops
from lm.errors import UserError

ROOT = Path(__file__).parents[2]
D, LAYERS, F, V, T = 4096, 32, 11_008, 50_257, 4096
WEIGHTS = LAYERS * (4 * D * D + 3 * D * F)  # of the layers; biases and norms are whole on every device
VECTORS = LAYERS * (4 * D + 2 * F + D + 4 * D) + 2 * D
EMBEDDINGS = (V + T) * D
GB = 1e9


@pytest.mark.slow
def test_readmes_plan_of_7b_on_64_chips():
    """Replica 8 x fsdp 8, 4 micro-batches of 2 sequences a device, bfloat16 over float32 parameters."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "README.md").read_text())
    (command,) = re.findall(r"^python -m (lm.train .* --plan .*)$", text, re.M)
    done = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{WEIGHTS + VECTORS + EMBEDDINGS:,} parameters" in done.stdout
    assert "compiled program's arguments, as computed" in done.stdout
    parameters = 4 * ((WEIGHTS + EMBEDDINGS) / 8 + VECTORS)
    expected = {
        "parameters  ": parameters,
        "optimizer state": 2 * parameters,
        "gradients  ": 2 * parameters,  # a micro-batch's and their sum
        "layers' parameters, forward and backward": 4 * 2 * (2 * WEIGHTS) * 7 / 8,
        "gradients of all of them": 4 * 4 * (WEIGHTS + EMBEDDINGS + V * D) * 7 / 8,  # a tied table has two uses
        "gradients, once a step": 4 * (WEIGHTS + EMBEDDINGS) / 8 * 2 * 7 / 8,
    }
    for what, size in expected.items():
        (found,) = re.findall(rf"^  {re.escape(what)}.*?([\d.]+) GB", done.stdout, re.M)
        assert float(found) == pytest.approx(size / GB, rel=1e-3), what


def test_devices_are_named_with_their_number():
    assert plan.named_device("v5p:256") == ("v5p", 256)
    for text in ("h100", "h900:8", "h100:0", "h100:x"):
        with pytest.raises(UserError, match="is not NAME:COUNT with a name of a100, h100"):
            plan.named_device(text)


def test_step_time_is_compute_beside_communication_or_after_it():
    """1e9 FLOPs a second for a batch of 4 x 8 tokens; 6 FLOPs a weight and token and the causal half of attention."""
    config = tiny()
    compute = flops.flops_per_token(config.model, 8) * 32 / 2 / 1e9
    assert plan.step_time(config, 1e9, compute / 2, 1.0, 2) == pytest.approx(
        (compute + 1, compute / 0.4 + compute / 2 + 1)
    )
    assert plan.step_time(config, 1e9, 3 * compute, 0.0, 2)[0] == pytest.approx(3 * compute)
    recomputed = plan.step_time(tiny(model={"remat": "block"}), 1e9, 0.0, 0.0, 2)[0]
    assert recomputed == pytest.approx(4 / 3 * compute)


def test_muons_own_communication_is_said_not_to_be_counted():
    job = (
        "import jax; jax.config.update('jax_num_cpu_devices', 2)\n"
        "from tiny import tiny\nfrom lm import plan\n"
        "for name in ('muon', 'adamw'):\n"
        "    config = tiny(optimizer={'name': name}, model={'compute_dtype': 'bfloat16'})\n"
        "    print(name, 'not counted' in plan.plan(config, 'h100', 2))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", job], env=env, capture_output=True, text=True)
    assert done.stdout == "muon True\nadamw False\n", done.stderr
