"""The table and the JSON of an evaluation."""

import math

from lm.data import shards
from lm.scoring.means import MIN_BLOCKS, Estimate, TextMeans, bits_per_byte, perplexity
from lm.scoring.texts import TextResult
from lm.system.text_tables import plural, table


def short_names(results: list[TextResult]) -> list[str]:
    """Return the names of the texts; where two are equal, their sources."""
    names = [r.text.name or r.text.corpus.name for r in results]
    return [
        r.text.source if names.count(name) > 1 else name
        for r, name in zip(results, names, strict=True)
    ]


def losses_table(results: list[TextResult]) -> str:
    """Return a table of the means of all texts, with a row for each kind of windows."""
    header = ("text", "predicted by", "tokens", "loss", "perplexity", "bits per byte", "accuracy")
    rows: list[tuple[str, ...]] = [header]
    for name, result in zip(short_names(results), results, strict=True):
        rows.append((name, f"model, windows of {result.plain.seq_len:,}", *_cells(result.plain)))
        if result.sliding:
            rows.append(("", f"model, stride {result.sliding.stride}", *_cells(result.sliding)))
        for baseline, loss in reversed(result.baselines.items()):
            cells = _loss_cells(Estimate(loss, None), result.plain.bytes_per_token)
            rows.append(("", baseline, "", *cells, "-"))
    if mean := weighted_mean(results):
        rows.append(("weighted mean", "model", "", str(mean), str(perplexity(mean)), "-", "-"))
    return table(rows, right=[2])


def weighted_mean(results: list[TextResult]) -> Estimate | None:
    """Return the mean loss over a mixture's sources by their weights; None if some are missing.

    The texts of the sources are independent, so the squares of the weighted standard errors add up.
    """
    weights = [(r.text.weight, r) for r in results if r.text.weight is not None]
    if not weights or not math.isclose(sum(weight for weight, _ in weights), 1):
        return None
    # as in a run: windows are drawn by their tokens, and the mean is over the targets in them
    counts = [(weight * r.text.split.target_fraction, r) for weight, r in weights]
    total = math.fsum(n for n, _ in counts)
    parts = [r.plain.loss.scaled(n / total) for n, r in counts]
    errors = [part.error for part in parts if part.error is not None]
    error = math.hypot(*errors) if len(errors) == len(parts) else None
    return Estimate(math.fsum(part.value for part in parts), error)


def _cells(means: TextMeans) -> tuple[str, ...]:
    return (
        f"{means.tokens:,}",
        *_loss_cells(means.loss, means.bytes_per_token),
        f"{means.accuracy.scaled(100)} %",
    )


def _loss_cells(loss: Estimate, bytes_per_token: float | None) -> tuple[str, str, str]:
    return str(loss), str(perplexity(loss)), str(bits_per_byte(loss, bytes_per_token) or "-")


def context_table(results: list[TextResult]) -> str:
    """Return a table of the loss by length of the context, with a column for each text."""
    columns = []
    for result in results:
        columns.append({(b.first, b.last): str(b.loss) for b in result.plain.by_context})
    rows = [("context", *short_names(results))]
    for first, last in sorted(set().union(*columns)):
        lengths = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        rows.append((lengths, *(column.get((first, last), "-") for column in columns)))
    return table(rows, right=[0])


def footnotes(results: list[TextResult]) -> list[str]:
    """Return the lines below the table of losses."""
    lines = ["Loss in nats per token."]
    for result in results:
        lines += shards.describe(result.text.corpus.record)
    if any(result.text.split.targets for result in results):
        lines.append(
            "Of chats, only answers are predicted and counted (config.data.targets = assistant)."
        )
    if any(result.is_bound for result in results):
        lines.append("The model's loss is a bound: masked diffusion, one mask for each window.")
    if any(result.baselines for result in results):
        lines.append("Baselines: n-gram models of the train split of the run.")
    blocks = {result.plain.blocks for result in results}
    if max(blocks) >= MIN_BLOCKS:
        counts = " or ".join(f"{n}" for n in sorted(n for n in blocks if n >= MIN_BLOCKS))
        lines.append(f"±: standard error over {counts} blocks of consecutive windows.")
    if min(blocks) < MIN_BLOCKS:
        lines.append(
            f"No standard error where a text has fewer than {plural(MIN_BLOCKS, 'window')}."
        )
    return lines


def to_record(result: TextResult) -> dict:
    """Return an evaluation as a JSON object."""
    text = result.text
    record = {
        "source": text.source,
        "name": text.name or text.corpus.name,
        "weight": text.weight,
        "prepared": text.corpus.record,
        "split": text.split.name,
        "tokens": text.split.n_tokens,
        "bytes": text.split.n_bytes,
        "baselines": result.baselines,
        "plain": _means_record(result.plain),
    }
    if result.sliding:
        record["sliding"] = _means_record(result.sliding)
    return record


def _means_record(means: TextMeans) -> dict:
    record = {"stride": means.stride, "predicted_tokens": means.tokens, "blocks": means.blocks}
    for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
        record |= _pair(name, getattr(means, name))
    bins = []
    for b in means.by_context:
        lengths = {"first": b.first, "last": b.last, "tokens": b.tokens}
        bins.append(lengths | _pair("loss", b.loss) | _pair("accuracy", b.accuracy))
    return record | {"block_losses": means.block_losses.tolist(), "by_context": bins}


def _pair(name: str, estimate: Estimate | None) -> dict:
    value, error = estimate or (None, None)
    return {name: value, f"{name}_error": error}
