"""Commands end with an exit code, whoever reads their output, and no name in it changes the terminal."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from running import ROOT

from lm import sweep
from lm.data import prepare
from lm.errors import TemporaryError, UserError, with_exit_code
from lm.files import name_errors
from lm.sweeps import runner
from lm.text_tables import for_terminal, say, table
from lm.training.progress import Progress


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


def say_with_progress(text):
    stream = io.StringIO()
    Progress(10, stream).say(text)
    print(stream.getvalue())


def fail_with(error):
    with_exit_code(lambda: (_ for _ in ()).throw(error))()


WAYS = {
    "a mistake": lambda text: fail_with(UserError(f"{text} is not a tensor")),
    "an error of the system": lambda text: fail_with(FileNotFoundError(2, "absent", Path(text))),
    "a notebook's error": lambda text: print(UserError(text)),
    "a line of progress": say_with_progress,
    "a warning": say,
    "a table": lambda text: print(table([("name",), (text,)])),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_no_name_changes_the_terminal_or_the_direction_of_the_text(way, capsys):
    """Names of tensors, runs, columns, files, tokenizers: all are chosen by somebody else."""
    codes = [*range(32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
    unsafe = "".join(map(chr, codes)).replace("\t", "").replace("\n", "")
    way(f"before{unsafe}after \u05e9\u05dc\u05d5\u05dd \u65e5\u672c")
    printed = "".join(capsys.readouterr())
    assert "before" in printed
    assert "after" in printed
    assert not set(printed) & set(unsafe)
    assert for_terminal("tab\tline\n\u05e9\u65e5") == "tab\tline\n\u05e9\u65e5"


PRINTS = {
    "lm/text_tables.py": "the rule itself",
    "lm/config/reference.py": "the schema",
    "lm/__main__.py": "a constant",
}


def test_every_module_prints_by_the_same_rule():
    prints = re.compile(r"^(?! *>>>)[^#\n]*(?<![\w.])print\((?!\))", re.MULTILINE)
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "lm").rglob("*.py")}
    found = {str(path.relative_to(ROOT)) for path, text in sources.items() if prints.search(text)}
    assert found == PRINTS.keys()
