"""Add a change to a published study: python -m lm.sweep --study changes_2026 --add "my change" --set model.key=value

The change is tuned and trained in the published cells with the study's seeds, and compared with the published baseline,
whose runs are not trained again. This module does not import jax.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

from lm.config.convert import flatten, suggestion
from lm.config.schema import schema
from lm.config.values import parse, short
from lm.errors import UserError
from lm.files import read_json, to_json
from lm.sweeps.declare import Values, match_params
from lm.sweeps.plan import Plan, plan_sweep, read_sweep
from lm.sweeps.record import wait_for_lock
from lm.sweeps.results import Run, append_runs, read_runs, runs_from_csv

RESULTS, STUDIES = Path("docs/results"), Path("configs/studies")


class Published(NamedTuple):
    """What a study has published: its sweep.json and the runs that an addition shares with it."""

    record: dict
    runs: list[Run]

    def copy_to(self, workdir: Path, record: dict) -> None:
        """Append the runs that a sweep's directory lacks.

        Args:
            workdir: the directory, which `open_sweep` has opened.
            record: what it returned.

        Raises:
            UserError: the present code or data make another experiment of the published variants.
        """
        for name in dict.fromkeys(run.variant for run in self.runs):
            was, now = (json.loads(to_json(r["variants"][name])) for r in (self.record, record))
            configs = was["config"], flatten(now["config"])  # a key that one of the two lacks is newer than the page
            pairs = {key: (configs[0][key], configs[1][key]) for key in configs[0].keys() & configs[1].keys()}
            pairs |= {key: (was[key], now[key]) for key in ("n_params", "tokens", "tune", "seeds", "tuning_seeds")}
            pairs["data"] = was["data"]["fingerprint"], now["data"]["fingerprint"]
            if other := [f"{key}: {a} -> {b}" for key, (a, b) in pairs.items() if a != b]:
                raise UserError(f"--study: {name} is not what was published: {'; '.join(other)}; check the data, or "
                                f"use commit {self.record['starts'][-1]['git']['commit']}")  # fmt: skip
        with wait_for_lock(workdir):
            known = {run.key for run in read_runs(workdir)}
            append_runs(workdir, [run for run in self.runs if run.key not in known])


def add_change(study: str, name: str, settings: list[str]) -> tuple[Plan, Published]:
    """Return the plan of a study's baseline and one more change, and the published runs of the baseline.

    Parameters are matched to the baseline's through model.d_ff, unless the change sets it.

    Args:
        study: the name of a study that is published.
        name: of the change.
        settings: its config values, "model.key=value" each.

    Raises:
        UserError: there is no such study, or the values are wrong.
    """
    page, path = RESULTS / study, STUDIES / study / f"{study}.py"
    if not (path.is_file() and (page / "runs.csv").is_file()):
        known = [p.stem for p in sorted(STUDIES.glob("*/*.py")) if (RESULTS / p.stem / "runs.csv").is_file()]
        raise UserError(f"--study: there is no published study {short(study)} here; published: {', '.join(known)}")
    record, sweep = read_json(page / "sweep.json"), read_sweep(str(path))
    base = sweep.baseline
    changes = {"model.d_ff": match_params(base)} | _parse(settings)
    sweep = dataclasses.replace(
        sweep,
        question=f"Is {name} better than the baseline of {study}?",
        variants={base: sweep.variants[base], name: changes},
        comparisons=((name, base),),
        sizes={},
        texts={cell: sweep.cells[cell] for cell in record["cells"]},
    )
    plan = dataclasses.replace(
        plan_sweep(str(path), sweep, "full"),
        name=f"{study}+{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}",
        study=study,
        background=f"Not preregistered: this change was added to the study {study} after its results were known.",
    )
    return plan, Published(record, [run for run in runs_from_csv(page / "runs.csv") if run.variant in plan.variants])


def _parse(settings: list[str]) -> Values:
    """Return config values by key; raises UserError with every mistake."""
    values, problems, keys = {}, [], schema()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key not in keys:
            problems.append(f"--set {short(setting)}: unknown {suggestion(key)}")
        elif not equals:
            problems.append(f"--set {short(setting)}: give its value with an equals sign, --set {key}=VALUE")
        else:
            values[key] = parse(text, keys[key][0])
    if problems:
        raise UserError(*problems)
    return values
