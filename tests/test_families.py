"""Small models of published families have the logits that transformers computes from the same weights."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from references import families
from tiny import redrawn

from lm import model


@functools.cache
def stored():
    return {name: np.array(logits_TV) for name, logits_TV in json.loads(families.PATH.read_text()).items()}


FAST = {"llama3", "gemma2", "olmo2"}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in families.FAMILIES if name not in FAST]


@pytest.mark.parametrize("name", [*sorted(FAST), *SLOW])
def test_logits_equal_those_of_transformers(name):
    """transformers 5.23 computed the stored logits in float64, except for RoPE and RMSNorm; ours are float32."""
    c = dataclasses.replace(families.model_config(name), scan_layers=True)  # compiles faster
    logits_TV = jax.jit(model.logits, static_argnums=1)(redrawn(c), c, np.array([families.TOKENS]))[0]
    np.testing.assert_allclose(logits_TV, stored()[name], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_installed_transformers_gives_the_stored_logits(name):
    pytest.importorskip("torch", reason="transformers needs torch")
    pytest.importorskip("transformers")
    np.testing.assert_allclose(families.transformers_logits(name), stored()[name], rtol=0, atol=1e-5)
