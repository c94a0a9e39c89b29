"""The tables of a report about a random search: the best trials, and the loss to expect from fewer trials."""

from lm.sweeps.analysis.answers import difference
from lm.sweeps.analysis.best_of_k import expected_best, numbers_of_trials, trial_losses
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.design.search import show_value, trial_of
from lm.sweeps.report.tables import Table
from lm.sweeps.storage.results import tuning_result


def best_trials(a: Analysis) -> Table:
    """Return the values and the tuning results of each variant's best trial."""
    search = a.record["search"]
    rows = []
    for v in a.variants.values():
        number, values = trial_of(a.record, v.rate)
        found = [tuning_result(a.results, a.record, v.name, rate) for rate in v.grid]
        best = found[v.grid.index(v.rate)]
        loss = difference(best.loss, sign="") if best.n_diverged + best.n_stuck == 0 else "diverged or stuck"
        lost = sum(t.n_diverged + t.n_stuck > 0 for t in found)
        rows.append([v.name, f"{number}", *map(show_value, values.values()), loss, f"{lost} of {len(found)}"])
    names = [key.rpartition(".")[2] for key in search["space"]]
    space = "; ".join(f"{name} {values}" for name, values in zip(names, search["space"].values(), strict=True))
    notes = {
        "best trial": f"Of {len(search['trials'])} random trials, the same for every variant, the one with the fewest "
        f"diverged or stuck runs, then the lowest validation loss. Drawn: {space}.",
        "validation loss": "Mean over the tuning seeds at the end of training. It is the lowest of all trials, so "
        "fresh seeds tend to give a higher loss.",
        "lost": "Trials in which a run diverged or got stuck.",
    }
    header = ["variant", "best trial", *names, "validation loss", "lost"]
    return Table("Tuning", header, rows, notes)


def best_of_k(a: Analysis) -> Table:
    """Return the expected best validation loss of each variant after 1, 2, 4, ... trials."""
    numbers = numbers_of_trials(len(a.record["search"]["trials"]))
    rows = []
    for name in a.variants:
        losses = trial_losses(a.results, a.record, name)
        rows.append([name, *(difference(expected_best(losses, k), sign="") for k in numbers)])
    notes = {
        "variant": "The lowest validation loss to expect from so many random trials, for the mean over the tuning "
        "seeds (Dodge et al. 2019, arXiv:1909.03004, equations 3 to 5). Runs that diverged, and losses above the "
        "unigram baseline, count as that baseline. The trials are drawn with replacement, so that the last column is "
        "a little above the lowest loss that was found.",
    }
    header = ["variant", *(f"{k} trial{'s' * (k > 1)}" for k in numbers)]
    return Table("Best of k trials", header, rows, notes)
