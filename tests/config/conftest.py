import pytest

from lm.config.loading import load
from lm.errors import UserError


@pytest.fixture
def config_file(tmp_path):
    """Return config_file(*lines), which writes a config file whose get_config() runs these lines, and its path."""

    def write(*lines):
        path = tmp_path / "experiment.py"
        body = "".join(f"    {line}\n" for line in lines)
        path.write_text(
            "from lm.config import default_config\n\n\ndef get_config():\n"
            f"    config = default_config()\n{body}    return config\n"
        )
        return str(path)

    return write


@pytest.fixture
def problems():
    """Return problems(path, *overrides), which returns the messages with which a config is refused."""

    def of(path, *overrides):
        with pytest.raises(UserError) as caught:
            load(path, list(overrides))
        return caught.value.problems

    return of


@pytest.fixture
def the_problem(problems):
    """Return the_problem(path, *overrides), which returns the one message with which a config is refused."""

    def of(path, *overrides):
        found = problems(path, *overrides)
        assert len(found) == 1, found
        return found[0]

    return of
