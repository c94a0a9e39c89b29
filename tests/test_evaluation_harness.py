"""The adapter for lm-evaluation-harness: results of local tasks, and equality with the harness's
own models.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as tokenizers_library
from running import metrics_of, summary_of
from tiny import redrawn, tiny
from tokenizers.models import WordLevel

import lm
from lm.data import tokenizers
from lm.generation.log_probabilities import likelihoods, split_text
from lm.generation.text import Continuation
from lm.harness import main
from lm.huggingface.tokenizer_files import read_settings
from lm.system.errors import UserError
from lm.trained_model import TrainedModel

pytestmark = pytest.mark.slow  # importing lm_eval takes seconds
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra [eval])")

TEXTS = ["the cat sat on a mat. ", "a cat, a hat and a mat! " * 5, "that is that"]
QUESTIONS = [
    {"context": "the cat sat on a", "choices": [" mat", " hat", "t"], "answer": 0},
    {"context": "a cat, a hat and a cat, a hat and ", "choices": ["a mat", "that"], "answer": 1},
    {"context": "", "choices": ["the", "mat"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
"""
KINDS = {
    "perplexity": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n",
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: '{{choices}}'\n"
    "target_delimiter: ''\ndoc_to_target: '{{answer}}'\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    "generation": "output_type: generate_until\ndoc_to_text: 'the cat {{context}}'\ndoc_to_target: 'mat'\n"
    "generation_kwargs: {until: ['t'], max_gen_toks: 5}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
}


def trained(kind="char", **model):
    """Return a model with random parameters and a context of 16 tokens."""
    tokenizer = tokenizers.make(kind, TEXTS)
    keys = {"vocab_size": tokenizer.vocab_size, "n_kv_heads": None} | model
    config = tiny(model=keys, train={"seq_len": 16})
    return TrainedModel(Path("run"), 7, config, redrawn(config.model), tokenizer)


@pytest.fixture
def adapt(monkeypatch):
    """Return adapt(trained, **options), which makes a HarnessModel of a model in memory."""
    from lm.scoring.evaluation_harness import HarnessModel

    def adapt(run, **options):
        monkeypatch.setattr(lm, "load", lambda workdir, step="best": run)
        return HarnessModel("run", **options)

    return adapt


def instances(arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, args, i) for i, args in enumerate(arguments)]


def test_local_tasks_give_our_results(adapt, tmp_path, monkeypatch):
    """Bits per byte are those of our evaluation; choices and texts are those of our
    log-probabilities and decoder.
    """
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for kind, rest in KINDS.items():
        data = tmp_path / f"{kind}.json"
        data.write_text(
            json.dumps([{"text": text} for text in TEXTS] if kind == "perplexity" else QUESTIONS)
        )
        (tmp_path / f"{kind}.yaml").write_text(TASK.format(name=f"local_{kind}", data=data) + rest)
    run = trained()
    names = [f"local_{kind}" for kind in KINDS]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        adapt(run), tasks=names, task_manager=manager, bootstrap_iters=0
    )

    nats = sum(run.loss(text) * len(text) for text in TEXTS)
    bits_per_byte = nats / math.log(2) / sum(len(text) for text in TEXTS)
    assert found["results"]["local_perplexity"]["bits_per_byte,none"] == pytest.approx(
        bits_per_byte, abs=1e-6
    )
    samples = {name: found["samples"][f"local_{name}"] for name in KINDS}
    for sample, question in zip(samples["choice"], QUESTIONS, strict=True):
        # spaces belong to the continuation
        context = run.encode(question["context"].rstrip()).tolist()
        for (log_p, _), choice in zip(sample["filtered_resps"], question["choices"], strict=True):
            ids = run.encode(question["context"] + choice).tolist()
            (window,) = split_text(
                ids[: len(context) or 1], ids[len(context) or 1 :], 16, full_last=True
            )
            expected = likelihoods(run.params, run.config.model, [window], seq_len=16)[0].log_p
            assert float(log_p) == pytest.approx(expected, abs=1e-5)
    for sample, question in zip(samples["generation"], QUESTIONS, strict=True):
        text = run.generate(("the cat " + question["context"])[-11:], 5, temperature=0, stop=["t"])
        assert sample["filtered_resps"] == [text]
    assert found["config"]["model_step"] == 7


def test_a_run_scores_local_tasks_and_refuses_others_before_it_compiles(
    train, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data, task = tmp_path / "data.json", tmp_path / "local.yaml"
    texts = ["the cat sat on a mat", "home and far"]
    data.write_text(json.dumps([{"text": text} for text in texts]))
    task.write_text(TASK.format(name="local", data=data) + KINDS["perplexity"])
    keys = (
        "--config.eval.harness_every=5",
        "--config.checkpoint.every=5",
        f"--config.eval.harness_tasks={task}",
    )
    assert train(tmp_path / "run", *keys)[0] == 0
    lines = [line for line in metrics_of(tmp_path / "run") if "scores" in line]
    assert [line["step"] for line in lines] == [5, 10, 12]
    for line in lines[1:]:  # the checkpoints that are kept
        run = lm.load(tmp_path / "run", line["step"])
        nats = sum(run.loss(text) * len(text) for text in texts)
        expected = nats / math.log(2) / sum(map(len, texts))
        assert line["scores"] == {"task/local/bits_per_byte": pytest.approx(expected, abs=1e-6)}
    assert summary_of(tmp_path / "run")["scores"] == lines[-1]["scores"]
    code, output = train(tmp_path / "other", *keys[:2], "--config.eval.harness_tasks=no_such_task")
    assert (code, "config.eval.harness_tasks: no_such_task" in output) == (2, True)
    assert not (tmp_path / "other").exists()


def test_results_are_those_of_the_harness_for_the_same_weights(adapt):
    """With GPT-2's layout and a BPE, for contexts and texts of all lengths."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra [bench])"
    )
    pytest.importorskip("torch", reason="torch is not installed (extra [bench])")
    pytest.importorskip("accelerate", reason="accelerate is not installed (lm-eval[hf])")
    from lm_eval.models.huggingface import HFLM

    from benchmarks.peers import built
    from benchmarks.shapes import transformers_fields, transformers_params

    keys = {
        "norm": "layer",
        "ffn": "mlp",
        "activation": "gelu_tanh",
        "ffn_bias": True,
        "attn_bias": True,
    }
    run = trained("bpe:300", positions="learned", tie_embeddings=True, d_ff=64, **keys)
    model = built(
        transformers_fields(run.config), transformers_params(run.config, run.params)
    ).eval()
    end = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=run.tokenizer.model, **end)
    # Their cache gives wrong results if one text is split into context and continuation in several
    # ways.
    theirs = HFLM(model, tokenizer=tokenizer, max_length=16, logits_cache=False, device="cpu")
    ours = adapt(run, windows="harness")

    text = "the cat sat on a mat and that hat"
    pairs = [
        (text[:i], text[i:j]) for i in range(0, len(text), 3) for j in range(i + 1, len(text), 5)
    ]
    pairs += [(TEXTS[1][:n], " mat") for n in range(20, 100, 7)]
    # If the continuation becomes a part of the context's last token, their model fails.
    requests = instances([pair for pair in pairs if not pair[0] or theirs._encode_pair(*pair)[1]])
    assert len(requests) > 30
    ours_found, theirs_found = (
        ours.loglikelihood(requests, True),
        theirs.loglikelihood(requests, True),
    )
    np.testing.assert_allclose([p for p, _ in ours_found], [p for p, _ in theirs_found], atol=2e-4)
    assert [g for _, g in ours_found] == [g for _, g in theirs_found]

    requests = instances([(TEXTS[1][:n],) for n in range(1, len(TEXTS[1]), 3)])
    both = [model.loglikelihood_rolling(requests, True) for model in (ours, theirs)]
    np.testing.assert_allclose(*both, atol=5e-4)

    options = {"until": ["q"], "max_gen_toks": 6}
    requests = instances([(TEXTS[1][:n], options) for n in range(1, 60, 7)])
    assert ours.generate_until(requests, True) == theirs.generate_until(requests, True)


@pytest.mark.parametrize("n", [16, 17, 32, 40])
def test_bits_per_byte_of_a_text_with_an_end_of_text_token(adapt, n):
    """With windows of training, the loss is that of our evaluation, for texts of any length."""
    run = trained("bpe:270")
    ids = run.encode(TEXTS[1]).tolist()[:n]
    text = run.tokenizer.decode(ids)
    (log_p,) = adapt(run).loglikelihood_rolling(instances([(text,)]), True)
    assert -log_p / len(ids) == pytest.approx(run.loss(ids), abs=1e-6)


def test_texts_start_with_the_begin_of_text(adapt):
    """As with the harness's own models: without it, some published models predict much worse."""
    run = trained("bpe:270")
    begin = run.tokenizer.end_of_text
    run.tokenizer.begin_of_text = (begin,)
    ids, model = run.tokenizer.encode(TEXTS[1]).tolist(), adapt(run)

    def log_p(context, ids, full_last):
        of = list(split_text(context, ids, 16, full_last=full_last))
        return sum(x.log_p for x in likelihoods(run.params, run.config.model, of, seq_len=16))

    (found,) = model.loglikelihood_rolling(instances([(TEXTS[1],)]), True)
    assert found == pytest.approx(log_p([begin], ids, full_last=False), abs=1e-4)
    assert model._encode_pair("the cat", " sat")[0] == [begin, *run.tokenizer.encode("the cat")]
    (pair,) = model.loglikelihood(instances([("", " mat")]), True)
    assert pair[0] == pytest.approx(
        log_p([begin], run.tokenizer.encode(" mat").tolist(), full_last=True), abs=1e-4
    )


TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SECOND = {"content": "</s>", "special": True}
SETTINGS = [  # tokenizer_config.json, special_tokens_map.json
    (TOKENS, {}),
    ({"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}, {}),
    ({"bos_token": None, "eos_token": "</s>"}, {}),
    ({"eos_token": "</s>"}, {"bos_token": "<s>"}),
    ({"bos_token": "<x>", "eos_token": "</s>"}, {"bos_token": "<s>"}),
    ({"eos_token": "</s>", "added_tokens_decoder": {"4": SECOND}}, {"bos_token": "<s>"}),
    ({"eos_token": "<s>", "additional_special_tokens": ["<x>"]}, {}),
    ({"tokenizer_class": "LlamaTokenizer"}, {}),
    ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}, {}),
    ({"tokenizer_class": "GPT2Tokenizer"}, {}),
]


@pytest.mark.parametrize(("config", "legacy"), SETTINGS)
def test_the_settings_of_a_checkpoint_name_the_prefix_and_the_special_tokens_as_in_transformers(
    config, legacy, adapt, tmp_path
):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra [bench])"
    )
    names = ["a", " b", "<x>", "<s>", "</s>", "<|endoftext|>", "<unk>"]
    model = tokenizers_library.Tokenizer(
        WordLevel({name: i for i, name in enumerate(names)}, "<unk>")
    )
    model.add_special_tokens(["<s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    family = "gpt2" if config.get("tokenizer_class") == "GPT2Tokenizer" else "llama"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    contents = {"tokenizer_config.json": config, "special_tokens_map.json": legacy}
    for name, content in contents.items():
        (tmp_path / name).write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | content)
        )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    run = trained(f"hf:{tmp_path / 'tokenizer.json'}")
    ours = adapt(dataclasses.replace(run, settings=read_settings(tmp_path)))
    expected = theirs.eos_token_id if theirs.bos_token_id is None else theirs.bos_token_id
    assert ours._prefix() == [expected]
    ids = range(len(names))
    left_out = {i for i in ids if not theirs.decode([i], skip_special_tokens=True)}
    assert ours._special_ids == left_out
    assert expected in left_out


def test_special_tokens_that_are_drawn_are_left_out_of_texts(adapt, monkeypatch):
    run = trained("bpe:300")
    run.tokenizer.model.add_special_tokens(["<s>"])
    special, model = run.tokenizer.special_ids()["<s>"], adapt(run)
    a, stop = run.tokenizer.encode("a mat")[0], run.tokenizer.encode("q")[0]
    for drawn, text in (
        ([a, special, a], "aa"),
        ([special, a, stop, a], "a"),
        ([special], ""),
        ([a, stop], "a"),
    ):
        row = Continuation("the", 0, prompt_ids=run.tokenizer.encode("the").tolist())
        row.add(drawn, run.tokenizer, ["q"], len(drawn))
        assert model._without_special(row, ["q"]) == text


FUNCTION = """
task: with_code
output_type: generate_until
doc_to_target: x
"""
WITH_CODE = {  # file: content; the task is in task.yaml
    "function": {"task.yaml": FUNCTION + "doc_to_text: !function code.run\n"},
    "included": {
        "task.yaml": FUNCTION + "include: other.yaml\n",
        "other.yaml": "process_docs: !function code.run\n",
    },
    "class": {"task.yaml": "task: with_code\nclass: !function code.run\n"},
    "standard library": {"task.yaml": FUNCTION + "doc_to_text: !function os.system\n"},
    "verbatim tag": {"task.yaml": FUNCTION + "doc_to_text: !<!function> code.run\n"},
}


@pytest.mark.parametrize("case", WITH_CODE)
def test_the_code_of_a_task_file_runs_only_where_it_is_trusted(
    case, command, tmp_path, monkeypatch
):
    from lm.scoring import evaluation_harness as harness

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name, content in WITH_CODE[case].items():
        (tmp_path / name).write_text(content)
    marker = f"open({str(tmp_path / 'it ran')!r}, 'w')"
    (tmp_path / "code.py").write_text(f"{marker}\ndef run(*a, **k): return 'x'\n")
    arguments = "--workdir=none", f"--tasks={tmp_path / 'task.yaml'}"
    code, output = command(main, *arguments)
    assert (code, "--trust-tasks" in output) == (2, True)
    with pytest.raises(UserError, match="--trust-tasks"):  # in a run, and in Python
        harness.load_tasks([str(tmp_path / "task.yaml")])
    assert not (tmp_path / "it ran").exists()
    if (tmp_path / "code.py").exists() and case != "standard library":
        command(main, *arguments, "--trust-tasks")
        assert (tmp_path / "it ran").exists()
    harness.check_functions(harness.trusted.check_tasks)


def test_the_templates_of_a_task_file_run_no_code(command):
    from jinja2.exceptions import SecurityError
    from lm_eval.utils import apply_template

    assert apply_template("{{a.strip() | regex_replace('x', 'y')}}\n", {"a": " x "}) == "y\n"
    for template in ("{{cycler.__init__.__globals__}}", "{{''.__class__.mro()}}"):
        with pytest.raises(SecurityError):
            apply_template(template, {})


def test_a_chat_template_is_refused_before_anything_is_loaded(command):
    for option in ("--apply_chat_template", "--apply_chat_template=x", "--apply_chat"):
        code, output = command(main, "--workdir=none", "--tasks=x", option)
        assert (code, "--apply_chat_template: not supported" in output) == (2, True)


def test_a_text_without_tokens_has_probability_one(adapt):
    assert adapt(trained()).loglikelihood_rolling(instances([("",)]), True) == [0.0]


def test_equal_contexts_get_different_samples(adapt):
    options = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    found = adapt(trained()).generate_until(
        instances([("the", options), ("a", options), ("the", options)]), True
    )
    assert len(set(found)) == 3


def test_mistakes_are_user_errors(adapt, command):
    for more, message in (
        ("--step=first", "--step: 'first' is not best"),
        ("--tasks=no_such_task", "no_such_task"),
    ):
        code, output = command(main, "--workdir=none", more)
        assert (code, message in output) == (2, True)
    for options, message in (
        ({"windows": "full"}, "training, harness"),
        ({"batch_size": "0"}, "at least 1"),
        ({"batch_size": "x"}, "auto"),
    ):
        with pytest.raises(UserError, match=message):
            adapt(trained(), **options)
    with pytest.raises(UserError, match=r"generation_kwargs\.top_p: 0\.0 is out of range"):
        adapt(trained()).generate_until(
            instances([("the", {"do_sample": True, "top_p": 0.0})]), True
        )
    # which is not used
    adapt(trained()).generate_until(instances([("the", {"do_sample": False, "top_p": 0.0})]), True)
    with pytest.raises(UserError, match="without a context"):  # there is no end of text
        adapt(trained()).generate_until(instances([("", {})]), True)
