import json
import pathlib

import numpy as np
import pytest


@pytest.fixture(scope="session")
def torch_answers():
    """Return inputs and PyTorch's results in float64, from tests/references/make_layers.py."""
    path = pathlib.Path(__file__).parents[1] / "references" / "layers.json"
    groups = json.loads(path.read_text())
    del groups["torch"]  # the version
    return {name: {k: np.array(v) for k, v in group.items()} for name, group in groups.items()}


@pytest.fixture(scope="session")
def finite_difference():
    """Return gradient(f, *arrays): central differences of a scalar float64 function, one array per
    argument.
    """

    def gradient(f, *arrays, step=1e-5):
        arrays = [np.array(a, np.float64) for a in arrays]
        gradients = [np.zeros(a.shape) for a in arrays]
        for a, g in zip(arrays, gradients, strict=True):
            for i in np.ndindex(a.shape):
                x = a[i]
                a[i] = x + step
                above = f(*arrays)
                a[i] = x - step
                g[i] = (above - f(*arrays)) / (2 * step)
                a[i] = x
        return gradients

    return gradient
