"""lm.load: logits, loss and text of a run."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from running import summary_of

import lm
from lm import model
from lm.data import open_corpus
from lm.errors import UserError


@pytest.fixture(scope="module")
def run(bench):
    return lm.load(bench.reference())


def test_logits_are_those_of_the_model(run):
    ids = run.encode("the cat")
    expected = model.logits(run.params, run.config.model, np.array([ids]))[0]
    np.testing.assert_allclose(run.logits("the cat"), expected, atol=1e-5)
    np.testing.assert_array_equal(run.logits(ids.tolist()), run.logits("the cat"))


def test_the_loss_of_the_validation_text_is_that_of_the_evaluation(bench):
    """summary.json has the validation loss of the last step."""
    run = lm.load(bench.reference(), "latest")
    corpus = open_corpus(run.config.data, seq_len=run.seq_len, say=print)
    text = run.tokenizer.decode(corpus.split("validation").tokens)
    assert run.loss(text) == pytest.approx(summary_of(bench.reference())["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_windows(run):
    ids = run.encode("the cat sat on a mat and ran far home " * 3)
    T, total = run.seq_len, 0.0
    for first in range(0, len(ids) - 1, T):
        window = ids[first : first + T + 1]
        logits = np.float64(run.logits(window[:-1]))
        total += sum(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(window) - 1), window[1:]])
    assert run.loss(ids) == pytest.approx(total / (len(ids) - 1), abs=1e-5)


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
        (lambda run: run.generate("", 3), "to no tokens"),
        (
            lambda run: dataclasses.replace(run, tokenizer=None).generate("the", 3),
            r"only logits\(\) and loss\(\) take ids",
        ),
        (lambda run: run.logits("Zeus"), "'Z'"),
    ],
)
def test_mistakes_are_user_errors(run, call, message):
    with pytest.raises(UserError, match=message):
        call(run)


def test_importing_lm_imports_neither_jax_nor_flax():
    code = "import sys, lm; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
