"""Write ngrams.json beside this file: probabilities of NLTK 3.10's KneserNeyInterpolated, for
tests/baselines.

Run once by hand, with nltk installed: python tests/references/make_ngrams.py. The tests read only
the JSON file.
"""

import json
import pathlib

from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

TRAIN = (
    "it was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of light"
)
SCORED = "it was the season of sadness, it was the spring of hope, it was the winter of despair"


def probabilities(order: int, discount: float) -> list[float]:
    """Return the probability of each character of SCORED after the order - 1 characters before it."""
    model = KneserNeyInterpolated(order, discount=discount)
    model.fit([everygrams(list(TRAIN), max_len=order)], vocabulary_text=TRAIN)
    return [
        model.score(SCORED[i], list(SCORED[i - order + 1 : i]))
        for i in range(order - 1, len(SCORED))
    ]


if __name__ == "__main__":
    cases = [
        {"order": order, "discount": discount, "probabilities": probabilities(order, discount)}
        for order, discount in ((2, 0.1), (2, 0.75), (3, 0.1), (3, 0.75))
    ]
    results = {"train": TRAIN, "scored": SCORED, "cases": cases}
    pathlib.Path(__file__).with_name("ngrams.json").write_text(json.dumps(results) + "\n")
