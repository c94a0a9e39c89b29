"""config.train.on_spike: robust z-scores find spikes, a resumed run skips the same ones, and their
text is shown.
"""

import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from running import assert_same_run, metrics_of, summary_of
from scipy.stats import median_abs_deviation

from lm import show, spikes

FIRST, N = 100 * 64, 64  # the tokens of step 101: characters that occur nowhere else
KEYS = (
    "--config.data.order=epochs", "--config.data.shuffle=false", "--config.train.steps=112", "--config.eval.every=0",
    "--config.checkpoint.every=100", "--config.log.every=20", "--config.train.steps_per_dispatch=8",
)  # fmt: skip


@pytest.fixture
def text(bench, tmp_path):
    garbage = "".join(random.Random(0).choice("XQZJ#@%&") for _ in range(N))
    words = bench.text.read_text() * 4
    path = tmp_path / "text.txt"
    path.write_text(words[:FIRST] + garbage + words[FIRST + N :])
    return path


def test_scores_are_those_of_scipy_and_0_until_half_of_the_window_is_known():
    draw, values = np.random.default_rng(0), np.array([3.0, 40.0], np.float32)
    window = draw.lognormal(size=(2, spikes.WINDOW)).astype(np.float32)
    expected = (values - np.median(window, 1)) / median_abs_deviation(window, 1, scale="normal")
    np.testing.assert_allclose(spikes.z_scores(window, values), expected, rtol=1e-4)
    half = spikes.empty_window().at[:, : spikes.WINDOW // 2].set(1.0)
    assert spikes.z_scores(half, jnp.array([1e9, 1e9])).tolist() == [0, 0]


def test_a_spike_is_logged_skipped_and_shown(train, command, text, tmp_path):
    code, output = train(
        tmp_path / "run", *KEYS, f"--config.data.source=text:{text}", "--config.train.on_spike=skip"
    )
    assert (code, "step 101 is a spike" in output) == (0, True)
    assert summary_of(tmp_path / "run")["skipped"] == 1
    (spike,) = (line for line in metrics_of(tmp_path / "run") if "window_starts" in line)
    assert (spike["step"], spike["window_starts"]) == (
        101,
        [FIRST, FIRST + 16, FIRST + 32, FIRST + 48],
    )

    code, output = command(show.main, f"--workdir={tmp_path / 'run'}", "--step=101")
    shown = [line[:16] for line in output.splitlines() if "----" not in line]
    assert (code, "".join(shown)) == (0, text.read_text()[FIRST : FIRST + N])
    text.write_text(text.read_text().replace("cat", "dog"))
    for more, advice in (
        ("--step=0", "use 1 to 112"),
        ("--step=113", "use 1 to 112"),
        ("--step=1", "other text"),
    ):
        code, output = command(show.main, f"--workdir={tmp_path / 'run'}", more)
        assert (code, advice in output) == (2, True)


@pytest.mark.slow
def test_watching_changes_no_bit_and_a_resumed_run_decides_alike(train, text, tmp_path):
    keys = (*KEYS, f"--config.data.source=text:{text}")
    for action in ("none", "warn", "skip"):
        code, output = train(tmp_path / action, *keys, f"--config.train.on_spike={action}")
        assert (code, "step 101 is a spike" in output) == (0, action != "none")
        assert summary_of(tmp_path / action)["skipped"] == (action == "skip")
    none, warn, skip = (metrics_of(tmp_path / action) for action in ("none", "warn", "skip"))
    # Skipping changes no loss up to that of the spike, and those after it.
    assert [line["loss"] for line in none] == [line["loss"] for line in warn if line["step"] != 101]
    assert [line["loss"] for line in skip[:6]] == [line["loss"] for line in warn[:6]]
    assert skip[6]["loss"] != warn[6]["loss"]

    def resume(before: str, after: str, per_dispatch: int = 8):
        """Resume a copy of a finished run from step 100."""
        workdir = tmp_path / f"{before}_{after}"
        shutil.copytree(tmp_path / before, workdir)
        (workdir / "summary.json").unlink()
        shutil.rmtree(workdir / "checkpoints" / "112")
        changed = [key.replace("per_dispatch=8", f"per_dispatch={per_dispatch}") for key in keys]
        assert train(workdir, *changed, "--resume", f"--config.train.on_spike={after}")[0] == 0
        return workdir

    assert_same_run(resume("skip", "skip", per_dispatch=5), tmp_path / "skip", 112)
    # The key may be changed: then the window is new and at first finds no spikes, or is dropped.
    for before, after, skipped in (("warn", "skip", 1), ("none", "skip", 0), ("skip", "none", 0)):
        assert summary_of(resume(before, after))["skipped"] == skipped


MIXTURE = '--config.data.mixture=(("web", "text:{}", 3.0), ("code", "text:{}", 1.0))'
PACKED = "--config.data.packing=documents", "--config.data.source=text:{}"


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "places"), [((MIXTURE,), "of "), (PACKED, "row ")])
def test_examples_of_mixtures_and_packed_rows_are_shown_with_their_place(
    train, command, text, tmp_path, keys, places
):
    texts = text, tmp_path / "code.txt"
    texts[1].write_text("".join(reversed(text.read_text())))
    given = (key.format(*texts) for key in keys)
    more = "--config.data.order=epochs", "--config.train.steps=1", "--config.eval.final_splits=test"
    code, output = train(tmp_path / "run", *given, *more)
    assert code == 0, output
    code, output = command(show.main, f"--workdir={tmp_path / 'run'}", "--step=1")
    assert code == 0
    heads = [line for line in output.splitlines() if line.startswith("---- example")]
    assert len(heads) == 4
    assert all(places in head for head in heads)
