"""The remaining time of an evaluation."""

import io

from lm.scoring.progress import show_progress


def test_lines_are_seconds_apart_and_leave_out_compilation():
    """The first batch, which compiles, takes until second 100; the others take 2 seconds each."""
    stream, clock = io.StringIO(), iter(range(100, 140, 2))
    report = show_progress("a text", stream, clock=lambda: next(clock))
    for done in range(1, 11):
        report(done, 10)
    assert stream.getvalue() == "a text: 40 %  ETA 0:12\na text: 70 %  ETA 0:06\n"
