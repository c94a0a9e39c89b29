"""lm.load: logits, loss and text of a run."""

import dataclasses
import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from running import summary_of

import lm
from lm import model
from lm.data import open_corpus
from lm.data.hf_tokenizer import train_bpe
from lm.generation import options
from lm.system.errors import UserError


@pytest.fixture(scope="module")
def run(bench):
    return lm.load(bench.reference())


def test_logits_are_those_of_the_model(run):
    ids = run.encode("the cat")
    expected = jax.jit(model.logits, static_argnums=1)(
        run.params, run.config.model, np.array([ids])
    )[0]
    np.testing.assert_allclose(run.logits("the cat"), expected, atol=1e-5)
    np.testing.assert_array_equal(run.logits(ids.tolist()), run.logits("the cat"))


def test_a_run_of_november_2026_is_loaded_and_has_its_losses(tmp_path):
    """Names of parameters and config keys must stay loadable: mend what reads them, not this file.

    The run trained for 20 steps on `markov` with d_model 4, d_ff 4, 2 layers, 2 heads and sgd.
    """
    with tarfile.open(Path(__file__).parent / "references" / "old_run.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    run = lm.load(tmp_path / "old_run")
    text = run.tokenizer.decode(open_corpus(run.config.data, say=print).split("validation").tokens)
    expected = json.loads((tmp_path / "old_run" / "summary.json").read_text())["val_loss"]
    assert run.loss(text) == pytest.approx(expected, abs=1e-5)
    assert run.config.optimizer.learning_rate == 0.3


def test_the_loss_of_the_validation_text_is_that_of_the_evaluation(bench):
    """summary.json has the validation loss of the last step."""
    assert lm.load(bench.reference(), "8").step == 8
    run = lm.load(bench.reference(), "latest")
    corpus = open_corpus(run.config.data, seq_len=run.seq_len, say=print)
    text = run.tokenizer.decode(corpus.split("validation").tokens)
    assert run.loss(text) == pytest.approx(summary_of(bench.reference())["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_generate_returns_a_text_or_a_list(run):
    text = run.generate("the cat", 12)
    assert len(text) == 12
    assert run.generate(["the cat", "far"], 12)[0] == text
    assert len(run.generate("the cat", 12, n_samples=2)) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.logits(""), "0 tokens"),
        (lambda run: run.logits("the cat " * 99), "792 tokens; this model accepts 1 to"),
        (lambda run: run.loss("t"), "at least two"),
        (lambda run: run.logits([0, 10**6]), "integers from 0 to"),
        (lambda run: run.logits([0, 10**400]), "integers from 0 to"),
        (lambda run: run.loss([0.5, 1.5]), "integers from 0 to"),
        (lambda run: run.loss([[1, 2], [3]]), "integers from 0 to"),
        (lambda run: run.generate("", 3), "to no tokens"),
        (
            lambda run: dataclasses.replace(run, tokenizer=None).generate("the", 3),
            r"only logits\(\) and loss\(\) take ids",
        ),
        (lambda run: run.logits("Zeus"), "'Z'"),
        (lambda run: run.with_special_tokens(), "a char tokenizer has no special tokens"),
        (lambda run: run.generate("the", 0), "n_tokens: 0 is out of range; it must be >= 1"),
        (
            lambda run: run.generate("the", 3, temperature="hot"),
            "temperature: 'hot' is not a float",
        ),
        (lambda run: run.generate("the", 3, top_k=2.5), "top_k: 2.5 is not an int or none"),
        (
            lambda run: run.generate("the", 3, top_p=1.5),
            "top_p: 1.5 is out of range; it must be <= 1.0",
        ),
        (
            lambda run: run.generate("the", 3, min_p=0),
            "min_p: 0.0 is out of range; it must be > 0.0",
        ),
        (lambda run: run.generate("the", 3, n_samples=0), "n_samples: 0 is out of range"),
        (lambda run: run.generate("the", 3, stop="\n"), r"stop: '\\n' is not a list of texts"),
        (lambda run: run.generate("the", 3, stop=[""]), "stop: a stop string is empty"),
        (lambda run: run.stream("the", 3), "prompts: 'the' is not a list of texts"),
        (lambda run: run.generate([3], 3), "prompts: .3. is not a list of texts"),
        (lambda run: run.generate(iter(["the"]), 3), "prompts: .* is not a list of texts"),
    ],
)
def test_mistakes_are_user_errors(run, call, message):
    with pytest.raises(UserError, match=message):
        call(run)


def test_all_arguments_of_generate_that_are_out_of_range_are_named_at_once(run):
    with pytest.raises(UserError) as error:
        run.generate("the", 3, top_k=-1, seed=2**32)
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["top_k", "seed"]


def test_numpy_scalars_are_arguments_of_generate():
    values = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(3),
        "seed": np.uint32(7),
        "n_tokens": np.int32(2),
    }
    options.check_options(values)
    with pytest.raises(UserError, match=r"top_p: 2\.0 is out of range; it must be <= 1\.0"):
        options.check_options({"top_p": np.float32(2)})


def test_special_tokens_of_a_prompt_are_encoded_if_asked(run):
    run = dataclasses.replace(run, tokenizer=train_bpe(["the cat"], 257))
    end = [run.tokenizer.end_of_text]
    assert run.encode("<|endoftext|>").tolist() != end
    assert run.with_special_tokens().encode("<|endoftext|>").tolist() == end
    assert (
        run.with_special_tokens().with_special_tokens(False).encode("<|endoftext|>").tolist() != end
    )
