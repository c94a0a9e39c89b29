"""Installing and the checkout: an old Python is refused with the version that is needed; data is not a change."""

import runpy
import subprocess
import sys

import pytest
from running import ROOT


def test_an_old_python_is_refused_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_documented_folders_are_ignored_by_git():
    """A run records whether its checkout has changes; data and results are not changes."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    files = ["data/file", "runs/file", "sweeps/file"]
    done = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == files
