"""Stacked runs differ only in seed and continuous hyperparameters; one program trains them together.

The states of all runs are stacked along a leading axis, which is sharded over the devices. Axis
letter: R, runs.

A run equals the same run trained alone up to rounding, not to the bit: XLA compiles another
program, whose sums may be in another order. In ten steps losses differ by about 1e-7 of their value
(tests/sweeps/test_stacked.py).
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lm import parameters
from lm.config import MESH_AXES, Resolved
from lm.cost.memory import memory_per_device
from lm.data import Corpus
from lm.data.entropy_floor import check_loss
from lm.kernels.platform import compiler_options, target
from lm.step import ema_params, eval_step, evaluated_params, init_state, optimizer, train_steps
from lm.sweeps import cpu_memory
from lm.sweeps.results import losses_at_quarters
from lm.training import probes
from lm.training.batch_source import BatchSource
from lm.training.dispatch import Done, dispatches, pipeline
from lm.training.evaluation import mean_losses, mean_of_sums
from lm.training.progress import Progress
from lm.training.signals import Signals
from lm.workdir.checkpoints import Checkpoints

# Optimizer keys that are inputs of the program if set, so that runs may differ in them.
TRACED = ("learning_rate", "adam_learning_rate", "weight_decay", "clip_norm", "final_fraction")
SAVE_EVERY = 120.0  # seconds between two checkpoints


def split_config(config: Resolved) -> tuple[Resolved, dict[str, float]]:
    """Split a config into what the program depends on and the values that are its inputs.

    Returns:
        The config of the program, with seed 0, 1.0 for every traced key, on_nonfinite = "stop", and
        the micro-batches of `cpu_memory.micro_batch_size` if each CPU core is a device; and the
        traced values by name. Two runs share a program if, and only if, these configs are equal.
    """
    values = {name: getattr(config.optimizer, name) for name in TRACED}
    values = {name: value for name, value in values.items() if value}
    micro_batch_size = config.train.micro_batch_size
    if jax.default_backend() == "cpu" and jax.device_count() >= cpu_memory.n_cores():
        n_parameters = parameters.count(parameters.parameter_table(config.model))
        micro_batch_size = cpu_memory.micro_batch_size(config, n_parameters)
    train = dataclasses.replace(
        config.train, on_nonfinite="stop", micro_batch_size=micro_batch_size
    )
    program = dataclasses.replace(config, train=train)
    return with_values(program, dict.fromkeys(values, 1.0), seed=0), values


def with_values(config: Resolved, values: dict, seed: int | None = None) -> Resolved:
    """Return the config with other values of optimizer keys, which may be traced, and this seed."""
    optimizer = dataclasses.replace(config.optimizer, **values)
    seed = config.train.seed if seed is None else seed
    train = dataclasses.replace(config.train, seed=seed)
    return dataclasses.replace(config, optimizer=optimizer, train=train)


class Programs(NamedTuple):
    """The jitted functions of stacked runs, and the shardings of arrays, which begin with R."""

    init: Callable  # (seeds_R) -> states
    steps: Callable  # (states, resident, inputs, values, n_steps) -> (states, metrics (R, k))
    evaluate: Callable  # (params, resident, batch) -> (sums (R,), counts (R,))
    by_run: NamedSharding
    replicated: NamedSharding


@functools.cache
def make_programs(program: Resolved, runs_per_device: int) -> Programs:
    """Make the programs of a config of `split_config`; each device vectorizes its runs (vmap)."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("run",), axis_types=(AxisType.Auto,), devices=jax.devices()
    )
    runs = PartitionSpec("run")
    replicated = PartitionSpec()

    def over_runs(f):
        if runs_per_device > 1:
            return jax.vmap(f)

        # With one run per device vmap only costs time: its batched products are slower on CPU.
        def of_one_run(*trees):
            result = f(*jax.tree.map(lambda a: a[0], trees))
            return jax.tree.map(lambda a: a[None], result)

        return of_one_run

    def over_devices(f, in_specs):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=runs, check_vma=False)

    def init(seeds):
        return over_runs(functools.partial(init_state, program))(seeds)

    def steps(states, resident, inputs, values, n_steps):
        def one_run(state, inputs, own):
            return train_steps(state, resident, inputs, n_steps, with_values(program, own))

        return over_runs(one_run)(states, inputs, values)

    def evaluate(params, resident, batch):
        return over_runs(lambda params: eval_step(params, resident, batch, program))(params)

    changed = program.train.compiler_options
    options = compiler_options(target(), jax.devices()[0].device_kind, changed)
    return Programs(
        jax.jit(over_devices(init, runs)),
        jax.jit(
            over_devices(steps, (runs, replicated, runs, runs, replicated)),
            donate_argnums=0,
            compiler_options=options or None,
        ),
        jax.jit(over_devices(evaluate, (runs, replicated, replicated))),
        NamedSharding(mesh, runs),
        NamedSharding(mesh, replicated),
    )


class StackedRuns:
    """Runs of one program, which continue from the newest checkpoint in their directory.

    Each device vectorizes `runs_per_device` of them. Progress is shown on a stream. Without a
    `WarmStart` for each run, the initial parameters are random. Raises ValueError if the runs do
    not share a program.
    """

    def __init__(
        self,
        configs: list[Resolved],
        corpus: Corpus,
        directory: Path,
        *,
        runs_per_device: int,
        stream,
        warm_starts=(),
    ):
        # Copies of the last run fill the last device's share; their results are dropped.
        padded = configs + [configs[-1]] * (runs_per_device * jax.device_count() - len(configs))
        splits = [split_config(config) for config in padded]
        self.config, names = splits[0]
        if any(program != self.config for program, _ in splits):
            raise ValueError("stacked runs may differ only in seed and in " + ", ".join(TRACED))
        self.configs = configs
        self.corpus = corpus
        self.directory = directory
        self._warm_starts = list(warm_starts)
        self._tokens_per_step = (
            self.config.train.batch_size * self.config.train.seq_len * len(configs)
        )
        self._progress = Progress(self.config.train.steps, stream)
        self._programs = make_programs(self.config, runs_per_device)
        seeds = [config.train.seed for config in padded]
        self._seeds = jax.device_put(np.array(seeds, np.uint32), self._programs.by_run)
        stacked = {name: np.array([values[name] for _, values in splits]) for name in names}
        self._values = jax.device_put(stacked, self._programs.by_run)
        source = BatchSource(corpus.split("train"), self.config)
        self._sources = [source.with_seed(seed) for seed in seeds]
        self._resident = jax.device_put(source.resident, self._programs.replicated)
        # The inputs of an evaluation by (split, max_batches), on the devices.
        self._evaluated: dict[tuple[str, int], tuple] = {}

    def train(self, signals: Signals) -> list[dict] | None:
        """Train to the last step; return the result of each run, or None if a signal came."""
        with (
            closing(self._progress),
            closing(Checkpoints(self.directory, keep=1, say=self._progress.say)) as saved,
        ):
            return self._train(*self._first_states(saved), saved, signals)

    def _first_states(self, checkpoints: Checkpoints) -> tuple[int, Any, dict]:
        """Return (step, states, record) of the newest intact checkpoint, else those of step 0."""
        by_run = self._programs.by_run
        if checkpoints.steps():
            abstract = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_run),
                jax.eval_shape(self._programs.init, self._seeds),
            )
            if restored := checkpoints.restore(abstract):
                return restored
        states = self._programs.init(self._seeds)
        if self._warm_starts:
            params = self._warm_started(states.params)
            start = jax.jit(jax.vmap(optimizer(self.config).init), out_shardings=by_run)
            states = states.replace(params=params, opt_state=start(params))
        return 0, states, {}

    def _warm_started(self, params):
        """Return the stacked parameters, with those that warm starts load instead of the initial."""
        missing = len(self._seeds) - len(self._warm_starts)
        loaded = self._warm_starts + self._warm_starts[-1:] * missing
        params = jax.device_get(params)
        return self._stacked(
            start.into(jax.tree.map(lambda a, i=i: a[i], params)) for i, start in enumerate(loaded)
        )

    def _stacked(self, of_runs: Iterable):
        stacked = jax.tree.map(lambda *a: np.stack(a), *of_runs)
        return jax.device_put(stacked, self._programs.by_run)

    def _train(
        self, first: int, states, record: dict, checkpoints: Checkpoints, signals: Signals
    ) -> list[dict] | None:
        steps = self.config.train.steps
        every = self.config.eval.every
        quarters = {steps * quarter // 4 for quarter in (1, 2, 3)}
        n_runs = len(self.configs)
        # The step of each run's first update that was not finite; 0: none.
        halted_at_R = np.array(record.get("halted_at", [0] * n_runs))
        evaluations = record.get("evaluations", [])
        began = saved = since = time.monotonic()
        speeds: list[float] = []  # tokens per second of each dispatch

        def eval_due(step: int) -> bool:
            is_due = step in quarters or bool(every and step % every == 0)
            return is_due and step < steps

        def save_due(step: int) -> bool:
            return step < steps and time.monotonic() - saved > SAVE_EVERY

        def seconds() -> float:
            return record.get("seconds", 0.0) + time.monotonic() - began

        def save() -> None:
            about = {
                "halted_at": halted_at_R.tolist(),
                "evaluations": evaluations,
                "seconds": seconds(),
            }
            checkpoints.save(step, states, about)

        step = first
        for done in pipeline(
            lambda states, inputs, n: self._programs.steps(
                states, self._resident, inputs, self._values, n
            ),
            states,
            dispatches(first, self.config, quarters),
            self._inputs,
            pause=lambda dispatch: eval_due(dispatch.end) or save_due(dispatch.end),
            stop=lambda: signals.received is not None,
        ):
            speeds.append(
                self._tokens_per_step * done.dispatch.n_steps / max(time.monotonic() - since, 1e-9)
            )
            since = time.monotonic()
            self._show_losses(done, halted_at_R, speeds[-1])
            if done.state is None:
                continue
            states = done.state
            step = done.dispatch.end
            if eval_due(step):
                evaluations.append(
                    self._evaluate(states, step, "validation", self.config.eval.max_batches)
                )
            if save_due(step):
                save()
                saved = time.monotonic()
            since = time.monotonic()
        if signals.received:
            save()
            return None
        splits = "validation", "test", *(f"probe/{name}" for name in self.config.eval.probes or ())
        evaluations += [self._evaluate(states, steps, split, 0) for split in splits]
        about = {
            "seconds": seconds() / n_runs,
            "tokens_per_second": _median(speeds),
            "at_once": n_runs,
        }
        return [
            self._result(i, int(halted_at), evaluations) | about
            for i, halted_at in enumerate(halted_at_R)
        ]

    def tokens_per_second(self) -> float:
        """Measure the speed of a few dispatches, all runs together. Nothing is written."""
        measure = self.speedometer()
        return statistics.median(measure() for _ in range(3))

    def speedometer(self, at_least: float = 0.0) -> Callable[[], float]:
        """Return a function that trains on and returns tokens per second, all runs together.

        The program is compiled here. A measurement is one dispatch, or as many as take `at_least`
        seconds.
        """
        n = self.config.train.steps_per_dispatch
        states = self._programs.init(self._seeds)
        inputs = self._inputs(0, n)

        def dispatch() -> None:
            nonlocal states
            states, metrics = self._programs.steps(
                states, self._resident, inputs, self._values, np.int32(n)
            )
            jax.block_until_ready(metrics)

        def measure() -> float:
            since = time.monotonic()
            n_dispatches = 0
            seconds = 0.0
            while not n_dispatches or seconds < at_least:
                dispatch()
                n_dispatches += 1
                seconds = max(time.monotonic() - since, 1e-9)
            return self._tokens_per_step * n * n_dispatches / seconds

        dispatch()
        return measure

    def _inputs(self, step: int, n_steps: int):
        """Return the inputs of a dispatch, stacked over the runs."""
        return self._stacked(source.train(step, n_steps) for source in self._sources)

    def _show_losses(self, done: Done, halted_at_R: np.ndarray, tokens_per_second: float) -> None:
        """Show the median loss of a dispatch, and record in halted_at_R which runs stopped in it."""
        n_runs = len(self.configs)
        step, n = done.dispatch
        losses = done.metrics["loss"][:n_runs, :n].astype(float)  # a copy
        finite = done.metrics["finite"][:n_runs, :n]
        for i in range(n):
            halted_at_R[(halted_at_R == 0) & ~finite[:, i]] = step + i + 1
            losses[halted_at_R > 0, i] = math.nan
        if done.dispatch.end % self.config.log.every < n:
            alive = losses[np.isfinite(losses[:, n - 1]), n - 1]
            line = {
                "step": done.dispatch.end,
                "loss": float(np.median(alive)) if len(alive) else math.nan,
                "tokens": done.dispatch.end * self._tokens_per_step,
                "tokens_per_second": tokens_per_second,
            }
            self._progress.update(line)

    def _evaluate(self, states, step: int, split: str, max_batches: int) -> dict:
        """Return for each run the sums of nats, and the token counts, of the batches of a split.

        Raises:
            BelowEntropy: the loss of a run is below that of the best possible model.
        """
        if (split, max_batches) not in self._evaluated:
            kind, _, name = split.partition("/")
            if kind == "probe":
                resident = None
                batches = probes.batches(name, self.config, self.corpus)
            else:
                source = BatchSource(self.corpus.split(split), self.config)
                resident = source.resident
                batches = source.evaluation(max_batches)
            # One batch at a time, so that a part of a split and the whole share a program.
            self._evaluated[split, max_batches] = jax.device_put(
                (resident, list(batches)), self._programs.replicated
            )
        resident, inputs = self._evaluated[split, max_batches]
        average = self.config.train.ema is not None
        params = ema_params(states) if average else evaluated_params(states, self.config)
        of_batches = [self._programs.evaluate(params, resident, batch) for batch in inputs]
        sums_R, counts_R = zip(*jax.device_get(of_batches), strict=True)
        sums = np.array(sums_R).T[: len(self.configs)].astype(float).tolist()
        counts = [int(count_R[0]) for count_R in counts_R]
        if split in self.corpus.splits:
            lowest = np.fmin.reduce([math.fsum(row) / sum(counts) for row in sums])  # ignores NaN
            is_estimate = self.config.model.masked_diffusion
            check_loss(self.corpus.split(split), lowest, sum(counts), is_estimate=is_estimate)
        return {"step": step, "split": split, "sums": sums, "counts": counts}

    def _result(self, i: int, halted_at: int, evaluations: list[dict]) -> dict:
        """Return the result of one run.

        A run has diverged if an update was not finite, or if a loss of its final evaluation is not
        finite. Evaluations after that are left out.
        """
        steps = self.config.train.steps
        curve = []
        final = {}
        sources = {}
        for evaluation in evaluations:
            step = evaluation["step"]
            name = evaluation["split"]
            if halted_at and step >= halted_at:
                continue
            nats = map(float, evaluation["sums"][i])  # "NaN" if restored
            sums = list(zip(nats, evaluation["counts"], strict=True))
            if name.startswith("probe/"):
                sources[name], _ = mean_of_sums(sums)
                continue
            split = self.corpus.split(name)
            if step == steps:
                final[name], losses, _ = mean_losses(split, self.config, sums)
                if split.parts and name == "test":
                    sources |= losses
            if name == "validation":
                # The whole split was evaluated last, but each point is over the same windows.
                loss, *_ = mean_losses(split, self.config, sums, self.config.eval.max_batches)
                curve.append((step, loss))
        curve = [point for point in curve if math.isfinite(point[1])]
        finished = not halted_at and all(map(math.isfinite, final.values()))
        return {
            "status": "finished" if finished else "diverged",
            "diverged_step": None if finished else halted_at or steps,
            "steps": halted_at - 1 if halted_at else steps,
            "val_loss": final["validation"] if finished else None,
            "test_loss": final["test"] if finished else None,
            "sources": sources if finished else {},
            "curve": tuple(curve),
            **losses_at_quarters(curve, steps),
        }


def _median(speeds: list[float]) -> float | None:
    """Return the median over the dispatches but the first, which compiles; None without others."""
    return statistics.median(speeds[1:]) if len(speeds) > 1 else None


def group_by_program(configs: dict, size: int) -> list[list]:
    """Group the keys of configs that share a program into lists of at most `size`, in order."""
    groups: dict[Resolved, list] = {}
    for key, config in configs.items():
        groups.setdefault(split_config(config)[0], []).append(key)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


def runs_that_fit(config: Resolved) -> int:
    """Return how many runs to vectorize on each device: as many as fit into it, and one on a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return 1
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    needed = memory_per_device(config, device, dict.fromkeys(MESH_AXES, 1)).total
    return max(1, int(0.8 * limit / needed))
