"""Mixtures: exact shares, no window twice in an epoch of its source, and a pure function of (seed,
step, row).
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from running import assert_same_run, checkpoint_steps, metrics_of

from lm.config import Config, DataConfig, TrainConfig
from lm.config.schema import EvalConfig
from lm.data import Split, batches, mixtures, open_corpus
from lm.data.concatenated import ConcatenatedArray
from lm.data.prepare import main as prepare
from lm.evaluate import main as evaluate
from lm.system.errors import UserError

SIZES = (4_000, 900, 333)


def mixed(weights, sizes=SIZES, seq_len=8, **keys):
    """Return a split whose tokens are 0, 1, 2, ... over its sources, and its config."""
    names = "abcdef"[: len(weights)]
    train = {"seed": keys.pop("seed", 0), "batch_size": keys.pop("batch_size", 7)}
    mixture = tuple(
        (name, f"text:{name}", weight) for name, weight in zip(names, weights, strict=True)
    )
    config = Config(
        data=DataConfig(order="epochs", mixture=mixture, **keys),
        train=TrainConfig(seq_len=seq_len, **train),
    )
    ends, shares = np.cumsum(sizes), mixtures.weights(config.data)
    parts = [
        mixtures.Part(name, int(end - size), size, share, 1.0)
        for name, end, size, share in zip(names, ends, sizes, shares, strict=False)
    ]
    arrays = [
        np.arange(end - size, end, dtype=np.uint16)
        for end, size in zip(ends, sizes[: len(names)], strict=False)
    ]
    return Split(
        "train", ConcatenatedArray(arrays), int(ends[-1]), None, parts=tuple(parts)
    ), config


def sources_of(split, starts):
    return np.searchsorted([part.start for part in split.parts], starts, side="right") - 1


@pytest.mark.parametrize(
    ("weights", "temperature"),
    [
        ((0.7, 0.3), 1.0),
        ((1, 1, 1), 1.0),
        ((0.5, 0.3, 0.2), 2.0),
        ((0.001, 0.9, 3.14159), 1.0),
        ((9.0,), 1.0),
    ],
)
def test_shares_are_exact_over_every_stretch_of_draws(weights, temperature):
    """Within as many windows as there are sources, for each source and any number of draws from the
    first one on.
    """
    expected = np.array(weights) ** (1 / temperature)
    for seed in range(3):
        split, config = mixed(weights, seed=seed, mixture_temperature=temperature)
        found = sources_of(split, batches.window_starts(split, config, np.arange(1000)).reshape(-1))
        counts = np.cumsum(found[:, None] == np.arange(len(weights)), 0)
        exact = np.arange(1, len(found) + 1)[:, None] * expected / expected.sum()
        assert np.abs(counts - exact).max() <= len(weights)


def test_each_epoch_of_a_source_visits_every_window_once_in_another_order():
    split, config = mixed((0.2, 0.5, 0.3))
    starts = batches.window_starts(split, config, np.arange(600)).reshape(-1)
    source = sources_of(split, starts)
    for i, part in enumerate(split.parts):
        own, windows = starts[source == i], np.arange(0, part.n_tokens - 8, 8) + part.start
        epochs = [
            own[k : k + len(windows)] for k in range(0, len(own) - len(windows), len(windows))
        ]
        assert len(epochs) >= 1
        for epoch in epochs:
            np.testing.assert_array_equal(np.sort(epoch), windows)
        assert all((epochs[k] != epochs[k + 1]).any() for k in range(len(epochs) - 1))


def test_a_batch_is_a_function_of_seed_step_and_row():
    """For one step or many, in any order; another seed gives other windows; a window never crosses
    two sources.
    """
    split, config = mixed((0.6, 0.3, 0.1), mixture_stages=((40, 0.1, 0.1, 0.8),), max_epochs=(9.0,))
    whole = batches.window_starts(split, config, np.arange(100))
    order = np.random.default_rng(0).permutation(100)
    np.testing.assert_array_equal(batches.window_starts(split, config, order), whole[order])
    np.testing.assert_array_equal(batches.window_starts(split, config, 41), whole[41])
    other = mixed((0.6, 0.3, 0.1), seed=1, mixture_stages=((40, 0.1, 0.1, 0.8),), max_epochs=(9.0,))
    assert (batches.window_starts(*other, np.arange(100)) != whole).any()
    tokens = batches.train_batch(split, config, 3)["tokens"]
    np.testing.assert_array_equal(tokens, whole[3][:, None] + np.arange(9))
    np.testing.assert_array_equal(sources_of(split, tokens[:, 0]), sources_of(split, tokens[:, -1]))


def test_stages_change_the_shares_at_their_steps_and_the_order_goes_on():
    split, config = mixed(
        (1.0, 1.0),
        sizes=(4000, 900),
        batch_size=10,
        mixture_stages=((30, 0.0, 1.0), (50, 3.0, 1.0)),
    )
    starts = batches.window_starts(split, config, np.arange(70))
    shares = (sources_of(split, starts) == 1).mean(1)
    assert (
        np.abs(
            [shares[:30].mean() - 0.5, shares[30:50].mean() - 1, shares[50:].mean() - 0.25]
        ).max()
        < 0.01
    )
    own = starts[sources_of(split, starts) == 1]
    # 112 windows of an epoch, over the border of the stages
    assert len(np.unique(own[:112])) == 112


def test_a_source_ends_after_its_epochs_and_the_others_share_its_weight():
    split, config = mixed((0.5, 0.25, 0.25), max_epochs=(100.0, 1.5, 2.0), batch_size=10)
    n_windows = mixtures.windows_of(split.parts, config)
    assert n_windows == (499, 112, 41)
    stretches, end = mixtures.plan(n_windows, config.data, 10, 0)
    assert end == 100 * 499 + 168 + 82
    source = sources_of(
        split, batches.window_starts(split, config, np.arange(end // 10)).reshape(-1)
    )
    assert [int((source == i).sum()) for i in range(3)] == [100 * 499, 168, 82]
    assert len(stretches) == 3
    first, second = (stretch.first for stretch in stretches[1:])  # 82 and 168 windows are drawn
    assert first == pytest.approx(82 * 4, abs=4)
    assert (source[first:second] == 1).mean() == pytest.approx(1 / 3, abs=0.02)
    with pytest.raises(ValueError, match="windows in all epochs"):
        batches.window_starts(split, config, end // 10)


def test_an_evaluation_reads_each_source_apart_and_its_mean_is_weighted():
    split, config = mixed((0.6, 0.3, 0.1), batch_size=5)
    config = dataclasses.replace(config, eval=EvalConfig(batch_size=4))
    for max_batches in (0, 3):
        covered = {part.name: 0 for part in split.parts}
        for part, numbers in batches.eval_batches(split, config, max_batches):
            for number in numbers:
                starts, weights = batches.eval_windows(split, config, number)
                tokens = batches.gather(split.arrays, starts, 8)["tokens"]
                targets = tokens[:, 1:][weights > 0]
                assert part.start < targets.min()
                assert targets.max() < part.start + part.n_tokens
                covered[part.name] += len(targets)
        n_windows = sum(
            batches.n_eval_windows(dataclasses.replace(split, parts=(p,)), config, 3)
            for p in split.parts
        )
        assert list(covered.values()) == (
            [size - 1 for size in SIZES] if max_batches == 0 else [96] * 3
        )
        assert batches.n_eval_windows(split, config, 3) == n_windows == 36


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_text("It was the best of times, it was the worst of times.\n" * 60)
    (tmp_path / "b.txt").write_text("0123456789 and 9876543210\n" * 60)
    return f'(("a", "text:{tmp_path}/a.txt", 0.7), ("b", "text:{tmp_path}/b.txt", 0.3))'


def test_a_run_on_a_mixture_reports_each_source_and_resumes_exactly(
    texts, tmp_path, train, command
):
    keys = (
        f"--config.data.mixture={texts}",
        "--config.data.order=epochs",
        "--config.data.mixture_stages=((4,1,1),)",
    )
    # 28 and 22 windows for 48 draws: none is left for a 13th step
    keys += ("--config.data.max_epochs=(0.16,0.26)",)
    code, output = train(tmp_path / "whole", *keys, "--config.checkpoint.keep=9")
    assert code == 0, output
    assert "mixture from step 0: a " in output
    assert "mixture from step 4: a 50.0%" in output
    evaluations = [line for line in metrics_of(tmp_path / "whole") if "split" in line]
    for line in evaluations:
        assert line["losses"].keys() == {"a", "b"}
        assert line["loss"] == pytest.approx(
            0.7 * line["losses"]["a"] + 0.3 * line["losses"]["b"], rel=1e-12
        )
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["losses_by_source"] == {line["split"]: line["losses"] for line in evaluations}
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in checkpoint_steps(tmp_path / "part")[1:]:
        shutil.rmtree(tmp_path / "part" / "checkpoints" / str(step))
    (tmp_path / "part" / "summary.json").unlink()
    code, output = train(tmp_path / "part", *keys, "--resume")
    assert code == 0, output
    assert_same_run(tmp_path / "part", tmp_path / "whole")
    (tmp_path / "part" / "summary.json").unlink()  # as after a kill in the final evaluations
    code, output = train(tmp_path / "part", *keys, "--resume")
    assert code == 0, output
    code, output = command(evaluate, f"--workdir={tmp_path / 'whole'}", "--json")
    assert code == 0, output
    record, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    final = next(line for line in evaluations if line["split"] == "test")
    assert [text["name"] for text in record["texts"]] == ["a", "b"]
    assert [text["plain"]["loss"] for text in record["texts"]] == pytest.approx(
        [*final["losses"].values()], rel=1e-5
    )
    assert record["weighted_mean_loss"] == pytest.approx(final["loss"], rel=1e-5)
    code, output = command(evaluate, f"--workdir={tmp_path / 'whole'}", "--data=b")
    assert code == 0, output
    assert "weighted mean" not in output


BAD = [
    ({"mixture": '(("a","text:a",0.0),("b","text:b",1.0))'}, ("data.mixture", "above 0")),
    ({"mixture": '(("a","text:a",-1.0),)'}, ("data.mixture", "above 0")),
    ({"mixture_temperature": "0.01"}, ("data.mixture", "above 0")),
    ({"mixture": '(("a","text:a",1.0),("a","text:b",1.0))'}, ("data.mixture", "different names")),
    ({"mixture": '(("a","novel.txt",1.0),)'}, ("data.mixture", "text:novel.txt")),
    ({"mixture": '(("a","text:a"),)'}, ("data.mixture", "(text, text, float)")),
    ({"mixture": '("a","text:a",1.0)'}, ("data.mixture", "tuple")),
    ({"order": "crops"}, ("data.order", "epochs")),
    ({"packing": "documents"}, ("data.packing", "none")),
    ({"max_epochs": "(1.0,2.0,3.0)"}, ("data.max_epochs", "2 for the sources")),
    ({"max_epochs": "0.0"}, ("data.max_epochs", "> 0")),
    ({"max_epochs": "0.1"}, ("data.max_epochs", "--config.train.steps=")),
    ({"max_epochs": "0.001"}, ("data.max_epochs", "steps; use more epochs")),
    ({"mixture_stages": "((2,1.0),)"}, ("data.mixture_stages", "2 of them")),
    ({"mixture_stages": "((2,0,0),)"}, ("data.mixture_stages", "not all 0")),
    ({"mixture_stages": "((2,1e-8,1.0),)"}, ("data.mixture_stages", "must be 0, or a millionth")),
    ({"mixture_stages": "((2,0.1,0.9),)", "mixture_temperature": "0.1"}, ("data.mixture_stages", "must be 0, or")),
    ({"mixture_stages": "((2,1,1),(1,1,1))"}, ("data.mixture_stages", "ascending")),
    ({"mixture": '(("a","text:{tmp}/a.txt",1.0),("s","text:{tmp}/short.txt",1.0))'}, ("train.seq_len", "split of s")),
    ({"mixture": '(("a","tokens:{tmp}/x",1.0),("b","tokens:{tmp}/y",1.0))', "tokenizer": "none"},
     ("tokenizers", "a and b")),
]  # fmt: skip


def test_mistakes_are_errors_of_one_line_before_anything_is_written(texts, tmp_path, train):
    (tmp_path / "short.txt").write_text("It was")
    for name, size in (("x", 260), ("y", 270)):
        job = [
            f"--input=text:{tmp_path}/a.txt",
            f"--tokenizer=bpe:{size}",
            f"--output={tmp_path / name}",
        ]
        assert prepare([*job, "--workers=1", "--validation=0.3"]) == 0
    for changes, parts in BAD:
        keys = {"mixture": texts, "order": "epochs"} | changes
        keys = {name: value.replace("{tmp}", str(tmp_path)) for name, value in keys.items()}
        more = (
            ["--config.data.splits=none", "--config.model.vocab_size=300"]
            if "tokenizer" in keys
            else []
        )
        code, output = train(
            tmp_path / "run",
            *more,
            *(f"--config.data.{name}={value}" for name, value in keys.items()),
        )
        assert code == 2, (changes, output)
        assert all(part in output for part in parts), (changes, output)
        assert "Traceback" not in output
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_sources_share_one_tokenizer_and_the_first_without_a_split_is_named(texts, tmp_path):
    data = DataConfig(mixture=eval(texts), order="epochs", cache_dir=str(tmp_path / "cache"))
    corpus = open_corpus(data, say=str)
    assert set("best0123") <= set(corpus.tokenizer.chars)
    assert [part.name for part in corpus.split("validation").parts] == ["a", "b"]
    assert corpus.name == "a+b"
    with pytest.raises(UserError, match="one by one"):
        corpus.split("validation+test")
    alone = open_corpus(data.of_source(data.mixture[1][1]), tokenizer=corpus.tokenizer, say=str)
    part = corpus.split("train").parts[1]
    np.testing.assert_array_equal(corpus.split("train").tokens[part.start : part.start + part.n_tokens],
                                  alone.split("train").tokens)  # fmt: skip
