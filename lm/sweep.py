"""Run an ablation: python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick"""

import argparse
import os
import sys
from pathlib import Path

from lm import runtime
from lm.config import Config
from lm.config.schema import PLATFORMS
from lm.config.values import short
from lm.errors import UserError, with_exit_code
from lm.files import refuse_url
from lm.sweeps.spec import BUDGETS, load_sweep

DESCRIPTION = """\
Train the variants of an ablation: tune the learning rate of each variant, then train the best rate and its neighbors
on fresh seeds. python -m lm.report writes the tables and figures.
"""
EPILOG = """\
examples:
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --dry-run
  python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick
  python -m lm.report sweeps/swiglu_vs_silu-quick

Rerun the same command to resume after an interruption. Several processes that run the same command, on one machine or
on several alike that share the directory, divide the runs among them.

budgets: "quick" checks that the sweep works and supports no conclusions; "full" does.

exit codes: 0 finished; 1 some runs failed, or the disk did: rerun to try again; 2 invalid arguments or sweep file;
130 (Ctrl-C) or 143 (SIGTERM): stopped, rerun to resume.
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return sweep(parse_arguments(argv))


def sweep(arguments: argparse.Namespace) -> int:
    refuse_url(arguments.workdir, "--workdir")
    if arguments.together is not None and arguments.together < 1:
        raise UserError(f"--together must be at least 1, not {short(arguments.together)}")
    plan = load_sweep(arguments.config, arguments.budget)
    start_jax(plan.configs[plan.sweep.baseline], arguments.platform)
    from lm.sweeps.runner import run_sweep

    workdir = Path(arguments.workdir or f"sweeps/{plan.name}-{arguments.budget}")
    return run_sweep(plan, workdir, arguments.together, dry_run=arguments.dry_run)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lm.sweep",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a sweep file, as in configs/sweeps/")
    parser.add_argument("--budget", choices=BUDGETS, default="quick", help="which budget of the file (%(default)s)")
    parser.add_argument("--workdir", metavar="DIR", help="the sweep's directory (sweeps/NAME-BUDGET)")
    parser.add_argument("--dry-run", action="store_true", help="print the variants, the runs and their cost, and stop")
    parser.add_argument(
        "--together",
        type=int,
        metavar="N",
        help="runs vectorized on each device (as many as fit in its memory; on CPU 1)",
    )
    parser.add_argument(
        "--platform", choices=PLATFORMS, help="required kind of device; stop if JAX finds none (default: any)"
    )
    return parser.parse_args(argv)


def start_jax(config: Config, platform: str | None) -> None:
    """Import jax, with one CPU device per core so that as many runs train at once."""
    jax = runtime.start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # not on macOS
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", n_cores)
    runtime.require_platform(platform)


if __name__ == "__main__":
    sys.exit(main())
