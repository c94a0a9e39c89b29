"""Check the arguments of a run or sweep before it waits in a queue. Imports no jax."""

import subprocess
import sys

from lm.command_line import sweeping, training
from lm.config import Config, MeshConfig
from lm.parallel.mesh import check_mesh
from lm.sweeps.plan import load_sweep
from lm.system.errors import UserError

NOT_CHECKED = (
    "not checked: whether the step compiles and fits into memory; --check{} finds out "
    "before the job starts"
)
# Arguments of lm.train that a launcher sets, beside --workdir.
RESERVED = (
    "--resume", "--platform", "--multihost", "--coordinator_address", "--num_processes", "--process_id", "--plan",
    "--device",
)  # fmt: skip


def after_dashes(argv: list[str]) -> list[str]:
    """Return the arguments behind the two dashes.

    Raises:
        UserError: there are no two dashes or no --config behind them.
    """
    if argv[:1] != ["--"] or "--config" not in [argument.partition("=")[0] for argument in argv]:
        raise UserError(
            "the arguments of the run are missing; give them after two dashes: -- --config FILE"
        )
    return argv[1:]


def check_train(
    argv: list[str], *, workdir: str, n_devices: int | None, unchecked: tuple[str, ...] = ()
) -> tuple[str, Config]:
    """Check the arguments of python -m lm.train and return the config file and the config.

    Args:
        argv: the arguments.
        workdir: where the user sets the workdir instead, for the error message.
        n_devices: the number of accelerators that the run will have; None: unknown.
        unchecked: keys whose values depend on the machine that trains ("--config.log.wandb").

    Raises:
        UserError: an argument, the config or an override is wrong, the launcher sets the argument,
            or the mesh does not fit the devices.
    """
    _refuse(argv, ("--workdir",), workdir)
    _refuse(argv, RESERVED, "the launcher sets this; remove it")
    checked = [argument for argument in argv if argument.partition("=")[0] not in unchecked]
    arguments, config = training.parse_arguments([*checked, "--workdir", "."])  # --mirror needs one
    if n_devices is not None:
        check_mesh(config, n_devices)
    return arguments.config, config


def check_sweep(argv: list[str], *, workdir: str) -> str:
    """Check the arguments of python -m lm.sweep and return the sweep file.

    Raises:
        UserError: the sweep file is wrong, or the launcher sets an argument.
        SystemExit: an argument is wrong; argparse has printed the error.
    """
    _refuse(argv, ("--workdir",), workdir)
    _refuse(argv, ("--platform",), "the launcher sets this; remove it")
    arguments = sweeping.parse_arguments(argv)
    load_sweep(arguments.config, arguments.budget)
    return arguments.config


def compile_step(argv: list[str], config: Config, device: str, n_slices: int = 1) -> int:
    """Compile the step for devices such as "h100:16" (--plan --compiled); return the exit code."""
    # wandb may be on the machine that trains only
    argv = [argument for argument in argv if not argument.startswith("--config.log.wandb=")]
    command = [sys.executable, "-m", "lm.train", *argv, "--workdir", ".", "--plan", "--compiled"]
    command += ["--device", device, "--slices", str(n_slices), "--config.log.wandb=false"]
    if config.mesh == MeshConfig():  # --plan would choose a mesh, but the run does not
        command.append(f"--config.mesh.replica={device.rpartition(':')[2]}")
    # stdout may be for kubectl
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _refuse(argv: list[str], names: tuple[str, ...], instead: str) -> None:
    for argument in argv:
        name = argument.partition("=")[0]
        if name[:2] + name[2:].replace("-", "_") in names:  # the parser takes both spellings
            raise UserError(f"{name} after the two dashes: {instead}")
