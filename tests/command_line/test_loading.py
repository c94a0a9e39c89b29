"""Files and overrides become a Config, or every mistake is reported; a Config equals its copy read
from JSON.
"""

import dataclasses
import json
import re

import pytest
from running import ROOT
from tiny import with_keys

from lm.command_line.loading import load, load_values
from lm.config import Config, flatten, from_dict, schema, to_dict
from lm.config.convert import from_flat
from lm.sweeps.plan import load_sweep
from lm.system.errors import UserError


def test_defaults_pass_their_own_checks(config_file):
    assert load(config_file(), []) == Config() == from_dict({})


def test_all_mistakes_are_reported_at_once(config_file, problems):
    path = config_file(
        "config.model.d_modl = 64",
        "config.modle.d_model = 64",
        "config.optimizer.learning_rate = float('inf')",
        "config.data.splits = (0.5, 1.5)",
    )
    overrides = [
        "tain.steps=3",
        "train.batchsize=8",
        "model.norm=rsm",
        "train.seq_len",
        "model.n_heads=3",
    ]
    expected = [
        ("model.d_modl", "unknown key", "d_model"),
        ("modle.d_model", "unknown section", "model"),
        ("optimizer.learning_rate", "inf", "finite"),
        ("data.splits", "1.5", "<= 1"),
        ("tain.steps", "unknown section", "train"),
        ("train.batchsize", "unknown key", "batch_size"),
        ("model.norm", "'rsm'", "rms"),
        ("train.seq_len", "equals sign", "--config.train.seq_len=VALUE"),
        ("model.d_model", "256 is not divisible by n_heads = 3", "n_heads = 2"),
    ]
    found = problems(path, *overrides)
    assert len(found) == len(expected), "\n".join(found)
    for name, why, suggestion in expected:
        (line,) = [line for line in found if line.startswith(f"config.{name}:")]
        assert why in line, line
        assert suggestion in line.partition(":")[2], line


def test_values_are_read_from_the_command_line(config_file):
    given = {
        "model.d_ff": ("None", None), "model.window_pattern": ("128,0", (128, 0)), "model.tie_embeddings": ("1", True),
        "log.tensorboard": ("False", False), "optimizer.learning_rate": ("1", 1.0), "model.embed_std": ("2e-2", 0.02),
        "eval.sample_prompt": ("a\\nb = c", "a\nb = c"), "data.source": ("text:a=b", "text:a=b"),
        "eval.final_splits": ("(validation, test+train)", ("validation", "test+train")),
        "train.profile": ("(2, 3)", (2, 3)),
    }  # fmt: skip
    path = config_file(
        "config.model.d_ff = 100", "config.data.splits = [0.8, 0.1, 0.1]", "config.eval.every = 7"
    )
    c = load(path, [f"{key}={text}" for key, (text, _) in given.items()])
    for key, (_, value) in given.items():
        section, name = key.split(".")
        found = getattr(getattr(c, section), name)
        assert (found, type(found)) == (value, type(value))
    assert (c.data.splits, c.eval.every) == ((0.8, 0.1, 0.1), 7)
    assert hash(c) == hash(dataclasses.replace(c))  # a jit-static argument


# ---- Short runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_train_steps_alone_makes_a_short_run_of_every_config(path, capsys):
    whole = load(str(path), [])
    for steps in (1, 2, 20):
        config = load(str(path), [f"train.steps={steps}"])
        assert config.train.steps == steps
        shortened = config.optimizer.warmup_steps < whole.optimizer.warmup_steps
        notes = [line for line in capsys.readouterr().err.splitlines() if "warmup_steps" in line]
        assert len(notes) == shortened
        assert all(len(note) < 100 and not note.startswith("WARNING") for note in notes)
        changes = {"train_steps": steps, "optimizer_warmup_steps": config.optimizer.warmup_steps}
        assert config == with_keys(
            dataclasses.replace(whole, notes=""), **changes, log_every=config.log.every
        )
        assert config.log.every <= steps


SHORTENED = [
    # Scaled in proportion if it does not fit ...
    (["warmup_steps = 100"], "train.steps=50", 5, None),
    (["warmup_steps = 100", "decay_steps = 800"], "train.steps=50", 5, 40),
    (["warmup_steps = 600", "decay_steps = 800"], "train.steps=700", 420, 560),
    (["warmup_steps = 1"], "train.steps=1", 0, None),
    (
        ["schedule = 'constant'", "warmup_steps = 100", "decay_steps = 800"],
        "train.steps=50",
        5,
        800,
    ),
    # ... and unchanged if it fits, is given on the command line, or has no effect.
    (["warmup_steps = 100"], "train.steps=101", 100, None),
    (["warmup_steps = 100", "decay_steps = 800"], "train.steps=800", 100, 800),
    (["warmup_steps = 100"], "train.steps=50 optimizer.warmup_steps=49", 49, None),
    (["decay_steps = 800"], "train.steps=50 optimizer.decay_steps=30", 0, 30),
    (["schedule = 'constant'", "decay_steps = 800"], "train.steps=50", 0, 800),
    (["warmup_steps = 100", "decay_steps = 800"], "train.steps=0", 100, 800),
    (["warmup_steps = 100", "decay_steps = 800"], "train.steps=9000", 100, 800),
]


def test_a_schedule_is_shortened_only_if_it_does_not_fit(config_file, capsys):
    for lines, overrides, warmup, decay in SHORTENED:
        path = config_file(*(f"config.optimizer.{line}" for line in lines))
        o, whole = load(path, overrides.split()).optimizer, load(path, []).optimizer
        assert (o.warmup_steps, o.decay_steps) == (warmup, decay)
        given = {
            name for name in ("warmup_steps", "decay_steps") if f"optimizer.{name}" in overrides
        }
        changed = {
            n for n in ("warmup_steps", "decay_steps") if getattr(o, n) != getattr(whole, n)
        } - given
        warned = [line for line in capsys.readouterr().err.splitlines() if "in place of" in line]
        assert {line.split("=")[0] for line in warned} == {
            f"config.optimizer.{name}" for name in changed
        }


def test_nothing_is_noted_about_a_config_that_is_refused(config_file):
    """Neither a schedule that was shortened nor a key without effect hides what is wrong."""
    path, notes = (
        config_file("config.optimizer.warmup_steps = 20", "config.optimizer.momentum = 0.5"),
        [],
    )
    load(path, ["train.steps=10"], notes.append)
    assert len(notes) == 2
    notes.clear()
    for wrong in ("model.n_heads=3", "train.sed=1", "train.batch_size=x"):
        with pytest.raises(UserError):
            load(path, ["train.steps=10", wrong], notes.append)
    assert not notes


def test_the_notes_of_a_file_are_about_the_experiment_of_the_file(config_file):
    path = config_file("config.notes = 'a better model: train longer'")
    kept = {"": True, "log.every=2": True, "model.remat=block": True}
    dropped = dict.fromkeys(
        ("train.steps=3000", "data.source=text:novel.txt", "model.d_model=256"), False
    )
    for overrides, is_kept in (kept | dropped).items():
        assert bool(load(path, overrides.split()).notes) == is_kept, overrides
    assert load(path, ["train.steps=3000", "notes=mine"]).notes == "mine"


def test_a_short_run_logs_more_often(config_file):
    """Else a run of 20 of 1000 steps logs its last step only, and has no loss curve."""
    path, cases = (
        config_file("config.log.every = 50"),
        {"train.steps=20": 1, "train.steps=40": 2, "train.steps=50": 50},
    )
    for overrides, every in (
        cases | {"train.steps=20 log.every=40": 40, "train.steps=9000": 50, "": 50}
    ).items():
        assert load(path, overrides.split()).log.every == every


def test_a_given_schedule_that_does_not_fit_is_refused_and_values_of_a_sweep_shorten_it(
    config_file, the_problem
):
    assert "use less than 20" in the_problem(
        config_file(), "train.steps=20", "optimizer.warmup_steps=20"
    )
    path = config_file("config.train.steps = 20", "config.optimizer.warmup_steps = 20")
    assert "use less than 20" in the_problem(path)
    path, warnings = config_file("config.optimizer.warmup_steps = 20"), []
    assert load_values(path, {"train.steps": 10}, warnings.append) == load(
        path, ["train.steps=10"], warnings.append
    )
    assert len(warnings) == 2
    with pytest.raises(UserError, match="use less than 10"):
        load_values(path, {"train.steps": 10, "optimizer.warmup_steps": 20})


# ---- Files ---------------------------------------------------------------------------------------


def test_files_that_cannot_be_loaded(tmp_path, config_file, problems, the_problem, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "shakespeare.py").write_text("")
    assert "did you mean configs/shakespeare.py?" in the_problem("configs/shakespear.py")
    assert "has no function get_config()" in the_problem("configs/shakespeare.py")
    assert "there is no file" in the_problem("x" * 5000 + ".py")
    broken = config_file("raise RuntimeError('no such thing')")
    assert "RuntimeError: no such thing" in the_problem(broken)
    assert len(problems(broken, "train.stpes=3", "train.steps=x")) == 3


def test_configs_of_the_package_are_found_from_any_folder(tmp_path, monkeypatch, the_problem):
    """The file of the working directory comes first, and the one that is used is named."""
    monkeypatch.chdir(tmp_path)
    name = "configs/shakespeare_small.py"
    notes = []
    here = ROOT / name
    assert load(name, [], notes.append) == load(str(here), [])
    assert notes == [f"--config: there is no {name} in this folder; {here} is used"]
    sweep = "configs/sweeps/norms.py"  # its base is the file above
    assert load_sweep(sweep, "quick").variants == load_sweep(str(ROOT / sweep), "quick").variants
    assert "did you mean configs/shakespeare_small.py?" in the_problem(f"{name[:-4]}.py")
    (tmp_path / "configs").mkdir()
    (tmp_path / name).write_text(here.read_text().replace("return config", "return {}"))
    assert load(name, []) != load(str(here), [])
    assert "there is no file elsewhere/" in the_problem("elsewhere/shakespeare_small.py")


BROKEN_FILES = [
    (
        b"import sys; sys.exit(0)",
        r"it called sys\.exit\(0\); a config file must define get_config\(\)",
    ),
    (b"def get_config(): raise SystemExit('bye')", r"it called sys\.exit\('bye'\)"),
    (b"class E(BaseException): pass\nraise E('own')", "E: own"),
    (b"class E(Exception):\n    def __str__(self): raise KeyError\nraise E", "E: no message"),
    (b"def get_config(): raise ValueError('long' * 10**5)", "ValueError: longlong"),
    (b"def get_config():\n    d = {}\n    d['a'] = d\n    return d", "must return a ConfigDict"),
    (b"def get_config(: \xff", "can't decode byte 0xff"),
    (b"\0\0", "null bytes"),
]


def test_a_config_file_can_neither_end_the_command_nor_give_a_traceback(tmp_path, the_problem):
    for i, (content, message) in enumerate(BROKEN_FILES):
        path = tmp_path / f"experiment{i}.py"
        path.write_bytes(content)
        line = the_problem(str(path))
        assert line.startswith(f"{path}: ")
        assert re.search(message, line)
        assert len(line) < 3000


STRANGE = [
    ("config.model.d_model = {'a': {}}", "config.model.d_model.a: unknown section 'model.d_model'"),
    ("config.train.steps = {}", "config.train.steps: {} is not an int"),
    ("config.modle", "config.modle: unknown key; did you mean model?"),
    (
        "config.model.n_heads = 10**400",
        "config.model.n_heads: 1000000000000000000000000000000000000000... (401",
    ),
    (
        "config.train.seed = 10**5000",
        "config.train.seed: a number of thousands of digits is out of range",
    ),
    (
        "config.model.window_pattern = (10**400,)",
        "config.model.window_pattern: 100000000000000000000000000000",
    ),
]


def test_empty_values_and_numbers_of_any_length_are_reported(config_file, the_problem):
    for line, message in STRANGE:
        assert the_problem(config_file(line)).startswith(message)


def test_a_config_file_may_have_dataclasses(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom lm.config import "
        "default_config\n"
        "@dataclasses.dataclass\nclass Size:\n    width: int = 8\n"
        "def get_config():\n    c = default_config()\n    c.model.d_model = 8 * Size().width\n    "
        "return c\n"
    )
    assert load(str(path), []).model.d_model == 64


def test_ctrl_c_while_a_config_file_runs_is_no_error_of_the_file(config_file):
    with pytest.raises(KeyboardInterrupt):
        load(config_file("raise KeyboardInterrupt"), [])


def test_a_sweep_file_is_refused_with_the_command_that_runs_it(the_problem):
    line = the_problem(str(ROOT / "configs" / "sweeps" / "norms.py"))
    assert "use python -m lm.sweep" in line


# ---- Dicts ---------------------------------------------------------------------------------------


RESTORED = {  # with each kind of tuple, which JSON writes as a list
    "name": "é\n", "model.d_head": None, "model.d_ff": 3, "model.window_pattern": (3, 0), "model.dropout": 0.25,
    "data.splits": (0.5, 0.25, 0.25), "model.tie_embeddings": True, "eval.probes": ("recall",),
    "data.mixture": (("a", "text:a", 1.0), ("b", "markov", 2.0)), "data.mixture_stages": ((3.0, 1.0, 0.0),),
}  # fmt: skip


def test_a_config_is_restored_from_json():
    tuples = {
        str(type_).removesuffix(" | None")
        for type_, _ in schema().values()
        if "tuple" in str(type_)
    }
    assert tuples <= {str(schema()[name][0]).removesuffix(" | None") for name in RESTORED}
    config, problems = from_flat(RESTORED)
    assert problems == {}
    assert RESTORED.items() <= flatten(to_dict(config)).items()
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_from_dict_reports_every_mistake():
    with pytest.raises(UserError) as caught:
        from_dict({"model": {"d_model": "x", "colour": 1}, "name": 3})
    assert len(caught.value.problems) == 3
