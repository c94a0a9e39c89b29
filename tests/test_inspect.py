"""The command lm.inspect."""

from lm.inspect import main


def test_the_page_of_a_run_is_written(bench, tmp_path, capsys):
    arguments = [f"--workdir={bench.reference()}", "--prompt=the cat"]
    assert main([*arguments, "--layers=0", f"--output={tmp_path / 'page.html'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The text has 7 tokens, mean loss " in page
    assert "Shown are" not in page


MISTAKES = {  # of arguments, then those that are found once the run is loaded
    "absent; python -m lm.runs": ["--workdir=absent", "--prompt=the"],
    "--prompt: 0 tokens; expected 1 to": ["--prompt="],
    "--layers: '0,-1' is not a list of layers": [
        "--workdir=absent",
        "--prompt=the",
        "--layers=0,-1",
    ],
    "--output: no/page.html is not a file in an": [
        "--workdir=absent",
        "--prompt=the",
        "--output=no/page.html",
    ],
    "--output: / is a directory": ["--workdir=absent", "--prompt=the", "--output=/"],
    "--output: /dev/stdout is a dir": ["--workdir=absent", "--prompt=the", "--output=/dev/stdout"],
    "--output: setup.py must end in .html": [
        "--workdir=absent",
        "--prompt=the",
        "--output=setup.py",
    ],
    "unrecognized arguments: --max_tokens\n": [  # and not: the 3 is not allowed beside --workdir
        "--workdir=absent",
        "--prompt=the",
        "--max_tokens",
        "3",
    ],
    "'Z'": ["--prompt=Zeus"],
    "792 tokens; expected 1 to": ["--prompt=" + "the cat " * 99],
    "--layers: 7 is not a layer; expected 0 to 0": ["--prompt=the", "--layers=0,7"],
}


def test_mistakes_are_errors(bench, command):
    workdir = bench.reference()
    for message, arguments in MISTAKES.items():
        given = [] if arguments[0].startswith("--workdir") else [f"--workdir={workdir}"]
        code, output = command(main, *given, *arguments)
        assert (code, message in output) == (2, True), output
