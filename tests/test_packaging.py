"""Installing: an old Python is refused with a message that names the version that is needed."""

import subprocess
import sys

from running import ROOT


def test_an_old_python_is_refused_with_the_version_that_is_needed():
    code = "import sys; sys.version_info = (3, 10, 13); import runpy; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
