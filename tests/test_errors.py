"""Commands end with an exit code, whoever reads their output."""

import contextlib
import os

import pytest
from running import ROOT

from lm import sweep
from lm.data import prepare
from lm.errors import TemporaryError, UserError, with_exit_code
from lm.files import name_errors
from lm.sweeps import runner


@contextlib.contextmanager
def unread():
    """Replace the standard output by a pipe whose reader went away."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield stream


def test_sweeps_and_the_preparation_of_a_corpus_continue_when_their_reader_goes_away(command, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 50)
    monkeypatch.setattr(sweep, "start_jax", lambda *_: None)
    monkeypatch.setattr(runner, "run_sweep", lambda *_, **__: print("x" * 10**5, flush=True) or 0)
    with unread():
        source = ("--input=text:text.txt", "--tokenizer=byte", "--workers=1")
        assert command(prepare.main, *source, f"--output={tmp_path / 'shards'}")[0] == 0
        assert command(sweep.main, f"--config={ROOT / 'tests/configs/tiny_sweep.py'}")[0] == 0
    assert (tmp_path / "shards" / "manifest.json").is_file()


def test_a_command_whose_reader_goes_away_ends_without_a_traceback():
    with unread() as stream:
        code = with_exit_code(lambda: print("x" * 10**5) or 0)()
        stream.write("what follows vanishes")
        stream.flush()
    assert code == 141


def test_each_kind_of_error_has_its_exit_code(capsys, tmp_path):
    def fail(error):
        raise error

    for error, code in (
        (UserError("a"), 2),
        (TemporaryError("a"), 1),
        (OSError(28, "full"), 1),
        (KeyboardInterrupt(), 130),
    ):
        assert with_exit_code(fail)(error) == code
    assert capsys.readouterr().err == "a\na\nOSError: [Errno 28] full\ninterrupted\n"
    with pytest.raises(OSError, match=r"full: '.*/metrics.jsonl'$"), name_errors(tmp_path / "metrics.jsonl"):
        raise OSError(28, "full")
