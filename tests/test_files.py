"""Small files: what is read has the expected shape, or the error says what is wrong with which
file.
"""

import contextlib
import itertools
import os
import re
import socket
from pathlib import Path

import pytest
from running import ROOT

from lm.data import storage
from lm.system import files
from lm.system.errors import UserError
from lm.system.files import COUNT, NUMBER, parse_json, read_json, remove_while_written

SHAPE = {"name": str, "losses": {str: NUMBER}, "shards": [{"size": COUNT, "split": (str, None)}]}
GOOD = '{"name": "a", "losses": {"3": 1.5, "4": "NaN"}, "shards": [{"size": 1, "split": null}], "more": 1}'


def test_json_of_the_expected_shape_is_returned(tmp_path):
    (tmp_path / "good.json").write_text(GOOD)
    assert read_json(tmp_path / "good.json", SHAPE)["losses"] == {"3": 1.5, "4": "NaN"}


CORRUPTED = [
    (b"", "it is empty"),
    (b"\0" * 20, "Expecting value"),
    (GOOD.encode()[:-4], "Expecting"),
    (b'{"name": "\xff"}', "can't decode byte 0xff"),
    (b"[" * 100_000, "nested too deeply"),
    (b"9" * 5000, "digits"),
    (b"[1]", "its content is a list, not an object"),
    (b"null", "its content is null, not an object"),
    (GOOD.replace('"name"', '"nom"').encode(), "its content has no 'name'"),
    (GOOD.replace('"a"', "7").encode(), "name is 7, not a string"),
    (GOOD.replace("1.5", '"1.5"').encode(), "losses.3 is \"1.5\", not a number or 'NaN' or"),
    (GOOD.replace("1.5", "1" + "0" * 400).encode(), "losses.3 is 1000"),
    (GOOD.replace('"a"', '"\\ud800"').encode(), "half of a surrogate pair"),
    (GOOD.replace('"a"', '"\ud800"').encode(errors="surrogatepass"), "can't decode byte 0xed"),
    (
        GOOD.replace('"size": 1', '"size": true').encode(),
        "shards[0].size is true, not an integer of at least 0",
    ),
    (
        GOOD.replace('"size": 1', '"size": -1').encode(),
        "shards[0].size is -1, not an integer of at least 0",
    ),
    (
        GOOD.replace('"split": null', '"split": 1').encode(),
        "shards[0].split is 1, not a string or null",
    ),
    (b"{}" + b" " * 99, "it has 101 bytes; at most 100"),
]


def test_a_corrupted_file_is_an_error_of_one_line_that_names_it(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    for content, reason in CORRUPTED:
        path.write_bytes(content)
        monkeypatch.setattr(files, "LARGEST", 100 if "at most" in reason else 2**30)
        with pytest.raises(UserError) as error:
            read_json(path, SHAPE, "delete it")
        message = str(error.value)
        assert message.startswith(f"{path} is corrupted: ")
        assert reason in message
        assert message.endswith("; delete it")
        assert "\n" not in message
        assert len(message) < 400


def test_a_file_that_cannot_be_read_is_not_called_corrupted(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing.json")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_json(tmp_path)


def test_a_number_is_finite_unless_the_shape_says_otherwise():
    assert parse_json('["NaN", 1]', [NUMBER]) == ["NaN", 1]
    for text in ('["NaN"]', "[NaN]", "[1e999]"):
        with pytest.raises(ValueError, match=r"\[0\] is .*, not a number"):
            parse_json(text, [float])
    assert parse_json("-3", int) == -3
    with pytest.raises(ValueError, match="not an integer"):  # of 64 bits
        parse_json(str(2**63), (int, COUNT))


def test_a_directory_is_removed_although_a_file_appears_meanwhile(tmp_path, monkeypatch):
    unfinished, rmdir, late = tmp_path / "8.orbax-checkpoint-tmp", os.rmdir, []
    (unfinished / "state").mkdir(parents=True)

    def write_one_more(path, **keywords):
        if not late:
            late.append(unfinished / "state" / "late")
            late[0].write_text("")
        rmdir(path, **keywords)

    monkeypatch.setattr(os, "rmdir", write_one_more)
    remove_while_written(unfinished)
    assert late
    assert not unfinished.exists()


# ---- Directories that somebody else may have made ------------------------------------------------

# What is read in another way, and why.
READ_OTHERWISE = {
    "lm/system/files.py": "the rule itself",
    "lm/huggingface/code_export.py": "a file of the package",
    "lm/cost/compiled.py": "what its own compiler wrote",
    "lm/data/python_docs.py": "a file of the package",
    "lm/data/storage.py": "the text that the user named",
    "lm/system/git.py": "what a package says of itself",
    "lm/generate.py": "the prompts that the user named",
    "lm/sweeps/plan.py": "the sweep file, which is run anyway",
    "lm/interpret/page.py": "files of the package",
    "lm/interpret/equations.py": "the source of the package",
    "lm/training/memory.py": "the system's limits",
    "lm/system/locks.py": "the system's processes",
    "lm/workdir/provenance.py": "the system's processor",
}


READS = re.compile(
    r"(?<!files)\.read_(text|bytes)\(|(?<!os\.)\bopen\((?![^\n]*\"(w|wb|xb|a|ab|a\+b)\")"
)


def test_every_module_reads_files_by_the_same_rule():
    paths = (ROOT / "lm").rglob("*.py")
    found = {
        str(path.relative_to(ROOT))
        for path in paths
        if READS.search(path.read_text(encoding="utf-8"))
    }
    assert found == READ_OTHERWISE.keys()


def test_directories_are_visited_once_whatever_links_lead_to_them(tmp_path, monkeypatch):
    """Two links to "." have 2^40 paths. Whoever walks a tree uses the same function; other links
    are one more way.
    """
    tree = tmp_path / "tree"
    for name in ("b/1.txt", "b/c/2.txt", "3.txt", ".hidden/4.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "5.txt").write_text("of somebody else")
    for link, target in {
        "x": ".",
        "y": ".",
        "a": "b/c",
        "b/up": "..",
        "out": "../out",
        "6.txt": "3.txt",
    }.items():
        (tree / link).symlink_to(target)
    monkeypatch.chdir(tree)
    own = [".hidden/4.txt", "3.txt", "b/1.txt", "b/c/2.txt"]
    for found, expected in (
        (files.files_below(tree), [*own, "6.txt", "out/5.txt"]),
        (files.files_below(tree, follow=False), own),
        (files.matching_files(f"{tree}/**/*.txt"), [*own[1:], "6.txt", "out/5.txt"]),
        (map(os.path.abspath, files.matching_files("**/*.txt")), [*own[1:], "6.txt", "out/5.txt"]),
        (
            files.matching_files(f"{tree}/*/**/[0-5].txt"),
            ["b/1.txt", "b/c/2.txt", "3.txt", "out/5.txt"],
        ),
        (files.matching_files(f"{tree}/**"), [*own[1:], "6.txt", "out/5.txt"]),
        (storage.list_files(f"{tree}/**/*.txt"), [*own[1:], "6.txt", "out/5.txt"]),
    ):
        first = itertools.islice(found, 100)
        names = sorted(os.path.relpath(path, tree).removeprefix("x/") for path in first)
        assert names == sorted(expected)
    walks = re.compile(r"os\.walk|\.rglob\(|recursive=True|copytree")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lm").rglob("*.py")
        if walks.search(path.read_text())
    }
    # The second walks what this process has just written.
    assert found == {"lm/system/files.py", "lm/data/cache.py"}


def test_pipes_devices_and_huge_files_are_refused_and_names_lead_nowhere(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="a pipe or a device"):
            files.read_bytes(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is a pipe or a device"):
            files.check_files(tmp_path, "d")
        (tmp_path / name).unlink()
    for folder, refused in (("state", True), ("d", False)):
        (tmp_path / folder).mkdir()
        with open(tmp_path / folder / "huge", "wb") as file:
            file.truncate(2**31)
        with pytest.raises(UserError, match="at most") if refused else contextlib.nullcontext():
            files.check_files(tmp_path / folder, "d")
    (tmp_path / "link").symlink_to(tmp_path / "state")
    with pytest.raises(UserError, match="is a link"):
        files.make_folder(tmp_path / "link")


def test_nothing_but_a_file_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("folder")
    os.symlink("/dev/null", "device")
    os.symlink("pipe", "to-pipe")
    os.symlink("folder", "to-folder")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        kept = ["pipe", "folder", "device", "to-pipe", "to-folder", "socket"]
        for path in [
            *kept,
            "/dev/stdout",
            "/dev/fd/1",
            "/proc/self/fd/1",
            "/dev/null",
            "/dev/absent",
        ]:
            before = os.path.lexists(path) and os.lstat(path)[:3]
            with pytest.raises(UserError, match=f"^{path} is a directory, a device or a pipe"):
                files.write_bytes(Path(path), b"content")
            with pytest.raises(
                UserError, match=f"^--output: {path} is a directory, a device or a pipe"
            ):
                files.check_output(Path(path), "--output")
            assert (os.path.lexists(path) and os.lstat(path)[:3]) == before
    Path("file").write_bytes(b"before")
    os.symlink("file", "to-file")
    os.symlink("absent", "to-nothing")
    for path in ("to-file", "to-nothing", "file"):
        files.check_output(Path(path), "--output")
        files.write_bytes(Path(path), b"content")
        assert Path(path).read_bytes() == b"content"
        assert not os.path.islink(path)
        assert Path("file").read_bytes() == (b"content" if path == "file" else b"before")
    assert not os.path.exists("absent")
    for path in ("s3://bucket/page.html", "absent/page.html", "a" * 5000, "a" * 250):
        with pytest.raises(UserError, match="--output"):
            files.check_output(Path(path), "--output")
