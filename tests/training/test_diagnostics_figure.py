"""The picture of a run's diagnostics: what it reads from metrics.jsonl, and where its labels are."""

import math

import numpy as np

from lm.training.diagnostics_figure import curves_of, diagnostics_png
from lm.workdir.metrics import MetricsWriter, read_metrics

DETAIL = {
    "attention": {
        "layers/max_logit": [2.0, 5.0],
        "layers/entropy": [1.0, 0.5],
        "layers/max_entropy": [3.0, 3.0],
    },
    "activations": {
        "layers/output": [1.0, 2.0],
        "layers/attention": [0.0, 0.1],
        "layers/ffn": [0.0, 0.2],
    },
    "gradients": {"layers": [1e-3, math.nan], "embedding": 1e-5, "head/w_DV": math.inf},
}


def written(workdir, *details):
    """Write a metrics.jsonl with these details at steps 0, 10, ..., and return its path."""
    writer = MetricsWriter(workdir, tensorboard=False)
    for i, detail in enumerate(details):
        writer.write({"step": 10 * i, "detail": detail})
        writer.write({"step": 10 * i, "loss": 1.0})
    writer.close()
    return workdir / "metrics.jsonl"


def test_there_is_one_curve_per_layer_over_the_steps_that_have_it(tmp_path):
    """Zeros, missing values and values that are not finite are left out of the picture."""
    path = written(tmp_path, DETAIL, {"gradients": {"embedding": 1.0}}, DETAIL)
    assert diagnostics_png(path).startswith(b"\x89PNG")
    lines = read_metrics(path)
    details = [(line["step"], line["detail"]) for line in lines if "detail" in line]
    first, last = curves_of(details, "gradients", "layers", "-", "")
    assert first[0] == last[0] == [0, 20]
    np.testing.assert_array_equal(first[1], [1e-3, 1e-3])
    assert np.isnan(last[1]).all()
    assert [first[2], last[2]] == ["layer 0", "layer 1"]
    assert first[3] != last[3]
    assert curves_of(details, "updates", "layers", "-", "") == []
