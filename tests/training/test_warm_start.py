"""config.init_from: parameters that fit are loaded bit for bit, and all others are reported."""

import re

import jax
import numpy as np
import pytest
from running import metrics_of
from tiny import redrawn, tiny

from lm import data, parameters
from lm.command_line.training import parse_arguments
from lm.config import MESH_AXES
from lm.parallel.mesh import make_mesh
from lm.parameters import flat
from lm.training.warm_start import (
    WarmStart,
    _chosen,
    _groups,
    _partial_rows,
    _shared_rows,
    warm_start,
)
from lm.workdir.checkpoints import restore_params

ONCE = ("--config.model.dropout=0", "--config.train.steps=0", "--config.eval.every=0")


@pytest.mark.slow
def test_the_architecture_may_change_and_every_parameter_is_reported(bench, train, tmp_path):
    reference = bench.reference()
    switches = (
        "--config.model.ffn=mlp",
        "--config.model.n_kv_heads=1",
        "--config.model.qk_norm=true",
    )
    code, output = train(tmp_path / "run", *ONCE, *switches, f"--config.init_from={reference}")
    assert code == 0
    reported = {
        line.partition(":")[0].strip(): line
        for line in output.splitlines()
        if line.startswith("  ")
    }
    assert "layers/ffn/w_in_DF, layers/ffn/w_out_FD" in reported["newly initialized"]
    assert "layers/attention/q_scale_K" in reported["newly initialized"]
    assert (
        "layers/attention/w_k_DGK (1, 16, 2, 8) -> (1, 16, 1, 8)" in reported["newly initialized"]
    )
    assert "layers/ffn/w_gate_DF" in reported["not used"]
    assert "embedding" in reported["loaded"]
    assert "ffn glu -> mlp" in reported.pop("config.model differs")
    table, before = (flat(restore_params(w, "latest")[1]) for w in (tmp_path / "run", reference))
    paths = set(re.findall(r"[a-z_/]+_[A-Z]+|embedding", "".join(reported.values())))
    assert paths == table.keys() | before.keys()
    same = [
        path for path in table.keys() & before.keys() if table[path].shape == before[path].shape
    ]
    assert "embedding" in same
    assert all(np.array_equal(table[path], before[path]) for path in same)


OTHER_DEPTHS = [
    # value embeddings are in every second layer before the last: 0 2 of 3 layers, 1 3 of 4, 0 2 4
    # of 5
    (3, 5, "value_", [0, 2], "of layer 4", None),
    (5, 3, "value_", [0, 2], None, "of layer 4"),
    (3, 4, "value_", [], "(0, 2) -> (1, 3)", "(0, 2) -> (1, 3)"),
    (2, 4, "attention/w_q_DHK", [0, 1], "of layers 2 3", None),
    (4, 2, "attention/w_q_DHK", [0, 1], None, "of layers 2 3"),
]


@pytest.mark.parametrize(("n_old", "n_new", "name", "shared", "new", "unused"), OTHER_DEPTHS)
def test_rows_of_stacks_are_loaded_into_the_layers_they_belong_to(
    n_old, n_new, name, shared, new, unused
):
    """For ideas that some layers have, and for a model of another depth."""
    theirs, ours = (
        tiny(model={"n_layers": n, "value_embeddings": True}).model for n in (n_old, n_new)
    )
    tables = [parameters.parameter_table(model) for model in (theirs, ours)]
    old, initial = flat(redrawn(theirs, 1)), redrawn(ours, 2)
    rows = _shared_rows(*tables)
    values = {path: _chosen(old[path], rows, path) for path in rows}
    found = WarmStart(values, _partial_rows(theirs, ours), "", _groups(values, theirs, ours), {})
    loaded, before = flat(found.into(initial)), flat(initial)
    paths = [path for path in tables[1] if name in path]
    assert paths
    for path in paths:
        layers = tables[1][path].layers
        for row, layer in enumerate(layers):
            wanted = (
                old[path][tables[0][path].layers.index(layer)]
                if layer in shared
                else before[path][row]
            )
            assert np.array_equal(loaded[path][row], wanted), (path, layer)
        lines = {line.partition(":")[0].strip(): line for line in found.groups.splitlines()}
        assert (path in lines["loaded"]) == bool(shared)
        for group, text in (("newly initialized", new), ("not used", unused)):
            assert (f"{path} {text}" in lines[group]) if text else (path not in lines[group])
    assert np.array_equal(loaded["embedding"], old["embedding"])


@pytest.mark.slow
def test_a_run_starts_from_one_of_another_depth(train, tmp_path):
    keys = (*ONCE, "--config.model.value_embeddings=true")
    assert train(tmp_path / "old", *keys, "--config.model.n_layers=3")[0] == 0
    deeper = ("--config.model.n_layers=5", f"--config.init_from={tmp_path / 'old'}")
    code, output = train(tmp_path / "new", *keys, *deeper, "--config.train.seed=1")
    assert (code, "of layers 3 4" in output) == (0, True), output
    new, old = (flat(restore_params(tmp_path / name, "latest")[1]) for name in ("new", "old"))
    for path in new:
        n = 2 if "value_" in path else 3 if path.startswith("layers/") else None
        assert np.array_equal(new[path][:n], old[path]), path


@pytest.mark.parametrize(
    ("both", "old", "new", "reported"),
    [
        (
            {},
            {"rope_pairing": "adjacent"},
            {"rope_pairing": "halves"},
            "rope_pairing adjacent -> halves",
        ),
        ({"parametrization": "mup"}, {}, {"mup_base_d_model": 16}, "mup_base_d_model 64 -> 16"),
        ({"parametrization": "mup"}, {}, {"mup_base_d_head": 4}, "mup_base_d_head 16 -> 4"),
        ({}, {}, {"parametrization": "mup"}, "parametrization standard -> mup"),
        (
            {"rope_scaling": "dynamic"},
            {"max_positions": 8},
            {"max_positions": 16},
            "max_positions 8 -> 16",
        ),
        ({}, {"mup_base_d_model": 4, "max_positions": 8}, {}, None),
    ],
)
def test_keys_by_which_the_function_differs_are_reported(both, old, new, reported):
    """Also those of models with the same parameters."""
    last = _groups({}, *(tiny(model=both | keys).model for keys in (old, new))).splitlines()[-1]
    assert last == (f"  config.model differs: {reported}" if reported else last)
    assert (reported is None) == ("differs" not in last)


def test_a_source_without_checkpoints_or_with_another_tokenizer_is_refused(bench, train, tmp_path):
    code, output = train(tmp_path / "run", *ONCE, f"--config.init_from={tmp_path}")
    assert (code, "holds no checkpoints" in output) == (2, True)
    other = ("--config.data.tokenizer=byte", f"--config.init_from={bench.reference()}")
    code, output = train(tmp_path / "run", *ONCE, *other)
    assert (code, "another tokenizer" in output) == (2, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_on_a_mesh_loaded_parameters_are_sharded(bench, tmp_path, monkeypatch):
    keys = (*ONCE, "--config.train.batch_size=8", f"--config.init_from={bench.reference()}")
    config = parse_arguments(bench.arguments(None, *keys))[1]
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=print)
    with jax.set_mesh(make_mesh(dict.fromkeys(MESH_AXES, 1))):
        values = warm_start(
            parameters.resolve(config, corpus.tokenizer.vocab_size), corpus, print
        ).values
    assert "fsdp" in values["layers/attention/w_q_DHK"].sharding.spec
    monkeypatch.setitem(bench.env, "JAX_PLATFORMS", "cpu")
    monkeypatch.setitem(bench.env, "JAX_NUM_CPU_DEVICES", "8")
    done = bench.train(tmp_path / "run", *keys, "--config.mesh.fsdp=8")
    assert done.returncode == 0, done.stderr
    final, evaluated = (
        [line["loss"] for line in metrics_of(workdir) if "split" in line and line["step"] == step]
        for workdir, step in ((bench.reference(), 12), (tmp_path / "run", 0))
    )
    assert evaluated == pytest.approx(final, rel=1e-6)
