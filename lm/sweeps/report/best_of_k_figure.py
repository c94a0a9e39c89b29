"""The figure of a random search: the expected best validation loss over the number of trials."""

import textwrap

from matplotlib.figure import Figure

from lm.sweeps.analysis.best_of_k import expected_best, numbers_of_trials, trial_losses
from lm.sweeps.analysis.outcomes import Analysis
from lm.sweeps.report.figure_parts import LETTERS, LOSS, add_legend, line_look, stack_panels


def best_of_k_figure(a: Analysis) -> Figure:
    """Draw one line per variant, with a marker at each number of trials in the table."""
    n, (figure, (axes,)) = len(a.record["search"]["trials"]), stack_panels(1, len(a.variants))
    numbers = list(range(1, n + 1))
    marked = [k - 1 for k in numbers_of_trials(n)]
    for i, name in enumerate(a.variants):
        losses = trial_losses(a.results, a.record, name)
        best = [expected_best(losses, k) for k in numbers]
        axes.plot(numbers, best, label=textwrap.fill(name, LETTERS - 8), markevery=marked, **line_look(i))
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    ticks = [2**i for i in range(n.bit_length())]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set(xlabel="number of random trials", ylabel=LOSS, title="best trial to expect")
    add_legend(axes)
    return figure
