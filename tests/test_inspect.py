"""The command lm.inspect."""

import pytest

from lm.inspect import main


def test_the_page_of_a_run_is_written(bench, tmp_path, capsys):
    arguments = [f"--workdir={bench.reference()}", "--prompt=the cat"]
    assert main([*arguments, "--layers=0", f"--output={tmp_path / 'page.html'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The text has 7 tokens, mean loss " in page
    assert "Shown are" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=the"], "holds no checkpoint"),
        (["--prompt=", "--step=x", "--layers=0;1"], "--prompt is empty"),
        (["--prompt=the", "--step=²"], "--step: '²' is not best, latest"),
        (["--prompt=the", "--layers=0,-1"], "--layers: '0,-1' is not a list of layers"),
        (["--prompt=the", "--output=no/such/page.html"], "--output: no/such/page.html is not a file in an existing"),
        (["--prompt=the", "--output=/"], "--output: / is not a file"),
    ],
)
def test_mistakes_are_errors(capsys, arguments, message):
    assert main(["--workdir=absent", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=Zeus"], "'Z'"),
        (["--prompt=" + "the cat " * 99], "792 tokens; expected 1 to"),
        (["--prompt=the", "--layers=0,7"], "--layers: 7 is not a layer; expected 0 to 0"),
    ],
)
def test_texts_and_layers_that_do_not_fit_the_run_are_errors(bench, capsys, arguments, message):
    assert main([f"--workdir={bench.reference()}", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
