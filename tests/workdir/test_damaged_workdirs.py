"""Damaged files of a workdir: a one-line error names the file, or the run continues without it."""

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
from checkpointing import make_state, save_steps
from tiny import tiny

from lm.system.errors import UserError
from lm.system.files import with_checksum
from lm.training.warm_start import warm_start
from lm.workdir.checkpoints import Checkpoints, read_metas, restore_params
from lm.workdir.directory import Workdir
from lm.workdir.saved_run import check_checkpoints, newest_checkpoint, read_run

DATA = {"name": "text", "fingerprint": "abc"}


def started(directory: Path, config) -> Path:
    """Return the directory of a run that made its first step."""
    with closing(Workdir(directory)) as workdir:
        workdir.start(config, data=DATA)
    (directory / "checkpoints" / "1").mkdir(parents=True)
    return directory


WRONG_JSON = [
    b"",
    b"\0" * 64,
    b"\xff\xfe{",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{}",
    b'{"train": 3}',
    b"9" * 5000,
]
WRONG = {
    "config.json": [b'{"train": {"steps": "20"}, "checkpoint": {"every": 5}}', b'{"train": {"steps": 20}}'],
    "run.json": [
        b'{"data": null}', b'{"data": null, "starts": 3}', b'{"data": null, "starts": [3]}',
        b'{"data": null, "starts": [{}]}', b'{"data": null, "starts": [{"versions": ["jax"]}]}', b'{"starts": []}',
        b'{"data": {"name": "text"}, "starts": []}', b'{"data": "text", "starts": []}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_record_is_an_error_that_names_it(tmp_path, name):
    path = started(tmp_path, tiny()) / name
    for content in WRONG_JSON + WRONG[name]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} is corrupted: .*; restore") as error:
            Workdir(tmp_path).start(tiny(), data=DATA, resume=True)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500


def test_a_damaged_summary_is_written_again(tmp_path):
    path = started(tmp_path, tiny()) / "summary.json"
    with closing(Workdir(tmp_path)) as workdir:
        workdir.start(tiny(), data=DATA, resume=True)
        workdir.write_json("summary.json", with_checksum({"status": "finished", "steps": 20}))
    whole = path.read_bytes()
    assert read_run(tmp_path).finished_at == 20
    for content in [
        *WRONG_JSON,
        b'{"status": "finished", "steps": 20}',
        whole.replace(b"20", b"21"),
    ]:
        path.write_bytes(content)
        assert read_run(tmp_path).finished_at is None


def test_a_lock_with_binary_content_still_locks(tmp_path):
    with closing(Workdir(started(tmp_path, tiny()))) as holder:
        holder.start(tiny(), data=DATA, resume=True)
        (tmp_path / ".lock").write_bytes(b"\xff" * 1000)
        with pytest.raises(UserError, match=r"is in use by .{,200};"):
            Workdir(tmp_path).start(tiny(), data=DATA, resume=True)


def test_directories_not_named_by_a_step_are_not_checkpoints(tmp_path):
    save_steps(tmp_path, [2])
    for name in ("\u00b2", "\u0663", "latest", "3.corrupted-1"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert newest_checkpoint(tmp_path) == 2
    assert restore_params(tmp_path)[0] == 2
    with closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.restore(make_state())[0] == 2


def test_a_checkpoint_whose_record_is_damaged_is_corrupted(tmp_path):
    save_steps(tmp_path, [1, 2])
    for content in (
        b"null",
        b"[]",
        b"{}",
        b'{"meta": {}, "leaves": {}}',
        b'{"meta": {}, "leaves": {}, "sha256": ""}',
    ):
        (tmp_path / "checkpoints" / "2" / "meta" / "metadata").write_bytes(content)
        assert list(read_metas(tmp_path)) == [1]
        with pytest.raises(UserError, match=r"step 2 .* is corrupted \(its record "):
            restore_params(tmp_path, 2)


def test_a_cut_config_is_named_rather_than_the_missing_checkpoints(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hid')
    with pytest.raises(UserError, match=r"config\.json is corrupted"):
        restore_params(tmp_path)


def test_a_checkpoint_without_the_record_of_a_run_is_refused(tmp_path):
    """One that another program wrote, for example."""
    with pytest.raises(
        UserError, match=r"the checkpoint of step 3 in .*: it is not a checkpoint of a run"
    ):
        check_checkpoints(tmp_path, {3: {"seconds": 3.0}}, tiny(), DATA)
    save_steps(tmp_path, [1])
    with pytest.raises(
        UserError, match=r"config.init_from: .*: its checkpoint: it is not a checkpoint of a run"
    ):
        warm_start(dataclasses.replace(tiny(), init_from=str(tmp_path)), None, print)
