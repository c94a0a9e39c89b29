"""Train a language model: python -m lm.train --config configs/shakespeare.py"""

import argparse
import dataclasses
import sys

from lm import runtime
from lm.command_line.training import parse_arguments
from lm.config import Config
from lm.cost.devices import parse_device
from lm.errors import run_command
from lm.training.saved_run import check_init_from, check_workdir, holds_run


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command(lambda: train(*parse_arguments(argv)))


def train(a: argparse.Namespace, config: Config) -> int:
    """Train, or estimate the cost with --plan, and return the exit code."""
    if a.plan:
        return show_estimate(config, a.device)
    # Check everything that does not need jax before importing it, which takes seconds.
    saved = check_workdir(a.workdir, config, resume=a.resume) if a.workdir else None
    if saved and saved.finished_at == config.train.steps:
        print(f"{a.workdir} holds a finished run of {config.train.steps} steps; there is nothing left to do")
        return 0
    check_init_from(config, saved)
    runtime.start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    from lm.parallel import processes
    from lm.training import job
    from lm.training.branch import branch

    processes.connect(a.coordinator_address, a.num_processes, a.process_id, a.multihost, a.connect_timeout)
    runtime.require_platform(a.platform)
    if a.branch_from and not processes.from_first(holds_run, a.workdir):
        step = processes.from_first(branch, a.branch_from, a.workdir, config)
        a.resume = True
        if processes.is_first():
            print(f"branching from step {step} of {a.branch_from}")
    return job.train(config, a.workdir, resume=a.resume, verbose=a.verbose)


def show_estimate(config: Config, device: str) -> int:
    """Print the estimate for other hardware; return the exit code: 2 if the run does not fit into memory."""
    name, n_devices = parse_device(device)
    jax = runtime.start_jax(config.data.cache_dir)
    jax.config.update("jax_platforms", "cpu")
    from lm import data, parameters
    from lm.cost.report import plan
    from lm.training.run import resolve_config

    vocab_size = config.model.vocab_size
    if vocab_size is None:  # the tokenizer defines it, and may be trained on the text
        corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=print)
        # Whether attention runs is a question to the planned device, which `plan` asks, and not to this one.
        anywhere = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))
        vocab_size = resolve_config(anywhere, corpus).model.vocab_size
    text, fits = plan(parameters.resolve(config, vocab_size), name, n_devices)
    print(text)
    return 0 if fits else 2


if __name__ == "__main__":
    sys.exit(main())
