"""Imports run one way: no cycle of packages or of modules, and no import of a command or of a
private name.
"""

import ast
import functools
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from huggingface_checkpoints import checkpoint
from running import CONFIG, ROOT

MODULES = sorted((ROOT / "lm").rglob("*.py"))
ALL_MODULES = [
    path
    for folder in ("lm", "launch", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# like a test, it calls commands and judges what they do
DRIVES_COMMANDS = ROOT / "benchmarks" / "faults"


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the modules of lm and launch that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith(("lm.", "launch."))}


def test_the_packages_and_the_modules_import_one_way():
    """Imports within functions count, so none of them is there to hide a cycle."""
    names = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
    }
    modules = set(names.values())
    graph = {
        # `imported` also lists what is taken from a module: that module is meant.
        names[path]: {
            name if name in modules else name.rpartition(".")[0] for name in imported(path)
        }
        - {names[path]}
        for path in MODULES
    }
    packages = {}
    for module, found in graph.items():
        package = f"{module}.".split(".")[1]
        packages.setdefault(package, set()).update(
            {f"{name}.".split(".")[1] for name in found} - {package}
        )
    for one_way in (graph, packages):
        # raises CycleError, which lists the modules
        list(TopologicalSorter(one_way).static_order())


def test_no_module_imports_a_command():
    def is_command(path: Path) -> bool:
        return "def main(argv" in path.read_text(encoding="utf-8")

    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in ALL_MODULES
        if is_command(path)
    }
    assert {"lm.train", "lm.hf", "lm.data.prepare", "launch.slurm"} <= commands
    for path in ALL_MODULES:
        if path.is_relative_to(DRIVES_COMMANDS):
            continue
        named = {
            name
            for name in imported(path)
            for command in commands
            if f"{name}.".startswith(f"{command}.")
        }
        assert not named, f"{path.relative_to(ROOT)} imports {named}"


def test_no_module_imports_a_private_name():
    for path in MODULES:
        private = {
            name for name in imported(path) if any(part.startswith("_") for part in name.split("."))
        }
        assert not private, f"{path.relative_to(ROOT)} imports {private}"


WITHOUT_JAX = """
import sys
from pathlib import Path

def check(*heavy):
    found = sorted(set(heavy) & set(sys.modules))
    assert not found, found

import lm, lm.workdir.directory, lm.workdir.metrics
from lm.workdir.tensorboard import EventFile
check("jax", "flax", "numpy")
EventFile(Path(sys.argv[-1]), 1).close()  # tensorboardX would import torch if it is installed
import launch.gke, launch.slurm, lm.cost.devices, lm.cost.units
from lm import hf, sweep, train
from lm.config import DataConfig
from lm.data import open_corpus

config, model, text, cache = sys.argv[1:]
mistake = [f"--config={config}", "--config.model.d_modle=3"]
for main, arguments, code in (
    (train.main, ["--help"], 0), (sweep.main, ["--help"], 0), (train.main, mistake, 2), (hf.main, ["--help"], 0),
    (train.main, [f"--config=hf:{model}", "--print_config=python"], 0),
):
    try:
        found = main(arguments)
    except SystemExit as error:
        found = error.code
    assert found == code, arguments
open_corpus(DataConfig(source=f"text:{text}", cache_dir=cache))
check("jax", "flax", "optax", "tensorflow", "tensorflow_datasets", "tokenizers")
"""


def test_help_mistakes_launchers_and_text_need_neither_jax_nor_unused_libraries(bench, tmp_path):
    """They must not wait seconds for an import."""
    (tmp_path / "cache").mkdir()
    arguments = [CONFIG, checkpoint(tmp_path / "model"), bench.text, tmp_path / "cache"]
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *arguments], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "did you mean d_model?" in done.stderr
    assert list((tmp_path / "cache" / "tensorboard").glob("events.out.tfevents.*"))
