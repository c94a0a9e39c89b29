"""A run says which parameters its loss does not read; tests/test_ideas.py checks that no idea has
any.
"""

import jax.numpy as jnp

from lm import ideas


def test_a_run_names_parameters_that_its_loss_does_not_read(train, tmp_path, monkeypatch):
    class OfTheInput:
        def apply(here, v_BTGK):
            return jnp.zeros_like(v_BTGK) + here.x_BTD[..., None, : v_BTGK.shape[-1]]

    monkeypatch.setitem(ideas.SITES["values"], "norm_bias", OfTheInput)  # any key that is true
    arguments = ["--config.train.steps=1", "--config.train.seed=777", "--config.eval.every=0"]
    code, output = train(tmp_path / "new", *arguments)
    assert code == 2  # an idea that is not of this package
    assert "w_v_DGK" in output
    OfTheInput.__name__ = "value_residual"  # as if it were
    code, output = train(tmp_path / "run", *arguments)
    assert code == 0
    assert "WARNING: the loss does not depend on layers/attention/w_v_DGK: " in output
