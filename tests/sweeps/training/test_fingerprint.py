"""Fingerprints: equal for configs whose runs at one learning rate cannot differ beyond rounding, else unequal."""

import dataclasses

import numpy as np
import pytest
from tiny import tiny

from lm.data.corpus import Corpus, Split
from lm.sweeps.training.fingerprint import differing_keys, fingerprint

TOKENS = np.arange(400, dtype=np.uint16) * 7 % 19
CORPUS = Corpus("numbers", {"train": Split("train", TOKENS, 400, 400)}, None, "fingerprint")


@pytest.fixture(scope="module")
def base():
    return fingerprint(tiny(), CORPUS)


DIFFERENT = [
    {"model": {"rope_theta": 500.0}},
    {"model": {"init": "he"}},
    {"model": {"embed_std": 0.5}},
    {"model": {"window_pattern": (7,)}},
    {"model": {"norm": "layer"}},
    {"model": {"dropout": 0.1}},
    {"optimizer": {"weight_decay": 0.0}},
    {"optimizer": {"b2": 0.9}},
    {"train": {"seed": 1}},
    {"train": {"steps": 21}},
    {"train": {"z_loss": 1e-4}},
    {"data": {"order": "epochs"}},
    {"data": {"order": "epochs", "shuffle": False}},
]
SAME = [
    {"model": {"window_pattern": (8,)}},
    {"model": {"window_pattern": (0, 100)}},
    {"model": {"norm_algorithm": "welford"}},
    {"model": {"norm_bias": False}},
    {"model": {"sinusoidal_order": "cosine_first"}},
    {"model": {"d_ff": 24}},
    {"optimizer": {"momentum": 0.9}},
    {"data": {"shuffle": False}},
    {"log": {"every": 3}},
    {"optimizer": {"learning_rate": 2e-3}},
    {"model": {"remat": "block"}},
    {"model": {"scan_layers": True}},
    {"train": {"micro_batch_size": 2, "loss_chunk": 4}},
    {"eval": {"batch_size": 2}},
]


def named(changes) -> str:
    return ",".join(f"{key}={value}" for section in changes.values() for key, value in section.items())


QUICK = ("rope_theta", "init", "window_pattern", "norm_algorithm", "learning_rate", "seed", "order")


def cases(of: list[dict]) -> list:
    """Return test cases; keys that users rarely sweep over are marked slow."""
    quick = [any(key in named(changes) for key in QUICK) for changes in of]
    marks = [[] if here else [pytest.mark.slow] for here in quick]
    return [pytest.param(changes, marks=mark, id=named(changes)) for changes, mark in zip(of, marks, strict=True)]


@pytest.mark.parametrize("changes", cases(DIFFERENT))
def test_different_experiments_have_different_fingerprints(base, changes):
    assert fingerprint(tiny(**changes), CORPUS) != base


@pytest.mark.parametrize("changes", cases(SAME))
def test_keys_without_an_effect_do_not_change_the_fingerprint(base, changes):
    """Windows as long as the sequence, options of LayerNorm under RMSNorm, rematerialization, ..."""
    assert fingerprint(tiny(**changes), CORPUS) == base


@pytest.mark.slow
def test_an_unused_hyperparameter_does_not_change_the_fingerprint():
    """A constant schedule does not use final_fraction."""
    constant = {"schedule": "constant", "final_fraction": 0.1}
    twice = [fingerprint(tiny(optimizer=constant | more), CORPUS) for more in ({}, {"final_fraction": 0.5})]
    assert twice[0] == twice[1]
    assert fingerprint(tiny(optimizer=constant | {"weight_decay": 0.0}), CORPUS) != twice[0]


def test_other_data_changes_the_fingerprint(base):
    assert fingerprint(tiny(), dataclasses.replace(CORPUS, fingerprint="other")) != base


def test_differing_keys():
    assert differing_keys(tiny(), tiny(model={"rope_theta": 5.0}, train={"seed": 4})) == [
        "model.rope_theta",
        "train.seed",
    ]
