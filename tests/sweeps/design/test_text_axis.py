"""Sweeps over several texts: their variants, the mistakes in them, and the dependence of a difference on the text."""

import dataclasses

import numpy as np
import pytest
import synthetic_sweep
from running import ROOT
from scipy import stats
from synthetic_sweep import LOSSES, diverge

from lm.errors import UserError
from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.claims import claim_rows
from lm.sweeps.analysis.interaction_answers import describe_interaction
from lm.sweeps.design import spec
from lm.sweeps.design.axes import Match, match_tokens
from lm.sweeps.design.spec import Budget, load_sweep
from lm.sweeps.report import figures, pages
from lm.sweeps.report.interaction_table import interaction_table
from lm.sweeps.statistics.inference import holm, paired_difference
from lm.sweeps.statistics.moderation import fit_prior

TINY = ROOT / "tests" / "configs" / "tiny_sweep.py"
TEXTS = {"plays": {}, "docs": {"data.source": "python_docs"}}
# On the second text the seeds vary otherwise, and "gated" is better by 0.1 less.
OTHERS = np.array([0.010, -0.004, 0.006, -0.009, 0.001])
ON_DOCS = {
    "plain": LOSSES["plain"] + OTHERS[::-1],
    "gated": LOSSES["gated"] + OTHERS + 0.1,
    "wide": LOSSES["wide"] - OTHERS,
}


def write(tmp_path, on_docs=ON_DOCS, change=lambda record, runs: None, budget="full"):
    """Write a sweep of three variants on two texts."""
    halves = [synthetic_sweep.sweep(losses, budget=budget) for losses in (LOSSES, on_docs)]
    record, runs = halves[0][0] | {"texts": list(TEXTS), "variants": {}}, []
    for text, (described, trained) in zip(TEXTS, halves, strict=True):
        for name, variant in described["variants"].items():
            record["variants"][f"{name}, {text}"] = variant | {"data": variant["data"] | {"fingerprint": text}}
        runs += [run | {"variant": f"{run['variant']}, {text}"} for run in trained]
    pairs = [("gated", "plain"), ("wide", "plain")]
    record["comparisons"] = [[f"{name}, {text}" for name in pair] for pair in pairs for text in TEXTS]
    record["baseline"] = "plain, docs"
    change(record, runs)
    workdir = synthetic_sweep.write(tmp_path / "sweep", record, runs)
    names = record["variants"]
    speeds = {"alone": 500.0, "at_once": 4, "variants": dict.fromkeys(names, 1000.0)}
    (workdir / "speeds.json").write_text(
        synthetic_sweep.json.dumps(speeds | {"quartiles": {name: [900.0, 1100.0] for name in names}})
    )
    return workdir


def test_an_interaction_is_the_paired_difference_of_two_differences(tmp_path):
    """Its variance is moderated by the contrasts of all three variants; the optima are on the grid."""
    a = analyze(write(tmp_path))
    contrasts = {name: np.subtract(ON_DOCS[name], LOSSES[name]) for name in LOSSES}
    prior = fit_prior(list(contrasts.values()))
    assert prior.df > 0
    expected = [paired_difference(contrasts[name], contrasts["plain"], 2, prior) for name in ("gated", "wide")]
    assert [(x.variant, x.against, x.text, x.first) for x in a.interactions] == [
        ("gated", "plain", "docs", "plays"),
        ("wide", "plain", "docs", "plays"),
    ]
    for x, d in zip(a.interactions, expected, strict=True):
        assert x.difference == pytest.approx(d)
    assert [x.p_adjusted for x in a.interactions] == pytest.approx(holm([d.p for d in expected]))
    gated, wide = a.interactions
    assert gated.difference.mean == pytest.approx(0.1)
    assert gated.at_optimum.mean == pytest.approx(0.1)
    assert (gated.is_significant, wide.is_significant) == (True, False)
    by_text = [c.sampling_error for c in a.comparisons[:2]]
    assert gated.sampling_error == pytest.approx(np.hypot(*by_text))


def test_the_report_has_each_text_and_the_interaction(tmp_path):
    a = analyze(write(tmp_path))
    assert a.answers[0].startswith("gated, plays ends 0.1040 nats per token lower than plain, plays, by more than")
    assert a.answers[1].startswith("Undecided between gated, docs and plain, docs: no significant difference")
    assert a.answers[4].startswith(
        "gated − plain depends on the text: on docs it is 0.1000 nats per token more than on plays, by more than the "
        "margin of 0.005 (n = 5 paired seeds"
    )
    assert a.answers[5].startswith(
        "Undecided whether wide − plain depends on the text: no significant interaction, docs minus plays, and no "
        "equivalence within the margin of 0.005 nats per token (n = 5 paired seeds"
    )
    for answer, x in zip(a.answers[4:], a.interactions, strict=True):
        parameters = "1,000 to 2,000" if x.variant == "gated" else "1,000 to 3,000"
        assert f"sampling error of the two texts is {x.sampling_error:.4f}). At this size ({parameters} par" in answer
        assert "tokens per parameter), on these texts (text), at fixed b2, warm-up" in answer
    page = pages.to_markdown(a, "")
    assert "## Dependence on the text" in page
    assert "| gated − plain | docs − plays | beyond the margin | +0.1000 [" in page
    assert figures.groups(a) == [[f"{name}, {text}" for name in LOSSES] for text in TEXTS]


@pytest.mark.parametrize("how", ["diverged", "stuck", "failed", "other data"])
def test_runs_without_a_mean_give_no_interaction(tmp_path, how):
    def change(record, runs):
        (*_, lost) = synthetic_sweep.select(runs, "final", "gated, docs")
        if how == "diverged":
            diverge(lost)
        elif how == "stuck":
            lost["test_loss"] = 2.7
        elif how == "failed":
            runs.remove(lost)
            (tmp_path / "sweep" / "failed").mkdir(parents=True)
            key = [lost[name] for name in ("phase", "variant", "learning_rate", "seed")]
            text = synthetic_sweep.json.dumps({"runs": [key], "error": "MemoryError"})
            (tmp_path / "sweep" / "failed" / "some.json").write_text(text)
        else:
            record["variants"]["gated, docs"]["data"]["fingerprint"] = "third"

    a = analyze(write(tmp_path, change=change))
    gated, wide = a.interactions
    assert (gated.difference, wide.missing) == (None, "")
    reason = {"failed": "runs of gated, docs failed", "other data": "losses on different data or tokens"}
    assert gated.missing.startswith(reason.get(how, "runs of gated, docs diverged or got stuck"))
    assert interaction_table(a).rows[0] == ["gated − plain", "docs − plays", gated.missing, *["–"] * 4]
    assert a.answers[4] == f"gated − plain on docs and on plays: no interaction, because {gated.missing}."
    assert wide.difference.df == 4  # two variants give no prior


def test_differences_that_are_equal_but_for_rounding_give_no_interaction(tmp_path):
    def change(record, runs):
        plain = {
            (run["phase"], run["variant"].replace("plain", "gated"), run["learning_rate"], run["seed"]): run
            for run in runs
            if run["variant"].startswith("plain")
        }
        for i, run in enumerate(runs):
            if same := plain.get((run["phase"], run["variant"], run["learning_rate"], run["seed"])):
                run |= {"val_loss": same["val_loss"], "test_loss": same["test_loss"] + 1e-7 + 1e-9 * (i % 7)}

    gated, _ = analyze(write(tmp_path, change=change)).interactions
    assert (gated.difference, gated.missing) == (None, "the differences on the two texts are equal but for rounding")


def test_an_interaction_within_the_margin_is_no_finding(tmp_path):
    """Significant, but a tenth of the margin: the text does not matter. The two one-sided tests are those of SciPy."""
    noise = 1e-4 * np.array([1.0, -1.0, 0.5, -0.5, 0.2])
    on_docs = LOSSES | {"gated": np.add(LOSSES["gated"], 0.0005 + noise), "wide": np.add(LOSSES["wide"], noise[::-1])}
    a = analyze(write(tmp_path, on_docs))
    x = a.interactions[0]
    assert x.is_significant
    assert x.verdict == "equivalent"
    sides = [stats.t.sf((0.005 + sign * x.difference.mean) / x.difference.error, x.difference.df) for sign in (-1, 1)]
    assert max(sides) / 2 < x.p_equivalent < 3 * max(sides)  # Holm's factor is 1 or 2; the optima are on the grid
    assert a.answers[4].startswith(
        "gated − plain is the same on docs and on plays within the margin of 0.005 nats per token: the interaction is "
        "significant, but smaller (n = 5 paired seeds"
    )
    row = next(row for row in claim_rows(a) if row["kind"] == "interaction")
    assert (row["answer"], row["significant"]) == ("equivalent", "no")


def test_an_interaction_without_an_estimate_at_the_optima_says_what_its_p_leaves_out(tmp_path):
    def at_the_edge(record, runs):
        for name in ("gated, plays", "gated, docs"):
            record["variants"][name]["grid"] = [0.002, 0.004]

    a = analyze(write(tmp_path, change=at_the_edge))
    assert a.interactions[0].at_optimum is None
    assert a.interactions[0].p_adjusted < 0.05
    assert (a.interactions[0].verdict, a.interactions[0].is_significant) == ("no claim", False)
    assert a.answers[4].startswith(
        "No claim about the dependence of gated − plain on the text (docs minus plays), because there is no estimate "
        "at the optima (n = 5 paired seeds"
    )
    assert "; p leaves out how far the best rates of the grids are from the optima; " in a.answers[4]


def test_an_interaction_without_variation_over_seeds_has_no_p(tmp_path):
    a = analyze(write(tmp_path))
    alike = paired_difference([0.25] * 5, [0.0] * 5)
    x = dataclasses.replace(a.interactions[0], difference=alike, p_adjusted=alike.p, at_optimum=None)
    assert describe_interaction(x, a.record) == (
        "gated − plain on docs, minus that on plays, is +0.2500 for every seed: without variation over seeds there is "
        "no p-value."
    )
    assert interaction_table(dataclasses.replace(a, interactions=[x])).rows[0][4] == "undefined"


def test_a_quick_budget_supports_no_conclusion_about_texts(tmp_path):
    answers = analyze(write(tmp_path, budget="quick")).answers
    assert answers[4] == "No conclusion about gated − plain on two texts: budget quick only checks that the sweep runs."


def loaded(monkeypatch, budget="full", **changes):
    sweep = dataclasses.replace(spec.run_file(str(TINY), "get_sweep", ""), **changes)
    monkeypatch.setattr(spec, "run_file", lambda *_: sweep)
    return load_sweep(str(TINY), budget)


def test_every_variant_is_planned_on_every_text(monkeypatch):
    plan = loaded(monkeypatch, texts=TEXTS)
    assert list(plan.configs) == [f"{name}, {text}" for text in TEXTS for name in ("mlp", "glu", "wild")]
    assert plan.configs["glu, docs"].data.source == "python_docs"
    assert plan.configs["glu, plays"].data.source != "python_docs"
    assert plan.sweep.comparisons[:2] == (("glu, plays", "mlp, plays"), ("glu, docs", "mlp, docs"))
    assert plan.matches == {f"glu, {text}": Match("params", f"mlp, {text}") for text in TEXTS}
    assert not plan.rates_from  # each has tuning runs on each text
    plan = loaded(monkeypatch, texts=TEXTS, placebo={"model.rope_pairing": "halves"})
    assert [name for name in plan.configs if name.startswith("placebo")] == ["placebo, plays"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"texts": {"plays": {}}}, "texts: there is 1, and the dependence on the text needs at least 2"),
        ({"texts": {"": {}, "docs": {}}}, "texts: a text must have a name"),
        ({"texts": {"a": {}, "b": {"model.d_model": 8}}}, "text 'b': model.d_model: a text may set keys of data only"),
        ({"texts": {"a": {}, "b": {"data.sorce": "x"}}}, "variant 'mlp, b': config.data.sorce: unknown key"),
        ({"texts": TEXTS, "sizes": {str(n): {"model.d_model": n} for n in (8, 16, 32)}}, "texts and sizes are both"),
        ({"texts": TEXTS, "budgets": {"full": Budget(1, looks=(5, 8))}}, "a sweep with texts needs a fixed number"),
        ({"texts": {"a": {}, "b": {"data.source": match_tokens(8)}}}, "only train.steps can be matched this way"),
        ({"texts": ("docs",)}, "texts: .* must be a dictionary, by name"),
        (
            {"texts": {"x, y": {}, "y": {}}, "variants": {"a": {}, "a, x": {"model.d_model": 8}}},
            "texts: 'a, x, y' would be the name of two variants; rename a text",
        ),
    ],
)
def test_mistakes_in_the_texts(monkeypatch, changes, expected):
    with pytest.raises(UserError, match=expected):
        loaded(monkeypatch, **changes)


def test_the_placebo_is_compared_on_the_first_text_and_has_no_interaction(tmp_path):
    def with_placebo(record, runs):
        copy = dict(record["variants"]["wide, plays"], changes={"model.rope_pairing": "adjacent"})
        record["variants"]["placebo, plays"], record["placebo"] = copy, "placebo, plays"
        runs += [run | {"variant": "placebo, plays"} for run in runs if run["variant"] == "wide, plays"]

    a, without = analyze(write(tmp_path, change=with_placebo)), analyze(write(tmp_path / "without"))
    assert (a.placebo.variant, a.placebo.against) == ("placebo, plays", "plain, plays")
    assert a.placebo.difference.mean == pytest.approx(without.comparisons[2].difference.mean)
    assert a.answers[-1].startswith("Placebo, whose true difference is 0: placebo, plays - plain, plays is +0.0002")
    assert a.interactions == without.interactions
    assert [row["kind"] for row in claim_rows(a)].count("placebo") == 1
    assert "placebo, plays: plain, plays with model.rope_pairing = adjacent" in pages.to_markdown(a, "")


def test_the_claims_are_the_differences_on_each_text_and_the_interactions(tmp_path):
    a = analyze(write(tmp_path))
    rows = claim_rows(a)
    pairs = [(pair, text) for pair in (("gated", "plain"), ("wide", "plain")) for text in TEXTS]
    assert [(row["variant"], row["against"]) for row in rows if row["kind"] == "difference"] == [
        (f"{variant}, {text}", f"{against}, {text}") for (variant, against), text in pairs
    ]
    found = [row for row in rows if row["kind"] == "interaction"]
    assert [(row["variant"], row["on"]) for row in found] == [("gated", "docs − plays"), ("wide", "docs − plays")]
    for row, x in zip(found, a.interactions, strict=True):
        assert float(row["estimate"]) == pytest.approx(x.difference.mean, rel=1e-5)
        assert float(row["p_page"]) == pytest.approx(x.p_adjusted, rel=1e-5)
        assert row["significant"] == ("yes" if x.is_significant else "no")
