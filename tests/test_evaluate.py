"""The command lm.evaluate, and lm.scoring.evaluate."""

import dataclasses
import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest
from huggingface_checkpoints import checkpoint
from running import metrics_of
from tiny import with_keys

import lm
from lm import show
from lm.baselines.ngrams import ngram_losses
from lm.command_line.exchange import import_checkpoint
from lm.data import tokenizers, trusted
from lm.data.entropy_floor import BelowEntropy
from lm.evaluate import file_name, main
from lm.scoring import evaluate
from lm.scoring.texts import find_baselines, open_text, score_text, with_seq_len
from lm.system.errors import UserError


@pytest.fixture(scope="module")
def run(bench):
    return lm.load(bench.reference(), "latest")


@pytest.fixture(autouse=True)
def cache(bench, monkeypatch):
    """Use the caches of the bench."""
    monkeypatch.setenv("XDG_CACHE_HOME", bench.env["XDG_CACHE_HOME"])


def test_the_file_has_each_text_and_the_loss_is_the_one_that_the_run_logged(
    bench, tmp_path, command
):
    (tmp_path / "other.txt").write_text("the mat sat on a cat " * 40)
    texts = f"--data=text:{bench.text}", "--data=text:other.txt"
    arguments = f"--workdir={bench.reference()}", "--step=latest", "--output=results", "--stride=4"
    assert command(main, *arguments, *texts)[0] == 0
    (written,) = (tmp_path / "results").glob("step_12_test_*_text_other_txt_stride_4.json")
    record = json.loads(written.read_text())
    assert (record["step"], record["seq_len"]) == (12, 16)
    text, other = record["texts"]
    assert (text["name"], other["name"]) == ("text.txt", "other.txt")
    plain, sliding = text["plain"], text["sliding"]
    (logged,) = (line for line in metrics_of(bench.reference()) if line.get("split") == "test")
    for key in ("loss", "bits_per_byte", "perplexity"):
        assert plain[key] == pytest.approx(logged[key], rel=1e-6)
    assert (
        plain["predicted_tokens"]
        == sliding["predicted_tokens"]
        == logged["tokens"]
        == text["tokens"] - 1
    )
    assert (plain["stride"], sliding["stride"]) == (16, 4)
    assert len(plain["block_losses"]) == plain["blocks"] > 8
    assert 0 < plain["loss_error"] < plain["loss"]
    assert other["plain"]["loss_error"] is None  # 42 tokens are three windows
    assert [b["last"] for b in plain["by_context"]] == [1, 2, 4, 8, 16]
    assert sum(b["tokens"] for b in plain["by_context"]) == text["tokens"] - 1
    assert set(text["baselines"]) == {"unigram", "bigram", "trigram"}


def test_a_loss_below_that_of_the_best_possible_model_is_an_error(run):
    text = open_text(run, "test", None, print)
    scores = score_text(run, text, {}, stride=4)
    least = min(found.loss.value for found in (scores.plain, scores.sliding) if found)

    def knowing(loss):
        return dataclasses.replace(
            text, split=dataclasses.replace(text.split, surprisal=lambda ids: 0 * ids + loss)
        )

    score_text(run, knowing(least), {}, stride=4)
    with pytest.raises(BelowEntropy, match="the test loss is "):
        score_text(run, knowing(least + 1), {}, stride=4)


def test_tables_and_json(bench, tmp_path, capsys):
    arguments = [f"--workdir={bench.reference()}", f"--output={tmp_path}", "--no-baselines"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    row = next(line for line in out.splitlines() if line.startswith("text.txt"))
    value, error = re.search(r"(\d\.\d+) ± (\d\.\d+)", row).groups()
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr().out
    (written,) = tmp_path.glob("*.json")
    assert printed == written.read_text()
    plain = json.loads(printed)["texts"][0]["plain"]
    assert float(value) == pytest.approx(plain["loss"], abs=5e-3)
    assert float(error) == pytest.approx(plain["loss_error"], rel=0.1)
    assert f"written: {tmp_path}" in err


def test_each_text_and_stride_has_its_own_file():
    texts = [["a/novel"], ["b/novel"], ["b" * 300 + "c"], ["a", "b" * 300], ["b", "b" * 300]]
    assert len(
        {file_name(7, "test", [f"text:{name}.txt" for name in names]) for names in texts}
    ) == len(texts)


def test_long_names_of_texts_leave_room_for_the_numbers():
    """A file name has at most 255 bytes. Without its stride, an evaluation would overwrite that of
    another stride.
    """
    names = [
        file_name(7, "test", ["\u65e5" * 100, "b" * 300], seq_len=None, stride=n) for n in (4, 8)
    ]
    assert [name[-14:] for name in names] == ["_stride_4.json", "_stride_8.json"]
    assert len(f".{names[0]}.host.12345.partial".encode()) <= 255


def test_evaluate_returns_the_scores_and_all_joins_the_splits(bench, run):
    result = evaluate(run, "all", batch_size=16)
    assert result.plain.tokens == len(bench.text.read_text()) - 1
    assert result.plain.loss.value == pytest.approx(run.loss(bench.text.read_text()), abs=1e-5)
    assert result.sliding is None


@pytest.mark.slow
def test_windows_of_one_token_are_a_bigram_model(run):
    """The loss with a context of 1 is that of the first prediction of each window, for every token."""
    scores = evaluate(run, seq_len=1, batch_size=256).plain
    logits_V = {i: np.float64(run.logits([i])[0]) for i in range(14)}
    ids = np.asarray(open_text(run, "test", None, print).split.tokens)
    losses = [
        np.log(np.exp(logits_V[a]).sum()) - logits_V[a][b] for a, b in itertools.pairwise(ids)
    ]
    assert scores.loss.value == pytest.approx(np.mean(losses), abs=1e-5)
    assert [(b.first, b.last, b.tokens) for b in scores.by_context] == [(1, 1, len(losses))]


def test_a_text_that_has_changed_is_reported(bench, tmp_path):
    """A copied run still has its record of the tokens that it trained on."""
    workdir = tmp_path / "run"
    shutil.copytree(bench.reference(), workdir)
    run, messages = lm.load(workdir), []
    evaluate(run, baselines=False, say=messages.append)
    assert messages == []
    record = json.loads((workdir / "run.json").read_text())
    record["data"]["fingerprint"] = "other"
    (workdir / "run.json").write_text(json.dumps(record))
    evaluate(run, baselines=False, say=messages.append)
    assert messages == [
        f"WARNING: the text or the tokens of text:{bench.text} have changed since {workdir} "
        "trained on them"
    ]


def test_rows_of_another_length_are_not_a_change_of_the_text(bench, run, tmp_path):
    rows = dataclasses.replace(
        run, path=tmp_path / "run", config=with_keys(run.config, data_packing="documents")
    )
    shutil.copytree(bench.reference(), rows.path)
    record = json.loads((rows.path / "run.json").read_text())
    record["data"]["fingerprint"] = open_text(rows, "test", None, print).corpus.fingerprint
    (rows.path / "run.json").write_text(json.dumps(record))
    messages = []
    open_text(rows, "test", None, messages.append)
    open_text(with_seq_len(rows, 8), "test", None, messages.append)
    assert not any("WARNING" in line for line in messages)


def test_mistakes_are_errors(bench, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_bad_texts()
    shutil.copytree(bench.reference(), "linked", ignore=lambda *_: ["evaluation"])
    os.symlink(tmp_path, "linked/evaluation")  # by somebody who sent the directory
    # found before anything is computed
    monkeypatch.setattr("lm.scoring.predictions.score_batch", None)
    for arguments, message in (
        (["--workdir=absent"], "absent; python -m lm.runs"),
        (["--workdir=absent", "--batch-size=-1"], "--batch-size: -1 must be at least 1"),
        (["--stride=0"], "--stride: 0 must be at least 1"),
        (["--workdir=absent", "--data=text:a", "--data=text:a"], "--data: text:a is given twice"),
        (["--data="], '--data: "" is not one of tfds:NAME, text:PATH'),
        (["--seq-len=17"], "--seq-len: 17 must be at least 1 and at most 16, as in training"),
        (
            ["--seq-len=8", "--stride=9"],
            "--stride: 9 must be at least 1 and at most 8, the length of a window",
        ),
        (["--stride=17"], "--stride: 17 must be at least 1 and at most 16"),
        (["--split=dev"], 'no split "dev"; it has train, validation, test; all joins them'),
        (["--split="], 'no split ""'),
        (["--split=test+train+test"], "--split: test is given twice"),
        (["--data=text:absent.txt"], '--data: "text:absent.txt" is not a file'),
        (["--data=novel.txt"], '--data: "novel.txt" is not one of tfds:NAME, text:PATH'),
        (
            ["--data=text:short.txt"],
            "the test split of short.txt has 3 tokens, and a window of this model has 17",
        ),
        (
            ["--data=text:foreign.txt"],
            "the validation split: tokenizer: 1 character not in its alphabet of 14: 'Z' "
            "(the first at line 2, column 2, after '\\nh'); the model cannot predict them",
        ),
        (["--data=tokens:shards"], "--data: the shards in shards have tokens of another tokenizer"),
        (["--data=tokens:large"], "has the id 999, but the vocabulary of this model has 14 ids"),
        (["--workdir=linked"], "linked/evaluation is a link or not a directory"),
        (["--output=short.txt/results"], "--output: short.txt/results cannot be created"),
    ):
        given = [] if arguments[0].startswith("--workdir") else [f"--workdir={bench.reference()}"]
        assert main([*given, *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err, err


def write_bad_texts() -> None:
    """Write texts that a model of 14 characters cannot predict into the current directory."""
    with open("short.txt", "w") as file:
        file.write("the cat sat on the mat " * 2)
    with open("foreign.txt", "w") as file:
        file.write("a" * 90 + "\nhZaa" + "a" * 5)
    for name, ids in (("shards", [1] * 40), ("large", [999] * 40)):
        os.mkdir(name)
        np.save(f"{name}/test.npy", np.array(ids, np.uint16))
    shard = {"file": "test.npy", "split": "test", "tokens": 40, "documents": 1, "text_bytes": 40, "sha256": "",
             "size": os.path.getsize("shards/test.npy")}  # fmt: skip
    with open("shards/manifest.json", "w") as file:
        manifest = {
            "job": {},
            "input": [],
            "commit": None,
            "units": [{"shards": [shard], "length": 0, "repeated": 0}],
        }
        json.dump(manifest | {"tokenizer": tokenizers.ByteTokenizer().fingerprint}, file)


def test_token_shards_of_a_model_without_a_tokenizer(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_bad_texts()
    without = dataclasses.replace(
        run, config=with_keys(run.config, data_tokenizer="none"), tokenizer=None
    )
    result = evaluate(without, data="tokens:shards")
    assert result.plain.loss.value == pytest.approx(run.loss([1] * 40), abs=1e-5)
    with pytest.raises(UserError, match="has no tokenizer, only token ids; give tokens:PATH"):
        evaluate(without)


def test_a_packed_run_has_no_stride(run):
    packed = dataclasses.replace(run, config=with_keys(run.config, data_packing="documents"))
    with pytest.raises(UserError, match=r"--stride: .* packs documents into rows"):
        evaluate(packed, stride=4)


@pytest.mark.slow
def test_a_packed_run_is_evaluated_in_its_rows(bench, run):
    """The text is one document, so the rows are its windows, and all their targets are the same."""
    packed = dataclasses.replace(run, config=with_keys(run.config, data_packing="documents"))
    result, plain = evaluate(packed), evaluate(run)
    assert result.text.split.packed
    assert result.plain.tokens == plain.plain.tokens
    assert result.plain.loss.value == pytest.approx(plain.plain.loss.value, abs=1e-5)


def test_an_imported_run_needs_a_text_and_has_no_baselines(tmp_path):
    """Its config has the default source, on which it was not trained."""
    import_checkpoint(checkpoint(tmp_path / "model"), tmp_path / "run")
    imported = lm.load(tmp_path / "run")
    with pytest.raises(UserError, match=r"--data: .* has no text of its own"):
        evaluate(imported)
    assert find_baselines(imported, [None], print) == [{}]


def test_the_config_of_a_checkpoint_of_hugging_face_is_not_read_as_that_of_a_run(
    bench, run, tmp_path
):
    """Also if the text is the one that the config of the model names by default."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    imported = dataclasses.replace(run, path=tmp_path)
    assert open_text(imported, "test", f"text:{bench.text}", print).split.name == "test"


def test_the_baselines_of_another_text_are_those_of_the_text_of_the_run(bench, run, tmp_path):
    """Two different baselines of one text would mean that they were counted in different texts."""
    copy = tmp_path / "copy.txt"
    copy.write_text(bench.text.read_text())
    own, other = (open_text(run, "test", source, print) for source in (None, f"text:{copy}"))
    losses = ngram_losses(own.corpus, own.split, 14)
    assert find_baselines(run, [own, other], print) == [losses, losses]
    assert find_baselines(run, [other], print) == [losses]
    assert set(losses) == {"unigram", "bigram", "trigram"}


def test_without_the_text_of_the_run_there_are_no_baselines(run):
    text, messages = open_text(run, "test", None, print), []
    lost = dataclasses.replace(run, config=with_keys(run.config, data_source="text:absent.txt"))
    assert find_baselines(lost, [text], messages.append) == [{}]
    assert messages[0].startswith(
        "WARNING: no baselines, because the text of the run cannot be read: "
    )


FOREIGN = {  # what a run may name that only its author can read, or that costs the user something
    "a file": {"data_source": "text:/etc/hostname"},
    "a file beside it": {"data_source": "text:notes.txt"},
    "a URL": {"data_source": "jsonl:https://192.0.2.1/corpus.jsonl"},
    "credentials of a cloud": {"data_source": "parquet:s3://bucket/corpus.parquet"},
    "a chain of URLs": {"data_source": "text:simplecache::https://192.0.2.1/corpus.txt"},
    "a folder": {"data_source": "hf:~/data"},
    "shards": {"data_source": "tokens:shards"},
    "a way out of the data sets": {"data_source": "tfds:../../private"},
    "another folder of data sets": {"data_source": "tfds:tiny_shakespeare", "data_data_dir": "."},
    "one of a mixture": {
        "data_mixture": (("a", "python_docs", 1.0), ("b", "text:/etc/hostname", 1.0))
    },
    "a tokenizer": {"data_source": "python_docs", "data_tokenizer": "hf:/etc/hostname"},
}


@pytest.mark.parametrize("keys", FOREIGN.values(), ids=FOREIGN.keys())
def test_the_run_of_somebody_else_opens_nothing_that_it_names(
    run, keys, bench, command, tmp_path, monkeypatch
):
    """The commands that read a text are lm.show and lm.evaluate."""
    opened = []
    monkeypatch.setattr("lm.scoring.texts.open_corpus", lambda config, **_: opened.append(config))
    monkeypatch.setattr("lm.show.open_corpus", lambda config, **_: opened.append(config))
    foreign = with_keys(run.config, data_cache_dir=str(tmp_path), **keys)
    shutil.copytree(bench.reference(), tmp_path / "run")
    config = dataclasses.asdict(foreign) | {
        "model": json.loads((tmp_path / "run/config.json").read_text())["model"]
    }
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    code, output = command(show.main, f"--workdir={tmp_path / 'run'}", "--step=1")
    assert (code, opened) == (2, [])
    assert "--trust-data" in output
    if "data_tokenizer" not in keys:  # a run has its tokenizer
        with pytest.raises(UserError, match="--trust-data"):
            evaluate(
                dataclasses.replace(run, config=foreign),
                data="b" if "data_mixture" in keys else None,
            )
        assert opened == []
    assert trusted.local(foreign.data).cache_dir is None


def test_the_text_of_a_run_is_opened_where_it_was_trained_or_with_a_flag(
    bench, command, monkeypatch, tmp_path
):
    arguments = f"--workdir={bench.reference()}", f"--output={tmp_path}"
    assert command(main, *arguments)[0] == 0
    monkeypatch.setitem(bench.env, "XDG_CACHE_HOME", str(tmp_path / "another user"))
    code, output = command(main, *arguments)
    assert (code, f"names text:{bench.text}, with which you have not trained" in output) == (
        2,
        True,
    )
    # it is named, for now
    code, output = command(main, *arguments, f"--data=text:{bench.text}", "--no-baselines")
    assert code == 0
    assert command(main, *arguments)[0] == 2
    assert command(main, *arguments, "--trust-data")[0] == 0
    assert command(main, *arguments)[0] == 0


def test_running_out_of_memory_is_an_error(bench, capsys, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr("lm.scoring.texts.score_split", fail)
    assert main([f"--workdir={bench.reference()}", f"--output={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith("allocating 9 bytes.; use a smaller --batch-size\n")
