"""A sweep beside the numbers of a paper."""

import pytest
from scipy import stats
from synthetic_sweep import sweep as synthetic_sweep

from lm import sweep
from lm.sweeps import replication
from lm.sweeps.analysis import analyze
from lm.sweeps.statistics import Estimate
from lm.system.errors import UserError

GLU = "configs/replications/glu_variants.toml"
STUDY = "configs/replications/changes_2026.toml"


@pytest.mark.parametrize("path", [GLU, STUDY])
def test_the_examples_name_published_claims_and_their_sources(path, capsys):
    assert sweep.main(["--replicate", path]) == 0
    shown = capsys.readouterr().out
    content, comparisons = replication.replicate(replication.Path(path))
    assert len(comparisons) == len(content["arm"])
    for c in comparisons:
        assert c.url.startswith("https://")
        assert f"{c.variant} − {c.against}" in shown
        assert 0 <= c.power <= 1


def test_a_paper_is_replicated_where_the_interval_is_on_its_side():
    comparisons = {c.variant: c for c in replication.replicate(replication.Path(GLU))[1]}
    swiglu = comparisons["SwiGLU"]
    assert (swiglu.theirs.mean, swiglu.theirs.se) == pytest.approx((-0.05, 0.00522), abs=1e-5)
    assert (swiglu.verdict, swiglu.size) == (replication.REPLICATED, "agrees")
    assert (comparisons["GeGLU"].verdict, comparisons["GeGLU"].size) == ("replicated", "smaller")
    assert (comparisons["ReLU"].verdict, comparisons["ReLU"].size) == ("contradicted", "other sign")


def test_the_changes_of_a_sweep_with_lengths_are_not_compared_with_differences(monkeypatch):
    """The source's difference is that at one length."""
    lengths = {"short": (100, 0.2), "long": (100, 0.0)}
    a = analyze(*synthetic_sweep(lengths, "length"))
    monkeypatch.setattr(replication, "read_results", lambda path: a)
    with pytest.raises(UserError, match="give a sweep without lengths"):
        replication.replicate(replication.Path(GLU))


def test_the_power_is_that_of_the_noncentral_t_test():
    ours = Estimate(0.0, 0.004, 30, 4)
    draws = stats.norm.rvs(-0.012, 0.004, 20_000, random_state=0)
    se = 0.004 * (stats.chi2.rvs(30, size=20_000, random_state=1) / 30) ** 0.5
    found = draws + stats.t.ppf(0.975, 30) * se < 0
    assert replication.power(ours, -0.012, -1, 0.005, 0.95) == pytest.approx(found.mean(), abs=0.01)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "configs/replications/ has examples"),
        (
            'sweep = "docs/results/norms"\nsource = "x"\narm = 3',
            "configs/replications/ has examples",
        ),
        (
            'sweep = "docs/results/swiglu_vs_silu"\nsource = "x"\n[[arm]]\nvariant = "SwiGLU"\n'
            'against = "SiLu"\ndifference = 0.1',
            "did you mean SwiGLU − SiLU?",
        ),
        (
            'sweep = "docs/results/swiglu_vs_silu"\nsource = "x"\n[[arm]]\nvariant = "SwiGLU"\n'
            'against = "SiLU"\nlosses = [1.0]',
            "needs difference = ",
        ),
        ('sweep = "nowhere"\nsource = "x"\narm = []', "holds no sweep"),
    ],
)
def test_a_wrong_file_is_an_error_with_advice(text, advice, tmp_path, capsys):
    path = tmp_path / "paper.toml"
    path.write_text(text)
    assert sweep.main(["--replicate", str(path)]) == 2
    assert advice in capsys.readouterr().err


def test_the_examples_are_found_from_any_folder_and_other_files_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(["--replicate", GLU]) == 2  # found; its sweep is not in this folder
    assert "docs/results/swiglu_vs_silu" in capsys.readouterr().err
    assert sweep.main(["--replicate", "mine.toml"]) == 2
    assert "there is no file mine.toml" in capsys.readouterr().err
