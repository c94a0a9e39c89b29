"""One training job, from a checked config to an exit code. `train` reads straight down."""

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm import parameters
from lm.baselines.ngrams import unigram_loss
from lm.checking.new_ideas import check_new_ideas
from lm.config import Config, to_dict
from lm.cost.memory import attention_implementation
from lm.cost.units import si
from lm.data import mixtures, shards
from lm.parallel import processes
from lm.parallel.mesh import current_mesh, use_mesh
from lm.parallel.sharding import replicate, shard_state
from lm.spikes import WINDOW, empty_window
from lm.step import TrainState, init_state, state_of_step_0
from lm.training.batch_source import BatchSource
from lm.training.evaluation import compile_evaluation
from lm.training.finish import Sample, finish, stop_early
from lm.training.loop import Loop, compile_steps
from lm.training.memory import (
    check_arrays,
    check_program,
    report_out_of_memory,
    rows_of_a_micro_batch,
)
from lm.training.progress import Progress
from lm.training.run import Run, describe_parameters, prepare
from lm.training.scores import Scorer, scorers
from lm.training.signals import Signals
from lm.training.wall_time import WallTime
from lm.training.warm_start import WarmStart, warm_start
from lm.workdir.checkpoints import Checkpoints, read_metas
from lm.workdir.directory import Workdir, default_workdir
from lm.workdir.metrics import MetricsWriter, best_step
from lm.workdir.mirror import Mirror
from lm.workdir.saved_run import SETTINGS, check_checkpoints, newest_checkpoint


def train(
    config: Config,
    directory: str | None,
    *,
    sample: Sample,
    task_scorer: Callable[[Run, Path], Scorer],
    resume: bool = False,
    verbose: bool = False,
    mirror: Mirror | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Train a model, or resume its training, and return the exit code.

    Args:
        config: a checked config, as returned by lm/command_line/loading.py.
        directory: the run's directory; None: a new one, runs/NAME-TIME.
        sample, task_scorer: what the run does with its model beside training it, see
            lm/scoring/in_training.py.
        resume: continue the run that `directory` holds, if any.
        verbose: show the table of parameters.
        mirror: where the directory is copied to.
        notes: lines about the config, shown once the run is known to be possible.

    Raises:
        UserError: before anything is written, if the config does not fit the data, the devices or
            the directory.
    """
    stream = sys.stdout
    if not processes.is_first():
        stream = open(os.devnull, "w")  # noqa: SIM115 - lasts as long as the process
    progress = Progress(config.train.steps, stream)

    # ---- The run: data, resolved config, mesh, parameters ----------------------------------------
    run = prepare(config, progress.say)
    check_arrays(run.config, run.mesh_sizes)
    if checked := check_new_ideas(run.config):
        progress.say(checked)
    workdir = Workdir(
        processes.from_first(lambda: str(directory or default_workdir(run.config.name)))
    )
    resuming = resume and processes.from_first(has_checkpoint, workdir.path, run)
    scoring = scorers(run, workdir.path, task_scorer)
    with use_mesh(run.mesh_sizes):
        loaded = None if resuming else warm_start(run.config, run.corpus, progress.say)
    with (
        closing(progress),
        closing(workdir),
        jax.disable_jit(config.train.debug),
        use_mesh(run.mesh_sizes),
    ):
        kind = jax.devices()[0].device_kind
        devices = {"processes": jax.process_count(), "devices": jax.device_count(), "device": kind}
        started = processes.from_first(
            workdir.start, config, data=run.data_facts, resume=resume, devices=devices
        )
        for line in (*started, *notes):
            progress.say(line)
        if mirror:
            processes.from_first(mirror.claim, config)
        show_run(run, workdir, progress, verbose=verbose)
        with (
            Signals(progress.say) as signals,
            closing(
                Checkpoints(workdir.path, keep=config.checkpoint.keep, say=progress.say)
            ) as checkpoints,
            closing(mirror) if mirror else nullcontext(),
            processes.fail_together(),
            # inside fail_together, so that one of several processes exits with 2, too
            report_out_of_memory(),
        ):
            # ---- The state: restored, warm-started or new ----------------------------------------
            state, record = first_state(run, checkpoints if resume else None, loaded)
            resumed_at = int(state.step) if record else None
            if record:
                progress.say(f"resuming at step {resumed_at}")
            if mirror and processes.is_first():
                mirror.start(checkpoints.hold, progress.say)
            with closing(open_writer(run, workdir.path, resumed_at)) as writer:
                checkpoints.protected = protected_steps(
                    run, checkpoints, writer, record, resumed_at, progress.say
                )
                # ---- The steps -------------------------------------------------------------------
                clock = WallTime(record.get("seconds", {}))
                source = BatchSource(run.corpus.split("train"), run.config)
                with clock.during("compilation"):
                    program = compile_and_check(run, source, state, progress.say)
                loop = Loop(
                    run=run,
                    writer=writer,
                    progress=progress,
                    checkpoints=checkpoints,
                    signals=signals,
                    program=program,
                    sources={"train": source},
                    record=record | record_of(run, checkpoints.protected, loaded),
                    scorers=scoring,
                    clock=clock,
                )
                state, status = loop.train(state)
                # ---- The end: final evaluations, summary and sample, or a report -----------------
                if status in ("finished", "stopped"):
                    status = finish(loop, state, workdir, status, sample)
                if status in ("interrupted", "nonfinite"):
                    stop_early(loop, state, workdir, status)
            is_copied = not mirror or processes.from_first(mirror.finish)
    if status == "nonfinite":
        return 3
    if status == "interrupted":
        return 128 + (signals.received or 0)
    return 0 if is_copied else 1


def open_writer(run: Run, directory: Path, resumed_at: int | None) -> MetricsWriter:
    """Return the writer of the run's metrics; lines after the step of a resumption are dropped."""
    log = run.config.log
    return MetricsWriter(
        directory,
        resume_step=resumed_at,
        tensorboard=log.tensorboard,
        wandb={"name": run.config.name, "config": to_dict(run.config)} if log.wandb else None,
        writes=processes.is_first(),
    )


def protected_steps(
    run: Run,
    checkpoints: Checkpoints,
    writer: MetricsWriter,
    record: dict,
    resumed_at: int | None,
    say,
) -> set[int]:
    """Return the steps whose checkpoints are always kept, because one of them may be the best.

    `record` is that of the checkpoint at which the run resumes.
    """
    protected = set(record.get("protected", ()))
    if resumed_at and (warning := writer.missing_lines(resumed_at, record)):
        say(warning)
        return protected | set(checkpoints.steps())
    if record and evaluated_windows(record["config"]) != evaluated_windows(to_dict(run.config)):
        # No loss from now on is compared with that of the best step so far.
        protected.add(best_step(checkpoints.steps(), writer.validation_losses()) or 0)
    return protected


def record_of(run: Run, protected: set[int], loaded: WarmStart | None) -> dict:
    """Return what is saved with every checkpoint, beside the record that the run resumed from."""
    corpus = run.corpus
    record = {
        "config": to_dict(run.config),
        "data": corpus.name,
        "data_fingerprint": corpus.fingerprint,
        "tokenizer": corpus.tokenizer and corpus.tokenizer.to_json(),
        "protected": sorted(protected),
    }
    if loaded:
        record[SETTINGS] = loaded.settings
    return record


def compile_and_check(run: Run, source: BatchSource, state: TrainState, say):
    """Return the training program of `compile_steps`; refuse it if a device has too little memory."""
    say("compiling the training step")
    began = time.monotonic()
    program, compiled, unused = compile_steps(run, source, state)
    if compiled:
        check_program("training", compiled, run.config, run.mesh_sizes)
        check_evaluation(run, state)
    say(f"compiled in {time.monotonic() - began:.1f} s")
    if unused:
        say(f"WARNING: {unused}")
    return program


def check_evaluation(run: Run, state: TrainState) -> None:
    """Raise UserError if an evaluation with more sequences than a micro-batch lacks memory."""
    evaluated = [name for name in ("validation", "test") if name in run.corpus.splits]
    n_parts = run.mesh_sizes["replica"] * run.mesh_sizes["fsdp"]
    rows = (run.config.eval.batch_size or run.config.train.batch_size) // n_parts
    if not evaluated or rows <= rows_of_a_micro_batch(run.config, run.mesh_sizes):
        return
    source = BatchSource(run.corpus.split(evaluated[0]), run.config)
    compiled = compile_evaluation(state.params, source)
    check_program("evaluation", compiled, run.config, run.mesh_sizes)


def has_checkpoint(directory: Path, run: Run) -> bool:
    """Return whether the directory has a checkpoint; raise UserError if one is of another run."""
    if newest_checkpoint(directory) is None:
        return False
    check_checkpoints(directory, read_metas(directory), run.config, run.data_facts)
    return True


def show_run(run: Run, workdir: Workdir, progress: Progress, *, verbose: bool) -> None:
    """Show what is trained, on what, and where; save the tokenizer in the directory."""
    if run.corpus.tokenizer is not None:
        workdir.write_text("tokenizer.json", run.corpus.tokenizer.to_json())
    device: Any = jax.local_devices()[0]
    n = jax.device_count()
    devices = f"{n} x {device.device_kind}" if n > 1 else device.device_kind
    progress.say(f"workdir {workdir.path}  data {run.corpus.name}  device {devices}")
    if n > 1:
        mesh = " x ".join(f"{axis} {size}" for axis, size in run.mesh_sizes.items())
        progress.say(f"mesh {mesh}, {jax.process_count()} processes")
    if run.config.model.vocab_size % run.mesh_sizes["tensor"]:
        progress.say(
            f"WARNING: tensor = {run.mesh_sizes['tensor']} does not divide vocab_size = "
            f"{run.config.model.vocab_size}: embeddings, head and logits are replicated; a larger "
            "config.model.vocab_size would be sharded"
        )
    stretches = mixtures.describe(run.corpus.split("train").parts, run.config)
    chats = [line for split in run.corpus.splits.values() for line in split.describe_chats()]
    for line in (*shards.describe(run.corpus.record), *chats, *stretches):
        progress.say(line)
    if verbose:
        progress.say(describe_parameters(run.table))
    parts = [
        f"{parameters.count(run.table):,} parameters",
        si(run.flops_per_token, "FLOPs per token"),
    ]
    baseline = unigram_loss(run.corpus, "validation", run.config.model.vocab_size)
    if baseline is not None:
        parts.append(f"unigram baseline {baseline:.2f}")
    progress.say("  ".join(parts))
    has_choice = device.platform != "cpu"  # a CPU has no other kernels
    if run.config.model.attention == "auto" and (verbose or has_choice):
        name, reason = attention_implementation(run.config, device, run.mesh_sizes)
        progress.say(f"attention: {name}; {reason}")


def evaluated_windows(config: dict) -> int:
    """Return how many windows are evaluated during training; 0: all."""
    batch_size = config["eval"]["batch_size"] or config["train"]["batch_size"]
    return config["eval"]["max_batches"] * batch_size


def first_state(
    run: Run, checkpoints: Checkpoints | None, loaded: WarmStart | None
) -> tuple[TrainState, dict]:
    """Return the state and record of the newest intact checkpoint, else the state of step 0, {}.

    Parameters that were loaded from another run replace initial values.
    """
    init = functools.partial(init_state, run.config)
    seed = np.uint32(run.config.train.seed)  # JAX would make an int an int32, which overflows
    abstract = shard_state(jax.eval_shape(init, seed), run.table)
    if checkpoints and (restored := checkpoints.restore(abstract, _as_saved)):
        _, state, record = restored
        # This start may change config.train.on_spike.
        if abstract.recent is None:
            state = state.replace(recent=None)
        elif state.recent is None:
            state = state.replace(recent=replicate(current_mesh(), np.asarray(empty_window())))
        return state, record
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    state = jax.jit(init, out_shardings=shardings)(seed)  # sharded from the start
    if loaded:
        start = jax.jit(functools.partial(state_of_step_0, run.config), out_shardings=shardings)
        state = start(loaded.into(state.params), seed)
    return state, {}


def _as_saved(abstract: TrainState, meta: dict) -> TrainState:
    """Return the abstract state of a checkpoint; with on_spike it has a window of losses."""
    was_on = meta["config"]["train"].get("on_spike", "none") != "none"
    window = jax.ShapeDtypeStruct((2, WINDOW), "float32", sharding=abstract.step.sharding)
    return abstract.replace(recent=window if was_on else None)
