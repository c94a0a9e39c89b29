"""A stream of changes that are added to a study: how many of those accepted are false.

All are compared with the same published runs of the baseline and its placebos, so their errors are
correlated. The noise of a run, the seed's part aside, and the error of tuning are those of
docs/results/changes_2026, by cell. A change is accepted by the ledger (`lm.sweeps.ledger`), or at p < 0.05 each.

    python3 -m benchmarks.calibration.stream
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

from lm.sweeps import ledger
from lm.sweeps.replication import read_results
from lm.system.text_tables import markdown_table

STUDY = Path("docs/results/changes_2026")
N_SEEDS = 10
N_CONTROLS = 4  # the baseline and three placebos
N_CHANGES = 200
UNSTABLE = "DyT"


def noise_of_study() -> tuple[np.ndarray, np.ndarray]:
    """Return by cell the standard deviation of a run's noise, and of the error of tuning of an arm."""
    a = read_results(STUDY)
    noise_C = []
    tuning_C = []
    for cell in a.record["cells"]:
        arms = [v for v in a.variants.values() if v.about["cell"] == cell]
        arms = [v for v in arms if v.about["arm"] != UNSTABLE]
        losses_AN = np.array([list(v.losses.values()) for v in arms])
        n_arms, n_seeds = losses_AN.shape
        residual_AN = (
            losses_AN - losses_AN.mean(1, keepdims=True) - losses_AN.mean(0) + losses_AN.mean()
        )
        noise_C.append(np.sqrt((residual_AN**2).sum() / ((n_arms - 1) * (n_seeds - 1))))
        tuning_C.append(np.sqrt(np.mean([v.tuning.variance for v in arms])))
    return np.array(noise_C), np.array(tuning_C)


def p_values(
    effects_T: np.ndarray, noise_C: np.ndarray, tuning_C: np.ndarray, n_streams: int, draw
) -> np.ndarray:
    """Return the one-sided p-values of changes with these true differences (streams, changes)."""
    n_changes, n_cells = len(effects_T), len(noise_C)

    def arms(n: int) -> np.ndarray:
        """Return losses (streams, n, cells, seeds): a vertex is never below the optimum."""
        above_STC = stats.chi2.rvs(1, size=(n_streams, n, n_cells), random_state=draw)
        above_STC *= tuning_C / np.sqrt(2)  # the standard deviation of chi2(1) is sqrt(2)
        noise_STCN = draw.normal(0, 1, (n_streams, n, n_cells, N_SEEDS)) * noise_C[:, None]
        return above_STC[..., None] + noise_STCN

    control_S1CN = arms(N_CONTROLS).mean(axis=1, keepdims=True)
    difference_STCN = effects_T[:, None, None] + arms(n_changes) - control_S1CN
    of_seeds_STC = difference_STCN.var(axis=-1, ddof=1) / N_SEEDS
    of_both_sides = (1 + 1 / N_CONTROLS) * (tuning_C**2).sum()
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
    noise_C, tuning_C = noise_of_study()
    batch = 50  # streams at once, which fit in memory
    shares = [
        p_values(effects_T, noise_C, tuning_C, batch, draw) for _ in range(-(-n_streams // batch))
    ]
    p_ST = np.concatenate(shares)
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
