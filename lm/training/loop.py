"""The training loop of a run: dispatches of steps, between them evaluations and checkpoints."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lm.data import batches
from lm.kernels import platform
from lm.parallel import processes, sharding
from lm.step import TrainState, ema_params, evaluated_params, train_steps
from lm.system.errors import UserError, first_line
from lm.training.batch_source import BatchSource
from lm.training.diagnostics import details
from lm.training.dispatch import dispatches, due, pipeline
from lm.training.evaluation import evaluate
from lm.training.progress import Progress
from lm.training.run import Run
from lm.training.scores import Scorer
from lm.training.signals import Signals
from lm.training.standstill import Standstill
from lm.training.step_log import StepLog
from lm.training.unused import unused_parameters
from lm.training.wall_time import WallTime
from lm.workdir.checkpoints import Checkpoints
from lm.workdir.metrics import MetricsWriter, best_step


@dataclasses.dataclass(frozen=True)
class Loop:
    """The parts of a run's training loop; the train state is passed from call to call."""

    run: Run
    writer: MetricsWriter
    progress: Progress
    checkpoints: Checkpoints
    signals: Signals
    program: Callable[[TrainState, Any, np.int32], tuple[TrainState, dict]]  # of `compile_steps`
    sources: dict[str, BatchSource]  # by split: "train", and each other split once it is evaluated
    record: dict  # saved with every checkpoint: config, data, tokenizer
    scorers: dict[str, Scorer]  # by kind, "probe" and "task"
    clock: WallTime  # over all starts of the run

    def train(self, state: TrainState) -> tuple[TrainState, str]:
        """Train to the last step; returns the last finite state and a status.

        The status is "finished", "stopped" (eval.patience), "interrupted" or "nonfinite".
        """
        config = self.run.config
        first = int(state.step)
        log = StepLog(self.run, self.writer, self.progress, self.clock)
        still = Standstill(config, self.run.table)
        still.warning(first, state.params)
        status = None

        def stop() -> bool:
            return status is not None or self.signals.to_stop()

        with contextlib.ExitStack() as profile, self.clock.during("steps"):
            # a resumed run finishes what was due
            status = self._between_dispatches(state, first, profile)
            for done in pipeline(
                self.program,
                state,
                dispatches(first, config),
                self.sources["train"].train,
                pause=lambda dispatch: bool(due(dispatch.end, config)),
                stop=stop,
                waiting=lambda: self.clock.during("data_wait"),
            ):
                if status != "nonfinite" and log.write(done):
                    status = "nonfinite"
                if done.state is not None:
                    state = done.state
                    if warning := still.warning(done.dispatch.end, state.params):
                        self.progress.say(warning)
                    status = status or self._between_dispatches(state, done.dispatch.end, profile)
        at_end = int(state.step) == config.train.steps
        return state, status or ("finished" if at_end else "interrupted")

    def _between_dispatches(
        self, state: TrainState, step: int, profile: contextlib.ExitStack
    ) -> str | None:
        """Do what is due after `step` steps and was not done; return a status if the run ends."""
        tasks = due(step, self.run.config)
        c = self.run.config.eval
        is_best = False
        if "profile" in tasks:
            self._start_or_stop_profile(state, step, profile)
        if "detail" in tasks and not any("detail" in line for line in self.writer.lines_of(step)):
            with self.clock.during("other"):
                detail = details(self.run, self.sources["train"], state)
                self.writer.write({"step": step, "detail": detail})
        if "eval" in tasks:
            if not self.evaluate_split(state, step, "validation", c.max_batches):
                return "interrupted"
            self.checkpoints.val_losses = self.writer.validation_losses()
            is_best = self.checkpoints.is_best(step)
            self.write_scores("probe", state, step)
        if "checkpoint" in tasks or is_best:
            self.save(state, step)
        if "tasks" in tasks:  # after the checkpoint: a task's own code may fail
            self.write_scores("task", state, step)
        losses = self.writer.validation_losses()
        if "eval" in tasks and is_out_of_patience(losses, c.patience):
            self.progress.say(
                f"step {step}: no smaller validation loss in eval.patience evaluations; stopped"
            )
            return "stopped"
        return None

    def _start_or_stop_profile(
        self, state: TrainState, step: int, profile: contextlib.ExitStack
    ) -> None:
        """End the trace of train.profile if there is one, and start it if this is the step for it."""
        profile.close()
        first, last = self.run.config.train.profile or ()
        if step == first - 1 and processes.is_first():
            jax.block_until_ready(state.step)
            folder = self.writer.workdir / "profile"
            profile.callback(self.progress.say, f"profile of steps {first} to {last}: {folder}")
            profile.enter_context(jax.profiler.trace(folder))

    def evaluate_split(
        self, state: TrainState, step: int, split: str, max_batches: int = 0
    ) -> dict | None:
        """Return the evaluation line of a split at this step, or None if a signal came.

        It is computed and written unless that was done before. max_batches = 0 is the full split.
        """
        if split not in self.sources:
            self.sources[split] = BatchSource(self.run.corpus.split(split), self.run.config)
        source = self.sources[split]
        windows = batches.n_eval_windows(source.split, source.config, max_batches)
        for line in self.writer.lines_of(step):
            if line.get("split") == split and line.get("windows") == windows:
                return line
        line = {"step": step, "split": split, "windows": windows, "data": self.run.corpus.name}
        measure = functools.partial(
            evaluate, source=source, max_batches=max_batches, stop=self.signals.to_stop
        )
        with self.clock.during("evaluation"):
            metrics = measure(evaluated_params(state, self.run.config))
            if metrics is None:
                return None
            line |= metrics
            if state.ema is not None:
                of_average = measure(ema_params(state))
                if of_average is None:
                    return None
                line["ema_loss"] = of_average["loss"]
        return self.write_evaluation(line)

    def write_evaluation(self, line: dict) -> dict:
        """Write and show an evaluation line, unless it was written before a resumption; returns it."""
        if line not in self.writer.lines_of(line["step"]):
            self.writer.write(line)
            known = self.sources.get(line["split"])
            whole = known and batches.n_eval_windows(known.split, known.config, 0)
            self.progress.evaluation(line, is_part=bool(whole) and line["windows"] < whole)
        return line

    def write_scores(self, kind: str, state: TrainState, step: int) -> None:
        """Write and show the scores of a kind, also of the average, unless that was done before."""
        scorer = self.scorers.get(kind)
        known = [name for line in self.writer.lines_of(step) for name in line.get("scores", {})]
        if scorer is None or any(name.startswith(f"{kind}/") for name in known):
            return
        scores = {}
        with self.clock.during("evaluation"):
            for name, x in scorer(evaluated_params(state, self.run.config)).items():
                scores[f"{kind}/{name}"] = x
            for name, x in scorer(ema_params(state)).items() if state.ema is not None else ():
                scores[f"{kind}/{name}/ema"] = x
        self.writer.write({"step": step, "scores": scores})
        self.progress.evaluation({"step": step, "split": "scores", **scores})

    def save(self, state: TrainState, step: int) -> None:
        """Start writing a checkpoint unless the step has one; metrics up to it are on disk first."""
        with self.clock.during("saving"):
            self.writer.fsync()
            self.checkpoints.val_losses = self.writer.validation_losses()
            state = state.replace(halted=jax.numpy.zeros_like(state.halted))
            gap = step - self.writer.last_step(step) + 1  # see `missing_lines`
            record = self.record | {"log_every": gap, "seconds": self.clock.seconds()}
            self.checkpoints.save(step, state, record)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written."""
        with self.clock.during("saving"):
            self.checkpoints.wait()


def is_out_of_patience(losses: dict[int, float], patience: int) -> bool:
    """Return whether `patience` evaluations, if not 0, followed the one with the smallest loss.

    >>> [is_out_of_patience({2: 3.0, 4: 2.5, 6: 2.75, 8: 2.6}, patience) for patience in (0, 2, 3)]
    [False, True, False]
    """
    best = best_step(losses, losses)
    return bool(patience) and best is not None and sum(step > best for step in losses) >= patience


def compile_steps(run: Run, source: BatchSource, state: TrainState):
    """Compile the training program ahead of the first step.

    Returns:
        The program (state, inputs, n_steps) -> (state, metrics), which donates its state; the
        compiled object (None with train.debug, which does not compile); and what
        `unused_parameters` says of it.

    Raises UserError if XLA does not know an option of config.train.compiler_options.
    """
    config = run.config
    if config.train.debug:

        def eager(state, inputs, n):
            return train_steps(state, source.resident, inputs, n, config)

        return eager, None, None
    shardings = (jax.tree.map(lambda a: a.sharding, state), sharding.replicated_sharding())
    jitted = jax.jit(
        train_steps, static_argnames="config", donate_argnames="state", out_shardings=shardings
    )
    # only their shapes are used; a mixture may have no window beyond the last step
    inputs = source.train(0, 1)
    traced = jitted.trace(state, source.resident, inputs, np.int32(1), config)
    kind = jax.devices()[0].device_kind
    changed = config.train.compiler_options
    options = platform.compiler_options(platform.target(), kind, changed) or None
    try:
        compiled = traced.lower().compile(options)
    except jax.errors.JaxRuntimeError as error:
        # An option is unknown, or its value is not of its type.
        if "compile option" in str(error) or "setting option" in str(error):
            raise UserError(f"config.train.compiler_options: {first_line(error)}") from None
        raise

    def program(state, inputs, n):
        return compiled(state, source.resident, inputs, n)

    return program, compiled, unused_parameters(traced, state)
