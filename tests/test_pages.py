"""Pages of docs/results that benchmarks make by themselves."""

import re

import numpy as np
import pytest

from benchmarks import mup_coordinates, page


def moves(width: int) -> dict[str, float]:
    return {"hidden states": 3.0 * width**0.5, "logits": 2.0}


def test_the_exponent_is_the_power_laws():
    by_width = [moves(width) for width in mup_coordinates.WIDTHS]
    rows = mup_coordinates.table({"mup": by_width, "standard": by_width})
    assert [(row[0], row[1], row[-1].lstrip("+-")) for row in rows[1:]] == [
        ("hidden states", "mup", "0.50"), ("hidden states", "standard", "0.50"),
        ("logits", "mup", "0.00"), ("logits", "standard", "0.00"),
    ]  # fmt: skip


def test_a_page_holds_all_that_repeats_it_and_no_place_of_this_machine(tmp_path):
    by_width = [moves(width) for width in mup_coordinates.WIDTHS]
    found = {"mup": by_width, "standard": by_width}
    page.publish(
        tmp_path, "check", "About it.", ["first", "second"], [["a", "b"], ["1", "2"]], mup_coordinates.draw(found)
    )
    text = (tmp_path / "check.md").read_text()
    assert text.startswith("# check\n\nAbout it.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n![check](check.png)\n")
    assert re.search(r"```\nfirst\nsecond\ncommit .*\nversions python 3.*jax.*\n.*, \d{4}-\d\d-\d\d\n```\n$", text)
    assert re.findall(r"(?<![\w.])/\w+", text) == []
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_at_the_bases_width_the_coordinate_check_has_nothing_to_tell(monkeypatch):
    monkeypatch.setattr(mup_coordinates, "STEPS", 2)
    monkeypatch.setattr(mup_coordinates, "SEEDS", (0,))
    same, wider = ([mup_coordinates.moved(name, width) for name in ("mup", "standard")] for width in (32, 64))
    assert same[0] == same[1]
    assert min(same[0].values()) > 0
    assert not np.isclose(wider[0]["hidden states"], wider[1]["hidden states"], rtol=0.05)
