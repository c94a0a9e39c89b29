"""Installing."""

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
from running import ROOT


def test_an_old_python_is_refused_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_the_package_is_found_beside_its_clone(tmp_path):
    """In the folder that contains a clone named lm, that folder is no package in place of the
    installed one.
    """
    try:
        metadata.distribution("lm-ablation")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    (tmp_path / "lm").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", "import lm; lm.load"], cwd=tmp_path, env=env, capture_output=True
    )
    assert run.returncode == 0, "install it again (pip install -e .): " + run.stderr.decode()


SWEEP = """
from lm.sweeps import Budget, Sweep

def get_sweep():
    return Sweep(
        question="Does an installed package sweep?",
        base="configs/shakespeare_small.py",
        values={"train.steps": 2, "train.batch_size": 2, "model.n_layers": 1, "eval.max_batches": 1},
        variants={"layer": {"model.norm": "layer"}, "rms": {"model.norm": "rms"}},
        baseline="layer",
        comparisons=(("rms", "layer"),),
        learning_rates=(0.01, 0.02, 0.04),
        budgets={"quick": Budget(tuning_seeds=1, seeds=2), "full": Budget(tuning_seeds=2, seeds=5)},
    )
"""


@pytest.mark.slow
def test_a_wheel_of_a_clone_trains_and_sweeps_from_an_empty_folder(tmp_path):
    """In an environment with nothing else, without network but to install; configs come along."""
    hidden = {"PYTHONPATH", "TFDS_DATA_DIR", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(*command) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    clone = tmp_path / "clone"  # the files of a commit, with the changes of the working tree
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    wheels = tmp_path / "wheels"
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", wheels, clone)
    (wheel,) = wheels.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"lm", "lm_ablation-0.1.0.dist-info"}
    assert "lm/configs/replications/glu_variants.toml" in names
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", wheel)
    assert not list(folder.iterdir())
    config = "configs/shakespeare_small.py"
    small = ["--config.train.steps=2", "--config.train.batch_size=2", "--config.eval.max_batches=1"]
    output = run(python.with_name("lm"), "train", "--config", config, *small, "--workdir=run")
    site = next((tmp_path / "env").rglob("site-packages"))
    assert f"there is no {config} in this folder; {site}/lm/{config} is used" in output
    assert (folder / "run" / "metrics.jsonl").exists()
    (folder / "mine.py").write_text(SWEEP)
    run(python.with_name("lm"), "sweep", "--config=mine.py", "--budget=quick", "--workdir=swept")
    run(python.with_name("lm"), "report", "swept")
    assert "Does an installed package sweep?" in (folder / "swept" / "report.md").read_text()
