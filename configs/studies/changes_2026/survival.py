"""Train changes_2026_survival change by change, so that a stop leaves a smaller table, not half a one.

    python configs/studies/changes_2026/survival.py sweeps/survival
    python configs/studies/changes_2026/survival.py sweeps/survival --publish

Two processes of the first command share the work. It reuses the runs that are published. --publish
writes the page of the changes that are finished, without their speed, which other programs on the
machine decide.
"""

import dataclasses
import sys
from pathlib import Path

from lm.sweeps.addition import RESULTS, Published
from lm.sweeps.declare import PLACEBO
from lm.sweeps.plan import load_sweep
from lm.sweeps.record import read_record
from lm.sweeps.results import read_runs, runs_from_csv, runs_to_csv
from lm.sweeps.runner import run_sweep
from lm.sweeps.tuning import USUAL_SHAPE
from lm.system.files import make_folder, read_json, to_json, write_text

NAME = "changes_2026_survival"
FILE = f"configs/studies/changes_2026/{NAME}.py"
GROUPS = (
    ("base",),
    ("token shift",),
    ("peri-norm",),
    ("placebo",),
    ("short convolution",),
    ("value embeddings", "wide for value embeddings"),
    ("AdamW",),
    ("SOAP",),
    ("MuonH",),
    ("Muon",),
    ("schedule-free",),
    ("NorMuon",),
    ("head gate",),
    ("value residual",),
    ("softcap",),
)


def train(workdir: Path) -> int:
    plan = load_sweep(FILE, "full")
    shapes = dict.fromkeys(plan.cells, USUAL_SHAPE)
    plan = dataclasses.replace(plan, shapes=shapes, groups=GROUPS)
    page = RESULTS / NAME
    published = None
    if page.is_dir():
        record = read_json(page / "sweep.json")
        published = Published(record, runs_from_csv(page / "runs.csv"))
    return run_sweep(plan, workdir, 1, published=published)


def publish(workdir: Path) -> None:
    """Write the page of the arms that are finished at all lengths, and whose control is."""
    record = read_record(workdir)
    runs = read_runs(workdir)
    variants = record["variants"]
    n_left: dict[str, int] = {}
    for name, about in variants.items():
        seeds = {run.seed for run in runs if run.variant == name and run.phase == "final"}
        n_left[about["arm"]] = n_left.get(about["arm"], 0) + len(set(about["seeds"]) - seeds)
    left_out = {arm for arm, n in n_left.items() if n}
    for pair in record["comparisons"]:
        arm, control = (variants[name]["arm"] for name in pair)
        left_out |= {arm} if control in left_out else set()
    kept = {name: about for name, about in variants.items() if about["arm"] not in left_out}
    for about in kept.values():
        if about["arm"] not in (record["baseline"], PLACEBO):
            del about["config"]
    for pairs in ("comparisons", "placebos"):
        record[pairs] = [pair for pair in record[pairs] if kept.keys() >= set(pair)]
    for start in record["starts"]:
        # the sweep of the page; this file is no command of its own
        start["argv"] = ["lm.sweep", "--config", FILE, "--budget", "full"]
    del record["sha256"]
    page = RESULTS / NAME
    make_folder(page)
    write_text(page / "sweep.json", to_json(record | {"variants": kept}, indent=1) + "\n")
    unmeasured = [
        dataclasses.replace(run, tokens_per_second=None) for run in runs if run.variant in kept
    ]
    write_text(page / "runs.csv", runs_to_csv(unmeasured))
    print(f"left out: {', '.join(sorted(left_out)) or 'none'}")


if __name__ == "__main__":
    workdir, *options = sys.argv[1:]
    if options == ["--publish"]:
        publish(Path(workdir))
    else:
        sys.exit(train(Path(workdir)))
