"""Run an ablation: python -m lm.sweep --config configs/sweeps/swiglu_vs_silu.py --budget quick"""

import os
import sys
from pathlib import Path

from lm.command_line.sweeping import parse_arguments
from lm.config import Config
from lm.config.values import short
from lm.sweeps import cpu_memory, replication
from lm.sweeps.addition import add_change, finish_addition
from lm.sweeps.plan import load_sweep
from lm.sweeps.repetition import PAIRS, finish_repeat, plan_repeat
from lm.system import runtime
from lm.system.errors import UserError, lasting_output, with_exit_code
from lm.system.files import refuse_url
from lm.system.text_tables import say


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    with lasting_output():
        refuse_url(arguments.workdir, "--workdir")
        if arguments.together is not None and arguments.together < 1:
            raise UserError(f"--together must be at least 1, not {short(arguments.together)}")
        if arguments.replicate:
            say(replication.describe(Path(arguments.replicate)))
            return 0
        if arguments.repeat:
            plan, published = plan_repeat(
                arguments.study,
                arguments.repeat,
                arguments.cell,
                arguments.seed,
                PAIRS if arguments.pairs is None else arguments.pairs,
                arguments.against,
            )
        elif arguments.study:
            plan, published = add_change(arguments.study, arguments.add, arguments.set)
        else:
            plan = load_sweep(arguments.config, arguments.budget)
            published = None
        start_jax(next(iter(plan.variants.values())).config, arguments.platform)
        from lm.sweeps.runner import run_sweep

        workdir = Path(arguments.workdir or f"sweeps/{plan.name}-{plan.budget_name}")
        options = {
            "dry_run": arguments.dry_run,
            "timed": arguments.measure,
            "speed": arguments.speed,
            "published": published,
        }
        code = run_sweep(plan, workdir, arguments.together, **options)
        if code == 0 and arguments.study and not arguments.dry_run:
            finish = finish_repeat if arguments.repeat else finish_addition
            say(finish(arguments.study, workdir))
        return code


def start_jax(config: Config, platform: str | None) -> None:
    """Import jax for a config of any variant, with one CPU device per core so that as many runs
    train at once.
    """
    jax = runtime.start_jax(
        config.data.cache_dir, deterministic=config.train.deterministic, single_arena=False
    )
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cpu_memory.n_cores())
    runtime.require_platform(platform)


if __name__ == "__main__":
    sys.exit(main())
