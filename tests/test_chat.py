"""The command lm.chat, from a file of chats to a conversation through a pipe."""

import json
import random
import signal

import lm.chat
import lm.evaluate
from lm.generation.chat import Conversation

WORDS = ["red", "green", "blue"]


def write_chats(path):
    """Write chats of three questions each, with one answer to all."""
    draw = random.Random(0)

    def turns(word):
        return [{"role": "user", "content": word}, {"role": "assistant", "content": "a color"}]

    chats = [
        [turn for word in draw.choices(WORDS, k=3) for turn in turns(word)] for _ in range(160)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def test_a_model_of_chats_is_trained_evaluated_and_talked_to(train, command, tmp_path, monkeypatch):
    """The last two of the conversations: a message that is too long ends a script, and Ctrl-C ends
    an answer only.
    """
    write_chats(tmp_path / "chats.jsonl")
    keys = {"source": f"jsonl:{tmp_path}/chats.jsonl", "field": "messages", "targets": "assistant", "order": "epochs",
            "tokenizer": "bpe:300", "packing": "documents"}  # fmt: skip
    workdir = tmp_path / "run"
    code, output = train(
        workdir, *(f"--config.data.{name}={value}" for name, value in keys.items()), "--config.train.steps=30",
        "--config.train.seq_len=64", "--config.optimizer.learning_rate=0.02",
    )  # fmt: skip
    assert code == 0, output
    assert "of which count" in output
    recorded = json.loads((workdir / "run.json").read_text())["data"]["chats"]
    assert sum(recorded.values()) == 160

    code, output = command(lm.evaluate.main, f"--workdir={workdir}", "--json")
    text = json.loads(output[: output.rindex("}") + 1])["texts"][0]
    n_of_an_answer = text["plain"]["predicted_tokens"] / recorded["test"] / 3
    assert n_of_an_answer == round(n_of_an_answer) > 1
    assert text["baselines"].keys() == {"unigram", "bigram", "trigram"}
    assert 0 < text["plain"]["loss"] < text["baselines"]["unigram"]

    code, output = command(
        lm.chat.main, workdir, "--temperature=0", "--tokens=9", stdin="red\n\nblue\nred"
    )
    assert code == 0, output
    assert output.startswith("a color\n" * 3 + "[")
    assert "not trained on chats" not in output

    code, output = command(
        lm.chat.main, workdir, "--temperature=0", "--tokens=9", stdin=f"red\n{'x ' * 99}\nred\n"
    )
    assert code == 2
    assert output.startswith("a color\n[")
    assert "too many for the context of 64" in output
    assert command(lm.chat.main, f"--workdir={workdir}", "--top-p=2")[0] == 2
    code, output = command(lm.chat.main, f"--workdir={workdir}", "--tokens=1", stdin="\udcff\n")
    assert (code, "standard input is not utf-8 text" in output) == (2, True)

    endless = Conversation.answer

    def answer(self, *arguments):
        for i, part in enumerate(endless(self, *arguments)):
            if i == 1:
                signal.raise_signal(signal.SIGINT)
            assert i < 2
            yield part

    monkeypatch.setattr(Conversation, "answer", answer)
    code, output = command(
        lm.chat.main, workdir, "--temperature=0", "--tokens=9", stdin="red\nblue\n"
    )
    assert code == 0, output
    assert len(output.partition("[")[0].split("\n")) == 3


def test_running_out_of_memory_is_an_error(bench, command, monkeypatch):
    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
        yield

    monkeypatch.setattr(Conversation, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Conversation, "answer", fail)
    monkeypatch.setattr(lm.chat, "check_chats", lambda run: None)
    monkeypatch.setattr(lm.chat, "messages", lambda: iter(["a"]))
    code, output = command(lm.chat.main, bench.reference())
    assert (code, "out of memory" in output) == (2, True)
