"""Runs that differ only in seed and continuous hyperparameters, trained together: seeds are an axis of the program.

The states of all members are stacked, spread over the devices along that axis, and stepped by one compiled program.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lm.config import Config
from lm.data import Corpus
from lm.step import eval_step, init_state, train_steps
from lm.training import metrics
from lm.training.batch_source import BatchSource
from lm.training.checkpoints import Checkpoints
from lm.training.loop import Signals, dispatches
from lm.training.progress import Progress

# Optimizer keys that enter the program as inputs, where they are set: runs may differ in them and share it.
TRACED = ("learning_rate", "adam_learning_rate", "weight_decay", "clip_norm", "final_fraction")
SAVE_EVERY = 120.0  # seconds between two checkpoints of a cohort


def split_config(config: Config) -> tuple[Config, dict[str, float]]:
    """(the config with seed 0 and 1.0 for every traced key, the traced values): equal first parts share a program."""
    values = {name: getattr(config.optimizer, name) for name in TRACED}
    values = {name: value for name, value in values.items() if value}
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, on_nonfinite="stop"))
    return with_values(config, dict.fromkeys(values, 1.0), seed=0), values


def with_values(config: Config, values: dict, seed=None) -> Config:
    """The config with optimizer keys and perhaps the seed replaced; values may be traced."""
    train = config.train if seed is None else dataclasses.replace(config.train, seed=seed)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **values), train=train)


class Programs(NamedTuple):
    """The jitted functions of a cohort, in which every array has a leading axis of members, and where arrays live."""

    init: Callable  # (seeds) -> states
    steps: Callable  # (states, corpus, feeds, values, n_steps) -> (states, metrics (R, k))
    evaluate: Callable  # (params, corpus, feeds (n, ...)) -> (sums (R, n), counts (R, n))
    by_member: NamedSharding
    shared: NamedSharding


@functools.cache
def make_programs(program: Config, together: int, n_devices: int | None = None) -> Programs:
    """For together x n_devices (none: all) members of one program: each device vectorizes its share of them (vmap)."""
    devices = jax.devices()[:n_devices]
    mesh = jax.make_mesh((len(devices),), ("member",), axis_types=(AxisType.Auto,), devices=devices)
    members, shared = PartitionSpec("member"), PartitionSpec()

    def over_members(f):
        if together > 1:
            return jax.vmap(f)
        # For one alone vmap would only cost time: its batched products are slower on CPU.
        alone = lambda trees: jax.tree.map(lambda a: a[0], trees)  # noqa: E731
        return lambda *trees: jax.tree.map(lambda a: a[None], f(*alone(trees)))

    def over_devices(f, in_specs):
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=members, check_vma=False)

    def init(seeds):
        return over_members(functools.partial(init_state, program))(seeds)

    def steps(states, corpus, feeds, values, n_steps):
        def member(state, feed, own):
            return train_steps(state, corpus, feed, n_steps, with_values(program, own))

        return over_members(member)(states, feeds, values)

    def evaluate(params, corpus, feeds):
        return over_members(lambda p: jax.lax.map(lambda feed: eval_step(p, corpus, feed, program), feeds))(params)

    return Programs(
        jax.jit(over_devices(init, members)),
        jax.jit(over_devices(steps, (members, shared, members, members, shared)), donate_argnums=0),
        jax.jit(over_devices(evaluate, (members, shared, shared))),
        NamedSharding(mesh, members),
        NamedSharding(mesh, shared),
    )


class Cohort:
    """The members' configs (resolved, of one program), their states, and where both are written.

    carried: what each member starts from; empty where all are freshly initialized.
    workdir: metrics.jsonl (lists over the members) and checkpoints, from which a cohort that was stopped goes on.
    """

    def __init__(
        self,
        configs: list[Config],
        corpus: Corpus,
        workdir: Path,
        *,
        together: int,
        stream,
        carried: list | None = None,
    ):
        splits = [split_config(config) for config in configs]
        self.config, _ = splits[0]
        if any(program != self.config for program, _ in splits):
            raise ValueError("a cohort's members may differ in seed and in " + ", ".join(TRACED))
        self.configs, self.corpus, self.workdir, self._carried = configs, corpus, workdir, carried
        self._progress = Progress(self.config.train.steps, stream)
        # Members that fill up the last device's share are trained and thrown away.
        padded = configs + [configs[-1]] * (together * jax.device_count() - len(configs))
        self._seeds = [config.train.seed for config in padded]
        self._programs = make_programs(self.config, together)
        names, values = splits[0][1], [split_config(config)[1] for config in padded]
        self._values = self._spread({name: np.array([v[name] for v in values]) for name in names})
        self._sources = {}  # by split
        self._halted_at = np.zeros(len(configs), int)  # the step whose update was not finite; 0: none

    def _spread(self, tree):
        dtype = jax.dtypes.canonicalize_dtype(float)
        cast = lambda a: a.astype(dtype) if a.dtype == np.float64 else a  # noqa: E731
        return jax.device_put(jax.tree.map(cast, tree), self._programs.by_member)

    def train(self, signals: Signals) -> bool:
        """Train to the end, from the last checkpoint where there is one; False if a signal came first."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(self.workdir, keep=1, say=self._progress.say)
        try:
            return self._train(signals, checkpoints)
        finally:
            self._progress.close()
            checkpoints.close()

    def _train(self, signals: Signals, checkpoints: Checkpoints) -> bool:
        seeds = self._spread(np.array(self._seeds, np.uint32))
        seconds, first = 0.0, None
        if checkpoints.steps():
            abstract = jax.eval_shape(self._programs.init, seeds)
            abstract = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._programs.by_member), abstract
            )
            first, self.states, meta = checkpoints.restore(abstract)
            self._halted_at, seconds = np.array(meta["halted_at"]), meta["seconds"]
        else:
            self.states = self._programs.init(seeds)
            if self._carried:
                self.states = self.states.replace(params=self._carried_into(self.states.params))
        writer = metrics.MetricsWriter(self.workdir, resume_step=first, tensorboard=False)
        saved = began = time.monotonic()
        steps, speed = self.config.train.steps, _Speed(self)
        for step, n in dispatches(first or 0, self.config):
            source = self._source("train")
            feeds = [source.with_seed(seed).train(step, n) for seed in self._seeds]
            feeds = jax.device_put(jax.tree.map(lambda *a: np.stack(a), *feeds), self._programs.by_member)
            self.states, out = self._programs.steps(self.states, source.resident, feeds, self._values, np.int32(n))
            self._record(step, n, jax.device_get(out), writer, speed)
            made, every = step + n, self.config.eval.every
            if every and made % every == 0 and made < steps:
                self._write_evaluation(writer, made, "validation", self.config.eval.max_batches)
                speed.restart()
            if signals.received or (made < steps and time.monotonic() - saved > SAVE_EVERY):
                writer.fsync()
                seconds += time.monotonic() - began
                checkpoints.save(made, self.states, {"halted_at": self._halted_at.tolist(), "seconds": seconds})
                saved = began = time.monotonic()
                speed.restart()
                if signals.received:
                    writer.close()
                    return False
        for split in ("validation", "test"):
            self._write_evaluation(writer, steps, split, 0)
        self.seconds = seconds + time.monotonic() - began
        writer.close()
        return True

    def _carried_into(self, params):
        """The stacked parameters with each member's carried over ones in their places."""
        carried = self._carried + self._carried[-1:] * (len(self._seeds) - len(self._carried))
        params = jax.device_get(params)
        members = [c.into(jax.tree.map(lambda a, i=i: a[i], params)) for i, c in enumerate(carried)]
        return jax.device_put(jax.tree.map(lambda *a: np.stack(a), *members), self._programs.by_member)

    def _source(self, split: str) -> BatchSource:
        """The batches of a split, which is sent to every device at the first use."""
        if split not in self._sources:
            source = self._sources[split] = BatchSource(self.corpus.split(split), self.config)
            source.resident = jax.device_put(source.resident, self._programs.shared)
        return self._sources[split]

    def _record(self, step: int, n: int, out: dict, writer, speed: "_Speed") -> None:
        n_members = len(self.configs)
        losses, finite = out["loss"][:n_members, :n].astype(float), out["finite"][:n_members, :n]
        for i in range(n):
            self._halted_at[(self._halted_at == 0) & ~finite[:, i]] = step + i + 1
            losses[self._halted_at > 0, i] = math.nan
            writer.write({"step": step + i + 1, "loss": losses[:, i].tolist()})
        tokens_per_second = speed.after(n)
        if (step + n) % self.config.log.every < n:
            alive = losses[np.isfinite(losses[:, n - 1]), n - 1]
            median = float(np.median(alive)) if len(alive) else math.nan
            self._progress.update({"step": step + n, "loss": median, "tokens_per_second": tokens_per_second})

    def _write_evaluation(self, writer, step: int, split_name: str, max_batches: int) -> None:
        """One line: per member the sums of nats and the numbers of tokens of each evaluation batch."""
        source = self._source(split_name)
        feeds = jax.tree.map(lambda *a: np.stack(a), *source.evaluation(max_batches))
        feeds = jax.device_put(feeds, self._programs.shared)
        sums, counts = jax.device_get(self._programs.evaluate(self.states.params, source.resident, feeds))
        sums = [[float(s) for s in row] for row in sums[: len(self.configs)]]
        writer.write({"step": step, "split": split_name, "sums": sums, "counts": [int(n) for n in counts[0]]})

    def results(self) -> list[dict]:
        """What each member came to, from metrics.jsonl; nothing is measured after its update was not finite."""
        lines = metrics.read_metrics(self.workdir / "metrics.jsonl")
        return [self._result(i, lines) for i in range(len(self.configs))]

    def _result(self, i: int, lines: list[dict]) -> dict:
        """A run has diverged when an update was not finite, or a loss of its final evaluation is not."""
        halted_at, steps, curve, final = int(self._halted_at[i]), self.config.train.steps, [], {}
        for line in lines:
            if "split" not in line or (halted_at and line["step"] >= halted_at):
                continue
            sums, counts = line["sums"][i], line["counts"]
            if line["step"] == steps:
                final[line["split"]] = math.fsum(sums) / sum(counts), sums, counts
            if line["split"] == "validation":  # the curve is of the same windows throughout
                n = self.config.eval.max_batches or len(counts)
                curve.append([line["step"], math.fsum(sums[:n]) / sum(counts[:n])])
        finished = not halted_at and all(math.isfinite(loss) for loss, _, _ in final.values())
        test_loss, test_sums, test_counts = final["test"] if finished else (None, None, None)
        return {
            "status": "finished" if finished else "diverged",
            "diverged_at": None if finished else halted_at or steps,
            "train_loss": [line["loss"][i] for line in lines if isinstance(line.get("loss"), list)],
            "validation": [point for point in curve if math.isfinite(point[1])],
            "val_loss": final["validation"][0] if finished else None,
            "test_loss": test_loss,
            "test_sums": test_sums,
            "test_counts": test_counts,
            "steps": halted_at - 1 if halted_at else steps,
        }


class _Speed:
    """Tokens per second of all members together, from dispatch to dispatch."""

    def __init__(self, cohort: Cohort):
        t = cohort.config.train
        self._tokens = t.batch_size * t.seq_len * len(cohort.configs)
        self.restart()

    def restart(self) -> None:
        self._mark = time.monotonic()

    def after(self, n_steps: int) -> float:
        before, self._mark = self._mark, time.monotonic()
        return n_steps * self._tokens / max(self._mark - before, 1e-9)


def cohorts_of(configs: dict, size: int) -> list[list]:
    """The keys of the configs, those of one program together, in their order; at most `size` in one list."""
    groups: dict[tuple, list] = {}
    for key, config in configs.items():
        program, values = split_config(config)
        groups.setdefault((program, tuple(values)), []).append(key)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


def together_on_this_machine(config: Config, corpus: Corpus) -> int:
    """How many members to vectorize on each device: as many as fit in its memory; on CPU one."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if limit is None:
        return 1
    program, values = split_config(config)
    source = BatchSource(corpus.split("train"), program)
    state = jax.eval_shape(functools.partial(init_state, program), 0)
    feed = source.train(0, 1)
    member = lambda state, feed, own: train_steps(state, source.resident, feed, 1, with_values(program, own))  # noqa: E731
    needed = jax.jit(member).lower(state, feed, values).compile().memory_analysis()
    each = needed.temp_size_in_bytes + 2 * needed.output_size_in_bytes
    return max(1, int(0.8 * limit / max(each, 1)))
