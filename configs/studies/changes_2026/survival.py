"""Train changes_2026_survival change by change, so that a stop leaves a smaller table, not half a one.

    python configs/studies/changes_2026/survival.py sweeps/survival
    python configs/studies/changes_2026/survival.py sweeps/survival --speed
    python configs/studies/changes_2026/survival.py sweeps/survival --publish

Two processes of the first command share the work. It reuses the runs that are published. --speed
measures the speeds of finished changes at the first length, in turn with the base. --publish writes
the page of the changes that are finished. It has no speeds of runs, which other programs on the
machine decide.
"""

import dataclasses
import sys
from pathlib import Path

from lm.sweeps import report
from lm.sweeps.addition import RESULTS, Published
from lm.sweeps.analysis import analyze
from lm.sweeps.plan import load_sweep
from lm.sweeps.record import read_failures, read_record
from lm.sweeps.results import read_runs, runs_from_csv
from lm.sweeps.runner import run_sweep
from lm.sweeps.speed import read_speeds
from lm.sweeps.speedometer import Speedometer
from lm.sweeps.tuning import USUAL_SHAPE
from lm.sweeps.variants import resolve_variants
from lm.system.files import read_json
from lm.training.signals import Signals

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


def measure(workdir: Path) -> None:
    plan = load_sweep(FILE, "full")
    at_first = {name: v for name, v in plan.variants.items() if v.cell == plan.cells[0]}
    pairs = tuple(pair for pair in plan.comparisons if set(pair) <= at_first.keys())
    plan = dataclasses.replace(plan, variants=at_first, comparisons=pairs)
    variants = resolve_variants(plan, print)
    with Signals(print) as signals:
        Speedometer(variants, workdir, 1, print, signals).measure()


def publish(workdir: Path) -> None:
    """Write the page of the arms that are finished at all lengths, and whose control is."""
    record = read_record(workdir)
    if failures := read_failures(workdir):
        sys.exit(f"runs of {', '.join(failures)} failed; the first command tries them again")
    runs = [run for run in read_runs(workdir) if run.phase != "again"]
    final = {(run.variant, run.seed) for run in runs if run.phase == "final"}
    unfinished = {
        about["arm"]
        for name, about in record["variants"].items()
        if not {(name, seed) for seed in about["seeds"]} <= final
    }
    arms = {name: about["arm"] for name, about in record["variants"].items()}
    for name, control in record["comparisons"]:
        if arms[control] in unfinished:
            unfinished.add(arms[name])
    kept = [name for name in arms if arms[name] not in unfinished]
    record["variants"] = {name: record["variants"][name] for name in kept}
    for pairs in ("comparisons", "placebos"):
        record[pairs] = [pair for pair in record[pairs] if set(pair) <= set(kept)]
    if not record["comparisons"]:
        sys.exit("no change is finished yet")
    for start in record["starts"]:  # this file is no command of its own
        start["argv"] = ["lm.sweep", "--config", FILE, "--budget", "full"]
    unmeasured = [
        dataclasses.replace(run, tokens_per_second=None) for run in runs if run.variant in kept
    ]
    speeds = read_speeds(workdir) or read_speeds(RESULTS / NAME)
    print(report.publish(analyze(record, unmeasured), RESULTS, speeds))
    print(f"left out: {', '.join(sorted(unfinished)) or 'none'}")


if __name__ == "__main__":
    workdir, *options = sys.argv[1:]
    if options == ["--publish"]:
        publish(Path(workdir))
    elif options == ["--speed"]:
        measure(Path(workdir))
    else:
        sys.exit(train(Path(workdir)))
