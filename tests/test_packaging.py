"""Installing."""

import runpy
import sys

import pytest
from running import ROOT


def test_an_old_python_is_refused_with_the_version_that_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        runpy.run_path(str(ROOT / "setup.py"))
