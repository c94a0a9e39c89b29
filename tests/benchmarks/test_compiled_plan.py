"""The table of the plan beside the compilers."""

import re
from pathlib import Path

from benchmarks import compiled_plan
from benchmarks.compiled_plan import ROWS, main
from lm.cost.communication import Bytes
from lm.cost.compiled import Compiled
from lm.system.errors import UserError

PAGE = Path(__file__).parents[2] / "benchmarks" / "NOTES.md"
C = Compiled(
    program="training", peak=2 * 10**9, state=0, aliased=0, buffers=[], compute=None, seconds=1,
    sent=Bytes(float, {("all-reduce", ()): 4e9}), overlapped=Bytes(float), kernels=[],
)  # fmt: skip


def test_figures_of_compilers_are_kept_and_only_the_plan_is_computed_again(
    monkeypatch, tmp_path, capsys
):
    def compile_step(config, device, sizes):
        compiled.append((device, sizes["fsdp"], config.model.remat))
        if device == "h100":
            raise UserError("it does not compile")
        return C

    compiled, tables = [], []
    monkeypatch.setattr(compiled_plan, "compile_step", compile_step)
    monkeypatch.setattr(compiled_plan, "ROWS", [ROWS[1], ROWS[6]])
    for _ in range(2):
        assert main(["--out", str(tmp_path / "figures.jsonl")]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert compiled == [("v5e", 8, "dots"), ("h100", 1, "none")]
    first, failed = tables[0].splitlines()[2:]
    assert re.search(
        r"fsdp 8 \| dots \| adamw \| \S+ GB \| 2.00 GB \| \S+ \| \S+ GB \| 4.00 GB", first
    )
    assert "does not compile" in failed


def test_the_page_has_the_present_plan_of_each_row():
    lines = [compiled_plan.table_line(row, {}) for row in ROWS]
    page = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()
    ]
    found = [
        line
        for line in page
        if len(line) == len(lines[0]) and line[0] != "model" and "---" not in line[0]
    ]
    columns = (*range(6), 8)  # model to the plan of the memory, and of what is sent
    assert [[line[i] for i in columns] for line in found] == [
        [line[i] for i in columns] for line in lines
    ]
