"""Repeat a published comparison: python -m lm.sweep --study changes_2026 --repeat "token shift"

The change and its control train in one cell with fresh seeds, at the published values, as many runs
as there are pairs. Nothing is tuned again, so the error of tuning is the same in the published pairs
and in the new ones. The result is one line, which others can send back: docs/results/repeats.csv
collects such lines. This module does not import jax.
"""

import csv
import dataclasses
import io
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lm.config.values import close_match, short
from lm.sweeps import statistics
from lm.sweeps.addition import Published, published_study, read_study
from lm.sweeps.analysis import analyze
from lm.sweeps.declare import in_cell
from lm.sweeps.plan import FIRST_TUNING_SEED, MAX_SEEDS, Plan, plan_sweep
from lm.sweeps.record import read_page_record, read_record
from lm.sweeps.results import Run, read_runs, runs_from_csv
from lm.sweeps.statistics import Estimate
from lm.system.errors import UserError
from lm.system.files import read_bytes, write_text
from lm.system.text_tables import csv_table, csv_text

LINE = "repeat.csv"
PAIRS = 10
MIN_PAIRS = 2


class Repeat(NamedTuple):
    """A comparison that was trained again: one line of repeats.csv."""

    study: str
    variant: str
    against: str
    cell: str
    seed: int  # the first; the others follow
    differences: tuple[float, ...]  # of the test losses of each pair
    date: str
    commit: str
    versions: str
    processor: str


class Comparison(NamedTuple):
    """What a study has published about a change in one cell."""

    arm: str
    control: str
    cell: str
    about: dict[str, dict]  # by full name, the entries in sweep.json
    points: dict[str, dict]  # by full name, the tuned values of the final runs
    seeds: set[int]

    @property
    def names(self) -> tuple[str, str]:
        return in_cell(self.arm, self.cell), in_cell(self.control, self.cell)


def plan_repeat(
    study: str,
    name: str,
    cell: str | None,
    seed: int | None,
    n_pairs: int,
    against: str | None = None,
) -> tuple[Plan, Published]:
    """Return the plan of a change and its control with fresh seeds.

    Args:
        cell: the size, text or length; None: the one with the fewest training FLOPs.
        seed: the first of the fresh seeds; None: a random one.
        against: what it is compared with; None: the only one.

    Raises:
        UserError: the study has no such change or cell, or has used these seeds.
    """
    path, page = published_study(study)
    full = plan_sweep(str(path), read_study(path), "full")
    record = read_page_record(page)
    # A page may have more placebos than its study's file.
    placebos = [pair for pair in record["placebos"] if pair[0] in full.variants]
    runs = runs_from_csv(page / "runs.csv")
    published = _published(record | {"placebos": placebos}, runs, name, cell, against)
    if not MIN_PAIRS <= n_pairs <= MAX_SEEDS:
        raise UserError(f"--pairs must be from {MIN_PAIRS} to {MAX_SEEDS}, not {short(n_pairs)}")
    if seed is None:
        seed = secrets.randbelow(FIRST_TUNING_SEED // MAX_SEEDS) * MAX_SEEDS
    seeds = range(seed, seed + n_pairs)
    if not 0 <= seed <= FIRST_TUNING_SEED - n_pairs or published.seeds & set(seeds):
        raise UserError(
            f"--seed {seed}: the seeds of a repeat are {n_pairs} from 0 to {FIRST_TUNING_SEED - 1} "
            "that the study has not used; leave it out to draw them"
        )
    sweep = dataclasses.replace(
        full.sweep,
        question=f"Does {name} − {published.control} of {study} repeat?",
        baseline=published.control,
        comparisons=((published.arm, published.control),),
    )
    variants = {}
    for full_name in published.names:
        lists = {key: (value,) for key, value in published.points[full_name].items()}
        planned = full.variants[full_name]
        variants[full_name] = dataclasses.replace(planned, lists=lists, seeds=seeds)
    targets = {}
    for planned in variants.values():
        if planned.match and planned.match not in variants:
            targets[planned.match] = full.variants[planned.match]
    plan = dataclasses.replace(
        full,
        targets=targets,
        name=f"{study}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}-{seed}",
        background=f"{name} and {published.control} of the study {study}, trained again with fresh seeds "
        "at the published values.",
        sweep=sweep,
        budget=dataclasses.replace(full.budget, seeds=n_pairs),
        variants=variants,
        comparisons=(published.names,),
    )
    same = {}
    for full_name, planned in variants.items():
        fresh = {
            "seeds": list(seeds),
            "tune": {key: list(values) for key, values in planned.lists.items()},
        }
        same[full_name] = published.about[full_name] | fresh
    return plan, Published({"variants": same, "starts": record["starts"]}, [])


def _published(
    record: dict, runs: Sequence[Run], name: str, cell: str | None, against: str | None
) -> Comparison:
    """Find a change in the record of a page."""
    variants = record["variants"]
    pairs = [
        [variants[full] for full in pair] for pair in record["comparisons"] + record["placebos"]
    ]
    arms = list(dict.fromkeys(pair[0]["arm"] for pair in pairs))
    if name not in arms:
        raise UserError(
            f"--repeat: {record['name']} compares no {short(name)}{close_match(name, arms)}; it "
            f"has {', '.join(arms)}"
        )
    own = [pair for pair in pairs if pair[0]["arm"] == name]
    controls = list(dict.fromkeys(pair[1]["arm"] for pair in own))
    if against is None and len(controls) > 1:
        raise UserError(
            f"--repeat: {name} is compared with {' and '.join(controls)}; add --against "
            f"{controls[0]!r}, for example"
        )
    if against not in (None, *controls):
        raise UserError(
            f"--against: {record['name']} does not compare {name} with {short(against)}; it "
            f"compares it with {' and '.join(controls)}"
        )
    own = [pair for pair in own if against in (None, pair[1]["arm"])]
    cells = [pair[0]["cell"] for pair in own]
    if cell is None:
        cell = min(own, key=lambda pair: pair[1]["flops_per_token"] * pair[1]["tokens"])[0]["cell"]
    if cell not in cells:
        raise UserError(
            f"--cell: {record['name']} has no {short(cell)}{close_match(cell, cells)}; its cells "
            f"are {'; '.join(cells)}"
        )
    control = own[cells.index(cell)][1]["arm"]
    names = [in_cell(arm, cell) for arm in (name, control)]
    final = [run for run in runs if run.phase == "final"]
    points = {run.variant: run.point for run in final if run.variant in names}
    about = {full: variants[full] for full in names}
    return Comparison(name, control, cell, about, points, {run.seed for run in runs})


def finish_repeat(study: str, workdir: Path) -> str:
    """Write the line of a finished repeat; return what to tell about it."""
    record = read_record(workdir)
    claim = analyze(record, read_runs(workdir)).claims[0]
    if not claim.differences:
        raise UserError(f"{workdir}: there is nothing to compare: {claim.missing}")
    about = next(iter(record["variants"].values()))
    start = record["starts"][-1]
    git = start["git"] or {"commit": "unknown", "dirty": False}
    repeat = Repeat(
        study,
        claim.variant,
        claim.against,
        about["cell"],
        about["seeds"][0],
        tuple(round(x, 6) for x in claim.differences),
        time.strftime("%Y-%m-%d"),
        git["commit"] + " with uncommitted changes" * git["dirty"],
        ", ".join(f"{k} {v}" for k, v in start["versions"].items() if k in ("jax", "python")),
        start["processor"],
    )
    write_text(workdir / LINE, to_lines([repeat]))
    _, page = published_study(study)
    record = read_page_record(page)
    published = published_pairs(record, runs_from_csv(page / "runs.csv"), repeat)
    here = statistics.estimate(repeat.differences)
    change = statistics.difference(here, published)
    return "\n".join(
        [
            f"{repeat.variant} − {repeat.against}, {repeat.cell}: difference in test loss, nats "
            "per token, with 95 % intervals",
            f"  published pairs  {_shown(published)}, {published.n} pairs; without placebos and the error "
            "of tuning, which the page has",
            f"  here             {_shown(here)}, {here.n} pairs",
            f"  here minus published  {_shown(change)}, p {change.p:.2g} (Welch's t test)",
            f"{workdir / LINE} has the line for docs/results/repeats.csv",
        ]
    )


def published_pairs(record: dict, runs: Sequence[Run], repeat: Repeat) -> Estimate:
    """Return the published difference in the cell of a repeat, by its pairs alone.

    A repeat trains the variant and what it is compared with, without placebos, at the same values:
    the same is compared here, and the error of tuning is not in it.
    """
    key = repeat.variant, repeat.against, repeat.cell
    for claim in analyze(record | {"control": "baseline"}, runs).claims:
        if (claim.variant, claim.against, claim.cell) == key and claim.differences:
            return statistics.estimate(claim.differences)
    raise UserError(f"{repeat.study} has published no {' and '.join(key[:2])}, {key[2]}")


def _shown(e: Estimate) -> str:
    low, high = e.interval()
    return f"{e.mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def to_lines(repeats: Sequence[Repeat]) -> str:
    """Return repeats as the text of a CSV file."""
    rows = [
        repeat._asdict() | {"differences": " ".join(f"{x:+.6f}" for x in repeat.differences)}
        for repeat in repeats
    ]
    return csv_table(list(Repeat._fields), rows)


def read_repeats(path: Path) -> list[Repeat]:
    """Read a file of repeats; raises UserError if a line is wrong, or is there twice."""
    repeats: list[Repeat] = []
    known: set[tuple] = set()
    rows = csv.DictReader(io.StringIO(read_bytes(path).decode(), newline=""))
    for number, row in enumerate(rows, 2):
        try:
            texts = {key: csv_text(row[key]) for key in Repeat._fields}
            differences = tuple(map(float, texts["differences"].split()))
            repeat = Repeat(
                texts["study"],
                texts["variant"],
                texts["against"],
                texts["cell"],
                int(texts["seed"]),
                differences,
                texts["date"],
                texts["commit"],
                texts["versions"],
                texts["processor"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: it must have the columns {', '.join(Repeat._fields)}, as "
                f"{LINE} of a repeat has them: {error}"
            ) from None
        key = repeat[:5]
        if len(differences) < MIN_PAIRS or key in known:
            reason = "it is there twice" if key in known else "it has too few differences"
            raise UserError(f"{path}, line {number}: {reason}; remove it")
        known.add(key)
        repeats.append(repeat)
    return repeats
