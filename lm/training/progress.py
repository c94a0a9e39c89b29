"""Show the progress of a run: a bar in a terminal, plain lines elsewhere."""

import collections
import os

from tqdm import tqdm

from lm.cost.units import duration, si
from lm.system.text_tables import message

N_LASTING = 25  # training lines that stay on the screen of a terminal, over a whole run
# The speed is a mean over so many measurements, or over more in so many seconds.
MEAN_LINES = 10
MEAN_SECONDS = 30


class Progress:
    """Shows training lines, evaluations and messages.

    In a terminal a training line replaces the one before, and about N_LASTING of them stay.
    Elsewhere, and for evaluations and messages, every line stays. The speed is a running mean, and
    plain lines show each measurement once: the lines of one call of the training program share
    theirs.
    """

    def __init__(self, total_steps: int, stream):
        self._total = total_steps
        self._stream = stream
        self._last_lasting = 0
        # tokens, seconds
        self._measured: collections.deque[tuple[float, float]] = collections.deque()
        self._last_speed: float | None = None
        self._last_tokens: int | None = None
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = tqdm(
            total=total_steps,
            file=stream,
            disable=not is_terminal,
            dynamic_ncols=True,
            bar_format="{desc} {bar}",
        )

    def update(self, line: dict) -> None:
        """Show a training line."""
        is_new = self._measure(line)
        shows_speed = is_new or not self._bar.disable  # a bar keeps its latest text
        text = f"{self._place(line)}  {self._describe(line, shows_speed)}"
        if self._bar.disable or line["step"] - self._last_lasting >= self._total / N_LASTING:
            self._last_lasting = line["step"]
            self.say(text)
        if not self._bar.disable:
            self._bar.n = line["step"]
            self._bar.set_description_str(text)

    def evaluation(self, line: dict, *, is_part: bool = False) -> None:
        """Show an evaluation line; is_part: of the first tokens of the split only."""
        shown = {key: value for key, value in line.items() if value is not None}
        for key in ("step", "split", "windows", "data"):
            shown.pop(key, None)
        for name, loss in shown.pop("losses", {}).items():
            shown[f"loss of {name}"] = loss
        values = [f"{k} {x:.4f}" if isinstance(x, float) else f"{k} {x}" for k, x in shown.items()]
        covered = f" (first {shown['tokens']:,} tokens)" if is_part else ""
        self.say(f"{self._place(line)}  {line['split']}{covered}: {'  '.join(values)}")

    def _place(self, line: dict) -> str:
        return f"step {line['step']:>{len(str(self._total))}}/{self._total}"

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._bar.write(message(text), file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        """Leave the bar on the screen."""
        self._bar.close()

    def _measure(self, line: dict) -> bool:
        """Add the speed of a line to the running mean; return whether it is a new one."""
        speed = line.get("tokens_per_second")
        if speed is None:
            return False
        is_new = speed != self._last_speed
        # The first line counts one step: how many a resumed run has trained is not known.
        n_tokens = line["tokens"] / line["step"]
        if self._last_tokens is not None:
            n_tokens = line["tokens"] - self._last_tokens
        self._last_speed = speed
        self._last_tokens = line["tokens"]
        if not is_new:
            return False
        self._measured.append((n_tokens, n_tokens / speed))
        while len(self._measured) > MEAN_LINES:
            if sum(seconds for _, seconds in self._measured) - self._measured[0][1] < MEAN_SECONDS:
                break
            self._measured.popleft()
        return True

    def _describe(self, line: dict, shows_speed: bool) -> str:
        parts = [f"loss {line['loss']:.4f}"]
        speed = line.get("tokens_per_second")
        if speed is None or not shows_speed:
            return parts[0]
        tokens, seconds = map(sum, zip(*self._measured, strict=True))
        mean = tokens / seconds
        ratio = mean / speed
        parts.append(si(mean, "tokens/s"))
        if line.get("mfu") is not None:
            mfu = f"MFU {100 * line['mfu'] * ratio:.1f} %"
            if line.get("mfu_full_square") is not None:
                mfu += f" (full square {100 * line['mfu_full_square'] * ratio:.1f} %)"
            parts.append(mfu)
        elif line.get("flops_per_second") is not None:
            parts.append(si(line["flops_per_second"] * ratio, "FLOP/s"))
        if line["step"] < self._total:
            seconds_left = (self._total - line["step"]) * line["tokens"] / line["step"] / mean
            parts.append(f"ETA {duration(seconds_left)}")
        return "  ".join(parts)
