"""End a run: final evaluations, last checkpoint, summary, sample, and plots."""

import math
from collections.abc import Callable
from pathlib import Path

from lm import parameters
from lm.baselines.ngrams import unigram_loss
from lm.cost.units import duration
from lm.step import TrainState, evaluated_params
from lm.system.errors import UserError
from lm.system.files import with_checksum
from lm.system.text_tables import for_terminal
from lm.training.diagnostics import nonfinite_report
from lm.training.diagnostics_figure import diagnostics_png, scores_png
from lm.training.loop import Loop
from lm.training.loss_curve import loss_curve, to_png
from lm.training.run import Run
from lm.training.step_log import nonfinite_cause
from lm.workdir.directory import Workdir
from lm.workdir.metrics import best_step, iter_metrics

# (run, parameters, step, directory of the run) -> text
Sample = Callable[[Run, dict, int, Path], str | None]


def finish(loop: Loop, state: TrainState, workdir: Workdir, status: str, sample: Sample) -> str:
    """End a run that is "finished" or "stopped"; return this, or "interrupted" after a signal."""
    config = loop.run.config
    corpus = loop.run.corpus
    say = loop.progress.say
    step = int(state.step)
    lines: dict[str, dict] = {}
    # A loss that is comparable with those of the steps before.
    n_batches = config.eval.max_batches
    if config.eval.every and not loop.evaluate_split(state, step, "validation", n_batches):
        return "interrupted"
    for name in config.eval.final_splits:
        splits = name.split("+")
        if missing := [split for split in splits if split not in corpus.splits]:
            say(f"{name} is not evaluated: {corpus.name} has no {missing[0]} split")
            continue
        parts: list[dict] = []
        for split in splits:
            line = loop.evaluate_split(state, step, split)
            if line is None:
                return "interrupted"
            parts.append(line)
        lines[name] = parts[0]
        if len(parts) > 1:
            line = {"step": step, "split": name} | joined(parts)
            lines[name] = loop.write_evaluation(line)
    loop.save(state, step)  # before the scores: a task's own code may fail
    for kind in loop.scorers:
        loop.write_scores(kind, state, step)
    loop.wait_for_checkpoint()
    write_summary(loop, state, workdir, status, lines)
    baseline = unigram_loss(corpus, "validation", config.model.vocab_size)
    metrics = workdir.path / "metrics.jsonl"
    workdir.write_bytes("loss.png", lambda: to_png(loss_curve(iter_metrics(metrics), baseline)))
    if loop.scorers:
        workdir.write_bytes("scores.png", lambda: scores_png(metrics))
        say(f"scores: {workdir.path / 'scores.png'}")
    try:
        text = sample(loop.run, evaluated_params(state, config), step, workdir.path)
    except UserError as error:
        say(f"no sample: {error}")
    else:
        if text is not None:
            workdir.write_text(f"samples/step_{step}.txt", text)
            say(f"---- a sample ----\n{for_terminal(text.strip())}\n-----------------")
    plot_diagnostics(loop, workdir)
    say(
        f"loss curve: {workdir.path / 'loss.png'}; more text: python -m lm.generate --workdir "
        f"{workdir.path}"
    )
    if config.notes:
        say(config.notes)
    return status


def joined(parts: list[dict]) -> dict:
    """Return the evaluation of several splits together, from their own lines.

    >>> parts = [{"loss": 2.0, "tokens": 300, "windows": 3}, {"loss": 3.0, "tokens": 100, "windows": 1}]
    >>> [joined([part | {"data": "text", "bits_per_byte": None} for part in parts])[key] for key in ("loss", "tokens")]
    [2.25, 400]
    """
    tokens = [line["tokens"] for line in parts]

    def mean(key: str) -> float:
        return math.fsum(n * line[key] for n, line in zip(tokens, parts, strict=True)) / sum(tokens)

    loss = mean("loss")
    line = {
        "windows": sum(line["windows"] for line in parts),
        "data": parts[0]["data"],
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": None,
        "tokens": sum(tokens),
    }
    if all(part["bits_per_byte"] for part in parts):
        n_bytes = [p["tokens"] * p["loss"] / math.log(2) / p["bits_per_byte"] for p in parts]
        line["bits_per_byte"] = sum(tokens) * loss / math.log(2) / math.fsum(n_bytes)
    for key in ("ema_loss", "best_loss"):
        if all(key in part for part in parts):
            line[key] = mean(key)
    return line


def plot_diagnostics(loop: Loop, workdir: Workdir) -> None:
    if loop.run.config.log.detail_every:
        workdir.write_bytes(
            "diagnostics.png", lambda: diagnostics_png(workdir.path / "metrics.jsonl")
        )
        loop.progress.say(f"diagnostics by layer: {workdir.path / 'diagnostics.png'}")


def stop_early(loop: Loop, state: TrainState, workdir: Workdir, status: str) -> None:
    """End a run before its last step: save its state, and report why it stopped."""
    say = loop.progress.say
    step = int(state.step)
    loop.save(state, step)
    if status == "nonfinite":
        (rejected,) = (line for line in loop.writer.lines_of(step + 1) if "grad_norm" in line)
        say(f"step {step + 1}: {nonfinite_cause(rejected)}; training stopped")
        for line in nonfinite_report(loop.run, loop.sources["train"], state):
            say(line)
    loop.wait_for_checkpoint()
    say(
        f"saved the last finite state, step {step}, in {workdir.path / 'checkpoints'}; rerun with "
        "--resume to continue"
    )
    plot_diagnostics(loop, workdir)
    write_summary(loop, state, workdir, status, {})


def write_summary(
    loop: Loop, state: TrainState, workdir: Workdir, status: str, lines: dict[str, dict]
) -> None:
    """Write summary.json, and show where the time went; lines: the final evaluations by split."""
    run = loop.run
    t = loop.run.config.train
    step = int(state.step)
    evaluated = loop.writer.validation_losses()
    best = best_step(evaluated, evaluated)
    seconds = sum(loop.clock.seconds().values())
    shares = loop.clock.shares()
    parts = [f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in shares.items()]
    loop.progress.say(f"{duration(seconds)} in all starts: {', '.join(parts)}")

    def by_split(key: str) -> dict:
        return {name: line[key] for name, line in lines.items() if key in line}

    losses = by_split("loss")
    scores: dict[str, float] = {}
    for line in loop.writer.lines_of(step):
        scores |= line.get("scores", {})
    summary = dict(
        name=run.config.name,
        status=status,
        steps=step,
        tokens=step * t.batch_size * t.seq_len,
        n_params=parameters.count(run.table),
        val_loss=losses.get("validation"),
        test_loss=losses.get("test"),
        best_val_loss=None if best is None else evaluated[best],
        best_step=best,
        losses=losses,
        ema_losses=by_split("ema_loss"),
        scores=scores,
        losses_by_source=by_split("losses"),
        val_bits_per_byte=by_split("bits_per_byte").get("validation"),
        wall_seconds=round(seconds, 1),
        goodput={name: round(share, 4) for name, share in shares.items()},
        skipped=int(state.skipped),
        data=run.corpus.name,
        data_notices=list(run.corpus.notices),
        entropy_floor=run.corpus.entropy_floor,
        unigram_loss=unigram_loss(run.corpus, "validation", run.config.model.vocab_size),
        flops_per_token=run.flops_per_token,
        flops_per_token_full_square=run.flops_full_square,
        config_digest=workdir.experiment_digest,
    )
    workdir.write_json("summary.json", with_checksum(summary))
