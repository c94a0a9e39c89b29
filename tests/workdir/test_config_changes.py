"""Which keys may differ when a run is resumed, and how far it can be extended."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import pytest
from tiny import with_keys

from lm import files
from lm.config import Config, OptimizerConfig, from_dict, to_dict
from lm.optimizers import learning_rate_schedule
from lm.workdir import config_changes


def as_saved(config) -> dict:
    return json.loads(files.to_json(to_dict(config)))


@dataclasses.dataclass(frozen=True)
class Part:
    width: int = 3
    every: int = dataclasses.field(default=7, metadata={"execution": True})


@dataclasses.dataclass(frozen=True)
class Whole:
    part: Part = Part()
    rates: tuple[float, ...] = (0.5, 1.0)
    logs: Part = dataclasses.field(default=Part(), metadata={"execution": True})


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_digests_are_over_sorted_json_of_their_keys():
    # The JSON is written out, because a digest must not depend on the version of Python or on this code's details.
    assert config_changes.experiment_digest(Whole()) == sha256('{"config.part.width": 3, "config.rates": [0.5, 1.0]}')
    assert config_changes.execution_digest(Whole()) == sha256(
        '{"config.logs.every": 7, "config.logs.width": 3, "config.part.every": 7}'
    )


@pytest.mark.parametrize(
    ("key", "value", "execution"),
    [
        ("model_d_model", 384, False),
        ("model_window_pattern", (128, 0), False),
        ("optimizer_learning_rate", 2e-3, False),
        ("data_source", "python_docs", False),
        ("train_seed", 1, False),
        ("train_batch_size", 8, False),
        ("model_remat", "block", True),
        ("train_steps_per_dispatch", 4, True),
        ("checkpoint_every", 5, True),
        ("log_every", 1, True),
        ("eval_every", 5, True),
    ],
)
def test_each_key_changes_one_digest_and_one_list_of_differences(key, value, execution):
    old, new = Config(), with_keys(Config(), **{key: value})
    assert (config_changes.experiment_digest(old) == config_changes.experiment_digest(new)) is execution
    assert (config_changes.execution_digest(old) == config_changes.execution_digest(new)) is not execution
    differences = config_changes.compare_configs(as_saved(old), new)
    assert differences[not execution] == []
    before = getattr(getattr(old, key.split("_")[0]), key.split("_", 1)[1])
    shown_before, shown_now = (list(v) if isinstance(v, tuple) else v for v in (before, value))
    assert differences[execution] == [f"config.{key.replace('_', '.', 1)}: {shown_before} -> {shown_now} (run -> now)"]


def test_a_config_read_back_from_json_does_not_differ():
    config = with_keys(Config(), model_window_pattern=(128, 0), train_profile=(3, 5), optimizer_learning_rate=1e-4)
    saved = as_saved(config)
    assert config_changes.compare_configs(saved, config) == ([], [])
    assert config_changes.experiment_digest(from_dict(saved)) == config_changes.experiment_digest(config)


def test_a_key_that_was_removed_is_ignored_in_a_saved_config():
    saved = as_saved(Config())
    saved["train"]["accumulation"] = 4
    assert from_dict(saved) == Config()
    assert config_changes.compare_configs(saved, Config()) == ([], [])


def test_a_key_missing_in_a_run_has_its_default_and_a_removed_key_is_a_difference():
    saved = as_saved(Config())
    del saved["model"]["qk_norm"]
    assert config_changes.compare_configs(saved, Config()) == ([], [])
    saved["model"]["former"] = 1
    assert config_changes.compare_configs(saved, with_keys(Config(), model_qk_norm=True))[0] == [
        "config.model.qk_norm: False -> True (run -> now)",
        "config.model.former: 1 -> absent (run -> now)",
    ]


# ---- Extending a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 30])
@pytest.mark.parametrize("decay_steps", [None, 80])
def test_a_run_can_be_extended_exactly_if_its_past_learning_rates_stay(schedule, warmup, decay_steps):
    o = OptimizerConfig(schedule=schedule, warmup_steps=warmup, decay_steps=decay_steps, decay_fraction=0.3)
    old, new = (jax.vmap(learning_rate_schedule(o, total))(jnp.arange(150)).tolist() for total in (100, 150))
    for made in range(101):
        if config_changes.refuse_growth(100, 150, o, made) is None:
            assert old[:made] == new[:made]
        else:  # refused at most one step before the rates differ
            assert old[: made + 1] != new[: made + 1]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_cannot_be_shortened(schedule):
    o = OptimizerConfig(schedule=schedule, warmup_steps=20)
    assert config_changes.refuse_growth(100, 100, o, 100) is None
    assert "can grow but not shrink" in config_changes.refuse_growth(100, 99, o, 10)


@pytest.mark.parametrize("warmup", [0, 30])
def test_a_run_can_be_shortened_where_both_lengths_are_stable(warmup):
    o = OptimizerConfig(schedule="wsd", warmup_steps=warmup, decay_fraction=0.3)
    old, new = (jax.vmap(learning_rate_schedule(o, total))(jnp.arange(60)).tolist() for total in (100, 60))
    for made in range(60):
        if config_changes.refuse_growth(100, 60, o, made) is None:
            assert old[:made] == new[:made]
        else:
            assert old[: made + 1] != new[: made + 1]
    fixed = dataclasses.replace(o, decay_steps=100)
    assert "can grow but not shrink" in config_changes.refuse_growth(100, 60, fixed, 10)
