"""Commands end with an exit code, whoever reads their output, and no name in it changes the
terminal.
"""

import contextlib
import io
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT

from lm import sweep
from lm.config import DataConfig
from lm.data import prepare, sources
from lm.sweeps import runner
from lm.system.errors import TemporaryError, UserError, lasting_output, with_exit_code
from lm.system.files import expanded, name_errors, user_cache
from lm.system.parser import Parser
from lm.system.text_tables import for_terminal, say, table
from lm.training.progress import Progress


@contextlib.contextmanager
def unread():
    """Replace the standard output by a pipe whose reader went away."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield stream


def test_sweeps_and_the_preparation_of_a_corpus_continue_when_their_reader_goes_away(
    command, monkeypatch, tmp_path
):
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
        (IsADirectoryError(21, "folder"), 2),
        (NotADirectoryError(20, "file"), 2),
        (OSError(36, "name"), 2),  # the same when it is rerun
        (KeyboardInterrupt(), 130),
    ):
        assert with_exit_code(fail)(error) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["a", "a", "OSError: [Errno 28] full"]
    assert lines[3:] == ["IsADirectoryError: [Errno 21] folder", "NotADirectoryError: [Errno 20] file",
                         "OSError: [Errno 36] name", "interrupted"]  # fmt: skip
    with (
        pytest.raises(OSError, match=r"full: '.*/metrics.jsonl'$"),
        name_errors(tmp_path / "metrics.jsonl"),
    ):
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
    codes = [
        *range(32),
        *range(127, 160),
        0x61C,
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    ]
    unsafe = "".join(map(chr, codes)).replace("\t", "").replace("\n", "")
    way(f"before{unsafe}after \u05e9\u05dc\u05d5\u05dd \u65e5\u672c")
    printed = "".join(capsys.readouterr())
    assert "before" in printed
    assert "after" in printed
    assert not set(printed) & set(unsafe)
    assert for_terminal("tab\tline\n\u05e9\u65e5") == "tab\tline\n\u05e9\u65e5"


PRINTS = {
    "lm/system/text_tables.py": "the rule itself",
    "lm/config/reference.py": "the schema",
    "lm/__main__.py": "a constant",
    "lm/huggingface/code_export.py": "an example in a model card",
}


def test_every_module_prints_by_the_same_rule():
    prints = re.compile(r"^(?! *>>>)[^#\n]*(?<![\w.])print\((?!\))", re.MULTILINE)
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "lm").rglob("*.py")}
    found = {str(path.relative_to(ROOT)) for path, text in sources.items() if prints.search(text)}
    assert found == PRINTS.keys()


# ---- What the shell hands over -------------------------------------------------------------------

HANDED_OVER = [
    ("lm --help >&-", 0),
    ("lm --help >&- 2>&- <&-", 0),
    ("lm --help >/dev/full", 1),
    ("lm train --help >/dev/full", 1),
    ("lm train --config $ROOT/configs/shakespeare.py --print_config python >&-", 0),
    ("lm train --config $ROOT/configs/shakespeare.py --print_config python >/dev/full", 1),
    ("lm runs nowhere 2>&-", 2),
    ("lm runs nowhere 2>/dev/full", 2),
    ("lm runs nowhere >/dev/full 2>/dev/full", 2),
    ("lm generate --workdir . --prompt-file - <&-", 2),
    ("set -o pipefail; lm train --help | true", 141),
    ("mkdir gone; cd gone; rmdir ../gone; lm runs", 2),
    ("ulimit -n 12; lm runs .", 2),
    ("COLUMNS=0 TERM= lm generate --help", 0),
    ("LC_ALL=C PYTHONIOENCODING=ascii lm runs n\u00f6where", 2),
]


def test_a_command_ends_with_its_exit_code_and_no_traceback_whatever_the_shell_hands_over(tmp_path):
    """Closed and full streams, no directory, few files, no width, no terminal, no locale, no home."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ROOT": str(ROOT),
        "PYTHON": sys.executable,
    }
    for line, code in HANDED_OVER:
        script = f'lm() {{ "$PYTHON" -m lm "$@"; }}; {line}'
        done = subprocess.run(
            ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, timeout=300
        )
        output = (done.stdout + done.stderr).decode()
        assert (done.returncode, "Traceback" in output, "Exception ignored" in output) == (code, False, False), (
            line, output
        )  # fmt: skip


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a command as another user")
def test_a_user_without_home_and_name_gets_no_traceback(tmp_path):
    if not all(folder.stat().st_mode & stat.S_IXOTH for folder in (ROOT, *ROOT.parents)):
        pytest.skip("other users cannot read this checkout")
    command = [
        "setpriv",
        "--reuid=12345",
        "--regid=12345",
        "--clear-groups",
        sys.executable,
        "-m",
        "lm",
        "runs",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "HOME"} | {
        "PYTHONPATH": str(ROOT)
    }
    python = command[: command.index("-m")]
    if subprocess.run(
        [*python, "-c", ""], env=environment, cwd="/", capture_output=True
    ).returncode:
        pytest.skip("other users cannot run this Python")
    done = subprocess.run(
        [*command, "/nowhere"], env=environment, cwd="/", capture_output=True, timeout=300
    )
    assert (done.returncode, b"Traceback" in done.stdout + done.stderr) == (2, False), done.stderr


def test_a_file_never_gets_the_number_of_a_closed_stream(tmp_path):
    """Libraries write their messages to these numbers, and would write them into a checkpoint."""
    script = (
        "from lm.system.errors import with_exit_code; import sys; "
        "sys.exit(with_exit_code(lambda: 0 if open(sys.argv[1], 'w').fileno() > 2 else 5)())"
    )
    command = f'exec "{sys.executable}" -c "{script}" {tmp_path}/file <&- >&- 2>&-'
    assert (
        subprocess.run(
            ["bash", "-c", command], env=os.environ | {"PYTHONPATH": str(ROOT)}
        ).returncode
        == 0
    )


def test_long_work_goes_on_when_its_output_cannot_be_stored():
    with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream), lasting_output():
        for _ in range(3):
            print("x" * 10**5, flush=True)


def test_without_a_home_directory_what_needs_one_is_refused(monkeypatch):
    def unknown(_):
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for advice, need in (
        ("set HOME", lambda: expanded("~/runs")),
        ("set XDG_CACHE_HOME", lambda: user_cache(None)),
        ("set HOME", lambda: sources.find_tfds("tiny_shakespeare", DataConfig(), print)),
    ):
        with pytest.raises(UserError, match=advice):
            need()
    assert expanded("~other") == "~other"  # a file of this name
    assert str(user_cache("/cache")) == "/cache"


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--prompt", "-So"], {"prompt": "-So"}),
        (["--prompt", "- a list", "--rate", "-1"], {"prompt": "- a list", "rate": -1.0}),
        (["--prompt", "--- a/file"], {"prompt": "--- a/file"}),
        (["--prompt", "--"], {"prompt": "--"}),
        (["--prompt", ""], {"prompt": ""}),
        (["--rate", "-1e-5"], {"rate": -1e-5}),
        (["--rate", "-inf"], {"rate": float("-inf")}),
        (["--out-dir", "-name"], {"out_dir": "-name"}),
        (["--prompt", "-h"], None),  # options remain options
        (["--prompt", "--rate", "1"], None),
        (["--prompt", "--rate=1"], None),
        (["--out_dir", "--prompt", "x"], None),
        (["--out_dir", "--promt"], None),  # a mistyped option
        (["-So"], None),
    ],
)
def test_a_value_may_begin_with_a_hyphen(arguments, values, capsys):
    parser = Parser("test", "")
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--out_dir", metavar="DIR")
    if values is None:
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
    else:
        found = vars(parser.parse_args(arguments))
        assert {name: x for name, x in found.items() if x is not None} == values
