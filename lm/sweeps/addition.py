"""Add a change to a published study: python -m lm.sweep --study changes_2026 --add "my change"
--set model.key=value

The change is tuned and trained in the published cells with the study's seeds, and compared with the
published baseline. As a check, one run of the baseline in each cell is trained again. A ledger beside
the sweep's directory counts what was tried (lm/sweeps/ledger.py). This module does not import jax.
"""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

from lm.command_line.loading import parse_settings
from lm.config.values import short
from lm.sweeps import ledger
from lm.sweeps.analysis import CLAIM, analyze
from lm.sweeps.declare import PLACEBO, Sweep, match_params
from lm.sweeps.plan import Plan, plan_sweep, read_sweep
from lm.sweeps.record import PATIENCE, read_page_record, read_record, variant_differences
from lm.sweeps.results import Run, append_runs, read_runs, rule_of, runs_from_csv, shapes_of
from lm.system.errors import UserError
from lm.system.locks import lock

# one value per study: they decide the tokens
SHARED = (
    "train.steps",
    "train.batch_size",
    "train.seq_len",
)
RESULTS = Path("docs/results")
STUDIES = Path("configs/studies")


class Published(NamedTuple):
    """What a study has published: its sweep.json and the runs that an addition shares with it."""

    record: dict
    runs: list[Run]
    added: tuple[str, ...] = ()  # the name and the settings of the change that is added

    def check(self, record: dict) -> None:
        """Raise UserError if the present code or data make another experiment of the published
        variants.

        `record` is the `sweep_record` of the plan.
        """
        git = self.record["starts"][-1].get("git") or {}
        for name in filter(record["variants"].__contains__, self.record["variants"]):
            # Pages have the configs of the baseline and its first placebo only.
            was, now = {"config": {}} | self.record["variants"][name], record["variants"][name]
            # A key that one lacks is newer than the page.
            if other := variant_differences(was, now, only_shared=True):
                raise UserError(
                    f"--study: {name} is not what was published: "
                    f"{'; '.join(other)}; check the data, or use commit "
                    f"{git.get('commit', 'of the page')}"
                )

    def begin(self, workdir: Path) -> None:
        """Enter a change into the ledger, and append the runs that a sweep's directory lacks."""
        if self.added:
            change, *settings = self.added
            ledger.register(ledger.path_beside(workdir, self.record["name"]), change, settings)
        with lock(workdir, timeout=PATIENCE):
            known = {run.key for run in read_runs(workdir)}
            append_runs(workdir, [run for run in self.runs if run.key not in known])


def published_study(study: str) -> tuple[Path, Path]:
    """Return the file of a study and the folder of its page; raises UserError without them."""
    paths = {
        path.stem: path
        for path in sorted(STUDIES.glob("*/*.py"))
        if all((RESULTS / path.stem / name).is_file() for name in ("runs.csv", "sweep.json"))
    }
    if study not in paths:
        known = ", ".join(paths) or "none"
        raise UserError(
            f"--study: there is no published study {short(study)} here; published: {known}"
        )
    return paths[study], RESULTS / study


def read_study(path: Path) -> Sweep:
    """Return the Sweep of a study; NAME_added.py beside it also has what joined its page later."""
    added = path.with_name(f"{path.stem}_added.py")
    return read_sweep(str(added if added.is_file() else path))


def add_change(study: str, name: str, settings: list[str]) -> tuple[Plan, Published]:
    """Return the plan of a study's baseline and one more change, and the published runs of the
    baseline.

    The settings of the change are config values, "model.key=value" each. Parameters are matched to
    the baseline's through model.d_ff, unless the change sets it.

    Raises:
        UserError: there is no such study, it has a change of this name, or the values are wrong.
    """
    path, page = published_study(study)
    sweep = read_sweep(str(path))
    if sweep.lengths:
        raise UserError(
            f"--study: {study} asks how differences change with the length of training; add to a "
            "study without lengths"
        )
    record = read_page_record(page)
    runs = runs_from_csv(page / "runs.csv")
    base = sweep.baseline
    if name in (*read_study(path).variants, PLACEBO):
        raise UserError(f"--add: {study} has a change of the name {short(name)}; choose another")
    values, problems = parse_settings(settings, "--set ")
    if problems:
        raise UserError(*(f"--set {short(key)}: {problem}" for key, problem in problems.items()))
    if tuned := sweep.lists.keys() & values.keys():
        raise UserError(
            f"--set {min(tuned)}: the study tunes this key over its own list; leave it out"
        )
    if others := [key for key in SHARED if key in values]:
        raise UserError(
            f"--set {others[0]}: the published baseline was trained with the "
            "study's value; for another one write a sweep file with its own "
            "baseline (docs/sweeps.md)"
        )
    budgets = {
        key: dataclasses.replace(budget, placebos=_n_placebos(record, base))
        for key, budget in sweep.budgets.items()
    }
    sweep = dataclasses.replace(
        sweep,
        budgets=budgets,
        placebos={},
        question=f"Is {name} better than the baseline of {study}?",
        variants={base: sweep.variants[base], name: {"model.d_ff": match_params(base)} | values},
        comparisons=((name, base),),
    )
    plan = plan_sweep(str(path), sweep, "full")
    variants = {full_name: v for full_name, v in plan.variants.items() if v.cell in record["cells"]}
    plan = dataclasses.replace(
        plan,
        name=f"{study}+{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}",
        background=f"Not preregistered: this change was added to the study {study} after its results were known. The "
        f"runs of the baseline and its placebos are those of docs/results/{study}/runs.csv.",
        variants=variants,
        rule=rule_of(record),
        shapes=shapes_of(record, runs),
        comparisons=tuple(pair for pair in plan.comparisons if variants.keys() >= set(pair)),
    )
    shared = [run for run in runs if run.variant in variants]
    return plan, Published(record, shared, (name, *settings))


def finish_addition(study: str, workdir: Path) -> str:
    """Enter the result of a change that was added into the ledger; return its verdict there."""
    (claim,) = analyze(read_record(workdir), read_runs(workdir)).of_kind(CLAIM)
    path = ledger.path_beside(workdir, study)
    ledger.finish(path, claim.variant, claim.difference)
    return f"{claim.variant}: {ledger.describe(path, claim.variant)} ({path})"


def _n_placebos(record: dict, baseline: str) -> int:
    """Return how many placebos of the baseline a study has in its control; 0: none are in it."""
    if record.get("control") != "mean":
        return 0
    variants = record["variants"]
    pairs = [[variants[name]["arm"] for name in pair] for pair in record["placebos"]]
    return len({placebo for placebo, like in pairs if like == baseline})
