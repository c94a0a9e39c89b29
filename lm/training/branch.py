"""Branch a run: start another one from its stable phase, with another number of steps.

Under the schedule "wsd" (warm-up, stable, decay) runs of all lengths take the same steps until the first one decays. So
one long run serves several lengths: each branch trains only its own decay, and ends as if it had started at step 0.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from lm.config import Config, to_dict
from lm.errors import UserError
from lm.files import COUNT, read_json, to_json, write_text
from lm.workdir.config_changes import compare_configs, stable_steps
from lm.workdir.metrics import cut_back
from lm.workdir.saved_run import holds_run, is_step


def branch(source: str, directory: str, config: Config, say: Callable[[str], None] = print) -> None:
    """Copy the last state that a run shares with one of config.train.steps steps to a new directory, to be resumed.

    A directory that holds a run already, such as one that was branched before, is left as it is.

    Args:
        source: the directory of the run.
        directory: the new directory.
        config: the config of the new run, as the user gave it.
        say: called with a line that names the step of the state.

    Raises:
        UserError: before anything is written, if there is no such state.
    """
    source, directory = Path(source), Path(directory)
    if holds_run(directory):
        return
    try:
        old = read_json(source / "config.json", {"train": {"steps": COUNT}}, "give another run")
    except FileNotFoundError:
        raise UserError(f"--branch_from: {source} holds no run; give the directory of one") from None
    o, steps = config.optimizer, config.train.steps
    if o.schedule != "wsd" or o.decay_steps is not None:
        raise UserError("--branch_from: the config needs optimizer.schedule = 'wsd', and optimizer.decay_steps = none")
    if problems := compare_configs(old, config)[0]:
        raise UserError(f"--branch_from: {source} holds a run of another experiment; set these back:", *problems)
    last = min(stable_steps(n, o) for n in (steps, old["train"]["steps"]))
    found = sorted(int(path.name) for path in (source / "checkpoints").glob("*") if is_step(path.name))
    shared = [step for step in found if step <= last]
    if not shared:
        raise UserError(
            f"--branch_from: {source} has checkpoints of steps {', '.join(map(str, found)) or '-'}, and none up to "
            f"step {last}, after which the learning rates differ; config.checkpoint.every and keep decide which exist"
        )
    step = shared[-1]
    partial = directory / "branch.partial"  # moved when it is complete, so that a failed copy can be repeated
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source / "checkpoints" / f"{step}", partial / "checkpoints" / f"{step}")
    for name in ("metrics.jsonl", "run.json"):
        with contextlib.suppress(FileNotFoundError):  # a run can be resumed without them
            shutil.copyfile(source / name, partial / name)
    cut_back(partial / "metrics.jsonl", step)
    write_text(partial / "config.json", to_json(to_dict(config), indent=2) + "\n")
    for path in sorted(partial.iterdir()):
        path.rename(directory / path.name)
    partial.rmdir()
    say(f"branching from step {step} of {source}")
