"""Warnings about the finished runs of a sweep: variants that do not differ, and runs from different machines."""

import math

from lm.sweeps.storage.results import Results

SAME = 1e-6  # relative difference of two losses below which rounding explains it


def identical_variants(results: Results, variants: list[str], phase: str = "final") -> list[str]:
    """Return a warning for each group of variants whose runs of a phase have the same test losses, up to rounding."""
    ends = {n: {k[2:]: run["test_loss"] for k, run in results.runs.items() if k[:2] == (phase, n)} for n in variants}

    def equal(a: str, b: str) -> bool:
        shared = [key for key in ends[a].keys() & ends[b].keys() if None not in (ends[a][key], ends[b][key])]
        return bool(shared) and all(math.isclose(ends[a][key], ends[b][key], rel_tol=SAME) for key in shared)

    groups = {}  # by the first variant of each
    for name in variants:
        first = next((first for first in groups if equal(first, name)), name)
        groups.setdefault(first, []).append(name)
    return [
        f"{', '.join(map(repr, group[:-1]))} and {group[-1]!r} have identical losses for all seeds, up to rounding: "
        "check that the change has an effect"
        for group in groups.values()
        if len(group) > 1
    ]


def mixed_machines(results: Results, pairs: list[list[str]]) -> list[str]:
    """Return a warning for each pair of variants whose runs of one seed were trained on different machines.

    Machines differ if their processors or devices do. Runs of older versions do not name them and are left out.
    """
    warnings, machines = [], _machines(results)
    for pair in pairs:
        seeds = {seed for variant, seed in machines if variant in pair}
        by_seed = [machines.get((pair[0], seed), set()) | machines.get((pair[1], seed), set()) for seed in seeds]
        if mixed := [found for found in by_seed if len(found) > 1]:
            warnings.append(
                f"{pair[0]} and {pair[1]}: the runs of {len(mixed)} of {len(seeds)} seeds were trained on different "
                f"machines ({'; '.join(sorted(set.union(*mixed)))}), which may change losses: see docs/sweeps.md"
            )
    return warnings


def mixed_sizes(results: Results, sizes: list[str] | None) -> list[str]:
    """Return a warning if the runs at several sizes, whose losses one curve describes, are from different machines."""
    found = set().union(*_machines(results).values())
    if not sizes or len(found) < 2:
        return []
    return [
        f"the runs were trained on different machines ({'; '.join(sorted(found))}), which may change losses, and so "
        "their slope over the sizes: see docs/sweeps.md"
    ]


def _machines(results: Results) -> dict[tuple[str, int], set[str]]:
    """Return the machines that trained the final runs of each variant and seed."""
    machines = {}
    for (phase, variant, _, seed), run in results.runs.items():
        if phase == "final" and (where := run["provenance"]):
            machines.setdefault((variant, seed), set()).add(f"{where['device']}, {where['processor']}")
    return machines
