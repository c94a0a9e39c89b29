"""The limits of an answer: the size, the text, the tokens, and the hyperparameters that were not tuned."""

import pytest
from synthetic_sweep import OPTIMIZER, diverge, select, sweep, write

from lm.sweeps.analysis.analyze_sweep import analyze
from lm.sweeps.analysis.scope import describe_scope, held_hyperparameters
from lm.sweeps.report import cost_tables


def config(**changes) -> dict:
    return {"optimizer": OPTIMIZER | changes, "train": {"batch_size": 8}}


def test_every_answer_names_the_size_the_text_and_the_fixed_hyperparameters(tmp_path):
    """gated has 2,000 parameters and plain 1,000; both train on 12,800 tokens."""
    record, runs = sweep()
    scope = (
        " At this size (2,000 and 1,000 parameters, 6.4 and 13 tokens per parameter), on this text (text), at fixed "
        "b2, warm-up, decay, weight decay and batch size: only the learning rate was tuned, over 3 values."
    )
    significant = analyze(write(tmp_path / "s", record, runs)).comparisons[0].answer
    diverge(select(runs, "final", "gated")[0])
    diverged = analyze(write(tmp_path / "diverged", record, runs)).comparisons[0].answer
    assert significant.endswith(")." + scope)
    assert diverged.endswith(")." + scope)


def test_an_answer_without_a_conclusion_has_no_scope(tmp_path):
    answer = analyze(write(tmp_path / "s", *sweep(budget="quick"))).comparisons[0].answer
    assert "At this size" not in answer


def test_the_answer_of_a_sweep_without_tuning_states_that_nothing_was_tuned(tmp_path):
    answer = analyze(write(tmp_path / "s", *sweep(grid=[0.002]))).comparisons[0].answer
    assert answer.endswith("and batch size: nothing was tuned, because each variant has one learning rate.")


def test_hyperparameters_that_a_comparison_changes_are_not_listed_as_fixed():
    assert held_hyperparameters(config(), config()) == ["b2", "warm-up", "decay", "weight decay", "batch size"]
    for key, name in (
        ("warmup_steps", "warm-up"),
        ("b2", "b2"),
        ("schedule", "decay"),
        ("weight_decay", "weight decay"),
    ):
        assert name not in held_hyperparameters(config(), config(**{key: 0}))
    bigger = config() | {"train": {"batch_size": 16}}
    assert "batch size" not in held_hyperparameters(config(), bigger)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (("sgd", "sgd"), ["momentum"]),
        (("sgd", "adamw"), ["b2", "momentum"]),  # each has one that the other does not use
        (("muon", "adamw"), ["b2", "momentum"]),
        (("lion", "adamw"), ["b2"]),
        (("new", "new"), ["b2", "momentum"]),
    ],
)
def test_hyperparameters_that_an_optimizer_does_not_use_are_not_named(names, first):
    held = held_hyperparameters(*(config(name=name) for name in names))
    assert held == [*first, "warm-up", "decay", "weight decay", "batch size"]


def test_numbers_of_two_variants_are_shown_once_if_equal():
    variant = {"n_params": 50, "grid": [1, 2], "data": {"name": "markov"}}
    variant["config"] = config() | {"train": {"batch_size": 8, "steps": 100, "seq_len": 16}}
    longer = variant | {"config": config() | {"train": {"batch_size": 8, "steps": 200, "seq_len": 16}}}
    assert describe_scope(variant, variant).startswith(
        "At this size (50 parameters, 256 tokens per parameter), on this text (markov), at fixed b2, "
    )
    assert describe_scope(variant, longer).endswith(
        ", over 2 values. The two trained on different numbers of tokens: 12,800 and 25,600."
    )


def test_the_table_of_costs_has_tokens_per_parameter(tmp_path):
    shown = cost_tables.costs(analyze(write(tmp_path / "s", *sweep())))
    assert [row[shown.header.index("tokens per parameter")] for row in shown.rows] == ["13", "6.4", "4.3"]
