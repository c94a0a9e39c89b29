"""End a run: final evaluations, last checkpoint, summary, sample, and plots of the losses and the
diagnostics.
"""

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
    """End a run that is "finished" or "stopped"; returns this status, or "interrupted" if a signal
    came.
    """
    config = loop.run.config
    corpus = loop.run.corpus
    say = loop.progress.say
    step = int(state.step)
    lines: dict[str, dict] = {}
    if config.eval.every and not loop.evaluate_split(
        state, step, "validation", config.eval.max_batches
    ):
        return "interrupted"  # this score is comparable with those of the steps before
    for name in config.eval.final_splits:
        if missing := [part for part in name.split("+") if part not in corpus.splits]:
            say(f"{name} is not evaluated: {corpus.name} has no {missing[0]} split")
            continue
        parts = list(
            filter(None, (loop.evaluate_split(state, step, part) for part in name.split("+")))
        )
        if len(parts) <= name.count("+"):
            return "interrupted"
        single = len(parts) == 1
        lines[name] = (
            parts[0]
            if single
            else loop.write_evaluation({"step": step, "split": name} | joined(parts))
        )
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
    }
    line |= {"perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": None, "tokens": sum(tokens)}
    if all(part["bits_per_byte"] for part in parts):
        n_bytes = [
            n * p["loss"] / math.log(2) / p["bits_per_byte"]
            for n, p in zip(tokens, parts, strict=True)
        ]
        line["bits_per_byte"] = sum(tokens) * loss / math.log(2) / math.fsum(n_bytes)
    return line | {
        key: mean(key) for key in ("ema_loss", "best_loss") if all(key in part for part in parts)
    }


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
    """Write summary.json, and show where the time of the run went. lines: of the final evaluations,
    by split.
    """
    run = loop.run
    t = loop.run.config.train
    step = int(state.step)
    losses = {name: line["loss"] for name, line in lines.items()}
    seconds = sum(loop.clock.seconds().values())
    shares = loop.clock.shares()
    evaluated = loop.writer.validation_losses()
    best = best_step(evaluated, evaluated)
    parts = ", ".join(
        f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in shares.items()
    )
    loop.progress.say(f"{duration(seconds)} in all starts: {parts}")
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
        ema_losses={name: line["ema_loss"] for name, line in lines.items() if "ema_loss" in line},
        scores={
            name: x
            for line in loop.writer.lines_of(step)
            for name, x in line.get("scores", {}).items()
        },
        losses_by_source={name: line["losses"] for name, line in lines.items() if "losses" in line},
        val_bits_per_byte=lines["validation"]["bits_per_byte"] if "validation" in lines else None,
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
