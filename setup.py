"""Refuse old versions of Python with a clear message; everything else is in pyproject.toml.

pip checks requires-python, but pip 23.0 (bundled with Python 3.10) first complains about a
dependency.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"This project needs Python 3.11 or newer; {sys.executable} is Python "
        f"{sys.version.split()[0]}."
    )

from setuptools import setup

setup()
