"""The comparison of --plan with published runs."""

from pathlib import Path

import pytest

from benchmarks.published_runs import RUNS, compare, config_of, reported, summary, table
from lm import parameters

PAGE = Path(__file__).parents[2] / "benchmarks" / "NOTES.md"


def test_sizes_of_the_models():
    """Compare numbers of parameters with LLM Foundry's tables and the model cards of Llama 2 and 3,
    to 0.1 %.
    """
    published = {
        "MPT 125M": 125_311_488, "MPT 1B": 1_315_950_592, "MPT 3B": 2_651_837_440, "MPT 7B": 6_658_859_008,
        "MPT 13B": 12_853_954_560, "MPT 30B": 29_975_214_080, "MPT 70B": 64_862_437_376, "Llama 2 7B": 6_738_415_616,
        "Llama 2 13B": 13_015_864_320, "Llama 2 70B": 68_976_648_192, "Llama 3 8B": 8_030_261_248,
        "Llama 3 70B": 70_553_706_496,
    }  # fmt: skip
    for name, expected in published.items():
        config = config_of(next(run for run in RUNS if run.model == name))
        assert parameters.count(parameters.parameter_table(config.model)) == pytest.approx(
            expected, rel=1e-3
        ), name


def test_each_device_has_one_anchor():
    anchors = [run.device for run in RUNS if run.anchor]
    assert len(anchors) == len(set(anchors))


def test_reported_throughput_agrees_with_reported_mfu():
    """Reported figures are rounded. LLM Foundry counts the position table, torchtitan also the
    embedding table.
    """
    for run in RUNS:
        if run.mfu:
            _, mfu = reported(run, config_of(run))
            assert mfu == pytest.approx(
                run.mfu, rel=0.055 if run.source == "titan A100" else 0.015
            ), run


def test_the_command_prints_the_table_of_the_page():
    found = [compare(run) for run in RUNS]
    text = PAGE.read_text()
    assert table(found) in text
    for line in summary(found):
        assert line in text
