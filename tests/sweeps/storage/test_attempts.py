"""Counting the processes that die while they train a group of runs."""

import pytest

from lm.sweeps.storage.attempts import MAX_DEATHS, ProcessDied, attempt, n_deaths


@pytest.fixture
def die():
    """Return die(directory), which enters an attempt and never leaves it, as a killed process does."""
    entered = []

    def die(directory):
        entered.append(attempt(directory))
        entered[-1].__enter__()

    return die


def test_deaths_are_counted_until_the_last_one_is_refused(tmp_path, die):
    for n in range(MAX_DEATHS):
        assert n_deaths(tmp_path / "group") == n
        die(tmp_path / "group")
    with pytest.raises(ProcessDied, match="3 processes died while they trained"), attempt(tmp_path / "group"):
        pass


@pytest.mark.parametrize("how", [None, ValueError, KeyboardInterrupt])
def test_a_process_that_ends_in_any_other_way_is_not_counted(tmp_path, die, how):
    die(tmp_path)
    try:
        with attempt(tmp_path):
            if how:
                raise how
    except (ValueError, KeyboardInterrupt):
        pass
    assert n_deaths(tmp_path) == 0


def test_deaths_before_the_newest_checkpoint_do_not_count(tmp_path, die):
    """A group that is longer than the time between two interruptions finishes in the end."""
    for step in range(100, 600, 100):
        die(tmp_path)
        die(tmp_path)
        assert n_deaths(tmp_path) == 2
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / f"{step + 50}.orbax-checkpoint-tmp").mkdir()
        assert n_deaths(tmp_path) == 0


@pytest.mark.parametrize("content", ["", "{", '{"attempts": 2}', '{"attempts": "2", "step": 0}'])
def test_a_damaged_count_is_zero(tmp_path, die, content):
    (tmp_path / "attempts.json").write_text(content)
    assert n_deaths(tmp_path) == 0
    die(tmp_path)
    assert n_deaths(tmp_path) == 1
