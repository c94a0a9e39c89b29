"""Installing."""

import os
import runpy
import subprocess
import sys
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
