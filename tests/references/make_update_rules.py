"""Write update_rules.json beside this file: steps of schedule-free AdamW by the authors' package,
schedulefree 1.4.1.

Run once by hand, with schedulefree and torch installed: python
tests/references/make_update_rules.py. The test reads only the JSON file. Each case has a warm-up,
by the steps below the peak. Step i has the gradient 2 y - i at y.
"""

import json
import pathlib
from importlib.metadata import version

import schedulefree
import torch

torch.set_default_dtype(torch.float64)
START, STEPS = torch.linspace(-1, 1, 12).reshape(3, 4), 12
KEYS = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.3}


def schedule_free(warmup_steps):
    """Return y, where gradients are taken, and x, which is evaluated, after each step."""
    w = torch.nn.Parameter(START.clone())
    # Its warm-up counts the first step at the peak, too.
    rule = schedulefree.AdamWScheduleFree([w], warmup_steps=warmup_steps + 1, **KEYS)
    found = {"warmup_steps": warmup_steps, "y": [], "x": []}
    for i in range(STEPS):
        rule.train()
        w.grad = 2 * w.detach() - i
        rule.step()
        found["y"].append(w.tolist())
        rule.eval()
        found["x"].append(w.tolist())
    return found


if __name__ == "__main__":
    content = {"schedulefree": version("schedulefree"), "start": START.tolist()}
    content["schedule_free"] = [schedule_free(warmup_steps) for warmup_steps in (0, 5)]
    path = pathlib.Path(__file__).with_name("update_rules.json")
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
