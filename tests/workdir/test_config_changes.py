"""Which keys may differ when a run is resumed, and how far it can be extended."""

import dataclasses
import hashlib
import itertools
import json

import jax
import jax.numpy as jnp
from tiny import with_keys

from lm.config import Config, ModelConfig, OptimizerConfig, from_dict, to_dict
from lm.ideas import moe
from lm.optimizers import learning_rate_schedule
from lm.system import files
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


def test_the_digest_is_over_sorted_json_of_the_keys_that_decide_what_is_computed():
    # The JSON is written out, because a digest must not depend on the version of Python or on this
    # code's details.
    assert config_changes.experiment_digest(Whole()) == sha256(
        '{"config.part.width": 3, "config.rates": [0.5, 1.0]}'
    )


CHANGES = {
    False: {
        "model_d_model": 384, "model_window_pattern": (128, 0), "optimizer_learning_rate": 2e-3,
        "data_source": "python_docs", "train_seed": 1, "train_batch_size": 8,
    },
    True: {
        "model_remat": "block", "train_steps_per_dispatch": 4, "checkpoint_every": 5, "log_every": 1, "eval_every": 5,
    },
}  # fmt: skip


def test_each_key_changes_the_digest_or_not_and_one_list_of_differences():
    for execution, keys in CHANGES.items():
        for key, value in keys.items():
            old, new = Config(), with_keys(Config(), **{key: value})
            assert (
                config_changes.experiment_digest(old) == config_changes.experiment_digest(new)
            ) is execution
            differences = config_changes.compare_configs(as_saved(old), new)
            before = getattr(getattr(old, key.split("_")[0]), key.split("_", 1)[1])
            shown = [list(v) if isinstance(v, tuple) else v for v in (before, value)]
            line = f"config.{key.replace('_', '.', 1)}: {shown[0]} -> {shown[1]} (run -> now)"
            assert differences == (([], [line]) if execution else ([line], []))


def test_a_config_read_back_from_json_does_not_differ():
    config = with_keys(
        Config(), model_window_pattern=(128, 0), train_profile=(3, 5), optimizer_learning_rate=1e-4
    )
    saved = as_saved(config)
    assert config_changes.compare_configs(saved, config) == ([], [])
    assert config_changes.experiment_digest(from_dict(saved)) == config_changes.experiment_digest(
        config
    )


def test_a_key_that_the_run_lacks_has_its_default_and_a_former_key_is_a_difference():
    saved = as_saved(Config())
    del saved["model"]["qk_norm"]
    assert config_changes.compare_configs(saved, Config())[0] == []
    saved["model"]["former"] = 1
    changed = dataclasses.replace(Config(), model=ModelConfig(qk_norm=True))
    assert config_changes.compare_configs(saved, changed)[0] == [
        "config.model.qk_norm: False -> True (run -> now)",
        "config.model.former: 1 -> absent (run -> now)",
    ]


# ---- Extending a run -----------------------------------------------------------------------------


def check_growth(o: OptimizerConfig, old: int, new: int) -> None:
    """A run may grow or shrink exactly if the learning rates of its steps stay; refused at most one
    step too early.
    """
    n = min(old, new)
    before, after = (
        jax.vmap(learning_rate_schedule(o, total))(jnp.arange(n + 1)).tolist()
        for total in (old, new)
    )
    for made in range(n):
        if config_changes.refuse_growth(old, new, Config(optimizer=o), made) is None:
            assert before[:made] == after[:made]
        else:
            assert before[: made + 1] != after[: made + 1]


def test_a_run_can_be_extended_exactly_if_its_past_learning_rates_stay():
    for schedule, warmup, decay_steps in itertools.product(
        ["constant", "linear", "cosine", "wsd"], [0, 30], [None, 80]
    ):
        o = OptimizerConfig(
            schedule=schedule, warmup_steps=warmup, decay_steps=decay_steps, decay_fraction=0.3
        )
        check_growth(o, 100, 150)


def test_the_slow_average_of_ademamix_grows_over_the_run_or_over_given_steps():
    o = OptimizerConfig(name="ademamix", schedule="constant")
    refusal = config_changes.refuse_growth(100, 150, Config(optimizer=o), 10)
    assert "set optimizer.slow_warmup_steps" in refusal
    assert config_changes.refuse_growth(100, 150, Config(optimizer=o), 0) is None
    fixed = dataclasses.replace(o, slow_warmup_steps=100)
    assert config_changes.refuse_growth(100, 150, Config(optimizer=fixed), 10) is None


def test_a_run_can_be_shortened_only_where_both_lengths_are_stable():
    for schedule in ("constant", "linear", "cosine"):
        config = Config(optimizer=OptimizerConfig(schedule=schedule, warmup_steps=20))
        assert config_changes.refuse_growth(100, 100, config, 100) is None
        assert "can grow but not shrink" in config_changes.refuse_growth(100, 99, config, 10)
    for warmup in (0, 30):
        o = OptimizerConfig(schedule="wsd", warmup_steps=warmup, decay_fraction=0.3)
        check_growth(o, 100, 60)
        fixed = Config(optimizer=dataclasses.replace(o, decay_steps=100))
        assert "can grow but not shrink" in config_changes.refuse_growth(100, 60, fixed, 10)


def test_weights_of_the_loss_that_change_in_training_fix_the_number_of_steps(monkeypatch):
    """Those of any idea."""
    mtp, experts = (
        with_keys(Config(), optimizer_schedule="constant", **keys)
        for keys in ({"model_multi_token_prediction": True}, {"model_ffn": "moe"})
    )
    assert config_changes.refuse_growth(100, 150, mtp, 0) is None
    assert "the weights in the loss of mtp_2, mtp_3 in the" in config_changes.refuse_growth(
        100, 150, mtp, 1
    )
    assert config_changes.refuse_growth(100, 150, experts, 1) is None
    monkeypatch.setattr(
        moe, "loss_weights", lambda c, fraction: {"mine": 1.0, "moe_balance": fraction > 0.85}
    )
    assert "of moe_balance in" in config_changes.refuse_growth(100, 150, experts, 1)
