"""Add two ideas to a published study: layers that are used twice, and a cache that heads share.

    python configs/studies/changes_2026/sharing.py changes_2026 sweeps/sharing
    python configs/studies/changes_2026/sharing.py changes_2026 sweeps/sharing --publish

The design, fixed before the first run (the commit that adds this file):

* "Looped depth" has two layers that are applied twice (Universal Transformers, arXiv:1807.03819): the
  FLOPs and the depth of the base, with half of the parameters of its blocks. d_ff is that of the base.
* "Latent attention" (DeepSeek-V2, arXiv:2405.04434) caches 32 numbers of a token in each layer: a
  latent vector of 24 and a rotated key of 8. "One key head" (multi-query attention,
  arXiv:1911.02150) caches as many: a key and a value of 16. The base caches 64 or 96.
  Parameters are matched through d_ff, to the base's.
* Three claims: looped depth against the base, latent attention against one key head (equal cache)
  and against the base (a half or a third of its cache). They join the other 29 of the page in one
  correction, now for 32 tests. One key head against the base is a secondary row.
* All cells, the study's seeds, lists and rule. The control of the rows against the base is the mean of
  the base and its placebos, whose published runs are reused. One key head has no placebo.
* Latent attention has no QK-norm: it normalizes the latent vector.

All rows are published, whichever way they point. Runs are published as those of controls.py.
"""

import dataclasses
import sys
from pathlib import Path

from controls import publish, train

from lm.sweeps.addition import STUDIES, read_study
from lm.sweeps.plan import Plan, plan_sweep, read_sweep
from lm.sweeps.results import rule_of, shapes_of


def plan_changes(study: str, record: dict, runs: list) -> Plan:
    """Return the plan of the base, its placebos and the changes of changes_2026_added.py."""
    path = STUDIES / "changes_2026" / f"{study}.py"
    sweep = read_study(path)
    first = read_sweep(str(path))
    variants = {
        name: changes
        for name, changes in sweep.variants.items()
        if name == sweep.baseline or name not in first.variants
    }
    sweep = dataclasses.replace(
        sweep,
        variants=variants,
        comparisons=tuple(pair for pair in sweep.comparisons if pair not in first.comparisons),
        budgets={"full": dataclasses.replace(sweep.budgets["full"], placebos=3)},
    )
    plan = plan_sweep(str(path), sweep, "full")
    return dataclasses.replace(
        plan,
        name=f"{study}_sharing",
        rule=rule_of(record),
        shapes=shapes_of(record, runs),
    )


if __name__ == "__main__":
    study, workdir, *options = sys.argv[1:]
    if options == ["--publish"]:
        publish(study, Path(workdir), beside=(("one key head", "base"),))
    else:
        sys.exit(train(study, Path(workdir), plan_changes))
