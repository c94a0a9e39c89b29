"""The interval over seeds and text: how often it misses the mean over both.

All seeds are tested on the same blocks of text. The sampling error of the difference is 0.003, as in the published
comparison of feed-forward layers, and most of it is the same for all seeds.
"""

import numpy as np

from lm.sweeps.statistics import inference
from lm.text_tables import table

# Standard deviations of a difference on a test text of N_BLOCKS blocks: over seeds, over blocks, and the rest.
N_BLOCKS = 55
DIFFERENCE_SD, BLOCK_SD, REST_SD = 0.016, 0.02, 0.02


def simulate(n_sweeps: int) -> str:
    """Return a table of the intervals over seeds alone, and over seeds and text."""
    rows, draw = [["interval over", "seeds", "false positives", "mean width"]], np.random.default_rng(0)
    for n in (5, 20):
        found = {"seeds": [], "seeds and text": []}
        for _ in range(n_sweeps):
            shared = draw.normal(0, DIFFERENCE_SD, (n, 1)) + draw.normal(0, BLOCK_SD, N_BLOCKS)
            tests = shared + draw.normal(0, REST_SD, (n, N_BLOCKS))
            found["seeds"].append(inference.interval(tests.mean(axis=1)))
            found["seeds and text"].append(inference.crossed_interval(tests, np.ones(N_BLOCKS)))
        for name, intervals in found.items():
            wrong = np.mean([not i.low <= 0 <= i.high for i in intervals])
            rows.append([name, f"{n}", f"{wrong:.3f}", f"{np.mean([i.high - i.low for i in intervals]):.4f}"])
    return table(rows, right=range(1, 4))
