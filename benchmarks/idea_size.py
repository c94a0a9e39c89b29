"""Count the files and lines of four ideas: remove each from a copy of lm/, and train without it.

    python -m benchmarks.idea_size

The copy must train with the losses of the present code. A line that loses a part counts as a line. Not counted: tests,
generated documents, and lm/huggingface, which reads and writes the checkpoints of others.
"""

import ast
import difflib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDEAS = {  # name: (its file in lm/layers/variants, the names under which other files know it)
    "head and feature gate": ("attention_gate", "attention_gate|attn_gate"),
    "value residual": ("value_residual", "value_residual"),
    "multi-token prediction": ("multi_token_prediction", "multi_token_prediction"),
    "mixture of experts": ("moe", r"moe|moe_\w+|\w+_experts?|experts_\w+|router_z"),
}
COMMAND = "-m lm.train --config configs/shakespeare_small.py --config.train.steps=2 --workdir"


def without(text: str, names: str) -> str:
    """Return the text of a file without the keys, imports and table entries of these names."""
    lines = text.splitlines(keepends=True)
    declared = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AnnAssign)]
    for node in sorted(declared, key=lambda node: -node.lineno):
        if re.fullmatch(names, ast.unparse(node.target)):
            del lines[node.lineno - 1 : node.end_lineno]
    text = re.sub(rf"^ +(?:{names}),\n", "", "".join(lines), flags=re.M)
    text = re.sub(rf'(?:, )?"(?:{names})"(?:: (?:{names})\b)?,?', "", text)
    return re.sub(r"^ +\n", "", text, flags=re.M)


def losses(folder: Path) -> list[float]:
    """Return the losses of two steps with the code in a folder."""
    with tempfile.TemporaryDirectory() as workdir:
        subprocess.run([sys.executable, *COMMAND.split(), workdir], cwd=folder, check=True, capture_output=True)
        lines = Path(workdir, "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def remove(folder: Path, file: str, names: str) -> dict[str, int]:
    """Remove an idea from the code in a folder; return the number of lines that change, by file."""
    found = {}
    for path in sorted(folder.glob("lm/**/*.py")):
        old = path.read_text()
        new = "" if path.stem == file else without(old, names)
        changed = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line.startswith("- ")]
        if changed and "huggingface" not in path.parts:
            found[str(path.relative_to(folder))] = len(changed)
            path.write_text(new) if new else path.unlink()
    return found


def main() -> None:
    print("| idea | files | lines |\n| --- | --- | --- |")
    expected = losses(ROOT)
    for idea, (file, names) in IDEAS.items():
        with tempfile.TemporaryDirectory() as name:
            for part in ("lm", "configs"):
                shutil.copytree(ROOT / part, Path(name) / part)
            found = remove(Path(name), file, names)
            if losses(Path(name)) != expected:
                raise SystemExit(f"the losses without {idea} differ")
        print(f"| {idea} | {len(found)} | {', '.join(f'`{path}` {n}' for path, n in found.items())} |")


if __name__ == "__main__":
    main()
