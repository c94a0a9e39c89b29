"""Settings and fixtures of the whole suite."""

import atexit
import contextlib
import gc
import io
import logging
import os
import sys
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path

import pytest

# XLA reads this when it starts. A training step of the tiny config compiles in 0.4 CPU seconds
# instead of 3.9: without LLVM's optimizations, with the older and simpler code of fusions, which
# jaxlib has until 0.10, and without splitting a program into parts that are compiled in parallel.
# To test the programs that users run, set XLA_FLAGS, for example to an empty string.
FAST_TO_COMPILE = ["backend_optimization_level=0", "cpu_parallel_codegen_split_count=1"]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # an unknown flag ends the process
    FAST_TO_COMPILE.append("cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in FAST_TO_COMPILE))


def pytest_configure(config):
    """Set up a process that runs tests; with pytest -n the first process only hands them out."""
    if config.getoption("numprocesses", None):
        return
    import hypothesis
    import jax

    # Products in full float32 (GPUs would use TF32), so that one set of tolerances holds
    # everywhere.
    jax.config.update("jax_default_matmul_precision", "highest")
    # Disable the persistent compilation cache, so that a test never runs a program that another
    # version of the code or of jax compiled.
    jax.config.update("jax_compilation_cache_dir", None)
    # On a shared machine a deadline would test the machine's load.
    hypothesis.settings.register_profile("lm", deadline=None, print_blob=True)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "lm"))
    atexit.register(leave)  # runs before what JAX registered


def pytest_collection_finish():
    """Look for garbage among new objects only, and rarely: most are modules, tests and the caches
    of JAX.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


exit_status = []


def pytest_sessionfinish(exitstatus):
    """End the process that commands were forked from."""
    forkserver._forkserver._stop()
    gc.freeze()  # pytest collects garbage several times
    exit_status.append(int(exitstatus))


def leave():
    """End the process without freeing each compiled program and object, which takes seconds."""
    if exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status[0])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Run the examples of layers with the slow tests: they compile a program for each operation."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.nodeid.startswith(
            ("lm/layers", "lm/kernels")
        ):
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter, config):
    """Print which tests the default selection leaves out."""
    if config.option.markexpr == "not slow":
        terminalreporter.write_line(
            "The slow tests were not run: all meshes of 8 devices, up to 4 processes, repeated "
            "kills, whole sweeps, SLURM, worked changes of the model, examples of layers. To run "
            "them: python -m pytest -m slow"
        )


@pytest.fixture(autouse=True)
def few_programs():
    """Forget the compiled programs once they take many memory mappings.

    A program takes hundreds, and a test of the resume compiles up to 20. Linux allows 65,530
    mappings in a process (vm.max_map_count), and beyond that XLA crashes.
    """
    yield
    import jax

    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def bench(tmp_path_factory, worker_id):
    """Return the `Bench` that all workers of the session share."""
    from running import Bench

    base = tmp_path_factory.getbasetemp()
    return Bench((base if worker_id == "master" else base.parent) / "bench")


@contextlib.contextmanager
def fresh_process_state():
    """Undo what a command changes in its process: the environment, the log, the settings of JAX and
    of Python.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    environment, argv = dict(os.environ), sys.argv
    logger = logging.getLogger("lm")
    log = logger.handlers, logger.propagate, logger.level
    settings = dict(jax.config.values)
    compilation_cache.reset_cache()  # JAX looks once for the directory of its cache
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv
        logger.handlers, logger.propagate = log[:2]
        logger.setLevel(log[2])
        for name, value in settings.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def command(bench, tmp_path, monkeypatch, capsys):
    """Return command(main, *arguments, stdin=""), which runs the main() of a module and returns
    (exit code, output).

    Use it in place of a subprocess: `code, output = command(lm.generate.main,
    f"--workdir={workdir}")`. It starts in tmp_path with the caches of the bench, so that a session
    compiles each program once. The output is that of stdout, then that of stderr. Start a process
    only if the test is about the process itself: kills, memory, several devices, what is imported.
    """
    monkeypatch.chdir(tmp_path)

    def command(main, *arguments: object, stdin: str = "") -> tuple[int, str]:
        with fresh_process_state(), monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", bench.env["XDG_CACHE_HOME"])
            patch.setattr(
                "sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape")))
            )
            capsys.readouterr()
            try:
                code = main([str(argument) for argument in arguments])
            except SystemExit as error:  # argparse: --help, or a mistake
                code = error.code
        return code, "".join(capsys.readouterr())

    return command


@pytest.fixture
def train(bench, command):
    """Return train(workdir, *arguments), which runs lm.train with the bench's tiny config; see
    `command`.
    """
    from lm.train import main

    return lambda workdir, *more: command(main, *bench.arguments(workdir, *more))


@pytest.fixture
def config_file(tmp_path):
    """Return config_file(*lines), which writes a config file whose get_config() runs these lines,
    and its path.
    """

    def write(*lines):
        path = tmp_path / "experiment.py"
        body = "".join(f"    {line}\n" for line in lines)
        path.write_text(
            "from lm.config import default_config\n\n\ndef get_config():\n"
            f"    config = default_config()\n{body}    return config\n"
        )
        return str(path)

    return write


@pytest.fixture
def problems():
    """Return problems(path, *overrides), which returns the messages with which a config is refused."""
    from lm.command_line.loading import load
    from lm.system.errors import UserError

    def of(path, *overrides):
        with pytest.raises(UserError) as caught:
            load(path, list(overrides))
        return caught.value.problems

    return of


@pytest.fixture
def the_problem(problems):
    """Return the_problem(path, *overrides), which returns the one message with which a config is
    refused.
    """

    def of(path, *overrides):
        found = problems(path, *overrides)
        assert len(found) == 1, found
        return found[0]

    return of


@pytest.fixture
def fresh_tables():
    """Return a function that forgets the tables of all configs, and call it at the end."""
    from lm import parameters  # imports jax

    yield parameters.parameter_table.cache_clear
    parameters.parameter_table.cache_clear()
