"""The training loop: steps in dispatches, and between them metrics, evaluations, checkpoints and signals."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator

import jax
import numpy as np

from lm import parameters
from lm.config import Config
from lm.cost import flops
from lm.data import Corpus
from lm.data.batches import prefetch
from lm.inspection import inspect
from lm.optimizers import learning_rate_schedule
from lm.parallel import processes, sharding
from lm.parallel.mesh import current_mesh
from lm.step import TrainState, take_batch, train_steps
from lm.training import metrics
from lm.training.checkpoints import Checkpoints
from lm.training.evaluation import evaluate
from lm.training.feeds import to_device, train_feed
from lm.training.progress import Progress


class Signals:
    """Notes SIGTERM or Ctrl-C while a run goes on, so that it can save and end; a second Ctrl-C ends it at once."""

    def __init__(self, say):
        self.received, self._say, self._before, self._asked = None, say, {}, 0

    def __enter__(self) -> "Signals":
        if jax.process_count() > 1:  # JAX has a handler for SIGTERM, and tells all processes of it
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, processes.pass_on)
            return self
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def to_stop(self) -> bool:
        """Whether to stop here, between two dispatches or batches; several processes, which all ask, agree on where."""
        self._asked += 1
        if self.received is None and processes.asked_to_stop(self._asked):
            self.received = signal.SIGTERM
            self._say("SIGTERM: saving, then stopping")
        return self.received is not None

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, _frame) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = number
        again = "; press Ctrl-C to stop at once" if number == signal.SIGTERM else "; press Ctrl-C again to stop at once"
        with contextlib.suppress(RuntimeError):  # the signal came while this very stream was being written to
            self._say(f"{signal.Signals(number).name}: saving, then stopping{again}")


def dispatches(first: int, config: Config) -> Iterator[tuple[int, int]]:
    """(step, how many steps) of each dispatch from step `first` on.

    At most steps_per_dispatch, and never past a step at which the host has something to do.
    """
    t = config.train
    periods = (config.eval.every, config.checkpoint.every, config.log.detail_every)
    marks = (t.steps, *((t.profile[0] - 1, t.profile[1]) if t.profile else ()))
    step = first
    while step < t.steps:
        ends = [
            step + t.steps_per_dispatch,
            *(step // p * p + p for p in periods if p),
            *(m for m in marks if m > step),
        ]
        yield step, min(ends) - step
        step = min(ends)


class Loop:
    """A run from the state it has to the end of its steps. `config` is resolved."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        state: TrainState,
        writer: metrics.MetricsWriter,
        progress: Progress,
        checkpoints: Checkpoints,
        meta: dict,
    ):
        self.config, self.corpus, self.state = config, corpus, state
        self.writer, self.progress, self.checkpoints = writer, progress, checkpoints
        self.step = int(state.step)  # steps made, and by now sent
        self.split = corpus.split("train")
        self.mesh = current_mesh()  # feeds are formed in a thread of their own, in which none is in force
        self.resident = to_device(self.split, config.data.device_bytes, self.mesh)
        self._meta, self._wall_before, self._began = meta, meta.get("wall_seconds", 0.0), time.monotonic()
        self._unread = None  # (first step, number of steps, metrics) of the dispatch sent last
        self._mark, self._steps_since = time.monotonic(), 0  # for the speed shown by the next training line
        device = jax.devices()[0]
        self.flops = flops.flops_per_token(config.model, config.train.seq_len)
        self.flops_full_square = flops.flops_per_token(config.model, config.train.seq_len, full_square=True)
        self._peak = flops.peak_flops(device.device_kind, config.model.compute_dtype)
        self._profiling = False

    def feed(self, step: int, n: int) -> dict:
        return train_feed(self.split, self.resident is not None, self.config, step, n, self.mesh)

    def compile(self) -> float:
        """Compile the training program ahead of the first step; returns the seconds it took."""
        began = time.monotonic()
        if self.config.train.debug:
            self.program = lambda state, corpus, feed, n: train_steps(state, corpus, feed, n, self.config)
        else:
            out = (jax.tree.map(lambda a: a.sharding, self.state), sharding.replicated_sharding())
            jitted = jax.jit(train_steps, static_argnames="config", donate_argnames="state", out_shardings=out)
            feed = self.feed(self.step, 1)
            self.program = jitted.lower(self.state, self.resident, feed, np.int32(1), self.config).compile()
        self._inspect = jax.jit(inspect, static_argnames="config", out_shardings=sharding.replicated_sharding())
        return time.monotonic() - began

    def run(self, signals: Signals) -> str:
        """Train; returns "finished", "interrupted" or "nonfinite". `self.state` is then the last finite state."""
        plan = list(dispatches(self.step, self.config))
        feeds = prefetch(lambda d: self.feed(*d), plan)
        stopped = self._between(signals)
        self._mark = time.monotonic()
        for (first, n), feed in zip(plan, feeds, strict=False):
            if stopped := stopped or ("interrupted" if signals.to_stop() else None):
                break
            self.state, out = self.program(self.state, self.resident, feed, np.int32(n))
            self.step = first + n
            previous, self._unread = self._unread, (first, n, out)
            stopped = self._read(previous) or self._between(signals)
        feeds.close()
        stopped = self._read_all() or stopped
        self._profile(stop=True)
        self.step = int(self.state.step)
        return stopped or "finished"

    # ---- Metrics of dispatches -----------------------------------------------------------------------------------

    def _read_all(self) -> str | None:
        unread, self._unread = self._unread, None
        return self._read(unread)

    def _read(self, dispatch) -> str | None:
        """Log a dispatch that was sent; "nonfinite" if the run must stop because an update was not finite."""
        if dispatch is None:
            return None
        first, n, out = dispatch
        out = jax.device_get(out)  # waits until the dispatch is done
        t, every = self.config.train, self.config.log.every
        now = time.monotonic()
        self._steps_since += n
        speed = self._steps_since * t.batch_size * t.seq_len / max(now - self._mark, 1e-9)
        logged = False
        for i in range(n):
            step = first + i + 1
            finite = bool(out["finite"][i])
            if step % every == 0 or step == t.steps or not finite:
                logged = True
                self._write_training_line(
                    step, {name: float(x[i]) for name, x in out.items() if name != "finite"}, speed
                )
            if not finite and t.on_nonfinite == "stop":
                self._unread = None  # a dispatch sent since then made no steps: there is nothing to log
                return "nonfinite"
            if not finite:
                self.progress.say(f"step {step}: the loss or a gradient is not finite; the update was withheld")
        if logged:
            self._mark, self._steps_since = now, 0
        return None

    def _write_training_line(self, step: int, values: dict, tokens_per_second: float) -> None:
        t = self.config.train
        line = {
            "step": step,
            **values,
            "tokens": step * t.batch_size * t.seq_len,
            "tokens_per_second": tokens_per_second,
            "flops_per_second": tokens_per_second * self.flops,
            "mfu": flops.mfu(tokens_per_second, self.flops, jax.device_count(), self._peak),
            "mfu_full_square": flops.mfu(tokens_per_second, self.flops_full_square, jax.device_count(), self._peak),
        }
        self.writer.write(line)
        self.progress.update(line)

    # ---- Between dispatches --------------------------------------------------------------------------------------

    def _between(self, signals: Signals) -> str | None:
        """What is due after `self.step` steps and not yet done; "nonfinite" or "interrupted" if the run must stop."""
        c, step, is_best = self.config, self.step, False
        due = {
            "eval": c.eval.every and step % c.eval.every == 0 and 0 < step < c.train.steps,
            "checkpoint": c.checkpoint.every and step % c.checkpoint.every == 0 and 0 < step < c.train.steps,
            "detail": c.log.detail_every and step % c.log.detail_every == 0 and step < c.train.steps,
        }
        self._profile()
        if not any(due.values()):
            return None
        if stopped := self._read_all():
            return stopped
        if due["detail"] and not self._written(step, "detail"):
            self._write_details()
        if due["eval"]:
            line = self.evaluation("validation", signals, c.eval.max_batches)
            if line is None:
                return "interrupted"
            is_best = self.checkpoints.score(step, line["loss"])
        if due["checkpoint"] or is_best:
            self.save()
        self._mark, self._steps_since = time.monotonic(), 0
        return None

    def _written(self, step: int, kind: str) -> dict | None:
        """The line of this step that has the key or split `kind`, if the run wrote it before it was resumed."""
        lines = self.writer.lines_of(step)
        return next((line for line in lines if line.get("split") == kind or kind in line), None)

    def evaluation(self, name: str, signals: Signals, max_batches: int = 0) -> dict | None:
        """The evaluation line of a split at this step, made and written unless it is there; None if a signal came."""
        if line := self._written(self.step, name):
            return line
        split = self.corpus.split(name)
        found = evaluate(self.state.params, split, self.config, max_batches=max_batches, stop=signals.to_stop)
        if found is None:
            return None
        line = {"step": self.step, "split": name, "data": self.corpus.name, **found}
        self.writer.write(line)
        self.progress.evaluation(line)
        return line

    def score_last(self, val_loss: float) -> None:
        """Tell the checkpoints how good the last step is, by the measure that the steps before it were judged by."""
        c = self.config.eval
        if c.every and c.max_batches:
            split = self.corpus.split("validation")
            val_loss = evaluate(self.state.params, split, self.config, max_batches=c.max_batches)["loss"]
        self.checkpoints.score(self.step, val_loss)

    def save(self) -> None:
        """Start writing a checkpoint of the state, unless it has one; the metrics up to it are on the disk first."""
        self.writer.fsync()
        state = self.state.replace(halted=jax.numpy.zeros_like(self.state.halted))
        self.checkpoints.save(self.step, state, self._meta | {"wall_seconds": self.wall_seconds()})

    def wall_seconds(self) -> float:
        """Seconds this run has taken, over all of its starts."""
        return self._wall_before + time.monotonic() - self._began

    def _batch(self, step: int) -> dict:
        feed = {name: array[0] for name, array in self.feed(step, 1).items()}
        return take_batch(self.resident, feed, self.config.train.seq_len)

    def _write_details(self) -> None:
        found = self._inspect(self.state, self._batch(self.step), self.config)
        self.writer.write({"step": self.step, "detail": jax.tree.map(lambda x: np.asarray(x).tolist(), found)})

    def _profile(self, stop: bool = False) -> None:
        """Start or stop the trace of config.train.profile, if this is the step for it."""
        if not self.config.train.profile or not processes.is_first():
            return
        first, last = self.config.train.profile
        if self._profiling and (stop or self.step >= last):
            jax.block_until_ready(self.state.step)
            jax.profiler.stop_trace()
            self._profiling = False
            self.progress.say(f"profile of steps {first} to {last}: {self.writer.workdir / 'profile'}")
        elif not stop and self.step == first - 1:
            jax.block_until_ready(self.state.step)
            jax.profiler.start_trace(self.writer.workdir / "profile")
            self._profiling = True

    def nonfinite_report(self) -> list[str]:
        """What to tell about an update that was not finite: the step's learning rate, and norms by parameter group."""
        found = jax.device_get(
            self._inspect(self.state.replace(halted=np.bool_(False)), self._batch(self.step), self.config)
        )
        sizes = {path: p.size for path, p in parameters.parameter_table(self.config.model).items()}
        updates = self.step - int(self.state.skipped)
        rate = learning_rate_schedule(self.config.optimizer, self.config.train.steps)(updates)
        lines = [
            f"learning rate {float(rate):.4g}; parameters before the step, and its gradients:",
            f"{'group':<24} {'parameter norm':>15} {'gradient norm':>15}",
        ]
        groups = itertools.groupby(sizes, key=lambda path: path.rpartition("/")[0] or path)
        for group, paths in groups:
            norms = [0.0, 0.0]
            for path in paths:
                for k, kind in enumerate(("parameters", "gradients")):
                    norms[k] += float(np.mean(np.square(np.asarray(found[kind][path], np.float64)))) * sizes[path]
            lines.append(f"{group:<24} {norms[0] ** 0.5:>15.4g} {norms[1] ** 0.5:>15.4g}")
        return lines
