"""Every choice of the schema has an implementation, and a choice without one is an error."""

import dataclasses

import pytest
from tiny import tiny

from lm import declarations, ideas, layer_stack, model, optimizers, parameters
from lm.config import DataConfig
from lm.config.schema import schema
from lm.data import open_corpus
from lm.layers import attention, feed_forward, layer_norms, position_encodings
from lm.optimizers import make_optimizer

# (config key, a table that is indexed by the key's value)
TABLES = [
    ("model.norm", model.NORMS),
    ("model.norm_algorithm", layer_norms.LAYER_NORMS),
    ("model.norm_placement", model.BLOCKS),
    ("model.ffn", (*model.FEED_FORWARDS, *ideas.FEED_FORWARDS)),
    ("model.residual", ideas.RESIDUALS),
    ("model.activation", feed_forward.ACTIVATIONS),
    ("model.positions", model.POSITION_ENCODINGS),
    ("model.rope_pairing", position_encodings.PAIRINGS),
    ("model.rope_scaling", position_encodings.ROPE_SCALINGS),
    ("model.sinusoidal_order", position_encodings.SINUSOID_ORDERS),
    ("model.qk_norm_over", model.QK_NORM_AXES),
    ("model.init", declarations.INITIALIZERS),
    ("model.attention", ("auto", *attention.IMPLEMENTATIONS)),
    ("model.remat", layer_stack.REMAT_POLICIES),
    ("optimizer.name", optimizers.UPDATE_RULES),
    ("optimizer.schedule", optimizers.SCHEDULES),
]


def test_tables_have_the_choices_of_the_schema():
    for key, table in TABLES:
        assert set(table) == set(schema()[key][1].metadata["choices"]), key


def test_a_choice_without_an_implementation_is_an_error(tmp_path):
    """What was added to the schema alone does not fall back to another choice."""
    config = tiny()
    for key in ("norm_placement", "ffn", "init", "parametrization"):
        with pytest.raises(KeyError, match="adopt"):
            parameters.parameter_table(dataclasses.replace(config.model, **{key: "adopt"}))
    for key in ("name", "schedule"):
        o = dataclasses.replace(config.optimizer, **{key: "adopt"})
        with pytest.raises(KeyError, match="adopt"):
            make_optimizer(o, 10, parameters.parameter_table(config.model))
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 20)
    data = DataConfig(
        source=f"text:{tmp_path / 'text.txt'}", cache_dir=str(tmp_path), packing="adopt"
    )
    with pytest.raises(KeyError, match="adopt"):
        open_corpus(data, seq_len=8, say=print)


def test_a_missing_parameter_is_an_error_that_names_the_table():
    with pytest.raises(
        KeyError,
        match=r"the parameter table of attention has no parameter 'w_x_DHK'; it has w_q_DHK",
    ):
        model.mixer_table(tiny().model, "attention")["w_x_DHK"]
