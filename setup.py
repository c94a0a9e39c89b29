"""Refuse old versions of Python with a clear message, and put configs/ into wheels; everything else
is in pyproject.toml.

pip checks requires-python, but pip 23.0 (bundled with Python 3.10) first complains about a
dependency.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"This project needs Python 3.11 or newer; {sys.executable} is Python "
        f"{sys.version.split()[0]}."
    )

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = [file for kind in ("*.py", "*.toml") for file in Path("configs").rglob(kind)]


class BuildWithConfigs(build_py):
    """Put configs/ inside lm: in site-packages a folder of that name would belong to everyone.

    A package-dir for it in pyproject.toml would make `pip install -e .` write an import hook.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for file in CONFIGS:
            target = Path(self.build_lib, "lm", file)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))

    def get_source_files(self):  # of the source archive, from which a wheel can be built
        return super().get_source_files() + [str(file) for file in CONFIGS]


setup(cmdclass={"build_py": BuildWithConfigs})
