"""--step names a checkpoint, or is refused before anything is loaded."""

import pytest

from lm.command_line.checkpoint import parse_step
from lm.system.errors import UserError


def test_a_step_is_best_latest_or_a_number():
    for text in ("best", "latest", "ema", "mean:3"):
        assert parse_step(text) == text
    for text, step in {"0": 0, "0200": 200}.items():
        assert parse_step(text) == step
    for text in ("", "last", "-1", "1.5", "²", "best\n", "9" * 19, "mean", "mean:"):
        with pytest.raises(
            UserError, match="is not best, latest, ema, mean:N, or the number of a step"
        ):
            parse_step(text)
