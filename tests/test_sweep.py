"""The command lm.sweep: dry run, training, interruption, resumption, several processes, and other
designs.
"""

import contextlib
import dataclasses
import json
import signal
import subprocess
import time

import pytest
from running import ROOT
from sweeping import SWEEP, changed, command, results, run

from lm import report, sweep
from lm.sweeps.plan import draw_seeds
from lm.sweeps.repetition import read_repeats

SEEDS = draw_seeds("tiny_sweep", 2)


@pytest.fixture(scope="module")
def finished(bench):
    """A complete quick sweep without interruptions, and its output."""
    workdir = bench.base / "sweep"
    code, output = run(bench, "--workdir", workdir)
    assert code == 0, output
    return workdir, output


def test_a_dry_run_prints_the_plan_without_compiling_and_writes_nothing(
    bench, tmp_path, monkeypatch
):
    from lm.sweeps import variants

    monkeypatch.setattr(variants, "fingerprint", None)
    code, output = run(bench, "--dry-run", "--workdir", tmp_path / "sweep")
    assert code == 0, output
    # 2 x 16 x 64 weights in the MLP against 3 x 16 x 43 in the GLU: 16 more.
    assert "model.d_ff=43 (params of 'mlp': +16 parameters, +96 FLOPs/token)" in output
    assert "9 runs to tune (1 tuning seed)" in output
    assert "6 runs at the tuned values" in output
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_dry_run_estimates_the_time_if_asked(bench, tmp_path):
    code, output = run(bench, "--dry-run", "--measure", "--workdir", tmp_path / "sweep")
    assert code == 0, output
    assert "minutes at the baseline's measured" in output


@pytest.mark.slow
def test_every_run_is_trained_once_and_divergence_is_a_result(finished):
    workdir, output = finished
    found = results(workdir)
    tuned = {
        name: {key[2][0] for key in found if key[:2] == ("tuning", name)}
        for name in ("mlp", "glu", "wild")
    }
    assert tuned == {
        "mlp": {0.03, 0.1, 0.3},
        "glu": {0.02, 0.04, 0.08, 0.16},
        "wild": {0.1, 0.2, 1e30},
    }
    final = {name: {key[2:] for key in found if key[:2] == ("final", name)} for name in tuned}
    assert all({seed for _, seed in of_variant} == set(SEEDS) for of_variant in final.values())
    rates = {name: {point[0] for point, _ in of_variant} for name, of_variant in final.items()}
    (mlp,), (glu,), (wild,) = rates.values()
    assert 0.03 < mlp < 0.3
    assert mlp != 0.1
    assert 0.04 < glu < 0.16
    assert glu != 0.08
    assert wild == 0.2  # its neighbor diverged
    for key, trained in found.items():
        diverged = key[2] == (1e30,)
        assert trained.status == ("diverged" if diverged else "finished")
        assert (trained.test_loss is None) == diverged
        assert diverged or ([step for step, _ in trained.curve], trained.steps, trained.tokens) == (
            [2, 4, 6, 8],  # the quarters, too
            8,
            512,
        )
    assert f"glu: tuned to learning_rate {glu} (best tried: learning_rate 0.08)" in output


@pytest.mark.slow
def test_a_run_of_a_sweep_equals_the_run_of_lm_train(bench, finished, tmp_path):
    (point, seed) = next(key[2:] for key in results(finished[0]) if key[:2] == ("final", "mlp"))
    changes = ["--config.model.ffn=mlp", "--config.model.dropout=0", "--config.train.steps=8"]
    changes += [f"--config.train.seed={seed}", "--config.optimizer.warmup_steps=1"]
    assert (
        bench.train(
            tmp_path / "run", *changes, f"--config.optimizer.learning_rate={point[0]}"
        ).returncode
        == 0
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    ours = results(finished[0])["final", "mlp", point, seed]
    assert ours.val_loss == pytest.approx(summary["val_loss"], rel=1e-5)
    assert ours.test_loss == pytest.approx(summary["test_loss"], rel=1e-5)


@pytest.mark.slow
def test_repeated_kills_do_not_change_the_results(bench, tmp_path):
    workdir, pipes = tmp_path / "sweep", {"cwd": bench.base, "env": bench.env, "text": True}
    moments = {"step 4/8": signal.SIGKILL, "tuning 2/": signal.SIGTERM, "tuning 1/1": signal.SIGKILL,
               "final 1/": signal.SIGINT, "final 2/": signal.SIGKILL}  # fmt: skip
    for moment, end in moments.items():
        before = results(workdir)
        with subprocess.Popen(command(workdir), stdout=subprocess.PIPE, **pipes) as process:
            for line in process.stdout:
                if line.startswith(moment):
                    time.sleep(0.2)
                    process.send_signal(end)
                    break
            process.stdout.read()
            assert process.wait(timeout=300) == (-end if end == signal.SIGKILL else 128 + end)
        assert before.items() <= results(workdir).items()  # finished runs do not change
        if end != signal.SIGKILL:
            # the runs in progress were saved
            assert list(workdir.glob("unfinished/*/checkpoints/[0-9]*"))
    for directory in (workdir, tmp_path / "whole"):
        done = subprocess.run(command(directory), capture_output=True, timeout=600, **pipes)
        assert done.returncode == 0, done.stdout + done.stderr
    assert results(workdir) == results(tmp_path / "whole")
    again = subprocess.run(command(workdir), capture_output=True, timeout=600, **pipes)
    assert again.returncode == 0
    assert not [line for line in again.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
def test_several_processes_divide_the_work(bench, tmp_path):
    """One process is killed while it trains; another then trains its runs. The design is a product
    of two lists.
    """
    fields = """
        tune={"optimizer.weight_decay": (0.1, 0.3)},
        variants={name: tiny.variants[name] for name in ("mlp", "glu")},
        comparisons=(("glu", "mlp"),),
    """
    config = changed(tmp_path / "lists.py", fields)
    pipes = {
        "cwd": bench.base,
        "env": bench.env,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    processes = [subprocess.Popen(command(tmp_path / "sweep", config), **pipes) for _ in range(3)]
    for line in processes[0].stdout:
        if line.startswith(("step", "waiting")):
            processes[0].kill()
            break
    output = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0, 0], output
    one = subprocess.run(command(tmp_path / "one", config), **pipes, timeout=600)
    assert one.returncode == 0, one.stdout
    found = results(tmp_path / "sweep")
    assert found == results(tmp_path / "one")
    assert {tuple(run.point) for run in found.values()} == {
        ("optimizer.learning_rate", "optimizer.weight_decay")
    }
    tuned = {key[2] for key in found if key[:2] == ("tuning", "mlp")}
    assert {decay for _, decay in tuned} > {0.1, 0.3}  # the best one of two is at an edge


@pytest.mark.slow
def test_variants_that_start_from_other_runs(bench, tmp_path):
    """Each seed starts from its own run. With 0 steps it evaluates that run. One learning rate
    needs no tuning.
    """
    for seed in SEEDS:
        done = bench.train(
            tmp_path / f"start-{seed}", f"--config.train.seed={seed}", "--config.model.dropout=0"
        )
        assert done.returncode == 0
    start = {"init_from": str(tmp_path / "start-{seed}"), "optimizer.learning_rate": (1e-3,)}
    variants = {"mlp": start | {"train.steps": 0}, "wild": start | {"train.steps": 4}}
    config = changed(
        tmp_path / "tiny_sweep.py", f'variants={variants!r}, comparisons=(("wild", "mlp"),)'
    )
    code, output = run(bench, "--workdir", tmp_path / "sweep", config=config)
    assert code == 0, output
    assert "not used: -" in output
    found = results(tmp_path / "sweep")
    assert {key[:2] for key in found} == {("final", "mlp"), ("final", "wild")}
    for seed in SEEDS:
        summary = json.loads((tmp_path / f"start-{seed}" / "summary.json").read_text())
        untouched, trained = (found["final", name, (1e-3,), seed] for name in ("mlp", "wild"))
        assert untouched.test_loss == pytest.approx(summary["test_loss"], rel=1e-6)
        assert abs(trained.test_loss - summary["test_loss"]) > 1e-4
        assert (untouched.steps, trained.steps) == (0, 4)
    assert run(bench, tmp_path / "sweep", main=report.main, config=None)[0] == 0


def mixed(other: str, weight: float = 1.0) -> dict:
    return {
        "data.mixture": (("a", "text:text.txt", weight), ("b", other, 1.0)),
        "data.order": "epochs",
    }


PACKED = {"data.packing": "documents", "data.order": "epochs"}


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ({}, {"data.tokenizer": "byte"}, "data.tokenizer"),
        ({}, {"data.source": "text:other.txt"}, "data.source"),
        ({}, {"data.splits": (0.6, 0.2, 0.2)}, "data.splits"),
        (PACKED, PACKED | {"train.seq_len": 8}, "train.seq_len"),
        (mixed("text:text.txt"), mixed("text:other.txt"), "data.mixture"),
        (mixed("text:other.txt"), mixed("text:other.txt", 2.0), None),
        ({}, {"data.order": "epochs"}, None),
        ({}, {"train.batch_size": 8}, None),
    ],
)
def test_losses_of_different_tokens_are_not_compared(bench, tmp_path, ours, theirs, named):
    """Another order, other weights of a mixture and another number of training tokens are legal."""
    (bench.base / "other.txt").write_text("".join(reversed((bench.base / "text.txt").read_text())))
    variants = {"a": ours, "b": theirs}
    fields = (
        f"variants={variants!r}, baseline='a', comparisons=(('b', 'a'),), learning_rates=(0.1,)"
    )
    code, output = run(bench, "--dry-run", config=changed(tmp_path / "tokens.py", fields))
    assert code == (2 if named else 0), output
    assert not named or f"different tokens ({named})" in output


@pytest.mark.slow
def test_a_sweep_over_the_weights_of_a_mixture_compares_by_source(bench, tmp_path):
    """The mean losses of two mixtures have other weights, so only those of each source are
    compared.
    """
    mixture = '(("a", "text:{0}", {1}), ("b", "text:{0}", 1.0))'
    variants = {
        name: mixture.format(bench.text, weight) for name, weight in (("even", 1.0), ("more", 3.0))
    }
    fields = ", ".join(f"{name!r}: {{'data.mixture': {value}}}" for name, value in variants.items())
    config = changed(
        tmp_path / "mixed.py",
        f"variants={{{fields}}}, baseline='even', comparisons=(('more', 'even'),), placebo={{}}, "
        f"sizes={{}}, learning_rates=(0.1,), values=tiny.values | "
        "{'data.order': 'epochs', 'eval.probes': ('recall',)}",
    )
    code, output = run(bench, "--workdir", tmp_path / "sweep", config=config)
    assert code == 0, output
    final = [found for found in results(tmp_path / "sweep").values() if found.phase == "final"]
    assert len(final) == 4
    for found in final:
        share = {"even": 0.5, "more": 0.75}[found.variant]
        expected = share * found.sources["a"] + (1 - share) * found.sources["b"]
        assert found.test_loss == pytest.approx(expected, rel=1e-9)
        assert found.sources["probe/recall"] > 0
    assert run(bench, tmp_path / "sweep", main=report.main, config=None)[0] == 0
    text = (tmp_path / "sweep" / "report.md").read_text()
    assert "different data or tokens" in text
    assert text.count("| more − even |") >= 3  # on each source, and on the probe


@pytest.mark.slow
def test_a_change_is_added_to_a_published_study_without_training_its_baseline_again(bench):
    study = bench.base / "configs" / "studies" / "demo"
    study.mkdir(parents=True)
    changed(
        study / "demo.py",
        'variants={"mlp": tiny.variants["mlp"], "glu": {"model.d_ff": match_params("mlp")}}, '
        'comparisons=(("glu", "mlp"),), placebo={"model.rope_pairing": "halves"}, '
        'sizes={"one": {"model.n_layers": 1}, "two": {"model.n_layers": 2}}, '
        'budgets={"full": Budget(tuning_seeds=1, seeds=5, placebos=2)}',
    )
    code, output = run(bench, "--budget", "full", "--workdir", "demo", config=study / "demo.py")
    assert code == 0, output
    assert run(bench, "demo", "--publish", "docs/results", main=report.main, config=None)[0] == 0
    before = results(bench.base / "demo")
    code, output = run(
        bench,
        "--study",
        "demo",
        "--add",
        "tied head",
        "--set",
        "model.tie_embeddings=True",
        config=None,
    )
    assert code == 0, output
    assert output.count("of mlp") == 2  # one run in each cell, to compare it with the published one
    found = results(bench.base / "sweeps" / "demo+tied_head-full")
    kept = {key: run for key, run in before.items() if not key[1].startswith("glu")}
    assert {key: dataclasses.replace(run, curve=()) for key, run in kept.items()} == {
        key: found[key] for key in kept
    }
    again = {key: run for key, run in found.items() if key[0] == "again"}
    assert [key[1] for key in again] == ["mlp, one", "mlp, two"]
    for key, run_again in again.items():
        assert run_again.test_loss == pytest.approx(before["final", *key[1:]].test_loss, rel=1e-6)
    added = found.keys() - kept.keys() - again.keys()
    assert {key[1] for key in added} == {"tied head, one", "tied head, two"}
    assert {key[3] for key in added} == {key[3] for key in kept}
    code, output = run(bench, "sweeps/demo+tied_head-full", main=report.main, config=None)
    assert code == 0, output
    text = (bench.base / "sweeps" / "demo+tied_head-full" / "report.md").read_text()
    assert "Not preregistered" in text
    assert text.count("was trained again with seed") == 2
    assert "at level 0.0013; 1 tried, " in text
    assert "WARNING" not in text
    _check_a_repeat(bench, before)
    for name, setting, advice in (
        ("glu", "model.ffn=glu", "choose another"), ("new", "optimizer.learning_rate=1.0", "leave it out"),
        ("new", "modl.ffn=glu", "did you mean"), ("new", "train.steps=960", "write a sweep file"),
        ("new", "train.batch_size=16", "write a sweep file"), ("new", "data.tokenizer=byte", "write a sweep file"),
    ):  # fmt: skip
        code, output = run(bench, "--study", "demo", "--add", name, "--set", setting, config=None)
        assert code == 2
        assert advice in output
    page = bench.base / "docs" / "results" / "demo" / "sweep.json"
    page.write_text(
        page.read_text().replace('"tokens": 512', '"tokens": 513').replace('b1": 0.9', 'b1": 0.8')
    )
    more = (
        "--workdir",
        "elsewhere",
        "--study",
        "demo",
        "--add",
        "tied",
        "--set",
        "model.tie_embeddings=True",
    )
    code, output = run(bench, *more, config=None)
    assert code == 2
    assert "tokens: 513 -> 512" in output
    assert "b1: 0.8 -> 0.9" in output
    code, output = run(bench, *more, "--dry-run", config=None)
    assert (code, "tokens: 513 -> 512" in output, "FLOPs" in output) == (2, True, False)


def _check_a_repeat(bench, before):
    """A published change and its control train again, with other seeds and without tuning."""
    again = ("--study", "demo", "--repeat", "glu", "--pairs", "2")
    code, output = run(bench, *again, "--seed", "7", "--workdir", "again", config=None)
    assert code == 0, output
    assert "tuning 1/" not in output
    found = results(bench.base / "again")
    points = {key[1]: key[2] for key in before if key[0] == "final" and key[1].endswith("one")}
    assert {key[:1] + key[3:] for key in found} == {("final", 7), ("final", 8)}
    assert {(key[1], key[2]) for key in found} == {
        (name, points[name]) for name in ("glu, one", "mlp, one")
    }
    (line,) = read_repeats(bench.base / "again" / "repeat.csv")
    losses = {(key[1], key[3]): run_of.test_loss for key, run_of in found.items()}
    expected = [losses["glu, one", seed] - losses["mlp, one", seed] for seed in (7, 8)]
    assert line[:5] == ("demo", "glu", "mlp", "one", 7)
    assert line.differences == pytest.approx(expected, abs=1e-6)
    published = [
        before["final", "glu, one", points["glu, one"], seed].test_loss
        - before["final", "mlp, one", points["mlp, one"], seed].test_loss
        for seed in sorted({key[3] for key in before if key[:2] == ("final", "mlp, one")})
    ]
    assert f"published pairs  {sum(published) / 5:+.4f}" in output
    used = min(key[3] for key in before if key[0] == "final")
    for name, wrong, advice in (
        ("gl", (), "did you mean glu?"), ("glu", ("--cell", "on"), "did you mean one?"),
        ("glu", ("--seed", str(used)), "leave it out"), ("glu", ("--pairs", "0"), "--pairs must be"),
    ):  # fmt: skip
        code, output = run(bench, "--study", "demo", "--repeat", name, *wrong, config=None)
        assert (code, advice in output) == (2, True), output


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--study", "x", "--add", "y", "--set", "model.ffn=mlp"), "published: "),
        (("--study", "x", "--repeat", "y"), "published: "),
        (("--study", "x", "--repeat", "y", "--add", "z"), "leave out --add"),
        (("--config", str(SWEEP), "--repeat", "y"), "--repeat belongs to --study"),
        (("--config", str(SWEEP), "--pairs", "3"), "--pairs belongs to --study"),
        (("--study", "x", "--add", "y"), "--set model.key=value"),
        (("--study", "", "--add", "y", "--set", "model.ffn=mlp"), "--set model.key=value"),
        (("--config", str(SWEEP), "--add", ""), "--study"),
        (("--config", str(SWEEP), "--measure"), "--measure belongs to --dry-run"),
        (
            ("--study", "x", "--add", "y", "--set", "model.ffn=mlp", "--budget", "quick"),
            "leave out --budget",
        ),
        (("--config", str(SWEEP), "--together=0"), "--together must be at least 1"),
        (("--config", str(SWEEP), "--workdir=gs://bucket/run"), "mount the bucket as a directory"),
        (("--config", str(ROOT / "configs" / "shakespeare.py")), "use python -m lm.train --config"),
    ],
)
def test_mistakes_are_errors_and_nothing_is_written(
    arguments, advice, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        assert sweep.main(list(arguments)) == 2
    assert advice in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
