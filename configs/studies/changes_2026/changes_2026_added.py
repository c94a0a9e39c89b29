"""changes_2026 with the changes that joined its page later: looped depth and latent attention.

sharing.py has their design and trains them. `lm.sweep --study changes_2026 --repeat` reads this file.
"""

import dataclasses

from lm.sweeps import match_params
from lm.sweeps.plan import read_sweep

STUDY = "configs/studies/changes_2026/changes_2026.py"
MATCHED = {"model.d_ff": match_params("base")}
CHANGES = {
    "looped depth": {"model.n_layers": 2, "model.loops": 2},
    "one key head": {"model.n_kv_heads": 1} | MATCHED,
    "latent attention": {
        "model.mixers": ("latent",),
        "model.latent_width": 24,
        "model.qk_norm": False,
    }
    | MATCHED,
}
COMPARISONS = (
    ("looped depth", "base"),
    ("latent attention", "one key head"),
    ("latent attention", "base"),
)


def get_sweep():
    study = read_sweep(STUDY)
    return dataclasses.replace(
        study,
        variants=study.variants | CHANGES,
        comparisons=tuple(study.comparisons) + COMPARISONS,
    )
