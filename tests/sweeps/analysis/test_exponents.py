"""The answers of a sweep with sizes and without comparisons: exponents, irreducible loss, table, figure, report."""

import re

import numpy as np
import pytest
import synthetic_sizes
from synthetic_sizes import COMPUTE, SIZES, without_comparisons
from synthetic_sweep import diverge

from lm import report as command
from lm.errors import UserError
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.exponents import ALL, FLOPS, INNER, INNER_FLOPS
from lm.sweeps.report import figures, pages
from lm.sweeps.report.exponents_figure import exponents_figure
from lm.sweeps.report.exponents_table import exponents_table


def analyzed(tmp_path, **changes):
    return analyze(synthetic_sizes.write(tmp_path / "sweep", *without_comparisons(**changes)))


def test_the_exponents_are_those_of_the_losses(tmp_path):
    a = analyzed(tmp_path)
    [found] = a.falls
    assert (found.variant, found.sizes, found.at_optimum) == ("plain", SIZES, True)
    np.testing.assert_allclose(found.x[FLOPS], list(COMPUTE.values()))
    np.testing.assert_allclose(found.x[INNER_FLOPS], found.x[FLOPS] / 2)
    np.testing.assert_allclose(found.x[INNER], found.x[ALL] - 5000)
    assert found.laws[ALL].exponent.low < 0.34 < found.laws[ALL].exponent.high  # FLOPs are its square
    law = found.laws[FLOPS]
    assert law.exponent.low < 0.17 < law.exponent.high
    assert law.floor.low < 1.4 < law.floor.high
    assert law.exponent.high - law.exponent.low < 0.05
    # Half of the FLOPs at every size change the factor alone.
    assert found.laws[INNER_FLOPS].exponent == pytest.approx(law.exponent, rel=1e-6)
    assert found.laws[INNER_FLOPS].floor == pytest.approx(law.floor, rel=1e-6)


def test_the_answer_has_exponents_with_and_without_embeddings_and_both_the_fitted_and_the_true_loss(tmp_path):
    [answer] = analyzed(tmp_path).answers
    number = r"\d+\.\d+ \[\d+\.\d+, \d+\.\d+\]"
    assert re.match(
        rf"The test loss of plain falls as E \+ A x\^-a, with the exponent a = {number} over parameters, {number} "
        rf"over parameters without embeddings, {number} over training FLOPs, {number} over training FLOPs without "
        r"embeddings "
        r"\(4 sizes, 5 seeds each, 95 % CI, at the estimated optima of the learning rate\)\. Irreducible loss: "
        rf"fitted {number}; true 1\.4000\..* At these sizes \(57,735 to 483,046 parameters, .*only the learning "
        r"rate was tuned",
        answer,
    )


def test_without_a_known_source_there_is_no_true_loss(tmp_path):
    a = analyzed(tmp_path, true_floor=None)
    assert "true" not in a.answers[0]
    assert {row[4] for row in exponents_table(a).rows} == {"unknown"}


def test_sizes_that_do_not_show_a_limit_are_reported_so(tmp_path):
    """With this noise a logarithm fits as well, which has no limit."""
    a = analyzed(tmp_path, noise=0.1)
    [found] = a.falls
    assert found.laws[ALL].floor.low == -np.inf
    assert re.search(
        r"Irreducible loss: at most \d\.\d{4}, and these sizes show no lower limit; true 1\.4", a.answers[0]
    )
    assert "[−∞, " in exponents_table(a).rows[0][3]


def test_losses_that_are_on_no_power_law_cause_a_warning(tmp_path):
    record, runs = without_comparisons()
    for run in runs:
        if run["phase"] == "final" and run["variant"] == "plain, 48":
            run["test_loss"] += 0.03
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    assert a.falls[0].laws[ALL].p_misfit < 1e-6
    assert "But the losses are not on such a curve (p = " in a.answers[0]


def test_losses_that_rise_have_no_exponent(tmp_path):
    record, runs = without_comparisons()
    for run in runs:
        run["test_loss"] = run["test_loss"] and 4 - run["test_loss"]
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    assert a.answers[0].startswith("plain: no exponent over the parameters, because the losses determine no exponent")
    assert "exponents" not in pages.captions(a)
    assert exponents_table(a).rows[0] == ["plain", "parameters", "none", "none", "1.4000", "–"]
    assert "None: the losses determine no exponent: they do not fall" in pages.to_markdown(a, "")


def test_runs_that_diverged_give_no_exponent(tmp_path):
    record, runs = without_comparisons()
    diverge(next(r for r in runs if (r["phase"], r["variant"], r["learning_rate"]) == ("final", "plain, 48", 0.002)))
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    assert a.answers == ["plain: no exponent, because runs of plain, 48 diverged or got stuck."]
    assert exponents_table(a).rows == [["plain", "–", "runs of plain, 48 diverged or got stuck", "–", "–", "–"]]


@pytest.mark.parametrize(
    ("n_params", "expected"), [(52735, "have only 3 different values, and a fit needs 4"), (0, "are 0 at a size")]
)
def test_sizes_without_different_parameters_give_no_exponent(tmp_path, n_params, expected):
    record, runs = without_comparisons()
    for size in SIZES[:2]:
        record["variants"][f"plain, {size}"]["without_embeddings"]["n_params"] = n_params
    a = analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
    assert a.answers == [f"plain: no exponent, because the parameters without embeddings {expected}."]


def test_a_quick_budget_makes_no_claim(tmp_path):
    a = analyzed(tmp_path, budget="quick")
    assert a.answers == ["No conclusion about plain: budget quick only checks that the sweep runs."]


def test_the_figure_shows_fits_with_and_without_embeddings(tmp_path):
    a = analyzed(tmp_path)
    figure = exponents_figure(a)
    for axes, measures in zip(figure.axes, ((ALL, INNER), (FLOPS, INNER_FLOPS)), strict=True):
        assert axes.get_xscale() == axes.get_yscale() == "log"
        points = [line for line in axes.lines if line.get_linestyle() == "None"]
        for line, measure in zip(points, measures, strict=True):
            np.testing.assert_allclose(line.get_xdata(), a.falls[0].x[measure])
            law = a.falls[0].laws[measure]
            np.testing.assert_allclose(line.get_ydata(), a.falls[0].losses_SN.mean(axis=1) - law.floor.value)


def test_the_report_has_the_section_and_no_empty_comparisons(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "figures", lambda a: dict.fromkeys(pages.CAPTIONS.keys() - {"differences"}))
    monkeypatch.setattr(figures, "to_bytes", lambda figure, kind: b"" if figure is None else b"drawn")
    workdir = synthetic_sizes.write(tmp_path / "s", *without_comparisons())
    assert command.main([str(workdir), "--publish", str(tmp_path / "docs")]) == 0
    page = (tmp_path / "docs" / "gates.md").read_text()
    assert page.index("## How the loss falls with size") < page.index("![exponents](gates/exponents.png)")
    assert "| plain | parameters without embeddings | 0." in page
    assert (tmp_path / "docs" / "gates" / "exponents.png").read_bytes() == b"drawn"
    assert "Comparisons" not in page
    assert "differences" not in page
    assert 'alt="exponents"' in (workdir / "report.html").read_text()
    assert not (workdir / "figures" / "differences.png").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"without_embeddings": None}, "without_embeddings is null, not an object"),
        ({"data": {"best_test_loss": "low"}}, "best_test_loss is 'low', not a number or null"),
    ],
)
def test_a_damaged_record_is_an_error(tmp_path, changes, expected):
    record, runs = without_comparisons()
    variant = record["variants"]["plain, 48"]
    for key, value in changes.items():
        variant[key] = variant[key] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=re.escape(expected)):
        analyze(synthetic_sizes.write(tmp_path / "s", record, runs))
