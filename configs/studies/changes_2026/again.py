"""Train the final runs of one arm of a published study again, at the published values, with the
present code.

    python configs/studies/changes_2026/again.py changes_2026 schedule-free AdamW sweeps/again
    python configs/studies/changes_2026/again.py changes_2026_longer schedule-free base sweeps/again_longer

The other runs are those of docs/results/NAME/runs.csv, but for one run of the arm that it is
compared with, in each cell: its loss shows whether this processor gives the published ones.
runs.jsonl in the directory has all of them. With --publish at the end, the new runs of the arm,
when all are there, take the place of the published ones, without their speed, which the machine and
its other programs decide; `python3 -m benchmarks.claims` then writes the pages.
"""

import dataclasses
import sys
from pathlib import Path

from lm.sweeps.addition import RESULTS, STUDIES, Published
from lm.sweeps.plan import load_sweep
from lm.sweeps.record import read_record
from lm.sweeps.results import read_runs, runs_from_csv, runs_to_csv
from lm.sweeps.runner import run_sweep
from lm.system.files import read_json, to_json, write_text


def train(study: str, arm: str, control: str, workdir: Path) -> int:
    plan = load_sweep(str(STUDIES / "changes_2026" / f"{study}.py"), "full")
    arms = {arm, control, plan.sweep.baseline}
    variants = {name: v for name, v in plan.variants.items() if v.arm in arms}
    plan = dataclasses.replace(
        plan,
        variants=variants,
        comparisons=tuple(pair for pair in plan.comparisons if variants.keys() >= set(pair)),
    )
    again = {(name, seed) for name, v in variants.items() if v.arm == arm for seed in v.seeds}
    again |= {(name, v.seeds[0]) for name, v in variants.items() if v.arm == control}
    page = RESULTS / study
    runs = [run for run in runs_from_csv(page / "runs.csv") if run.variant in variants]
    kept = [run for run in runs if run.phase == "tuning" or (run.variant, run.seed) not in again]
    record = read_json(page / "sweep.json")
    return run_sweep(plan, workdir, 1, published=Published(record, kept))


def publish(study: str, arm: str, workdir: Path) -> None:
    page = RESULTS / study
    here = read_record(workdir)
    record = read_json(page / "sweep.json")
    runs = runs_from_csv(page / "runs.csv")
    names = {name for name, about in record["variants"].items() if about["arm"] == arm}
    made = [run for run in read_runs(workdir) if run.phase == "final" and run.variant in names]
    new = {run.key: dataclasses.replace(run, tokens_per_second=None) for run in made}
    missing = [
        run.key
        for run in runs
        if run.phase == "final" and run.variant in names and run.key not in new
    ]
    if missing:
        sys.exit(f"{len(missing)} runs are missing, the first is {missing[0]}; train them first")
    start = {key: here["starts"][0][key] for key in record["starts"][0]}
    # the sweep of the page; this file is no command of its own
    start["argv"] = record["starts"][-1]["argv"]
    record["starts"].append(start)
    write_text(page / "sweep.json", to_json(record, indent=1) + "\n")
    write_text(page / "runs.csv", runs_to_csv([new.get(run.key, run) for run in runs]))


if __name__ == "__main__":
    study, arm, control, workdir, *options = sys.argv[1:]
    if options == ["--publish"]:
        publish(study, arm, Path(workdir))
    else:
        sys.exit(train(study, arm, control, Path(workdir)))
