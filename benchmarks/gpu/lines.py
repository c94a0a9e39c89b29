"""A plugin of pytest that writes a line per test at once: -p benchmarks.gpu.lines.

The file is named by TEST_LINES. What a time limit or a crash leaves of it has the names of all
tests that ran, and of those that were running:

    running tests/test_a.py::test_b
    failed tests/test_a.py::test_b 0.12 AssertionError: ...
"""

import os
from pathlib import Path


def write(*words: str) -> None:
    # Processes of pytest-xdist report to the first one, which has the same hooks.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["TEST_LINES"], "a", encoding="utf-8") as file:
            file.write(" ".join(words) + "\n")


def pytest_runtest_logstart(nodeid):
    write("running", nodeid)


def pytest_runtest_logreport(report):
    # A failed setup has no call; a passed one is not worth a line.
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr or "").strip()
        first = reason.splitlines()[:1] if report.outcome == "failed" else []
        write(report.outcome, report.nodeid, f"{report.duration:.2f}", *first)


def outcomes(path: Path) -> dict[str, list[str]]:
    """Return the tests by outcome; "running": those that did not end."""
    last: dict[str, tuple[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        outcome, nodeid, *_ = line.split(" ", 2)
        # a test that failed does not pass in its teardown
        if last.get(nodeid, ("", ""))[0] != "failed":
            last[nodeid] = outcome, line
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "running": []}
    for outcome, line in last.values():
        found[outcome].append(line.partition(" ")[2])
    return found
