"""The faults are patches of the present code, of many kinds, and the results are those of them."""

import ast
import csv
from collections import Counter

from benchmarks.seeded_bugs.__main__ import RESULTS, _patched
from benchmarks.seeded_bugs.faults import CONTROLS, FAULTS, HINTS
from lm.command_line.loading import load


def test_each_fault_is_a_patch_that_python_can_read():
    names = Counter(fault.name for fault in FAULTS)
    assert max(names.values()) == 1
    kinds = {fault.kind for fault in FAULTS}
    assert kinds == HINTS.keys()
    assert len(kinds) >= 15
    assert len(FAULTS) >= 100
    for fault in FAULTS:
        ast.parse(_patched(fault))


def test_the_configs_of_controls_are_valid():
    for control in CONTROLS:
        load("configs/shakespeare_small.py", control.keys.split(), lambda line: None)


def test_the_results_are_of_these_faults():
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = {fault.name for fault in (*FAULTS, *CONTROLS)}
    assert {row["fault"] for row in rows} <= known
    accused = [row["fault"] for row in rows if row["kind"] == "control" and row["found"] == "yes"]
    assert not accused
