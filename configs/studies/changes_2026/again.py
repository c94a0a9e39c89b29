"""Train the final runs of one arm of a published study again, at the published values, with the present code.

    python configs/studies/changes_2026/again.py changes_2026 schedule-free AdamW sweeps/again
    python configs/studies/changes_2026/again.py changes_2026_longer schedule-free base sweeps/again_longer

The other runs are those of docs/results/NAME/runs.csv, but for one run of the arm that it is compared with, in each
cell: its loss shows whether this processor gives the published ones. runs.jsonl in the directory has all of them.
"""

import dataclasses
import sys
from pathlib import Path

from lm.files import read_json
from lm.sweeps.addition import RESULTS, STUDIES, Published
from lm.sweeps.plan import load_sweep
from lm.sweeps.results import runs_from_csv
from lm.sweeps.runner import run_sweep


def main(study: str, arm: str, control: str, workdir: str) -> int:
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
    # Pages have the configs of the baseline and the placebo only.
    record["variants"] = {name: {"config": {}} | about for name, about in record["variants"].items()}
    return run_sweep(plan, Path(workdir), 1, published=Published(record, kept))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
