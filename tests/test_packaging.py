"""Installing and the checkout: an old Python is refused with the version that is needed; data is not a change."""

import subprocess
import sys

import pytest
from running import ROOT


def test_an_old_python_is_refused_with_the_version_that_is_needed():
    code = "import sys; sys.version_info = (3, 10, 13); import runpy; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("folder", ["data", "runs", "sweeps"])
def test_documented_folders_are_ignored_by_git(folder):
    """A run records whether its checkout has changes; data and results are not changes."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert subprocess.run(["git", "check-ignore", "-q", f"{folder}/file"], cwd=ROOT).returncode == 0
