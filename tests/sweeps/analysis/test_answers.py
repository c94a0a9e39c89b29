"""The answer to a comparison: what it claims, and the numbers beside them."""

import math

import pytest
from scipy import stats
from synthetic_sweep import BASE, LOSSES, moderated, select, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.answers import difference
from lm.sweeps.report import tables


def test_answer_for_a_difference_beyond_the_margin(tmp_path):
    a, (_, error, p, df) = analyze(write(tmp_path / "s", *sweep())), moderated("gated")
    half = stats.t.ppf(0.975, df) * error
    evidence = f"difference -0.1040, 95 % CI {-0.104 - half:+.4f} to {-0.104 + half:+.4f}, p = {2 * p:.2g}"
    beyond = 2 * sum(stats.t.sf((0.104 + sign * 0.005) / error, df) for sign in (-1, 1))
    assert a.is_full
    assert a.comparisons[0].verdict == "beyond the margin"
    assert a.comparisons[0].answer.startswith(
        f"gated ends 0.1040 nats per token lower than plain, by more than the margin of 0.005 (n = 5 paired seeds, "
        f"{evidence} after Holm's correction; at the estimated optima {evidence}; for a difference beyond the margin "
        f"p = {beyond:.2g}). At this size ("
    )
    assert [row[1] for row in tables.comparisons(a).rows] == ["beyond the margin", "undecided"]


def test_answer_for_a_difference_that_may_be_smaller_than_the_margin(tmp_path):
    record, runs = sweep()
    gated = analyze(write(tmp_path / "s", record | {"margin": 0.1}, runs)).comparisons[0]
    assert gated.p_adjusted < 0.05 < gated.p_beyond
    assert gated.verdict == "different"
    assert gated.answer.startswith(
        "gated ends 0.1040 nats per token lower than plain; whether by more than the margin of 0.1 is undecided (n = 5"
    )


def test_answer_for_equivalent_variants(tmp_path):
    record, runs = sweep()
    a = analyze(write(tmp_path / "s", record | {"margin": 0.02}, runs))
    wide, (mean, error, _, df) = a.comparisons[1], moderated("wide")
    p = 2 * stats.t.sf((0.02 - mean) / error, df)  # Holm: gated is not equivalent
    assert wide.p_equivalent == pytest.approx(p, rel=1e-6)
    assert wide.verdict == "equivalent"
    assert wide.answer.startswith(
        "wide and plain are equivalent within the margin of 0.02 nats per token (n = 5 paired"
    )
    assert f"; for equivalence p = {p:.2g}). At this size" in wide.answer


def test_equivalence_needs_both_estimates(tmp_path):
    record, runs = sweep()
    for seed, r in enumerate(select(runs, "final", "wide", 0.004)):
        r["test_loss"] += 0.4 * (-1) ** seed * (seed < 4)  # the spread of the estimated minimum grows
    wide = analyze(write(tmp_path / "s", record | {"margin": 0.02}, runs)).comparisons[1]
    assert (wide.verdict, wide.p_equivalent > 0.05) == ("undecided", True)


def test_answer_for_an_undecided_comparison(tmp_path):
    wide = analyze(write(tmp_path / "s", *sweep())).comparisons[1]
    assert wide.verdict == "undecided"
    assert wide.answer.startswith(
        "Undecided between wide and plain: no significant difference, and no equivalence within the margin of 0.005 "
        "nats per token (n = 5 paired seeds, difference +0.0002, 95 % CI -0.0"
    )
    # For two comparisons: the non-central t with 8 degrees of freedom and shift 3.6805 exceeds t_8(0.9875), which is
    # 2.7515, with probability 0.8.
    assert stats.nct.sf(stats.t.isf(0.0125, 8), 8, 3.6805) == pytest.approx(0.8, abs=2e-4)
    assert wide.difference.detectable == pytest.approx(moderated("wide")[1] * 3.6805, rel=1e-3)
    assert f"smallest detectable difference {wide.difference.detectable:.4f}; " in wide.answer
    # With n seeds the degrees of freedom are n - 1 + 4.
    sd = moderated("wide")[1] * math.sqrt(5)
    shifts = {n: 0.005 / (sd / math.sqrt(n)) for n in (56, 57)}
    power = {n: stats.nct.sf(stats.t.isf(0.0125, n + 3), n + 3, shift) for n, shift in shifts.items()}
    assert power[56] < 0.8 <= power[57]
    assert "; 57 seeds would find a true difference of 0.005 in 8 of 10 such sweeps)" in wide.answer


def test_a_tiny_difference_is_shown_with_one_digit_and_is_no_finding(tmp_path):
    tiny = [b + d for b, d in zip(BASE, [3e-8, 2e-8, 4e-8, 3e-8, 3e-8], strict=True)]
    c = analyze(write(tmp_path / "sweep", *sweep(LOSSES | {"wide": tiny}))).comparisons[1]
    assert c.p_adjusted < 0.05
    assert c.verdict == "equivalent"
    assert c.answer.startswith(
        "wide and plain are equivalent within the margin of 0.005 nats per token: their difference is significant, but "
        "smaller (n = 5 paired seeds, difference +3e-08, 95 % CI"
    )
    assert [difference(x) for x in (0.0, 4e-5, -6e-5, 0.25)] == ["+0.0000", "+4e-05", "-0.0001", "+0.2500"]


def test_a_variant_whose_runs_are_all_stuck_did_not_train(tmp_path):
    losses = LOSSES | {"wide": [2.70, 2.71, 2.70, 2.72, 2.70]}
    a = analyze(write(tmp_path / "s", *sweep(losses)))
    wide = a.comparisons[1]
    assert (wide.difference, wide.verdict) == (None, "did not train")
    assert math.isnan(wide.p_adjusted)
    assert wide.answer == (
        "No conclusion about wide and plain: wide did not train: at its best learning rate 5 of 5 runs got stuck and "
        "0 diverged (medians 2.7000 and 2.0000)."
    )
    assert tables.comparisons(a).rows[1][1:] == ["did not train"] * 8
    assert a.comparisons[0].p_adjusted == 2 * a.comparisons[0].difference.p  # it still counts in the correction


def test_stuck_runs_are_named_beside_a_significant_difference(tmp_path):
    losses = LOSSES | {"wide": [2.70, 2.71, 2.72, 2.70, 2.30]}
    wide = analyze(write(tmp_path / "s", *sweep(losses, grid=[0.002]))).comparisons[1]
    assert wide.verdict == "beyond the margin"
    assert "; 4 of 5 and 0 of 5 runs got stuck, medians 2.7000 and 2.0000). At this size" in wide.answer


def test_answer_when_only_the_uncorrected_interval_excludes_0(tmp_path):
    differences = [0.020, 0.001, 0.012, 0.015, 0.003]  # p is 0.046 for one comparison, and twice that for two
    losses = {"plain": BASE, "wide": [b + d for b, d in zip(BASE, differences, strict=True)]}
    losses["gated"] = [b + 1e-6 * (-1) ** i for i, b in enumerate(BASE)]  # plain but for rounding: no third variance
    wide = analyze(write(tmp_path / "s", *sweep(losses))).comparisons[1]
    assert wide.difference.low > 0
    assert wide.difference.p < 0.05 < wide.p_adjusted
    assert wide.answer.startswith("Undecided between wide and plain: no significant difference")
    assert "; this interval alone excludes 0, which is not enough among 2 comparisons). " in wide.answer


@pytest.fixture(params=["one rate", "at the edge"])
def without_optimum(request):
    """Return the sweep without estimates at the optima, and whether the rates were tuned."""
    tuned = request.param == "at the edge"
    return sweep(grid=[0.002, 0.004] if tuned else [0.002]), tuned


@pytest.mark.parametrize(
    ("name", "margin", "verdict"), [("gated", 0.1, "different"), ("gated", 0.005, "beyond the margin"),
                                    ("wide", 0.1, "equivalent")]
)  # fmt: skip
def test_after_tuning_without_an_estimate_at_the_optimum_there_is_no_claim(
    tmp_path, without_optimum, name, margin, verdict
):
    (record, runs), tuned = without_optimum
    a = analyze(write(tmp_path / "s", record | {"margin": margin}, runs))
    c = next(c for c in a.comparisons if c.variant == name)
    assert c.at_optimum is None
    assert c.verdict == ("no claim" if tuned else verdict)
    assert c.is_significant == (not tuned and name == "gated")
    assert c.answer.startswith(f"No claim about {name} and plain, because there is no estimate") == tuned
    notes = tables.comparisons(a).notes["at the optimum [95 % CI], p"]
    assert ("A comparison of tuned variants without it makes no claim." in notes) == tuned
