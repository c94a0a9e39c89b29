"""The progress that a run shows: one live line in a terminal, plain lines anywhere else."""

import os
import sys
import time


class Progress:
    """What a person sees of a run: one live line in a terminal, plain lines anywhere else.

    Evaluations and notices are lasting lines in both. The time left is extrapolated from the steps since the first
    update, so that compilation does not count.
    """

    def __init__(self, total_steps: int, stream=None, *, clock=time.monotonic):
        self._total, self._stream, self._clock = total_steps, stream or sys.stderr, clock
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = False  # a live line is on the screen
        self._first: tuple[int, float] | None = None

    def update(self, line: dict) -> None:
        """Show a training line."""
        text = f"step {line['step']:>{len(str(self._total))}}/{self._total}  {self._describe(line)}"
        if not self._live:
            self._print(text)
            return
        self._stream.write(f"\r{text[: self._columns() - 1]}\x1b[K")  # \x1b[K: clear what an older line left
        self._stream.flush()
        self._shown = True

    def evaluation(self, line: dict) -> None:
        """Show an evaluation line; it stays on the screen."""
        rest = [f"{key} {_number(value)}" for key, value in line.items() if key not in ("step", "split", "data")]
        self.say(f"step {line['step']:>{len(str(self._total))}}/{self._total}  {line['split']}: {'  '.join(rest)}")

    def say(self, text: str) -> None:
        """Show a line that stays on the screen."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._shown = False
        self._print(text)

    def close(self) -> None:
        """Leave the last live line standing."""
        if self._shown:
            self._print("")
            self._shown = False

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
            parts.append(f"{_with_prefix(speed)}tokens/s")
        if line.get("mfu") is not None:
            square = line.get("mfu_full_square")
            beside = "" if square is None else f" (full square {100 * square:.1f} %)"
            parts.append(f"MFU {100 * line['mfu']:.1f} %{beside}")
        elif line.get("flops_per_second") is not None:
            parts.append(f"{_with_prefix(line['flops_per_second'])}FLOP/s")
        if (left := self._seconds_left(line["step"])) is not None:
            parts.append(f"ETA {duration(left)}")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, then = self._first
        return None if step <= first_step else (self._total - step) * (now - then) / (step - first_step)


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34, 5:06:07 or 3d 04:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _with_prefix(value: float) -> str:
    """A number with three significant digits and an SI prefix, ready for its unit: "41.2 k"."""
    thousands = 0
    while abs(value) >= 999.5 and thousands < 5:
        value, thousands = value / 1000, thousands + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {('', 'k', 'M', 'G', 'T', 'P')[thousands]}"


def _number(value) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
