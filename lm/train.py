"""Train a language model: python -m lm.train --config configs/shakespeare.py

This file reads as the story of a run: command line, config, data, workdir, state, loop, end.
"""

import dataclasses
import json
import os
import sys
from contextlib import closing
from pathlib import Path

from lm.config import Config, to_dict
from lm.config.command_line import command_line
from lm.errors import Passing, UserError
from lm.files import to_json
from lm.runtime import log_to, start_jax
from lm.training import workdir as runs


def main(argv: list[str] | None = None) -> int:
    try:
        arguments, config = command_line(argv)
        if arguments.plan:
            return plan(config, arguments.device)
        return train(config, arguments.workdir, resume=arguments.resume, others=arguments)
    except UserError as error:
        return end(error.code, str(error))
    except OSError as error:  # a full disk, a directory that cannot be read
        return end(Passing.code, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        return end(130, "interrupted before the first step; nothing was trained")


def end(code: int, why: str) -> int:
    """The exit code of a run that did not come to be; jax need not have been imported. One of several ends here."""
    print(why, file=sys.stderr, flush=True)
    if processes := sys.modules.get("lm.parallel.processes"):
        processes.leave(code)
    return code


def train(config: Config, workdir: str | None, *, resume: bool = False, others=None) -> int:
    """A whole run; returns the exit code. Raises UserError, before anything is written, for what cannot work.

    others: the command line's arguments that tell how to reach other processes.
    """
    if workdir:
        runs.check(workdir, config, resume=resume)
    if resume and is_finished(Path(workdir), config):
        print(f"{workdir} holds a finished run of {config.train.steps} steps; there is nothing left to do")
        return 0
    jax = start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    if others is not None:  # before anything else uses a device
        from lm.parallel import processes

        processes.start(others.coordinator_address, others.num_processes, others.process_id, others.multihost)
    from lm import data, parameters
    from lm.parallel import processes
    from lm.parallel.mesh import check_mesh, use_mesh
    from lm.training.progress import Progress
    from lm.training.run import resolve_config
    from lm.training.warm_start import carry_over

    progress = Progress(config.train.steps, sys.stdout if processes.is_first() else open(os.devnull, "w"))  # noqa: SIM115
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=progress.say)
    resolved = resolve_config(config, corpus)
    sizes = check_mesh(resolved, jax.device_count())
    processes.check_equal("the data", corpus.fingerprint)
    processes.check_equal("the config", to_json(to_dict(resolved)))
    goes_on = resume and processes.from_first(lambda: runs.steps_made(workdir))
    with use_mesh(sizes):
        carried = None if goes_on else carry_over(resolved, corpus, progress.say)
    if corpus.name.endswith("(fallback)"):  # whatever bears the run's name must not claim the text that was asked for
        resolved = dataclasses.replace(resolved, name=f"{config.name}-{config.data.offline}")
    with (
        take(workdir, config, resolved.name, corpus, resume) as run,
        jax.disable_jit(config.train.debug),
        use_mesh(sizes),
        log_to(progress.say),
    ):
        for notice in run.notices:
            progress.say(notice)
        if corpus.tokenizer is not None:
            run.write_text("tokenizer.json", corpus.tokenizer.to_json())
        n, kind = jax.device_count(), jax.devices()[0].device_kind
        progress.say(f"workdir {run.workdir}  data {corpus.name}  device {f'{n} x ' if n > 1 else ''}{kind}")
        if n > 1:
            spread = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            progress.say(f"mesh {spread}, {jax.process_count()} processes")
        if resolved.model.vocab_size % sizes["tensor"]:
            progress.say(
                f"NOTICE: tensor = {sizes['tensor']} does not divide the vocabulary of {resolved.model.vocab_size}: "
                "embeddings, head and logits are whole on each; a larger config.model.vocab_size would be shared"
            )
        progress.say(describe(parameters.parameter_table(resolved.model)))
        if (unigram := data.unigram_loss(corpus, "validation", resolved.model.vocab_size)) is not None:
            progress.say(f"validation: {unigram:.4f} nats per token by counting tokens alone")
        return carry_out(resolved, corpus, run, progress, resume, carried)


def take(workdir: str | None, config: Config, name: str, corpus, resume: bool) -> runs.Run:
    """The run's directory, taken by the first process for all; raises UserError in all where it cannot be."""
    from lm.parallel import processes

    data, taken = {"name": corpus.name, "fingerprint": corpus.fingerprint}, []

    def start():
        taken.append(runs.start(workdir or runs.default_workdir(name), config, data=data, resume=resume))
        return str(taken[0].workdir), taken[0].notices

    where, notices = processes.from_first(start)
    return taken[0] if taken else runs.Run(Path(where), None, notices, runs.experiment_digest(config))


def plan(config: Config, device: str) -> int:
    """Print what a run would take on machines that need not be here; returns the exit code."""
    jax = start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    jax.config.update("jax_platforms", "cpu")
    import lm.cost.estimate

    name, count = lm.cost.estimate.named_device(device)
    jax.config.update("jax_num_cpu_devices", count)
    from lm import data, parameters
    from lm.training.run import resolve_config

    vocab_size = config.model.vocab_size
    if vocab_size is None:  # it is the tokenizer's, which the text makes
        corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=print)
        vocab_size = resolve_config(config, corpus).model.vocab_size
    print(lm.cost.estimate.plan(parameters.resolve(config, vocab_size), name, count))
    return 0


def is_finished(workdir: Path, config: Config) -> bool:
    """Whether the run in this directory made all of its steps and wrote its summary."""
    try:
        summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a summary that cannot be read is written anew
        return False
    return (summary.get("status"), summary.get("steps")) == ("finished", config.train.steps)


def describe(table) -> str:
    """The table of parameters."""
    from lm.parameters import count

    rows = [("parameter", "shape", "axes", "initializer", "count")]
    rows += [(path, str(p.shape), p.axes, p.initializer, f"{p.size:,}") for path, p in table.items()]
    rows.append(("total", "", "", "", f"{count(table):,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for *cells, size in rows:
        text = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"{text}  {size.rjust(widths[4])}")
    return "\n".join(lines)


def carry_out(config: Config, corpus, run, progress, resume: bool, carried) -> int:
    """From the state, new or restored, to the summary; returns the exit code. `config` is resolved."""
    import jax

    from lm.parallel import processes
    from lm.training import checkpoints, metrics
    from lm.training.loop import Loop, Signals

    wandb = {"project": config.log.wandb_project, "name": config.name, "config": to_dict(config)}
    with (
        Signals(progress.say) as signals,
        closing(progress),
        closing(checkpoints.Checkpoints(run.workdir, keep=config.checkpoint.keep, say=progress.say)) as saved,
        processes.ending_together(),
    ):
        state, meta = first_state(config, saved, resume, carried)
        resumed_at = int(state.step) if meta else None
        if meta:
            progress.say(f"resuming at step {resumed_at}")
        tokenizer = corpus.tokenizer and corpus.tokenizer.to_json()
        facts = {"data": corpus.name, "data_fingerprint": corpus.fingerprint, "tokenizer": tokenizer}
        meta = meta | facts | {"config": to_dict(config)}
        log = {"resume_step": resumed_at, "tensorboard": config.log.tensorboard}
        log["wandb"] = wandb if config.log.wandb else None
        log["writes"] = jax.process_index() == 0
        with closing(metrics.MetricsWriter(run.workdir, **log)) as writer:
            loop = Loop(config, corpus, state, writer, progress, saved, meta)
            causal, square = loop.flops / 1e6, loop.flops_full_square / 1e6
            progress.say(f"{causal:,.1f} MFLOP a token ({square:,.1f} if every query were to see every key)")
            progress.say(f"compiled in {loop.compile():.1f} s")
            status = loop.run(signals)
            if status == "finished":
                status = finish(loop, run, signals)
            if status != "finished":
                stop(loop, run, status)
    return {"finished": 0, "nonfinite": 3, "interrupted": 128 + (signals.received or 0)}[status]


def first_state(config: Config, saved, resume: bool, carried):
    """The newest whole checkpoint's state and record where there is one to resume, else the state of step 0 and {}."""
    import functools

    import jax

    from lm import parameters
    from lm.parallel import processes, sharding
    from lm.step import init_state

    init = functools.partial(init_state, config)
    abstract = sharding.shard_state(jax.eval_shape(init, config.train.seed), parameters.parameter_table(config.model))
    if resume and processes.from_first(saved.steps):
        return saved.restore(abstract)[1:]
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    state = jax.jit(init, out_shardings=shardings)(config.train.seed)  # born spread, never whole on one device
    if carried:
        state = state.replace(params=carried.into(state.params))
    return state, {}


def finish(loop, run, signals) -> str:
    """The end of a run: the final evaluations, the last checkpoint, the summary, the sample. Or "interrupted"."""
    from lm.training.sampling import sample_text

    config, corpus, lines = loop.config, loop.corpus, {}
    for name in config.eval.final_splits:
        if missing := [part for part in name.split("+") if part not in corpus.splits]:
            loop.progress.say(f"no {missing[0]} split in {corpus.name}: {name} is not scored")
            continue
        lines[name] = loop.evaluation(name, signals)
        if lines[name] is None:
            return "interrupted"
    if "validation" in lines:
        loop.score_last(lines["validation"]["loss"])
    loop.save()
    loop.checkpoints.wait()
    write_summary(loop, run, "finished", lines)
    if config.eval.sample_tokens and corpus.tokenizer is not None:
        text = sample_text(
            loop.state.params,
            config,
            corpus.tokenizer,
            prompt=config.eval.sample_prompt,
            n_tokens=config.eval.sample_tokens,
            temperature=config.eval.sample_temperature,
            seed=config.train.seed,
        )
        run.write_text(f"samples/step_{loop.step}.txt", text)
        loop.progress.say(f"---- a sample ----\n{text.strip()}\n-----------------")
    loop.progress.say(f"more text: python -m lm.sample --workdir {run.workdir}")
    if config.notes:
        loop.progress.say(config.notes)
    return "finished"


def stop(loop, run, status: str) -> None:
    """The end of a run before its last step: its state is saved, and how it came to that is told."""
    say = loop.progress.say
    loop.save()
    if status == "nonfinite":
        say(f"step {loop.step + 1}: the loss or a gradient is not finite; training stopped")
        for line in loop.nonfinite_report():
            say(line)
    loop.checkpoints.wait()
    say(f"the last good state is saved: step {loop.step} in {run.workdir / 'checkpoints'}; --resume goes on from it")
    write_summary(loop, run, status, {})


def write_summary(loop, run, status: str, lines: dict) -> None:
    """summary.json; the losses are those of the final evaluations, by split."""
    from lm.data import unigram_loss
    from lm.parameters import count, parameter_table

    t = loop.config.train
    losses = {name: line["loss"] for name, line in lines.items()}
    run.write_summary(
        name=loop.config.name,
        status=status,
        steps=loop.step,
        tokens=loop.step * t.batch_size * t.seq_len,
        n_params=count(parameter_table(loop.config.model)),
        val_loss=losses.get("validation"),
        test_loss=losses.get("test"),
        losses=losses,
        val_bits_per_byte=lines["validation"]["bits_per_byte"] if "validation" in lines else None,
        wall_seconds=round(loop.wall_seconds(), 1),
        skipped=int(loop.state.skipped),
        data=loop.corpus.name,
        data_notices=list(loop.corpus.notices),
        entropy_floor=loop.corpus.entropy_floor,
        unigram_loss=unigram_loss(loop.corpus, "validation", loop.config.model.vocab_size),
        flops_per_token=loop.flops,
        flops_per_token_full_square=loop.flops_full_square,
        config_digest=run.experiment_digest,
    )


if __name__ == "__main__":
    sys.exit(main())
