"""Training lines of metrics.jsonl and of the terminal, with the speed since the last line."""

import math

import jax

from lm.cost.devices import peak_flops
from lm.cost.flops import mfu
from lm.data import batches
from lm.spikes import LIMIT
from lm.training.dispatch import Done
from lm.training.progress import Progress
from lm.training.run import Run
from lm.training.wall_time import WallTime
from lm.workdir.metrics import MetricsWriter


def nonfinite_cause(metrics: dict[str, float]) -> str:
    """Return which part of a rejected step was not finite, from its metrics.

    >>> nonfinite_cause({"loss": 2.5, "grad_norm": float("inf")})
    'the gradient norm is not finite'
    """
    if not math.isfinite(metrics["loss"]):
        return "the loss is not finite"
    if not math.isfinite(metrics["grad_norm"]):
        return "the gradient norm is not finite"
    return "the update is not finite (the loss and the gradient norm are)"


class StepLog:
    """Writes a line every log.every steps, at the last step, and where a step is unusual.

    Unusual is a step that is not finite, or a spike.
    The line of a spike has the window_starts of its batch: see `lm.data.batches`.
    """

    def __init__(self, run: Run, writer: MetricsWriter, progress: Progress, clock: WallTime):
        self._run = run
        self._writer = writer
        self._progress = progress
        self._clock = clock
        self._tokens_per_step = run.config.train.batch_size * run.config.train.seq_len
        device = jax.devices()[0]
        self._peak = peak_flops(device.device_kind, run.config.model.compute_dtype)
        self._since = self._training_seconds()
        self._n_steps = 0

    def write(self, done: Done) -> bool:
        """Log the steps of a dispatch; returns whether the run must stop at one that is not finite."""
        config = self._run.config
        now = self._training_seconds()
        logged = False
        self._n_steps += done.dispatch.n_steps
        speed = self._n_steps * self._tokens_per_step / max(now - self._since, 1e-9)
        for i in range(done.dispatch.n_steps):
            step = done.dispatch.step + i + 1
            finite = bool(done.metrics["finite"][i])
            values = {name: float(x[i]) for name, x in done.metrics.items() if name != "finite"}
            spike = max(values.get("loss_z", 0.0), values.get("grad_norm_z", 0.0)) > LIMIT
            if step % config.log.every == 0 or step == config.train.steps or spike or not finite:
                line = dict(values)
                if spike:
                    train = self._run.corpus.split("train")
                    starts = batches.window_starts(train, config, step - 1)
                    line["window_starts"] = starts.tolist()
                self._write_line(step, line, speed)
                logged = True
            if not finite:
                if config.train.on_nonfinite == "stop":
                    return True
                self._progress.say(
                    f"step {step}: {nonfinite_cause(values)}; the update was skipped"
                )
            elif spike:
                self._progress.say(self._spike_warning(step, values))
        if logged:
            self._since = now
            self._n_steps = 0
        return False

    def _training_seconds(self) -> float:
        """Return the seconds up to now, without those in which the host evaluated or saved."""
        seconds = self._clock.seconds()
        return seconds["steps"] + seconds["data_wait"]

    def _spike_warning(self, step: int, values: dict[str, float]) -> str:
        done = "skipped" if self._run.config.train.on_spike == "skip" else "applied"
        return (
            f"WARNING: step {step} is a spike: loss {values['loss']:.4g} (z = "
            f"{values['loss_z']:.1f}), gradient norm {values['grad_norm']:.4g} (z = "
            f"{values['grad_norm_z']:.1f}); the update was {done}. Its text: python -m lm.show "
            f"--workdir {self._writer.workdir} --step {step}"
        )

    def _write_line(self, step: int, values: dict, tokens_per_second: float) -> None:
        run = self._run
        n_devices = jax.device_count()
        line = {
            "step": step,
            **values,
            "tokens": step * self._tokens_per_step,
            "tokens_per_second": tokens_per_second,
            "flops_per_second": tokens_per_second * run.flops_per_token,
            "mfu": mfu(tokens_per_second, run.flops_per_token, n_devices, self._peak),
            "mfu_full_square": mfu(tokens_per_second, run.flops_full_square, n_devices, self._peak),
        }
        self._writer.write(line)
        self._progress.update(line)
