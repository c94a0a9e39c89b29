"""The estimate behind --plan, against figures derived by hand."""

import dataclasses
import itertools
import math
import re
import shlex

import pytest
from running import ROOT
from tiny import tiny

from lm.command_line.loading import load
from lm.config.schema import DataConfig
from lm.cost import flops
from lm.cost.communication import seconds
from lm.cost.devices import DEVICES
from lm.cost.estimate import estimate, factorizations, search_meshes
from lm.cost.memory import moved_activation_bytes
from lm.cost.report import plan
from lm.system.errors import UserError
from lm.train import main
from lm.training.run import missing_data

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


@pytest.mark.slow
def test_plan_of_a_7b_model_on_64_h100s(capsys, monkeypatch):
    """Replica 16 x fsdp 4, 4 micro-batches of 2 sequences per device, bfloat16 products of float32
    parameters.
    """
    monkeypatch.chdir(ROOT)
    text = re.sub(r"\\\n\s*", "", DOCUMENT.read_text())
    (documented,) = re.findall(r"^python3? -m lm.train (.* --plan --device .*)$", text, re.M)
    assert main(shlex.split(documented)) == 0
    plan = capsys.readouterr().out
    assert f"```\n{plan}```" in DOCUMENT.read_text()
    assert f"{WEIGHTS + VECTORS + EMBEDDINGS:,} parameters" in plan
    assert "4 micro-batches of 2 sequences per device" in plan
    assert "64 x h100, mesh replica 16 x fsdp 4 x tensor 1 x sequence 1\n" in plan
    parameters = 4 * ((WEIGHTS + EMBEDDINGS) / 4 + VECTORS)
    expected = {
        "parameters (float32)": parameters,
        "optimizer state (adamw)": 2 * parameters,
        "gradients, and their float32 sum over micro-batches": parameters
        + 4 * (WEIGHTS / 4 + LAYERS * (4 * D + 2 * F + 5 * D))
        + 4 * V * D,
        "parameters of the layers, forward and backward": 4 * 2 * (2 * WEIGHTS) * 3 / 4,
        # a tied table is used twice, but XLA:GPU sums both gradients before it sends them
        "gradients of these parameters": 4 * 4 * (WEIGHTS + EMBEDDINGS) * 3 / 4,
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

    line = plan.splitlines()[1]
    days, seconds, speed = re.search(
        r"about ([\d.]+) days: ([\d.]+) s per step, ([\d.]+ k) tokens/s", line
    ).groups()
    assert number(days) == pytest.approx(STEPS * number(seconds) / 86400, rel=5e-3)
    assert number(speed) == pytest.approx(TOKENS / number(seconds), rel=5e-3)


def test_the_time_of_a_step_by_hand():
    """Products, activations and the optimizer's bytes; sums over replica overlap products on TPUs
    only.
    """
    model = {"compute_dtype": "bfloat16", "remat": "block"}
    for name, mesh in itertools.product(
        ("h100", "v5e"), ({"replica": 2}, {"replica": 1, "tensor": 2})
    ):
        e, device = estimate(tiny(model=model, mesh=mesh), name, 2), DEVICES[name]
        products = (
            4 / 3 * flops.flops_per_token(e.config.model, 8) * 4 * 8 / 2 / device.peak["bfloat16"]
        )
        work = (
            products / device.attained
            + moved_activation_bytes(e.config, e.sizes) / device.bandwidth
        )
        sent = sum(seconds(transfer, device, e.sizes) for transfer in e.sent)
        update = (3 * e.memory.parameters + 2 * e.memory.optimizer) / device.bandwidth
        exposed = max(0.0, sent - work) if (name, "tensor" in mesh) == ("v5e", False) else sent
        assert sent > 0
        assert e.seconds == pytest.approx(work + exposed + update)


def test_factorizations_are_all_ordered_products():
    found = factorizations(24, 4)
    brute = [
        f
        for f in itertools.product([d for d in range(24, 0, -1) if 24 % d == 0], repeat=4)
        if math.prod(f) == 24
    ]
    assert found == brute


def seven_billion(**sections):
    model = {
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "d_ff": 11_008,
        "remat": "block",
    }
    model |= {
        "d_head": 128,
        "vocab_size": 32_000,
        "compute_dtype": "bfloat16",
        "max_positions": 4096,
    }
    train = {"batch_size": 64, "seq_len": 4096, "micro_batch_size": 1}
    return tiny(model=model | sections.pop("model", {}), train=train, **sections)


def test_the_best_mesh_is_the_fastest_that_fits():
    config = seven_billion()
    found = search_meshes(config, "h100", 16)
    fitting = [e for e in found if e.fits]
    assert found[: len(fitting)] == sorted(fitting, key=lambda e: e.seconds)
    assert 0 < len(fitting) < len(found)
    assert not estimate(config, "h100", 16).fits  # only data parallelism
    assert len({tuple(e.sizes.values()) for e in found}) == len(found)
    text, chosen = plan(config, "h100", 16)
    assert (chosen.sizes, chosen.fits) == (fitting[0].sizes, True)
    assert (
        f"16 x h100, mesh replica {fitting[0].sizes['replica']} x fsdp {fitting[0].sizes['fsdp']} "
        in text
    )
    assert f"Meshes: {len(fitting)} of {len(found)} fit" in text
    meshes = text.partition("Meshes:")[2].partition("\n\n")[0]
    times = [float(line.split()[-3]) for line in meshes.splitlines()[1:]]
    assert times == sorted(times)  # the fastest is the first of its own column
    assert "batch" not in meshes


def test_the_plan_says_what_it_omits_and_what_would_be_better():
    bf16 = {"compute_dtype": "bfloat16"}
    one_mesh = plan(seven_billion(mesh={"replica": 1, "fsdp": 2, "tensor": 8}), "h100", 16)
    assert one_mesh[1].fits
    cases = [  # the text of a plan, what it says, what it does not say
        (one_mesh[0], "mesh replica 1 x fsdp 2 x tensor 8 x sequence 1", "Meshes:"),
        (plan(seven_billion(model={"d_ff": 10**7}), "h100", 16)[0], "meshes fits; this one needs the least", "Fits"),
        (plan(tiny(optimizer={"name": "soap"}, model=bf16), "h100", 2)[0], "soap's state is not counted", "Meshes: 0"),
        (plan(tiny(model=bf16, train={"batch_size": 48, "seq_len": 16}), "v5p", 32)[0],
         "--config.train.batch_size=32 or --config.train.batch_size=64 none needs to", "muon"),
        (plan(tiny(model=bf16, train={"batch_size": 16}), "v5p", 16)[0], "16 v5p chips (v5p-32 in Google's", "x v5p"),
    ]  # fmt: skip
    for text, said, unsaid in cases:
        assert said in text
        assert unsaid not in text


def test_no_mesh_and_no_peak_are_assumed():
    config = seven_billion(
        model={"n_heads": 31, "n_kv_heads": 31, "d_model": 31 * 128, "d_ff": 31 * 128}
    )
    object.__setattr__(config.train, "batch_size", 1)
    object.__setattr__(config.train, "seq_len", 4095)
    with pytest.raises(UserError, match=r"config\.train\.batch_size: 1 is not divisible by"):
        search_meshes(config, "h100", 16)
    with pytest.raises(
        UserError,
        match=r"^config\.model\.compute_dtype: no float32 peak is published for v5e; use bf",
    ):
        plan(tiny(model={"compute_dtype": "float32"}), "v5e", 2)


def test_the_exit_code_depends_on_whether_the_run_fits(command):
    arguments = [f"--config={ROOT / 'configs/gpt2_124m.py'}", "--plan", "--device=h100:1"]
    for d_ff, expected in {3072: (0, "Fits: "), 10**9: (2, "DOES NOT FIT: ")}.items():
        code, output = command(main, *arguments, f"--config.model.d_ff={d_ff}")
        assert code == expected[0]
        assert output.startswith(expected[1])


def test_a_plan_may_use_attention_that_this_machine_lacks(command, tmp_path):
    """Also where a tokenizer must be made for the size of the vocabulary."""
    (tmp_path / "text.txt").write_text("the cat sat on a mat.\n" * 100)
    arguments = [f"--config={ROOT / 'configs' / 'shakespeare_gpu.py'}", "--plan", "--device=h100:1"]
    keys = {
        "data.source": f"text:{tmp_path / 'text.txt'}",
        "train.seq_len": 32,
        "model.attention": "cudnn",
    }
    keys |= {"data.splits": "(0.8,0.1,0.1)", "model.vocab_size": None, "data.tokenizer": "char"}
    code, output = command(
        main, *arguments, *(f"--config.{key}={value}" for key, value in keys.items())
    )
    assert (code, "Fits: " in output) == (0, True)


def test_an_unknown_device_is_an_error_before_jax_is_imported(command, monkeypatch):
    monkeypatch.setattr("lm.system.runtime.start_jax", lambda *a, **k: pytest.fail("started jax"))
    code, output = command(
        main, f"--config={ROOT / 'configs/gpt2_124m.py'}", "--plan", "--device=h900"
    )
    assert (code, "is not NAME:COUNT" in output) == (2, True)


def test_a_plan_ends_with_the_options_of_the_compiler_and_names_batch_and_data_that_a_run_would_want(
    command, tmp_path
):
    """The data of a large run are rarely on the machine where it is planned: a note there, and an
    error of the run.
    """
    config = f"--config={ROOT}/configs/gpt2_124m.py"
    code, output = command(main, config, "--plan", "--device=v5e:64")
    assert code == 0
    assert (
        output.index("Meshes:")
        < output.index("--config.train.batch_size=512")
        < output.index("Options of the comp")
    )
    assert "tokens:data/openwebtext is not on this machine" in output
    code, output = command(main, config, "--plan", "--device=v5e:64", "--config.mesh.replica=64")
    # an error stands alone
    assert (code, "512" in output, "openwebtext" in output) == (
        2,
        True,
        False,
    )
    code, output = command(main, config)
    assert (code, "lm.data.prepare" in output, "config file" in output) == (2, True, True), output
    of_file = load(f"{ROOT}/configs/gpt2_124m.py", [])
    (tmp_path / "data" / "openwebtext").mkdir(parents=True)
    (tmp_path / "there.txt").write_text("there")
    for source, is_missing in (
        ("tokens:data/openwebtext", False), ("text:there.txt", False), ("text:*.txt", False), ("text:*.md", True),
        ("parquet:absent", True), ("hf:absent", True), ("text:gs://bucket/x", False), ("tfds:tiny_shakespeare", False),
    ):  # fmt: skip
        notes = missing_data(dataclasses.replace(of_file, data=DataConfig(source=source)))
        assert bool(notes) == is_missing, source
