"""Pages of docs/results that benchmarks write."""

import re
import sys

from benchmarks import layernorm_swap, mup_coordinates, page


def test_a_page_has_its_table_and_the_commands_that_reproduce_it(tmp_path):
    by_width = [
        {"hidden states": 3.0 * width**0.5, "logits": 2.0} for width in mup_coordinates.WIDTHS
    ]
    found = {"mup": by_width, "standard": by_width}
    table = mup_coordinates.table(found)
    assert [row[-1].lstrip("+-") for row in table[1:]] == ["0.50", "0.50", "0.00", "0.00"], (
        "exponents"
    )
    page.publish(
        tmp_path,
        "check",
        "About it.",
        ["first", "second"],
        table,
        lambda: mup_coordinates.draw(found),
    )
    text = (tmp_path / "check.md").read_text()
    assert re.match(
        r"# check\n\nAbout it.\n\n\| change of \|(.*\n){6}\n!\[check\]\(check.png\)\n", text
    )
    assert re.search(
        r"```\nfirst\nsecond\ncommit .*\nversions python 3.*jax.*\n.*, \d{4}-\d\d-\d\d\n```\n$",
        text,
    )
    assert re.findall(r"(?<![\w.])/\w+", text) == [], "no local directory"
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")


def test_swapped_algorithms_in_a_trained_model(bench, tmp_path, monkeypatch, capsys):
    """Exact one-pass formulas change the logits by rounding only; running_mean changes them by far
    more.
    """
    runs = [tmp_path / "layer", tmp_path / "rms"]
    assert (
        bench.train(runs[0], "--config.model.norm=layer", "--config.model.d_model=64").returncode
        == 0
    )
    assert bench.train(runs[1]).returncode == 0
    monkeypatch.chdir(bench.base)
    found = layernorm_swap.swapped(str(runs[0]))
    assert found["two_pass"]["max"] == 0
    assert 0 < found["welford"]["max"] < 1e-4
    assert 0 < found["chan"]["max"] < 1e-4
    assert found["running_mean"]["mean"] > 100 * found["welford"]["mean"]
    monkeypatch.setattr(layernorm_swap, "SHAPE", (8, 64))
    monkeypatch.setattr(
        sys, "argv", ["layernorm_swap", str(runs[0]), "--publish", str(tmp_path / "docs")]
    )
    assert layernorm_swap.main() == 0
    text = (tmp_path / "docs" / "layernorm_swap.md").read_text()
    assert "\npython -m benchmarks.layernorm_swap layer --publish docs/results\n" in text
    assert str(tmp_path) not in text
    monkeypatch.setattr(sys, "argv", ["layernorm_swap", str(runs[1])])
    assert layernorm_swap.main() == 2
    assert "but has norm=rms, norm_algorithm=two_pass" in capsys.readouterr().err
