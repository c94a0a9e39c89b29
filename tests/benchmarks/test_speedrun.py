"""The speedrun: its rules are enforced or checked, its statistics are right, and its tables show its logs."""

import copy
import json
import math
import re

import pytest
from running import ROOT

from benchmarks.page import marked
from benchmarks.speedrun import __main__ as command
from benchmarks.speedrun import records, runs, table, tracks
from lm.errors import UserError

LOGS = sorted(records.RECORDS.glob("*/*.json"))
TINY = str(ROOT / "tests" / "configs" / "tiny.py")
TUNE = ["--track", "nanogpt-cpu", "--config", TINY, "--tune", "--runs", "2"]
CONFIG = {"model.d_model": 96, "train.steps": 210}
RECORD = {
    "track": "shakespeare-2-cores", "overrides": [], "caveat": None, "config": CONFIG,
    "machine": {
        "cores_used": 2, "git": {"commit": "0123", "dirty": False}, "date": "2026-11-23", "cpu": "one (family 6)",
    },
    "runs": [
        {"seed": seed, "loss": loss, "cpu": 1200.0 + seed, "wall": 700.0 + seed, "load": 0.5}
        for seed, loss in enumerate([1.462, 1.465, 1.461, 1.463, 1.464])
    ],
}  # fmt: skip


# ---- Rules -----------------------------------------------------------------------------------------------------------


def test_the_p_value_is_that_of_a_one_sided_t_test():
    """Student's t distribution with 2 degrees of freedom is 1/2 + t / (2 sqrt(2 + t^2))."""
    t = (1.86 - 1.88) / (0.01 / math.sqrt(3))
    assert records.p_value([1.85, 1.86, 1.87], 1.88) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert math.isnan(records.p_value([1.5], 1.88))
    assert math.isnan(records.p_value([1.5, 1.5, 1.5], 1.88))


BROKEN = [
    (("runs", 0, "loss"), 1.48, "p = 0.21, not below 0.01"),
    (("runs", 0, "loss"), math.nan, "p = nan, not below 0.01"),
    (("runs",), RECORD["runs"][:4], "4 runs, fewer than 5"),
    (("runs", 3, "wall"), 901.0, "a run took 901 s, more than 900"),
    (("runs", 3, "seed"), 7, "seeds are not 0, 1, 2, ..."),
    (("machine", "cores_used"), 4, "4 cores, not 2"),
    (("machine", "git"), None, "not of a commit"),
    (("machine", "git", "dirty"), True, "not of a commit"),
    (("overrides",), ["train.steps=3"], "values of the config were overridden"),
    (("caveat",), "seen before", "seen before"),
    (("config", "model.d_model"), 128, "not tuned on the tuning text"),
]


def test_a_result_by_the_rules_is_a_record_and_each_broken_rule_is_named():
    assert list(records.problems(RECORD, [{"config": CONFIG | {"train.steps": 180}}])) == []
    for path, value, problem in BROKEN:
        broken = place = copy.deepcopy(RECORD)
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        assert list(records.problems(broken, [{"config": CONFIG}])) == [problem], path


def test_configs_cannot_change_the_rules(config_file):
    with pytest.raises(UserError) as caught:
        tracks.load_config(config_file("config.init_from = 'runs/other'", "config.train.seq_len = 257"), [])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "config.init_from",
        "config.train.seq_len",
    ]
    path = config_file("config.data.splits = (0.98, 0.02, 0.0)", "config.data.tokenizer = 'byte'")
    config = tracks.load_config(path, ["data.splits=(1.0,0.0,0.0)"])
    assert (config.data.splits, config.data.tokenizer, config.eval.every) == ((0.9, 0.1, 0.0), "char", 0)
    assert tracks.describe(config) == {}


def test_both_texts_have_the_same_length_and_another_text_is_refused(tmp_path):
    text = tracks.tuning_text()
    assert (len(text), text.isascii()) == (1_115_394, True)
    assert tracks.n_predicted(text) == 1_115_394 - 1_003_854 - 1
    path = tmp_path / "input.txt"
    path.write_text("First Citizen:\n" * 100)
    with pytest.raises(UserError, match=r"--text: sha256 .* instead of 86c4e6aa9db7"):
        tracks.scored_text(path)
    with pytest.raises(UserError, match=r"--text: .*missing.txt is not a file"):
        tracks.scored_text(tmp_path / "missing.txt")


def test_a_run_sees_no_settings_of_jax_or_malloc(monkeypatch):
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "0")
    found = [item for item in runs.clean_environment().items() if item[0].startswith(runs.CLEARED)]
    assert found == [("JAX_PLATFORMS", "cpu")]


def test_only_a_tuning_run_accepts_changes_of_the_config(capsys):
    arguments = ["--track", "nanogpt-cpu", "--config", TINY, "--config.train.steps=3"]
    with pytest.raises(SystemExit, match="2"):
        command.parse_arguments(arguments)
    assert "change the file, or add --tune" in capsys.readouterr().err
    assert command.parse_arguments([*arguments, "--tune"])[1] == ["train.steps=3"]


# ---- The logs and the tables -----------------------------------------------------------------------------------------


def test_the_page_shows_the_logs():
    for track in tracks.TRACKS:
        assert marked(table.PAGE, track)[1] == table.track_table(track) + "\n"


def test_logs_have_the_text_of_their_kind_their_config_and_no_paths_of_a_machine():
    for path in LOGS:
        expected = tracks.TUNING_SHA256 if path.name == "tuning.json" else tracks.shakespeare.SHA256
        assert {attempt["text"] for attempt in records.read_attempts(path)} == {expected}, path
        assert not re.search('["=]/', path.read_text(encoding="utf-8")), path
        if path.name == "log.json":
            config = tracks.load_config(str(path.with_name("config.py")), [])
            assert records.read_attempts(path)[-1]["config"] == json.loads(json.dumps(tracks.describe(config))), path


def test_shakespeare_best_trains_the_model_of_the_record():
    """They differ only in what is evaluated and saved."""
    described = [
        tracks.describe(tracks.load_config(str(path), []))
        for path in (ROOT / "configs" / "shakespeare_best.py", records.RECORDS / "two_cores" / "config.py")
    ]
    best, record = ({k: v for k, v in d.items() if k.startswith(("model", "optimizer", "train"))} for d in described)
    assert best == record
    assert best["model.n_layers"] == 6


def test_an_attempt_whose_second_run_fails_is_in_the_log(tmp_path, monkeypatch):
    def train_and_score(config, overrides, text, seed, directory):
        if seed == 1:
            raise RuntimeError("out of memory")
        return {"seed": seed, "loss": 1.9, "cpu": 2.0, "wall": 3.0, "load": 0.5}

    monkeypatch.setattr(command, "use_cores", lambda n: None)
    monkeypatch.setattr(command, "train_and_score", train_and_score)
    log = tmp_path / "tuning.json"
    with pytest.raises(RuntimeError, match="out of memory"):
        command.main([*TUNE, "--log", str(log)])
    (attempt,) = records.read_attempts(log)
    assert records.column(attempt, "loss") == [1.9]


def test_a_tuning_run_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "use_cores", lambda n: None)  # pins the process for good
    log = tmp_path / "tuning.json"
    assert command.main([*TUNE, "--log", str(log), "--config.checkpoint.every=0"]) == 0
    (attempt,) = records.read_attempts(log)
    losses = records.column(attempt, "loss")
    assert losses[0] != losses[1]
    assert all(2.0 < loss < 1.2 * math.log(96) for loss in losses)
    assert all(run["cpu"] > 1 and run["wall"] > 1 for run in attempt["runs"])
    assert attempt["config"]["checkpoint.every"] == 0
    assert f"mean loss {sum(losses) / 2:.4f}" in capsys.readouterr().out
