"""The workdir of a run: what is recorded, what is refused, and that nothing is overwritten."""

import json
import os
import re
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import jax
import pytest
from tiny import with_keys

from lm.config import Config
from lm.sweeps.report import code_lines
from lm.system import files, git
from lm.system.errors import TemporaryError, UserError
from lm.workdir import directory, provenance, saved_run
from lm.workdir.metrics import MetricsWriter


def start(path, config, **options) -> list[str]:
    """Start a run in a directory and release it; returns the lines to show."""
    with closing(directory.Workdir(path)) as run:
        return run.start(config, **options)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_commit_is_that_of_the_checkout():
    root = Path(__file__).parents[2]
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        pytest.skip("not a git checkout")
    assert git.git_state()["commit"] == head.stdout.strip()


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def changed(clone: Path) -> None:
    (clone / "lm" / "system" / "git.py").write_text("changed")


def large(clone: Path) -> None:
    (clone / "lm" / "system" / "git.py").write_text("changed\n" * 100_000)


def binary(clone: Path) -> None:
    (clone / "lm" / "data.bin").write_bytes(bytes(range(256)))
    _git(clone, "add", ".")


def untracked(clone: Path) -> None:
    _git(clone, "config", "status.showUntrackedFiles", "no")
    for number in range(150):
        (clone / f"{number}.py").touch()


def detached(clone: Path) -> None:
    _git(clone, "checkout", "--detach")


def without_history(clone: Path) -> None:
    _git(clone, "update-ref", "-d", "HEAD")


def of_another_owner(clone: Path) -> None:
    for path in (clone, *clone.rglob("*")):
        os.chown(path, 12345, 12345)


def in_another_checkout(clone: Path) -> None:
    _git(clone, "rm", "--cached", "lm/system/git.py")


CHECKOUTS = [
    # what was done to a clone; is the commit known; is it dirty; in the notes; in the diff
    (None, True, False, "", ""),
    (changed, True, True, "", "+changed"),
    (
        large,
        True,
        True,
        "the diff of the uncommitted changes has 900,... bytes and is not recorded",
        None,
    ),
    (binary, True, True, "", "GIT binary patch"),
    (untracked, True, True, "150 files have uncommitted changes; the first 100 are named", ""),
    (detached, True, False, "", ""),
    (of_another_owner, True, False, "", ""),
    (without_history, False, None, "commit unknown: the checkout has no commit", None),
    (
        in_another_checkout,
        False,
        None,
        "commit unknown: .* is not tracked by the git repository around it",
        None,
    ),
    (
        lambda clone: shutil.rmtree(clone / ".git"),
        False,
        None,
        "commit unknown: .* is no git checkout but a copy",
        None,
    ),
]


@pytest.mark.parametrize(("change", "known", "dirty", "note", "diff"), CHECKOUTS)
def test_the_code_is_recorded_or_what_is_not_known_of_it(
    tmp_path, monkeypatch, change, known, dirty, note, diff
):
    clone = tmp_path / "clone"
    (clone / "lm" / "system").mkdir(parents=True)
    (clone / "lm" / "system" / "git.py").write_text("first")
    _git(clone, "init", "-b", "main")
    _git(clone, "add", ".")
    _git(clone, "commit", "-m", "first")
    if change is of_another_owner and os.getuid():
        pytest.skip("only root gives files away")
    if change:
        change(clone)
    monkeypatch.setattr(git, "__file__", str(clone / "lm" / "system" / "git.py"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # of a hook
    found = git.describe_code(())
    assert (found["git"] is not None) == known
    assert re.search(note, "\n".join(found["notes"])), found["notes"]
    assert bool(found["notes"]) == bool(note)
    if known:
        assert found["git"]["dirty"] == dirty
        assert found["git"]["branch"] == ("HEAD" if change is detached else "main")
    if dirty:
        recorded = found["changes"]["diff"]
        assert (recorded is None) if diff is None else (diff in recorded)
        assert len(found["changes"]["sha256"]) == 64


@pytest.mark.parametrize(
    ("git_script", "reason"),
    [
        (None, "git is not installed"),
        ("#!/bin/sh\nexec sleep 60", "git did not answer"),
        (
            "#!/bin/sh\necho fatal: detected dubious ownership in repository >&2; exit 128",
            "safe.directory",
        ),
        ("#!/bin/sh\nexit 3", "git failed with exit code 3"),
        ("not a program", "git cannot be run"),
    ],
)
def test_a_commit_that_git_does_not_tell_is_unknown_for_a_reason(
    tmp_path, monkeypatch, git_script, reason
):
    if git_script:
        (tmp_path / "git").write_text(git_script)
        (tmp_path / "git").chmod(0o755)
        monkeypatch.setattr(git, "SECONDS", 0.3)
    monkeypatch.setenv(
        "PATH", f"{tmp_path}:/bin" if git_script and "sh" in git_script else str(tmp_path)
    )
    found = git.describe_code(())
    assert found["git"] is None
    (note,) = found["notes"]
    assert note.startswith("commit unknown: ")
    assert reason in note
    start = provenance.describe_start() | {"device": "cpu"}
    assert reason in code_lines(start)[0]


def test_packages_that_are_not_what_their_version_says_are_named(monkeypatch):
    class Distribution:
        version = "1.0"

        def __init__(self, url):
            self.url = url

        def read_text(self, name):
            return json.dumps({"url": self.url}) if self.url else None

        def locate_file(self, name):
            return "/elsewhere/site-packages"

    for url in ("git+https://me:secret@host/jax", "git+https://me:sec/ret@host/jax"):
        monkeypatch.setattr("importlib.metadata.distribution", lambda _, url=url: Distribution(url))
        (note,) = git.describe_code(("jax",))["notes"]
        assert note == "jax 1.0 was installed from git+https://***@host/jax"
    monkeypatch.setattr(
        "importlib.metadata.distribution",
        lambda _: Distribution("https://host/jax.whl?token=secret"),
    )
    (note,) = git.describe_code(("jax",))["notes"]
    assert note == "jax 1.0 was installed from https://host/jax.whl?***"
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Distribution(None))
    (note,) = git.describe_code(("jax",))["notes"]
    assert note.startswith(f"jax is imported from {Path(jax.__file__).parent}; version 1.0 is in ")


@pytest.mark.parametrize(
    "name", ["compare.png", "inspection.html", "runs/x/loss.png", "sweeps/x/report.md", "data/x"]
)
def test_what_commands_write_does_not_make_the_checkout_dirty(name):
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    assert subprocess.run(["git", "check-ignore", "-q", name], cwd=root).returncode == 0


def take_a_step(path: Path) -> None:
    """Make the directory of the checkpoint of a run that took a step."""
    (path / "checkpoints" / "1").mkdir(parents=True)


def test_a_run_is_never_overwritten(tmp_path):
    """What remains of a run suffices (a whole run: tests/test_train_refusals.py)."""
    for i, mark in enumerate(("metrics.jsonl", "checkpoints/5/state", "summary.json")):
        path = (workdir := tmp_path / str(i)) / mark
        path.parent.mkdir(parents=True)
        path.write_text("x")
        with pytest.raises(UserError, match="already holds a run"):
            saved_run.check_workdir(workdir, Config(), resume=False)
        with pytest.raises(UserError, match=r"has no config\.json"):
            saved_run.check_workdir(workdir, Config(), resume=True)


def test_a_run_that_made_no_step_starts_anew(tmp_path):
    """A run that failed while it was compiled has left its records, and no metrics."""
    start(tmp_path, Config())
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    changed = with_keys(Config(), model_d_model=384)
    start(tmp_path, changed)
    assert json.loads((tmp_path / "config.json").read_text())["model"]["d_model"] == 384
    (tmp_path / "slurm-1.out").write_text("queued")
    start(tmp_path, Config(), resume=True)


def test_a_run_that_was_only_partly_copied_into_a_directory_is_not_trained_there(tmp_path):
    """The same command copies it again (tests/training/test_branch.py)."""
    take_a_step(tmp_path)
    (tmp_path / saved_run.ARRIVING).mkdir()
    for resume in (False, True):
        with pytest.raises(
            UserError, match="repeat the command with its --mirror or --branch_from"
        ):
            start(tmp_path, Config(), resume=resume)


def test_resuming_with_other_execution_keys_is_reported(tmp_path, monkeypatch):
    constant = with_keys(Config(), optimizer_schedule="constant")
    start(tmp_path, constant)
    take_a_step(tmp_path)
    later = with_keys(constant, log_every=1, train_steps=2000)
    monkeypatch.setattr(provenance, "describe_code", lambda _: {"git": None})
    start(tmp_path, constant, resume=True)
    assert [line.partition(": ")[2] for line in start(tmp_path, later, resume=True)] == [
        "config.log.every: 10 -> 1 (run -> now)",
        "config.train.steps: 1000 -> 2000 (run -> now)",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 2000
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 3


def test_changed_versions_and_commits_are_reported(tmp_path, monkeypatch):
    start(tmp_path, Config())
    take_a_step(tmp_path)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    record["starts"][0]["versions"]["jax"] = "0.4.1"
    record["starts"][0]["git"] = {"commit": "0123456789abcdef", "dirty": False}
    path.write_text(json.dumps(record))
    state = {"commit": "fedcba9876543210", "dirty": True}
    monkeypatch.setattr(
        provenance, "describe_code", lambda _: {"git": state, "notes": ["the diff is not recorded"]}
    )
    notices = start(tmp_path, Config(), resume=True)
    assert [notice.partition(" since")[0] for notice in notices[:2]] == [
        f"jax 0.4.1 -> {jax.__version__}", "commit 0123456789ab -> fedcba987654"
    ]  # fmt: skip
    assert notices[2] == "the diff is not recorded"
    assert "uncommitted changes" in notices[3]


def test_other_devices_are_reported_and_another_variable_that_changes_numbers_is_refused(
    tmp_path, monkeypatch
):
    one, two = ({"processes": n, "devices": 8, "device": "cpu"} for n in (1, 2))
    monkeypatch.setattr(provenance, "describe_code", lambda _: {"git": None})
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    start(tmp_path, Config(), devices=one)
    take_a_step(tmp_path)
    assert start(tmp_path, Config(), resume=True, devices=one) == []
    assert [
        line.partition(" since")[0] for line in start(tmp_path, Config(), resume=True, devices=two)
    ] == ["processes 1 -> 2"]
    for value, advice in (
        (None, "set JAX_DEFAULT_MATMUL_PRECISION=highest"),
        ("bfloat16", "PRECISION=highest"),
    ):
        monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION") if value is None else monkeypatch.setenv(
            "JAX_DEFAULT_MATMUL_PRECISION", value
        )
        with pytest.raises(UserError, match=advice):
            start(tmp_path, Config(), resume=True, devices=two)


@pytest.mark.parametrize("moved", [False, True])
def test_a_workdir_that_is_gone_is_not_made_again(tmp_path, moved):
    with closing(directory.Workdir(tmp_path / "run")) as run:
        run.start(Config())
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        if moved:
            start(tmp_path / "run", Config())  # another run in its place
        before = tree(tmp_path)
        with pytest.raises(TemporaryError, match="was deleted, moved or replaced"):
            run.write_json("summary.json", {"status": "finished"})
        assert tree(tmp_path) == before


def test_links_that_the_owner_made_are_followed_and_no_file_is_written_through_one(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "samples").symlink_to(tmp_path / "scratch")
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "real" / "loss.png").symlink_to(precious)
    (tmp_path / "real" / "metrics.jsonl").symlink_to(tmp_path / "absent")
    with closing(directory.Workdir(tmp_path / "run")) as run:
        run.start(Config())
        run.write_text("samples/step_5.txt", "once\n")
        run.write_text("loss.png", "picture")
    with closing(MetricsWriter(tmp_path / "run", tensorboard=False)) as writer:
        writer.write({"step": 1, "loss": 2.5})
    assert (tmp_path / "scratch" / "step_5.txt").read_text() == "once\n"
    assert (precious.read_text(), (tmp_path / "real" / "loss.png").read_text()) == (
        "precious",
        "picture",
    )
    assert not (tmp_path / "absent").exists()
    (tmp_path / "real" / ".lock").unlink()
    (tmp_path / "real" / ".lock").symlink_to(precious)
    with pytest.raises(UserError, match=r"\.lock is not a file"):
        start(tmp_path / "run", Config(), resume=True)
    assert precious.read_text() == "precious"


def test_default_workdirs_differ_within_one_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        found.append(directory.default_workdir("name"))
        found[-1].mkdir(parents=True)
    assert all(str(path).startswith("runs/name-") for path in found)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    files.write_text(path, "old")

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*/x\.json'"):
        files.write_text(path, "new, and longer")
    assert tree(tmp_path) == {"x.json": b"old"}


def test_a_recorded_command_names_no_directories_of_the_machine():
    root = Path(directory.__file__).parents[2]
    typed = [
        "--config",
        f"{root}/configs/shakespeare.py",
        "--workdir=/home/me/runs/one",
        "--resume",
    ]
    typed += [
        "--config.data.source=text:/home/me/a text.txt",
        "--config.data.data_dir=gs://bucket/data",
        "lr=1e-3",
    ]
    assert provenance.format_command("lm.train", typed) == (
        "python -m lm.train --config configs/shakespeare.py --workdir=one --resume "
        "'--config.data.source=text:a text.txt' --config.data.data_dir=gs://bucket/data lr=1e-3"
    )
