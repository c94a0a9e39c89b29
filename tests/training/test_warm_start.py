"""config.init_from: parameters that fit are loaded bit for bit, and all others are reported."""

import subprocess
import sys

import numpy as np
import pytest
from running import checksums, metrics_of, summary_of

from lm.parameters import flat
from lm.workdir.checkpoints import restore_params

ONCE = ("--config.model.dropout=0", "--config.train.steps=0", "--config.eval.every=0")


def evaluated(workdir) -> list[float]:
    return [line["loss"] for line in metrics_of(workdir) if "split" in line and line["step"] == 0]


@pytest.mark.slow
def test_a_run_without_steps_evaluates_the_loaded_parameters(bench, train, tmp_path):
    reference = bench.reference()
    code, output = train(tmp_path / "run", *ONCE, f"--config.init_from={reference}")
    assert code == 0
    assert "step 12:" in output
    assert "newly initialized: -" in output
    assert "not used: -" in output
    final = [line["loss"] for line in metrics_of(reference) if "split" in line and line["step"] == 12]
    assert evaluated(tmp_path / "run") == pytest.approx(final, rel=1e-6)
    assert summary_of(tmp_path / "run")["steps"] == 0
    source, ours = (flat(restore_params(w, "latest")[1]) for w in (reference, tmp_path / "run"))
    assert all(np.array_equal(source[path], ours[path]) for path in source.keys() | ours.keys())


@pytest.mark.slow
def test_the_architecture_may_change_and_every_parameter_is_reported(bench, train, tmp_path):
    reference = bench.reference()
    switches = ("--config.model.ffn=mlp", "--config.model.d_ff=64", "--config.model.qk_norm=true")
    code, output = train(tmp_path / "run", *ONCE, *switches, f"--config.init_from={reference}")
    assert code == 0
    reported = {line.partition(":")[0].strip(): line for line in output.splitlines() if line.startswith("  ")}
    assert "layers/ffn/w_in_DF, layers/ffn/w_out_FD" in reported["newly initialized"]
    assert "layers/attention/q_scale_K" in reported["newly initialized"]
    assert "layers/ffn/w_gate_DF" in reported["not used"]
    assert "embedding" in reported["loaded"]
    assert reported.pop("config.model differs") == ("  config.model differs: ffn glu -> mlp, qk_norm False -> True")
    n_reported = sum(line.count(",") + 1 for line in reported.values())
    table, before = (flat(restore_params(w, "latest")[1]) for w in (tmp_path / "run", reference))
    assert n_reported == len(table.keys() | before.keys())
    assert np.array_equal(table["embedding"], before["embedding"])


@pytest.mark.slow
def test_a_parameter_of_another_shape_is_reported_with_both_shapes(bench, train, tmp_path):
    code, output = train(tmp_path / "run", *ONCE, "--config.model.d_ff=32", f"--config.init_from={bench.reference()}")
    assert code == 0
    assert "layers/ffn/w_gate_DF (1, 16, 64) -> (1, 16, 32)" in output


def test_a_source_without_checkpoints_or_with_another_tokenizer_is_refused(bench, train, tmp_path):
    code, output = train(tmp_path / "run", *ONCE, f"--config.init_from={tmp_path}")
    assert (code, "holds no checkpoints" in output) == (2, True)
    other = ("--config.data.tokenizer=byte", f"--config.init_from={bench.reference()}")
    code, output = train(tmp_path / "run", *ONCE, *other)
    assert (code, "another tokenizer" in output) == (2, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_is_not_warm_started_again(bench, train, tmp_path):
    from_reference = ("--config.optimizer.schedule=constant", f"--config.init_from={bench.reference()}")
    for workdir, steps in (("grown", 6), ("grown", 12), ("whole", 12)):
        assert train(tmp_path / workdir, *from_reference, f"--config.train.steps={steps}", "--resume")[0] == 0
    assert checksums(tmp_path / "grown", 12) == checksums(tmp_path / "whole", 12)


SHARDED = """
import sys
import jax
from lm import data, parameters
from lm.parallel import sharding
from lm.parallel.mesh import check_mesh, use_mesh
from lm.training.warm_start import warm_start
from lm.command_line.training import parse_arguments
config = parse_arguments(sys.argv[1:])[1]
corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=print)
config = parameters.resolve(config, corpus.tokenizer.vocab_size)
with use_mesh(check_mesh(config, jax.device_count())):
    values = warm_start(config, corpus, print).values
    wanted = parameters.flat(sharding.shard_state(parameters.nest(values), parameters.parameter_table(config.model)))
    assert all(x.sharding == wanted[path].sharding for path, x in values.items())
    print(min(x.size // x.addressable_shards[0].data.size for path, x in values.items() if x.ndim > 2), "parts")
"""


@pytest.mark.slow
def test_on_a_mesh_loaded_parameters_are_sharded(bench, tmp_path, monkeypatch):
    reference = bench.reference()
    for name, value in {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}.items():
        monkeypatch.setitem(bench.env, name, value)
    more = (*ONCE, "--config.train.batch_size=8", "--config.mesh.fsdp=8", f"--config.init_from={reference}")
    command = [sys.executable, "-c", SHARDED, *bench.arguments(None, *more)]
    done = subprocess.run(command, cwd=bench.base, env=bench.env, capture_output=True, text=True, check=False)
    assert (done.returncode, "8 parts" in done.stdout) == (0, True), done.stderr[-2000:]
    done = bench.train(tmp_path / "run", *more)
    assert done.returncode == 0, done.stderr
    final = [line["loss"] for line in metrics_of(reference) if "split" in line and line["step"] == 12]
    assert evaluated(tmp_path / "run") == pytest.approx(final, rel=1e-6)
