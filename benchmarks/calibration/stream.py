"""A stream of changes that are added to a study: how many of those accepted are false.

All are compared with the same published runs of the baseline and its placebos, so their errors are
correlated. The noise of a run and the error of tuning are those of docs/results/changes_2026, by
cell. A change is accepted by the ledger (`lm.sweeps.ledger`), or at p < 0.05 each.

    python3 -m benchmarks.calibration.stream
"""

import sys
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.calibration.published import STUDY, draw_starts, final_losses, final_noise
from lm.sweeps import ledger
from lm.sweeps.report import read_page
from lm.system.text_tables import markdown_table

N_SEEDS = 10
N_CONTROLS = 4  # the baseline and three placebos
N_CHANGES = 200
UNSTABLE = "DyT"


class Noise(NamedTuple):
    """Standard deviations by cell."""

    of_run_C1: np.ndarray
    of_start_C1: np.ndarray  # see `published.Cell`
    of_tuning_C: np.ndarray  # the error of tuning of an arm


def noise_of_study() -> Noise:
    """Return the noise of the published runs, without that of the variant that gets stuck."""
    a = read_page(STUDY)
    of_runs = []
    of_tuning = []
    for cell in a.record["cells"]:
        of_runs.append(final_noise(*final_losses(a, "base", cell)))
        arms = [v for v in a.variants.values() if v.about["cell"] == cell]
        arms = [v for v in arms if v.about["arm"] != UNSTABLE]
        of_tuning.append(np.sqrt(np.mean([v.tuning.variance for v in arms])))
    of_run_C1, of_start_C1 = np.array(of_runs).T[..., None]
    return Noise(of_run_C1, of_start_C1, np.array(of_tuning))


def p_values(effects_T: np.ndarray, noise: Noise, n_streams: int, draw) -> np.ndarray:
    """Return the one-sided p-values of changes with these true differences (streams, changes)."""
    n_changes, n_cells = len(effects_T), len(noise.of_tuning_C)
    # Arms: the controls, then the changes. A vertex is never below the optimum.
    above_SAC = stats.chi2.rvs(
        1, size=(n_streams, N_CONTROLS + n_changes, n_cells), random_state=draw
    )
    above_SAC *= noise.of_tuning_C / np.sqrt(2)  # the standard deviation of chi2(1) is sqrt(2)
    sizes_SCN = (n_streams, n_cells, N_SEEDS)
    starts_SACN = draw_starts(noise.of_start_C1, N_CONTROLS, n_changes, sizes_SCN, draw)
    noise_SACN = draw.normal(0, 1, starts_SACN.shape) * noise.of_run_C1
    losses_SACN = above_SAC[..., None] + starts_SACN + noise_SACN
    control_S1CN = losses_SACN[:, :N_CONTROLS].mean(axis=1, keepdims=True)
    difference_STCN = effects_T[:, None, None] + losses_SACN[:, N_CONTROLS:] - control_S1CN
    of_seeds_STC = difference_STCN.var(axis=-1, ddof=1) / N_SEEDS
    of_both_sides = (1 + 1 / N_CONTROLS) * (noise.of_tuning_C**2).sum()
    total_ST = of_seeds_STC.sum(-1) + of_both_sides
    df_ST = total_ST**2 / (of_seeds_STC**2 / (N_SEEDS - 1)).sum(-1)
    mean_ST = difference_STCN.mean(axis=(-1, -2))
    return stats.t.cdf(mean_ST / (np.sqrt(total_ST) / n_cells), df_ST)


def accepted_by_ledger(p_ST: np.ndarray) -> np.ndarray:
    """Return which changes the ledger of each stream accepts."""
    accepted_ST = np.zeros(p_ST.shape, bool)
    for p_T, accepted_T in zip(p_ST, accepted_ST, strict=True):
        for t, p in enumerate(p_T):
            accepted_T[t] = p <= ledger.next_level(accepted_T[:t])
    return accepted_ST


def simulate(
    n_changes: int, n_true: int, effect: float, n_streams: int, draw
) -> dict[str, dict[str, float]]:
    """Return by rule the share of streams with a false acceptance, of false ones, and the power.

    n_true changes, evenly spread, have the difference `effect`; the others are equal.
    """
    effects_T = np.zeros(n_changes)
    if n_true:
        effects_T[:: n_changes // n_true] = effect
    is_true_T = effects_T < 0
    noise = noise_of_study()
    batch = 50  # streams at once, which fit in memory
    batches = [p_values(effects_T, noise, batch, draw) for _ in range(-(-n_streams // batch))]
    p_ST = np.concatenate(batches)
    answers = {}
    for rule, accepted_ST in (("ledger", accepted_by_ledger(p_ST)), ("p < 0.05", p_ST < 0.05)):
        false_S = (accepted_ST & ~is_true_T).sum(1)
        all_S = accepted_ST.sum(1)
        answers[rule] = {
            "any false": float((false_S > 0).mean()),
            "false among accepted": float((false_S / np.maximum(all_S, 1)).mean()),
            "power": float(accepted_ST[:, is_true_T].mean()) if n_true else np.nan,
        }
    return answers


def table(n_streams: int) -> str:
    """Return the errors of the ledger beside those of p < 0.05 each."""
    rows = []
    for n_true, effect in ((0, 0.0), (20, -0.02), (20, -0.01)):
        answers = simulate(N_CHANGES, n_true, effect, n_streams, np.random.default_rng(3))
        for rule, answer in answers.items():
            shares = ["–" if np.isnan(x) else _percent(x) for x in answer.values()]
            better = f"{n_true} by {-effect:g}" if n_true else "none"
            rows.append([better, rule, *shares])
    header = ["better", "accepted by", "streams with a false one", "false among accepted", "found"]
    return markdown_table(header, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > 0.1 else f"{100 * share:.2g} %"


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
