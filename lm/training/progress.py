"""Show the progress of a run: one live line in a terminal, plain lines elsewhere."""

import collections
import os
import sys
import time

from lm.cost.units import si

WINDOW = 20  # moments over which the remaining time is extrapolated
SECONDS_APART = 0.5  # between two of them: the lines of one dispatch come all at once
N_LASTING = 25  # training lines that stay on the screen of a terminal, over a whole run


class Progress:
    """Shows training lines, evaluations and messages.

    In a terminal a training line replaces the one before, and about N_LASTING of them stay. Elsewhere, and for
    evaluations and messages, every line stays. The remaining time follows from the last WINDOW moments, so neither
    compilation nor a change of speed distorts it for long.

    Args:
        total_steps: the last step.
        stream: where to write; None: standard error.
        clock: returns seconds; for tests.
    """

    def __init__(self, total_steps: int, stream=None, *, clock=time.monotonic):
        self._total, self._stream, self._clock = total_steps, stream or sys.stderr, clock
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live_line_shown = False
        self._recent: collections.deque[tuple[int, float]] = collections.deque(maxlen=WINDOW + 1)  # (step, time)
        self._last_lasting = 0

    def update(self, line: dict) -> None:
        """Show a training line."""
        text = f"step {line['step']:>{len(str(self._total))}}/{self._total}  {self._describe(line)}"
        if not self._is_terminal:
            self._print(text)
        elif line["step"] - self._last_lasting >= self._total / N_LASTING:
            self._last_lasting = line["step"]
            self.say(text)
        else:
            self._stream.write(f"\r{text[: self._columns() - 1]}\x1b[K")  # \x1b[K clears the rest of the line
            self._stream.flush()
            self._live_line_shown = True

    def evaluation(self, line: dict) -> None:
        """Show an evaluation line."""
        shown = {key: value for key, value in line.items() if key not in ("step", "split", "data", "batches")}
        values = "  ".join(f"{key} {_number(value)}" for key, value in shown.items() if value is not None)
        self.say(f"step {line['step']:>{len(str(self._total))}}/{self._total}  {line['split']}: {values}")

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._live_line_shown:
            self._stream.write("\r\x1b[K")
            self._live_line_shown = False
        self._print(text)

    def close(self) -> None:
        """Leave the last live line on the screen."""
        if self._live_line_shown:
            self._print("")
            self._live_line_shown = False

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):
            return 80

    def _describe(self, line: dict) -> str:
        parts = [f"loss {line['loss']:.4f}"]
        if (speed := line.get("tokens_per_second")) is not None:
            parts.append(si(speed, "tokens/s"))
        if line.get("mfu") is not None:
            square = line.get("mfu_full_square")
            beside = "" if square is None else f" (full square {100 * square:.1f} %)"
            parts.append(f"MFU {100 * line['mfu']:.1f} %{beside}")
        elif line.get("flops_per_second") is not None:
            parts.append(si(line["flops_per_second"], "FLOP/s"))
        if (left := self._seconds_left(line["step"])) is not None:
            parts.append(f"ETA {duration(left)}")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        now = self._clock()
        if not self._recent or now - self._recent[-1][1] >= SECONDS_APART:
            self._recent.append((step, now))
        (first_step, begin), (last_step, end) = self._recent[0], self._recent[-1]
        return (self._total - step) * (end - begin) / (last_step - first_step) if last_step > first_step else None


def duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:34, 5:06:07 or 3d 04:05.

    >>> duration(754), duration(273_900)
    ('12:34', '3d 04:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _number(value) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
