"""A conversation: the same tokens as a chat of training, one reading of each, and what happens when
it is full.
"""

import dataclasses

import pytest
from tiny import redrawn, tiny

import lm
from lm.chat import check_chats
from lm.data import chats, tokenizers
from lm.data.chats import Chat, Turn
from lm.generation import decoding
from lm.generation.chat import Conversation
from lm.generation.decoding import CachedText, make_decoder
from lm.generation.filters import Sampling
from lm.system.errors import UserError

GREEDY = Sampling(temperature=0.0)
BPE = tokenizers.make("bpe:300", ["How are you? I am fine."] * 9, markers=chats.MARKERS)
TOKENIZERS = {"byte": tokenizers.make("byte", ()), "bpe": BPE}
CONFIG = tiny(model={"vocab_size": 300}, train={"seq_len": 512})
DECODER = make_decoder(redrawn(CONFIG.model), CONFIG.model, seq_len=512)


@pytest.fixture
def scripted(monkeypatch):
    """Return scripted(*answers): the model draws the ids of these texts, whatever it reads."""
    draws = []

    def draw(text):
        text.ids.append(draws.pop(0))
        return text.ids[-1]

    monkeypatch.setattr(CachedText, "draw", draw)
    return lambda *ids: draws.extend(int(i) for of_text in ids for i in of_text)


def answers(tokenizer, *texts):
    """Return the ids of answers as a model writes them, with the marker of their end."""
    return [
        chats.encode(tokenizer, [[chats.Part(t), chats.ending(True)[0]]])[0].ids.tolist()
        for t in texts
    ]


def say_nothing(line):
    raise AssertionError(line)


def start(name, n_tokens=100, seq_len=512, **options):
    decoder = dataclasses.replace(DECODER, seq_len=seq_len)
    return Conversation(decoder, TOKENIZERS[name], GREEDY, n_tokens, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_conversation_is_the_chat_that_training_would_have_read(name, scripted):
    tokenizer = TOKENIZERS[name]
    scripted(*answers(tokenizer, "I am fine.", "Très bien."))
    talk = start(name, system="Be kind.")
    assert "".join(talk.answer("How are you?", say_nothing)) == "I am fine."
    assert "".join(talk.answer("<|im_end|>", say_nothing)) == "Très bien."
    turns = (("system", "Be kind."), ("user", "How are you?"), ("assistant", "I am fine."), ("user", "<|im_end|>"),
             ("assistant", "Très bien."))  # fmt: skip
    (expected,) = chats.encode(tokenizer, [Chat(Turn(*turn) for turn in turns).parts])
    assert talk.text.ids == expected.ids.tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answer_that_does_not_end_is_ended(name, scripted):
    """By --tokens, by Ctrl-C, or by the end of a document in place of the marker: all turns are as
    in training.
    """
    tokenizer, said = TOKENIZERS[name], []
    scripted(tokenizer.encode("fine"), [BPE.end_of_text] * (name == "bpe"))
    n_tokens = len(tokenizer.encode("fine")) + (name == "bpe")
    talk = start(name, n_tokens=n_tokens)
    assert "".join(talk.answer("a", said.append)) == "fine"
    assert len(said) == (name == "byte")
    scripted(tokenizer.encode("well"))
    talk.n_tokens = 100
    for _ in talk.answer("b", said.append):
        talk.interrupted = True
    turns = [Turn("user", "a"), Turn("assistant", "fine"), Turn("user", "b")]
    (expected,) = chats.encode(tokenizer, [[*Chat(turns).parts, *chats.opening("assistant")]])
    cut = tokenizer.encode("well")[:1].tolist()
    end = chats.encode(tokenizer, [chats.ending(True)])[0].ids.tolist()
    assert talk.text.ids == [*expected.ids.tolist(), *cut, *end]


def test_the_past_is_read_once_and_answers_are_those_of_the_whole_text_read_anew(monkeypatch):
    """With a random model: three answers of greedy tokens, each beside a text without a cache of
    earlier turns.
    """
    n_prefilled, prefill = [], decoding._prefill
    monkeypatch.setattr(
        decoding, "_prefill", lambda *a, **more: n_prefilled.append(1) or prefill(*a, **more)
    )
    talk = start("bpe", n_tokens=6)
    for message in ("How are you?", "I am fine.", "you?"):
        list(talk.answer(message, lambda line: None))
        ids = talk.text.ids
        begin = talk.starts[-1] + len(
            talk._encode([*chats.render(Turn("user", message)), *chats.opening("assistant")])
        )
        drawn = ids[begin : begin + 6]
        count = len(n_prefilled)
        assert drawn == DECODER.generate([ids[:begin]], 6, GREEDY)[0].tolist()
        del n_prefilled[count:]
    assert len(n_prefilled) == 1


def test_old_messages_are_forgotten_when_the_context_is_full(scripted):
    """The system's turn stays, what is left is whole turns in order, and each loss is said once."""
    said, talk = [], start("bpe", n_tokens=20, seq_len=150, system="Be kind.")
    for i in range(8):
        scripted(*answers(BPE, f"answer {i}"))
        assert "".join(talk.answer(f"message {i}", said.append)) == f"answer {i}"
    text = BPE.decode(talk.text.ids)
    last = [i for i in range(8) if f"message {i}" in text]
    assert last == list(range(last[0], 8))
    assert 1 < len(last) < 8
    turns = [
        turn
        for i in last
        for turn in (Turn("user", f"message {i}"), Turn("assistant", f"answer {i}"))
    ]
    assert text == Chat([Turn("system", "Be kind."), *turns])
    assert said == ["the context of 150 tokens is full: forgot the oldest 1 message"] * (
        8 - len(last)
    )


def test_a_message_that_does_not_fit_is_refused_and_changes_nothing(scripted):
    talk = start("byte", n_tokens=20, seq_len=90)
    scripted(*answers(TOKENIZERS["byte"], ""))
    list(talk.answer("a", say_nothing))
    before = list(talk.text.ids)
    with pytest.raises(
        UserError,
        match="the message has 150 tokens with its markers, too many for the context of 90",
    ):
        list(talk.answer("a" * 100, say_nothing))
    assert talk.text.ids == before


def test_an_answer_ends_where_the_context_ends(scripted):
    said, talk = [], start("byte", n_tokens=80, seq_len=90)
    scripted(b"x" * 80, *answers(TOKENIZERS["byte"], "y"))
    answer = "".join(talk.answer("a", said.append))
    assert answer == "x" * (91 - len(Chat([Turn("user", "a")])) - len("<|im_start|>assistant\n"))
    assert said == ["the context of 90 tokens is full: the answer is cut"]


def test_models_that_do_not_know_chats_are_named(bench):
    """A byte tokenizer can write the markers although the model does not know them; letters cannot."""
    run = lm.load(bench.reference())
    with pytest.raises(UserError, match="cannot write the markers of chats"):
        check_chats(run)
    assert "was not trained on chats" in check_chats(
        dataclasses.replace(run, tokenizer=TOKENIZERS["byte"])
    )
