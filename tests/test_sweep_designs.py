"""The command lm.sweep for other designs: sizes, looks, random search, and variants that start from other runs."""

import itertools
import json
import subprocess
import sys

import pytest
from sweeping import EAGER, changed, results, run

from lm.data.markov import MarkovChain
from lm.sweeps.design.seeds import fresh_seeds, tuning_seeds

SEEDS = fresh_seeds("tiny_sweep", 2)
FALLS = """
        question="How does the loss fall?",
        values={"data.source": "markov", "model.dropout": 0.0, "train.steps": 80, "eval.every": 0},
        variants={"tiny": {}},
        sizes={str(d): {"model.d_model": d} for d in (8, 16, 24, 32)},
        baseline="tiny",
        comparisons=(),
        learning_rates=(3e-2,),
"""


@pytest.mark.slow
def test_a_sweep_with_sizes_and_without_comparisons_reports_exponents(bench, tmp_path):
    """The true irreducible loss is that of the source on the test text, and each size has seeds of its own."""
    config = changed(tmp_path / "falls.py", FALLS)
    dry = run(bench, "--dry-run", config=config)
    assert dry.returncode == 0, dry.stdout + dry.stderr
    seeds = {d: fresh_seeds(f"falls, {d}", 2) for d in (8, 16, 24, 32)}
    for d, (first, last) in seeds.items():
        assert f"size {d}: seeds {first} to {last}, tuning seeds {tuning_seeds(f'falls, {d}', 1)[0]}" in dry.stdout
    done = run(bench, "--workdir", tmp_path / "sweep", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {key[1:] for key in results(tmp_path / "sweep")} == {
        (f"tiny, {d}", 3e-2, seed) for d, of_size in seeds.items() for seed in of_size
    }
    reported = run(bench, tmp_path / "sweep", module="lm.report", config=None)
    assert reported.returncode == 0, reported.stderr
    page = (tmp_path / "sweep" / "report.md").read_text()
    text = MarkovChain().text()[950_000:]
    assert f"| {MarkovChain().surprisal(text)[1:].mean():.4f} |" in page
    assert "| tiny | training FLOPs without embeddings | " in page
    assert (tmp_path / "sweep" / "figures" / "exponents.png").stat().st_size > 10_000
    assert "seeds " + str(list(seeds[8])) in page


GROWING = """
        variants=tiny.variants | {"wild": tiny.variants["wild"] | {"optimizer.learning_rate": 0.1}},
        learning_rates=(1e-2,),
        placebo={"model.rope_pairing": "halves"},
        budgets={"full": Budget(tuning_seeds=1, looks=(5, 6, 8))},
"""


@pytest.mark.slow
def test_seeds_are_added_for_undecided_comparisons_only(bench, tmp_path):
    """The same with two processes, one of them killed; the placebo stays at the first look.

    Each variant has one learning rate: after tuning, comparisons would need an estimate at the optimum.
    """
    config = changed(tmp_path / "growing.py", GROWING)
    arguments = [f"--config={config}", "--budget=full", f"--workdir={tmp_path / 'both'}"]
    command = [sys.executable, "-c", EAGER, *arguments]
    pipes = {"cwd": bench.base, "env": bench.env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    killed, other = (subprocess.Popen(command, **pipes) for _ in range(2))
    for line in killed.stdout:
        if line.startswith("undecided at 5 seeds"):
            killed.kill()
            break
    killed.communicate(timeout=600)
    output = other.communicate(timeout=900)[0]
    assert other.returncode == 0, output
    done = run(bench, "--budget=full", "--workdir", tmp_path / "one", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path / "both")
    assert found == results(tmp_path / "one")
    seeds = fresh_seeds("growing", 8)
    used = {name: {key[3] for key in found if key[:2] == ("final", name)} for name in ("mlp", "glu", "wild", "placebo")}
    assert used == {"mlp": set(seeds), "glu": set(seeds), "wild": set(seeds[:5]), "placebo": set(seeds[:5])}
    reported = run(bench, tmp_path / "one", module="lm.report", config=None)
    assert reported.returncode == 0, reported.stderr
    page = (tmp_path / "one" / "report.md").read_text()
    assert "| glu − mlp | 8 (look 3) |" in page
    assert "| wild − mlp | 5 (look 1) |" in page
    assert "| placebo − mlp | 5 |" in page


DRAWN = """
        search=Search(3, {"optimizer.learning_rate": log_uniform(1e-3, 1e-1), "train.batch_size": choice(4, 8)}),
        learning_rates=None,
        variants={name: tiny.variants[name] for name in ("mlp", "glu")},
        comparisons=(("glu", "mlp"),),
"""


@pytest.mark.slow
def test_a_random_search_divided_among_processes_equals_that_of_one(bench, tmp_path):
    """One of two processes is killed in a run. Every variant tries the same trials, and trains the best one again."""
    config = changed(tmp_path / "drawn.py", DRAWN)
    command = [sys.executable, "-c", EAGER, f"--config={config}", f"--workdir={tmp_path / 'both'}"]
    pipes = {"cwd": bench.base, "env": bench.env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    killed, other = (subprocess.Popen(command, **pipes) for _ in range(2))
    for line in killed.stdout:
        if line.startswith(("step", "waiting")):
            killed.kill()
            break
    killed.communicate(timeout=600)
    output = other.communicate(timeout=900)[0]
    assert other.returncode == 0, output
    done = run(bench, "--workdir", tmp_path / "one", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path / "both")
    assert found == results(tmp_path / "one")
    trials = json.loads((tmp_path / "one" / "sweep.json").read_text())["search"]["trials"]
    by_rate = {trial["optimizer.learning_rate"]: trial for trial in trials}
    assert {trial["train.batch_size"] for trial in trials} == {4, 8}
    tuned = {
        (name, rate): trained["val_loss"] for (phase, name, rate, _), trained in found.items() if phase == "tuning"
    }
    assert set(tuned) == set(itertools.product(("mlp", "glu"), by_rate))
    assert all(trained["steps"] == 32 // by_rate[key[2]]["train.batch_size"] for key, trained in found.items())
    best = {name: min(by_rate, key=lambda rate, name=name: tuned[name, rate]) for name in ("mlp", "glu")}
    final = {key[1:] for key in found if key[0] == "final"}
    assert final == {(name, rate, seed) for name, rate in best.items() for seed in fresh_seeds("drawn", 2)}
    reported = run(bench, tmp_path / "one", module="lm.report", config=None)
    assert reported.returncode == 0, reported.stderr
    assert "Best of k trials" in (tmp_path / "one" / "report.md").read_text()


@pytest.mark.slow
def test_variants_that_start_from_other_runs(bench, tmp_path):
    """Each seed starts from its own run. With 0 steps it evaluates that run. One learning rate needs no tuning."""
    for seed in SEEDS:
        done = bench.train(tmp_path / f"start-{seed}", f"--config.train.seed={seed}", "--config.model.dropout=0")
        assert done.returncode == 0
    start = {"init_from": str(tmp_path / "start-{seed}"), "optimizer.learning_rate": (1e-3,)}
    variants = {"mlp": start | {"train.steps": 0}, "wild": start | {"train.steps": 4}}
    config = changed(tmp_path / "tiny_sweep.py", f'variants={variants!r}, comparisons=(("wild", "mlp"),)')
    done = run(bench, "--workdir", tmp_path / "sweep", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not used: -" in done.stdout
    found = results(tmp_path / "sweep")
    assert {key[:1] + key[1:2] for key in found} == {("final", "mlp"), ("final", "wild")}
    for seed in SEEDS:
        summary = json.loads((tmp_path / f"start-{seed}" / "summary.json").read_text())
        untouched, tuned = (found["final", name, 1e-3, seed] for name in ("mlp", "wild"))
        assert untouched["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
        assert abs(tuned["test_loss"] - summary["test_loss"]) > 1e-4
        assert (untouched["steps"], tuned["steps"]) == (0, 4)
    assert run(bench, tmp_path / "sweep", module="lm.report", config=None).returncode == 0
