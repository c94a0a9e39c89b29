"""Train a language model: python -m lm.train --config configs/shakespeare.py"""

import argparse
import os
import sys

from lm.command_line.loading import print_note
from lm.command_line.training import as_python, parse_arguments, process_id
from lm.config import Config, to_dict
from lm.cost.devices import parse_device
from lm.system import runtime
from lm.system.errors import lasting_output, with_exit_code
from lm.system.files import to_json
from lm.system.text_tables import say, write
from lm.workdir.mirror import Mirror
from lm.workdir.saved_run import check_init_from, check_workdir


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run(*parse_arguments(argv))


def run(a: argparse.Namespace, config: Config) -> int:
    """Train, print the config or the model, or estimate the cost on other devices with --plan, and
    return the exit code.
    """
    if a.print_config == "python":
        write(as_python(config) + "\n")
        for note in a.notes:
            print_note(note)
        return 0
    if not (a.plan or a.print_config or a.print_model):
        with lasting_output():
            return train(a, config)
    name, n_devices = parse_device(a.device, a.slices) if a.plan else ("", 0)
    runtime.start_jax(config.data.cache_dir).config.update("jax_platforms", "cpu")
    from lm.cost.compiled import compile_step
    from lm.cost.report import describe_compiled, plan
    from lm.interpret.equations import equations
    from lm.parameters import parameter_table
    from lm.training.run import describe_parameters, missing_data, resolve_for_other_devices

    resolved = resolve_for_other_devices(config, say=print_note)
    for note in a.notes:
        print_note(note)
    if a.print_config:
        write(to_json(to_dict(resolved), indent=2) + "\n")
        return 0
    if a.print_model:
        write(f"{equations(resolved)}\n\n{describe_parameters(parameter_table(resolved.model))}\n")
        return 0
    text, chosen = plan(resolved, name, n_devices, a.slices)
    say(text)
    for note in missing_data(config):
        print_note(f"\n{note}")
    fits = chosen.fits
    if a.config.startswith("hf:"):
        say(
            "The checkpoint gives the architecture; batch size, steps and the rest have their "
            "defaults or flags."
        )
    if a.compiled:
        program, code = ("training", True) if a.compiled == "time" else (a.compiled, False)
        options = {"code": code, "program": program, "n_slices": a.slices}
        compiled = compile_step(chosen.config, name, chosen.sizes, a.dump, **options)
        say(f"\n{describe_compiled(chosen, compiled)}")
        fits = compiled.peak <= chosen.device.memory and (program == "training" or fits)
    return 0 if fits else 2  # 2: a mistake of the user, as any config that does not fit into memory


def train(a: argparse.Namespace, config: Config) -> int:
    """Train, unless the run is finished, and return the exit code."""
    # Check everything that does not need jax before importing it, which takes seconds.
    mirror = Mirror(a.mirror, a.workdir) if a.mirror is not None else None
    saved = check_workdir(a.workdir, config, resume=a.resume) if a.workdir else None
    if saved and saved.finished_at == config.train.steps and not mirror:
        say(
            f"{a.workdir} holds a finished run of {config.train.steps} steps; there is nothing "
            "left to do"
        )
        return 0
    if not mirror and not a.branch_from:  # which may start from a copy, without the other run
        check_init_from(config, saved)
    if (
        process_id(a) is not None
    ):  # no warnings such as that of a SIGTERM, which each process repeats; errors remain
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    runtime.start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    from lm.parallel import processes
    from lm.scoring.in_training import sample, task_scorer
    from lm.training import job
    from lm.training.branch import branch

    processes.connect(
        a.coordinator_address, a.num_processes, a.process_id, a.multihost, a.connect_timeout
    )
    runtime.require_platform(a.platform)
    resume = a.resume or bool(a.branch_from)
    if mirror:
        resume = processes.from_first(mirror.fetch, config, say=say) or resume
    if a.branch_from:
        processes.from_first(branch, a.branch_from, a.workdir, config, say=say)
    options = {"resume": resume, "verbose": a.verbose, "mirror": mirror, "notes": a.notes}
    return job.train(config, a.workdir, sample=sample, task_scorer=task_scorer, **options)


if __name__ == "__main__":
    sys.exit(main())
