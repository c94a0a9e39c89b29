"""Files of tensors: what is written is what the safetensors package reads; damage is a clear error."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from huggingface_checkpoints import checkpoint, planned

from lm.huggingface.safetensors_files import INDEX, TensorFiles, write_tensors
from lm.system.errors import UserError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float16),
}
PLANNED = planned(TENSORS)


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    assert write_tensors(tmp_path, PLANNED) == ["model.safetensors"]
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(found[name], x)
        assert found[name].dtype == x.dtype


def test_shards_hold_at_most_the_given_bytes_and_the_index_names_them(tmp_path):
    names = write_tensors(tmp_path, PLANNED, shard_bytes=24)
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 34
    assert index["weight_map"] == {"a": names[0], "b": names[1], "empty": names[1]}
    with TensorFiles(tmp_path) as files:
        np.testing.assert_array_equal(files.read("a"), TENSORS["a"])
        assert files.shapes == {name: x.shape for name, x in TENSORS.items()}


def test_damaged_foreign_and_missing_files_are_refused_when_they_are_opened(tmp_path):
    path = checkpoint(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:keep] for keep in (0, 4, 100, 1000, -1)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"model\.safetensors is corrupted or truncated"):
            TensorFiles(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        TensorFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*can run any code.*convert"):
        TensorFiles(tmp_path)


def test_missing_and_foreign_shards_are_refused(tmp_path):
    names = write_tensors(tmp_path, PLANNED, shard_bytes=24)
    index = json.loads((tmp_path / INDEX).read_text())

    def write_index(**places):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | places}))

    write_index(c=names[0])
    with pytest.raises(UserError, match="has no tensor c"):
        TensorFiles(tmp_path)
    for name in (
        "../other/model.safetensors",
        "/model.safetensors",
        "model.bin",
        300 * "a" + ".safetensors",
    ):
        write_index(c=name)
        with pytest.raises(UserError, match="is not a safetensors file beside it"):
            TensorFiles(tmp_path)
    write_index()
    shutil.copyfile(tmp_path / names[0], tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"both model\.safetensors and model\.safetensors\.index\.json.*remove one"
    ):
        TensorFiles(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shutil.copyfile(tmp_path / names[1], tmp_path / "stale.safetensors")
    write_index(b="stale.safetensors")
    with pytest.raises(UserError, match="both have the tensor b"):
        TensorFiles(tmp_path)
    write_index()
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match=f"{names[1]} is missing"):
        TensorFiles(tmp_path)


def test_weights_that_an_adapter_changes_are_refused(tmp_path):
    """With peft, transformers adds the adapter to the weights beside it."""
    write_tensors(tmp_path, [])
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match="merge_and_unload"):
        TensorFiles(tmp_path)


def test_quantized_tensors_are_refused(tmp_path):
    safetensors.numpy.save_file({"a": np.zeros(3, np.int8)}, tmp_path / "model.safetensors")
    with (
        TensorFiles(tmp_path) as files,
        pytest.raises(UserError, match="a is stored as I8; supported are F32"),
    ):
        files.read("a")
