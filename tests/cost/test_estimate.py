"""The estimate behind --plan, against figures derived by hand."""

import itertools
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from lm.cost import flops
from lm.cost.devices import DEVICES
from lm.cost.estimate import estimate, factorizations, search_meshes, step_time
from lm.cost.report import plan
from lm.errors import UserError
from lm.train import main

ROOT = Path(__file__).parents[2]
D, LAYERS, F, V, T = 4096, 32, 11_008, 50_257, 4096
WEIGHTS = LAYERS * (4 * D * D + 3 * D * F)  # of the layers, sharded
VECTORS = LAYERS * (4 * D + 2 * F + D + 4 * D) + 2 * D  # biases and gains, replicated
EMBEDDINGS = (V + T) * D
STEPS, TOKENS = 600_000, 512 * T


def number(text: str) -> float:
    """Read a number with an SI prefix: "3.36 GB" is 3.36e9."""
    value, prefix = re.fullmatch(r"([\d.,]+) ?([kMGT]?)B?", text.strip()).groups()
    return float(value.replace(",", "")) * 1000 ** " kMGT".index(prefix or " ")


DOCUMENT = ROOT / "docs" / "plan.md"


def plan_of_documented_command(capsys) -> str:
    """Return what the --plan command of docs/plan.md prints."""
    text = re.sub(r"\\\n\s*", "", DOCUMENT.read_text())
    (command,) = re.findall(r"^python3? -m lm.train (.* --plan .*)$", text, re.M)
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_plan_of_a_7b_model_on_64_h100s(capsys, monkeypatch):
    """Replica 16 x fsdp 4, 4 micro-batches of 2 sequences per device, bfloat16 products of float32 parameters."""
    monkeypatch.chdir(ROOT)
    plan = plan_of_documented_command(capsys)
    assert f"```\n{plan}```" in DOCUMENT.read_text()
    assert f"{WEIGHTS + VECTORS + EMBEDDINGS:,} parameters" in plan
    assert "4 micro-batches of 2 sequences per device" in plan
    assert "64 x h100, mesh replica 16 x fsdp 4 x tensor 1 x sequence 1\n" in plan
    parameters = 4 * ((WEIGHTS + EMBEDDINGS) / 4 + VECTORS)
    expected = {
        "parameters (float32)": parameters,
        "optimizer state (adamw)": 2 * parameters,
        "gradients (float32, and their float32 sum over micro-batches)": 2 * parameters,
        "parameters of the layers, forward and backward": 4 * 2 * (2 * WEIGHTS) * 3 / 4,
        "gradients of these parameters": 4 * 4 * (WEIGHTS + EMBEDDINGS + V * D) * 3 / 4,  # a tied table is used twice
        "gradients, once per step": 4 * (WEIGHTS + EMBEDDINGS) / 4 * 2 * 15 / 16,
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
    days, seconds, speed = re.search(r"about ([\d.]+) days: ([\d.]+) s per step, ([\d.]+ k) tokens/s", line).groups()
    assert number(days) == pytest.approx(STEPS * number(seconds) / 86400, rel=5e-3)
    assert number(speed) == pytest.approx(TOKENS / number(seconds), rel=5e-3)


H100 = DEVICES["h100"]
TIMES = {"overlapped": 0.0, "exposed": 0.0, "activations": 0.0, "update": 0.0}


def test_step_time_by_hand():
    """A batch of 4 x 8 tokens on 2 devices."""
    config = tiny(model={"compute_dtype": "bfloat16"})
    products = flops.flops_per_token(config.model, 8) * 32 / 2 / H100.peak["bfloat16"]
    parts = {name: i * products for i, name in enumerate(TIMES, start=1)}
    work = products / H100.attained + 3 * products
    assert step_time(config, H100, **parts, n_devices=2) == pytest.approx(
        (3 * products + 4 * products, work + (1 + 2 + 4) * products, products / 0.4 + (1 + 2 + 3 + 4) * products)
    )
    recomputed = step_time(tiny(model={"compute_dtype": "bfloat16", "remat": "block"}), H100, **TIMES, n_devices=2)
    assert recomputed == pytest.approx([4 / 3 * products / x for x in (1, H100.attained, 0.4)])


def test_communication_over_fsdp_overlaps_products_on_tpus():
    config, v5e = tiny(model={"compute_dtype": "bfloat16"}), DEVICES["v5e"]
    _, alone, _ = step_time(config, v5e, **TIMES, n_devices=2)
    _, hidden, _ = step_time(config, v5e, **TIMES | {"overlapped": alone / 2}, n_devices=2)
    _, longer, _ = step_time(config, v5e, **TIMES | {"overlapped": 3 * alone}, n_devices=2)
    assert (hidden, longer) == pytest.approx((alone, 3 * alone))


def test_factorizations_are_all_ordered_products():
    found = factorizations(24, 4)
    brute = [f for f in itertools.product([d for d in range(24, 0, -1) if 24 % d == 0], repeat=4) if math.prod(f) == 24]
    assert found == brute


def seven_billion(**sections):
    model = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "d_ff": 11_008, "remat": "block"}
    model |= {"d_head": 128, "vocab_size": 32_000, "compute_dtype": "bfloat16", "max_positions": 4096}
    train = {"batch_size": 64, "seq_len": 4096, "micro_batch_size": 1}
    return tiny(model=model | sections.pop("model", {}), train=train, **sections)


def test_the_best_mesh_is_the_fastest_that_fits():
    config = seven_billion()
    found = search_meshes(config, "h100", 16)
    fitting = [e for e in found if e.fits]
    assert found[: len(fitting)] == fitting
    assert 0 < len(fitting) < len(found)
    assert not estimate(config, "h100", 16).fits  # only data parallelism
    assert all(fitting[0].expected <= 1.01 * e.expected for e in fitting)
    assert len({tuple(e.sizes.values()) for e in found}) == len(found)
    text, fits = plan(config, "h100", 16)
    assert fits
    assert f"16 x h100, mesh replica {fitting[0].sizes['replica']} x fsdp {fitting[0].sizes['fsdp']} " in text
    assert f"Meshes: {len(fitting)} of {len(found)} fit" in text


def test_only_the_given_mesh_is_estimated():
    text, fits = plan(seven_billion(mesh={"replica": 1, "fsdp": 2, "tensor": 8}), "h100", 16)
    assert fits
    assert "mesh replica 1 x fsdp 2 x tensor 8 x sequence 1" in text
    assert "Meshes:" not in text


def test_no_mesh_fits():
    text, fits = plan(seven_billion(model={"d_ff": 10**7}), "h100", 16)
    assert not fits
    assert text.startswith("DOES NOT FIT: ")
    assert "possible meshes fits; this one needs the least memory" in text


def test_no_mesh_divides_the_batch():
    config = seven_billion(model={"n_heads": 31, "n_kv_heads": 31, "d_model": 31 * 128, "d_ff": 31 * 128})
    object.__setattr__(config.train, "batch_size", 1)
    object.__setattr__(config.train, "seq_len", 4095)
    with pytest.raises(UserError, match=r"config\.train\.batch_size: 1 is not divisible by"):
        search_meshes(config, "h100", 16)


@pytest.mark.parametrize(("d_ff", "code"), [(3072, 0), (10**9, 2)])
def test_the_exit_code_depends_on_whether_the_run_fits(capsys, d_ff, code):
    arguments = ["--config", str(ROOT / "configs" / "gpt2_124m.py"), "--plan", "--device", "h100:1"]
    assert main([*arguments, f"--config.model.d_ff={d_ff}"]) == code
    assert capsys.readouterr().out.startswith("DOES NOT FIT: " if code else "Fits: ")


def test_a_plan_may_use_attention_that_this_machine_lacks(capsys, tmp_path):
    """Also where a tokenizer must be made for the size of the vocabulary."""
    (tmp_path / "text.txt").write_text("the cat sat on a mat.\n" * 100)
    arguments = [f"--config={ROOT / 'configs' / 'shakespeare_gpu.py'}", "--plan", "--device=h100:1"]
    keys = {"data.source": f"text:{tmp_path / 'text.txt'}", "train.seq_len": 32, "model.attention": "cudnn"}
    keys |= {"data.splits": "(0.8,0.1,0.1)", "model.vocab_size": None, "data.tokenizer": "char"}
    assert main(arguments + [f"--config.{key}={value}" for key, value in keys.items()]) == 0
    assert "Fits: " in capsys.readouterr().out


def test_an_unknown_device_is_an_error_before_jax_is_imported():
    command = [sys.executable, "-X", "importtime", "-m", "lm.train", "--plan", "--device=h100"]
    done = subprocess.run(
        [*command, "--config=configs/gpt2_124m.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "is not NAME:COUNT" in done.stderr) == (2, True), done.stderr[-500:]
    assert not re.search(r"\bjax$", done.stderr, re.M)


def test_the_plan_states_what_it_omits():
    config = tiny(optimizer={"name": "muon"}, model={"compute_dtype": "bfloat16"})
    assert "Muon's own communication is not counted" in plan(config, "h100", 2)[0]
    assert "Muon" not in plan(tiny(model={"compute_dtype": "bfloat16"}), "h100", 2)[0]


@pytest.mark.parametrize(("scan_layers", "fsdp", "warned"), [(True, 2, False), (False, 2, True), (False, 1, False)])
def test_the_plan_warns_that_unrolled_layers_may_be_gathered_at_once(scan_layers, fsdp, warned):
    mesh = {"replica": 2 // fsdp, "fsdp": fsdp}
    config = tiny(model={"compute_dtype": "bfloat16", "scan_layers": scan_layers}, mesh=mesh)
    assert ("unrolled layers" in plan(config, "h100", 2)[0]) == warned


def test_no_peak_is_assumed():
    with pytest.raises(
        UserError, match=r"^config\.model\.compute_dtype: no float32 peak is published for v5e; use bfl"
    ):
        plan(tiny(model={"compute_dtype": "float32"}), "v5e", 2)
