"""sweep.json: damaged and changed files, and directories that hold something else."""

import pytest
from running import ROOT

from lm.sweeps.plan import load_sweep
from lm.sweeps.record import open_sweep, read_failures, read_record, sweep_record
from lm.sweeps.variants import resolve_variants
from lm.system.errors import UserError

START = {"time": "now", "platform": "Linux", "processor": "cpu", "device": "2 x cpu", "argv": ["lm.sweep"],
         "versions": {"jax": "1"}, "git": None}  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The record of the tiny sweep, none of whose runs is trained."""
    base = tmp_path_factory.mktemp("sweep")
    (base / "text.txt").write_text("to be or not to be, that is the question\n" * 80)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        patch.setenv("XDG_CACHE_HOME", str(base))
        plan = load_sweep(str(ROOT / "tests" / "configs" / "tiny_sweep.py"), "quick")
        variants = resolve_variants(plan, lambda text: None)
    return sweep_record(plan, variants, START)


def test_every_start_is_kept(tmp_path, sweep):
    for device in ("2 x cpu", "1 x gpu"):
        open_sweep(tmp_path / "s", sweep | {"starts": [START | {"device": device}]})
    assert [start["device"] for start in read_record(tmp_path / "s")["starts"]] == [
        "2 x cpu",
        "1 x gpu",
    ]


def test_a_changed_number_is_refused_as_another_file_is(tmp_path, sweep):
    open_sweep(tmp_path, sweep)
    path = tmp_path / "sweep.json"
    content = path.read_text()
    for damaged in (content.replace('"margin": 0.005', '"margin": 0.006'), "{}"):
        assert damaged != content
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"sweep\.json is corrupted: .*; restore it"):
            read_record(tmp_path)


def test_differences_between_two_sweeps_are_named(tmp_path, sweep):
    open_sweep(tmp_path / "s", sweep)
    glu = sweep["variants"]["glu"]
    changed = sweep["variants"] | {
        "glu": glu | {"tune": {"optimizer.learning_rate": [0.5]}, "seeds": [1, 2]}
    }
    with pytest.raises(UserError) as caught:
        open_sweep(tmp_path / "s", sweep | {"budget": "full", "variants": changed})
    text = str(caught.value)
    assert "holds another sweep" in text
    assert "budget: quick -> full (sweep -> now)" in text
    assert "variant 'glu': tune: {'optimizer.learning_rate': [0.02, 0.04, 0.08]} -> {" in text
    assert f"variant 'glu': seeds: {glu['seeds']} -> [1, 2] (sweep -> now)" in text


def test_a_sweep_goes_on_with_the_same_probes_and_the_same_rule_for_spikes(tmp_path, sweep):
    """Both keys may change at a resumption of one run."""
    open_sweep(tmp_path / "s", sweep)
    glu = sweep["variants"]["glu"]
    for section, key, value in (("eval", "probes", ["recall"]), ("train", "on_spike", "skip")):
        config = glu["config"] | {section: glu["config"][section] | {key: value}}
        changed = sweep | {"variants": sweep["variants"] | {"glu": glu | {"config": config}}}
        with pytest.raises(
            UserError, match=rf"variant 'glu': config\.{section}\.{key}: \w+ -> .*(sweep -> now)"
        ):
            open_sweep(tmp_path / "s", changed)


def test_a_key_that_is_newer_than_the_sweep_had_its_default(tmp_path, sweep):
    glu = sweep["variants"]["glu"]
    model = {key: value for key, value in glu["config"]["model"].items() if key != "qk_norm"}

    def with_model(values):
        return sweep | {
            "variants": sweep["variants"]
            | {"glu": glu | {"config": glu["config"] | {"model": values}}}
        }

    open_sweep(tmp_path / "s", with_model(model))
    open_sweep(tmp_path / "s", sweep)
    with pytest.raises(
        UserError, match=r"variant 'glu': config\.model\.qk_norm: False -> True \(sweep -> now\)"
    ):
        open_sweep(tmp_path / "s", with_model(model | {"qk_norm": True}))


def test_directories_that_hold_something_else_are_refused(tmp_path, sweep):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    with pytest.raises(UserError, match=r"is not empty \(something\) and holds no sweep"):
        open_sweep(tmp_path / "full", sweep)
    with pytest.raises(UserError, match="cannot be created"):
        open_sweep(tmp_path / "full" / "something", sweep)
    with pytest.raises(UserError, match="holds no sweep"):
        read_record(tmp_path / "full")


def test_damaged_failures_are_ignored(tmp_path):
    (tmp_path / "failed").mkdir()
    for i, content in enumerate(
        ('{"variants": ["glu"], "error": "MemoryError"}', '{"variants": 3}', "")
    ):
        (tmp_path / "failed" / f"{i}.json").write_text(content)
    assert read_failures(tmp_path) == {"glu": "MemoryError"}
