import dataclasses
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lm import files
from lm.config import Config, OptimizerConfig, from_dict, to_dict
from lm.errors import TemporaryError, UserError
from lm.optimizers import learning_rate_schedule
from lm.training import provenance, workdir
from lm.training.metrics import MetricsWriter


def with_keys(config, **changes):
    """Return a config with keys of sections replaced: with_keys(config, train_steps=5)."""
    for name, value in changes.items():
        section, key = name.split("_", 1)
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})
    return config


def start(path, config, **options) -> list[str]:
    """Start a run in a directory and release it; returns the lines to show."""
    with closing(workdir.Workdir(path)) as run:
        return run.start(config, **options)


def as_saved(config) -> dict:
    return json.loads(files.to_json(to_dict(config)))


# ---- Digests and differences -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    width: int = 3
    every: int = dataclasses.field(default=7, metadata={"execution": True})


@dataclasses.dataclass(frozen=True)
class Whole:
    part: Part = Part()
    rates: tuple[float, ...] = (0.5, 1.0)
    logs: Part = dataclasses.field(default=Part(), metadata={"execution": True})


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_digests_are_over_sorted_json_of_their_keys():
    # The JSON is written out, because a digest must not depend on the version of Python or on this code's details.
    assert workdir.experiment_digest(Whole()) == sha256('{"config.part.width": 3, "config.rates": [0.5, 1.0]}')
    assert workdir.execution_digest(Whole()) == sha256(
        '{"config.logs.every": 7, "config.logs.width": 3, "config.part.every": 7}'
    )


@pytest.mark.parametrize(
    ("key", "value", "execution"),
    [
        ("model_d_model", 384, False),
        ("model_window_pattern", (128, 0), False),
        ("optimizer_learning_rate", 2e-3, False),
        ("data_source", "python_docs", False),
        ("train_seed", 1, False),
        ("train_batch_size", 8, False),
        ("model_remat", "block", True),
        ("train_steps_per_dispatch", 4, True),
        ("checkpoint_every", 5, True),
        ("log_every", 1, True),
        ("eval_every", 5, True),
    ],
)
def test_each_key_changes_one_digest_and_one_list_of_differences(key, value, execution):
    old, new = Config(), with_keys(Config(), **{key: value})
    assert (workdir.experiment_digest(old) == workdir.experiment_digest(new)) is execution
    assert (workdir.execution_digest(old) == workdir.execution_digest(new)) is not execution
    differences = workdir.compare_configs(as_saved(old), new)
    assert differences[not execution] == []
    before = getattr(getattr(old, key.split("_")[0]), key.split("_", 1)[1])
    shown_before, shown_now = (list(v) if isinstance(v, tuple) else v for v in (before, value))
    assert differences[execution] == [f"config.{key.replace('_', '.', 1)}: {shown_before} -> {shown_now} (run -> now)"]


def test_a_config_read_back_from_json_does_not_differ():
    config = with_keys(Config(), model_window_pattern=(128, 0), train_profile=(3, 5), optimizer_learning_rate=1e-4)
    saved = as_saved(config)
    assert workdir.compare_configs(saved, config) == ([], [])
    assert workdir.experiment_digest(from_dict(saved)) == workdir.experiment_digest(config)


def test_a_key_that_was_removed_is_ignored_in_a_saved_config():
    saved = as_saved(Config())
    saved["train"]["accumulation"] = 4
    assert from_dict(saved) == Config()
    assert workdir.compare_configs(saved, Config()) == ([], [])


def test_a_key_missing_in_a_run_has_its_default_and_a_removed_key_is_a_difference():
    saved = as_saved(Config())
    del saved["model"]["qk_norm"]
    assert workdir.compare_configs(saved, Config()) == ([], [])
    saved["model"]["former"] = 1
    assert workdir.compare_configs(saved, with_keys(Config(), model_qk_norm=True))[0] == [
        "config.model.qk_norm: False -> True (run -> now)",
        "config.model.former: 1 -> absent (run -> now)",
    ]


# ---- Extending a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 30])
@pytest.mark.parametrize("decay_steps", [None, 80])
def test_a_run_can_be_extended_exactly_if_its_past_learning_rates_stay(schedule, warmup, decay_steps):
    o = OptimizerConfig(schedule=schedule, warmup_steps=warmup, decay_steps=decay_steps, decay_fraction=0.3)
    old, new = (jax.vmap(learning_rate_schedule(o, total))(jnp.arange(150)).tolist() for total in (100, 150))
    for made in range(101):
        if workdir.refuse_growth(100, 150, o, made) is None:
            assert old[:made] == new[:made]
        else:  # refused at most one step before the rates differ
            assert old[: made + 1] != new[: made + 1]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_cannot_be_shortened(schedule):
    o = OptimizerConfig(schedule=schedule, warmup_steps=20)
    assert workdir.refuse_growth(100, 100, o, 100) is None
    assert "can grow but not shrink" in workdir.refuse_growth(100, 99, o, 10)


@pytest.mark.parametrize("warmup", [0, 30])
def test_a_run_can_be_shortened_where_both_lengths_are_stable(warmup):
    o = OptimizerConfig(schedule="wsd", warmup_steps=warmup, decay_fraction=0.3)
    old, new = (jax.vmap(learning_rate_schedule(o, total))(jnp.arange(60)).tolist() for total in (100, 60))
    for made in range(60):
        if workdir.refuse_growth(100, 60, o, made) is None:
            assert old[:made] == new[:made]
        else:
            assert old[: made + 1] != new[: made + 1]
    fixed = dataclasses.replace(o, decay_steps=100)
    assert "can grow but not shrink" in workdir.refuse_growth(100, 60, fixed, 10)


# ---- The directory ---------------------------------------------------------------------------------------------


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_start_records_config_versions_and_commit(tmp_path):
    config = with_keys(Config(), train_steps=5)
    with closing(workdir.Workdir(tmp_path / "run")) as run:
        assert run.start(config) == []
        assert run.experiment_digest == workdir.experiment_digest(config)
        run.write_text("samples/step_5.txt", "once\n")
    assert (tmp_path / "run/samples/step_5.txt").read_text() == "once\n"
    assert from_dict(json.loads((tmp_path / "run/config.json").read_text())) == config
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["experiment_digest"] == workdir.experiment_digest(config)
    (start,) = record["starts"]
    assert start["versions"]["jax"] == jax.__version__
    assert start["versions"]["python"] == sys.version.split()[0]
    assert {"time", "host", "argv", "git"} <= start.keys()


def test_the_commit_is_that_of_the_checkout():
    root = Path(__file__).parents[2]
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip("not a git checkout")
    assert provenance.git_state()["commit"] == git.stdout.strip()


def test_a_run_is_never_overwritten(tmp_path):
    start(tmp_path, Config())
    before = tree(tmp_path)
    with pytest.raises(UserError, match="already holds a run"):
        start(tmp_path, Config())
    assert tree(tmp_path) == before


@pytest.mark.parametrize("mark", ["metrics.jsonl", "checkpoints/5/state", "summary.json"])
def test_any_trace_of_a_run_protects_it(tmp_path, mark):
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).write_text("")
    with pytest.raises(UserError, match="already holds a run"):
        workdir.check_workdir(tmp_path, Config(), resume=False)
    with pytest.raises(UserError, match=r"has no config\.json"):
        workdir.check_workdir(tmp_path, Config(), resume=True)


def test_resume_in_an_empty_directory_starts_a_run(tmp_path):
    start(tmp_path / "new", Config(), resume=True)
    (tmp_path / "with_log").mkdir()
    (tmp_path / "with_log" / "slurm-1.out").write_text("queued")
    start(tmp_path / "with_log", Config())
    assert workdir.holds_run(tmp_path / "new")
    assert workdir.holds_run(tmp_path / "with_log")


def test_resuming_with_another_experiment_is_refused_and_lists_every_difference(tmp_path):
    start(tmp_path, Config())
    before = tree(tmp_path)
    changed = with_keys(Config(), model_d_model=384, train_seed=5, train_steps=10, log_every=1)
    with pytest.raises(UserError) as error:
        start(tmp_path, changed, resume=True)
    text = str(error.value)
    for part in ("config.model.d_model: 256 -> 384", "config.train.seed: 0 -> 5", "can grow but not shrink"):
        assert part in text
    assert "log.every" not in text
    assert tree(tmp_path) == before


def test_resuming_with_other_execution_keys_is_reported(tmp_path):
    constant = with_keys(Config(), optimizer_schedule="constant")
    start(tmp_path, constant)
    later = with_keys(constant, log_every=1, train_steps=2000)
    assert [line.partition(": ")[2] for line in start(tmp_path, later, resume=True)] == [
        "config.log.every: 10 -> 1 (run -> now)",
        "config.train.steps: 1000 -> 2000 (run -> now)",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 2000
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 2


def test_extending_a_run_after_its_decay_began_is_refused(tmp_path):
    config = with_keys(Config(), optimizer_schedule="wsd")  # 1000 steps: the decay begins at 800
    start(tmp_path, config)
    longer = with_keys(config, train_steps=2000)
    (tmp_path / "checkpoints" / "800").mkdir(parents=True)
    (tmp_path / "checkpoints" / "900.corrupted-1").mkdir()
    workdir.check_workdir(tmp_path, longer, resume=True)
    (tmp_path / "checkpoints" / "900").mkdir()
    with pytest.raises(UserError, match="steps 801 to 900, already trained"):
        workdir.check_workdir(tmp_path, longer, resume=True)


def test_changed_versions_are_reported(tmp_path):
    start(tmp_path, Config())
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    record["starts"][0]["versions"]["jax"] = "0.4.1"
    path.write_text(json.dumps(record))
    (notice,) = start(tmp_path, Config(), resume=True)
    assert notice.startswith("jax 0.4.1 -> ")
    assert "bit-identical" in notice


HOLD_THE_LOCK = """
import sys
from lm import files
from lm.training.workdir import Workdir
from lm.config import Config
workdir = Workdir(sys.argv[1])
workdir.start(Config())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_workdir_is_locked_until_its_process_ends(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} on "):
            start(tmp_path, Config(), resume=True)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    start(tmp_path, Config(), resume=True)


@pytest.mark.parametrize("moved", [False, True])
def test_a_workdir_that_is_gone_is_not_made_again(tmp_path, moved):
    with closing(workdir.Workdir(tmp_path / "run")) as run:
        run.start(Config())
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        if moved:
            start(tmp_path / "run", Config())  # another run in its place
        before = tree(tmp_path)
        with pytest.raises(TemporaryError, match="was deleted, moved or replaced"):
            run.write_summary(status="finished")
        assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "link",
    [
        ".lock",
        "huggingface",
        "metrics.jsonl",
        "checkpoints",
        "checkpoints/5",
        "samples",
        "samples/step_5.txt",
        "tensorboard",
    ],
)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_where_a_run_writes_is_refused(tmp_path, link, dangling):
    outside, path = tmp_path / "outside", tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    if not dangling:
        outside.mkdir() if "." not in link else outside.write_text("precious")
    path.symlink_to(outside)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=f"{link} is a symbolic link"):
        start(tmp_path / "run", Config(), resume=True)
    assert {name: text for name, text in tree(tmp_path).items() if name != "run/.lock"} == {
        name: text for name, text in before.items() if name != "run/.lock"
    }
    assert outside.exists() != dangling


def test_other_links_in_a_workdir_and_a_linked_workdir_are_left_alone(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "slurm.out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    start(tmp_path / "run", Config())
    assert workdir.holds_run(tmp_path / "real")


def test_no_file_is_written_through_a_link(tmp_path):
    """The checks come first; this is for links that are made after them."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "x.json").symlink_to(precious)
    files.write_text(tmp_path / "x.json", "new")
    assert (precious.read_text(), (tmp_path / "x.json").read_text()) == ("precious", "new")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "absent")
    with pytest.raises(OSError, match="symbolic link"):
        MetricsWriter(tmp_path, tensorboard=False)
    assert not (tmp_path / "absent").exists()


def test_default_workdirs_differ_within_one_second(tmp_path):
    first = workdir.default_workdir("name", tmp_path)
    assert first.name.startswith("name-")
    first.mkdir()
    assert workdir.default_workdir("name", tmp_path) != first


def test_a_summary_has_all_its_fields_and_is_strict_json(tmp_path):
    with closing(workdir.Workdir(tmp_path)) as run:
        run.start(Config())
        run.write_summary(status="diverged", steps=3, val_loss=math.nan, extra=1)
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary.keys() == {*workdir.SUMMARY_FIELDS, "extra"}
    assert (summary["status"], summary["val_loss"], summary["test_loss"]) == ("diverged", "NaN", None)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    files.write_text(path, "old")

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*/x\.json'"):
        files.write_text(path, "new, and longer")
    assert tree(tmp_path) == {"x.json": b"old"}


def test_modules_of_help_do_not_import_jax():
    code = "import sys, lm.training.workdir, lm.training.metrics, lm.cost.flops"
    code += "; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_recorded_command_names_no_directories_of_the_machine():
    root = Path(workdir.__file__).parents[2]
    typed = ["--config", f"{root}/configs/shakespeare.py", "--workdir=/home/me/runs/one", "--resume"]
    typed += ["--config.data.source=text:/home/me/a text.txt", "--config.data.data_dir=gs://bucket/data", "lr=1e-3"]
    assert provenance.format_command("lm.train", typed) == (
        "python -m lm.train --config configs/shakespeare.py --workdir=one --resume "
        "'--config.data.source=text:a text.txt' --config.data.data_dir=gs://bucket/data lr=1e-3"
    )
