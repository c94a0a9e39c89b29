"""Train more placebos of a published study, so that its control is a mean of equal models.

    python configs/studies/changes_2026/controls.py changes_2026 sweeps/controls
    python configs/studies/changes_2026/controls.py changes_2026 sweeps/controls --publish

The design, fixed before the first run (the commit that adds this file):

* Each cell gets two more placebos of the base and two of AdamW: the same model with another
  independent draw of the initial values (model.init_draw). Each is tuned over the lists of the
  variant that it is like, by the study's rule, and trained with the study's ten seeds.
* With all of them there, the control of every comparison with the base is the mean of the base and
  its three placebos, and that of an update rule the mean of AdamW and its two. All rows of the page
  are computed again, and all verdicts are published, whichever way they change.
* The two wide bases have no placebos: their rows stay as they are.
* A placebo with a run that diverged or got stuck is left out of the control. Cells are trained in the
  order of the page.

The design allowed to publish some cells without the others. All were finished, so --publish needs
all of them. The published runs are reused; one run of the base in each cell is trained again, as a check of this
processor. With --publish the new runs join those of the page, without their speed, which the machine
and its other programs decide; `python3 -m benchmarks.claims` then writes the pages.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

from lm.sweeps.addition import RESULTS, STUDIES, Published
from lm.sweeps.declare import in_cell
from lm.sweeps.plan import Plan, plan_sweep, read_sweep
from lm.sweeps.record import read_record
from lm.sweeps.results import read_runs, rule_of, runs_from_csv, runs_to_csv, shapes_of
from lm.sweeps.runner import run_sweep
from lm.system.files import read_json, to_json, write_text

PLACEBOS = {"AdamW": 2}


def plan_controls(study: str, record: dict, runs: list) -> Plan:
    """Return the plan of the variants that others are compared with, and of their placebos."""
    path = str(STUDIES / "changes_2026" / f"{study}.py")
    sweep = read_sweep(path)
    full = dataclasses.replace(sweep.budgets["full"], placebos=3)
    sweep = dataclasses.replace(sweep, budgets={"full": full}, placebos=PLACEBOS)
    plan = plan_sweep(path, sweep, "full")
    arms = {sweep.baseline, *PLACEBOS, *sweep.placebos_of(full)}
    return dataclasses.replace(
        plan,
        name=f"{study}_controls",
        variants={name: v for name, v in plan.variants.items() if v.arm in arms},
        rule=rule_of(record),
        shapes=shapes_of(record, runs),
        comparisons=(),
    )


def train(study: str, workdir: Path, plan_of: Callable[[str, dict, list], Plan]) -> int:
    """Train what a plan, made of a page's record and runs, lacks; returns the exit code."""
    record = read_json(RESULTS / study / "sweep.json")
    runs = runs_from_csv(RESULTS / study / "runs.csv")
    plan = plan_of(study, record, runs)
    reused = [run for run in runs if run.variant in plan.variants]
    return run_sweep(plan, workdir, 1, published=Published(record, reused))


def publish(study: str, workdir: Path, beside: tuple = ()) -> None:
    """Add the new variants of a directory to a page, and secondary comparisons (arm, arm)."""
    page = RESULTS / study
    here = read_record(workdir)
    record = read_json(page / "sweep.json")
    new = [name for name in here["variants"] if name not in record["variants"]]
    if not new:
        sys.exit(f"{page} has these variants already")
    made = [run for run in read_runs(workdir) if run.variant in new]
    for name in new:
        seeds = {run.seed for run in made if run.variant == name and run.phase == "final"}
        if missing := set(here["variants"][name]["seeds"]) - seeds:
            sys.exit(f"{name}: {len(missing)} runs are missing; train them first")
    for name in new:
        about = dict(here["variants"][name])
        del about["config"]  # as of all but the baseline and its first placebo
        record["variants"][name] = about
    for pairs in ("placebos", "comparisons"):
        record[pairs] += [pair for pair in here[pairs] if pair not in record[pairs]]
    for pair, cell in itertools.product(beside, record["cells"]):
        record["beside"].append([in_cell(arm, cell) for arm in pair])
    record["control"] = here["control"]
    for start in here["starts"]:
        kept = {key: start[key] for key in record["starts"][0]}
        # the sweep of the page; this file is no command of its own
        kept["argv"] = record["starts"][0]["argv"]
        record["starts"].append(kept)
    write_text(page / "sweep.json", to_json(record, indent=1) + "\n")
    runs = runs_from_csv(page / "runs.csv")
    unmeasured = [dataclasses.replace(run, tokens_per_second=None) for run in made]
    write_text(page / "runs.csv", runs_to_csv([*runs, *unmeasured]))


if __name__ == "__main__":
    study, workdir, *options = sys.argv[1:]
    if options == ["--publish"]:
        publish(study, Path(workdir))
    else:
        sys.exit(train(study, Path(workdir), plan_controls))
