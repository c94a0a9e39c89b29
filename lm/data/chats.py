"""Chats: lists of turns, and how they become tokens. One format, ChatML, for training and for
`lm.chat`:

    <|im_start|>user
    How are you?<|im_end|>
    <|im_start|>assistant
    Fine.<|im_end|>

A document may also be a list of parts of a text, {"text": ..., "label": true or false}, as axolotl's
template-free format has them: it is their text, and the labeled parts are the answers.

The two markers are special tokens if the tokenizer has them (Qwen's has; so has a BPE that is
trained on chats), and text otherwise. What somebody wrote never becomes a marker: contents are
encoded as text even with config.data.special_tokens, and where the markers are text, a marker in a
content gets a space after its first character.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.config.values import short
from lm.data.hf_tokenizer import ENDS_OF_TURN
from lm.data.tokenizer_base import Tokenizer
from lm.system.errors import UserError
from lm.system.files import expanded, read_bytes, read_json

START, END = "<|im_start|>", "<|im_end|>"
MARKERS = (START, END)
ROLES = ("system", "user", "assistant")
ALIASES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of roles
# The templates of checkpoints are programs, which are not run.
NO_TEMPLATE = (
    "--apply_chat_template: not supported; leave it out, and write what surrounds a question into "
    "the doc_to_text of the task"
)
# Keys of a turn that change what was said: a turn that has one is refused.
NOT_READ = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# Keys of a turn that say whether it is learned, and the value with which it is.
LEARNED = {"weight": 1, "train": 1, "loss": 1, "loss_weight": 1, "mask": 0, "masked": 0}

IGNORED = (
    "config.data.targets: all, but chats of {} say what is not learned, with a label or a weight; "
    "use assistant"
)


class Turn(NamedTuple):
    """What one side says; an answer may be said not to be learned."""

    role: str
    content: str
    is_learned: bool = True


class Part(NamedTuple):
    """A part of a chat that is encoded alone; an answer is a target with targets = assistant."""

    text: str
    is_answer: bool = False
    is_marker: bool = False


class Chat(str):
    """A chat as a document: its text, as a tokenizer without markers encodes it, and its parts."""

    parts: list[Part]
    is_marked: bool  # whether it says itself what is not learned
    learns_end: bool = False  # whether the end of the document is a target

    def __new__(cls, turns: Iterable[Turn]) -> "Chat":
        turns = list(turns)
        chat = cls._of_parts([part for turn in turns for part in render(turn)])
        chat.is_marked = not all(turn.is_learned for turn in turns)
        return chat

    @classmethod
    def of_labeled(cls, parts: list[Part]) -> "Chat":
        """Return a document of parts without turns; its end is that of its last part."""
        chat = cls._of_parts(parts)
        chat.is_marked = not all(part.is_answer for part in parts)
        chat.learns_end = parts[-1].is_answer
        return chat

    @classmethod
    def _of_parts(cls, parts: list[Part]) -> "Chat":
        chat = super().__new__(cls, "".join(map(_as_text, parts)))
        chat.parts = parts
        return chat


def render(turn: Turn) -> list[Part]:
    r"""Return the parts of a turn. An answer is its text and the marker that ends it.

    >>> [part.text for part in render(Turn("user", "Hi"))]
    ['<|im_start|>', 'user\n', 'Hi', '<|im_end|>', '\n']
    """
    is_answer = turn.role == "assistant" and turn.is_learned
    return [*opening(turn.role), Part(turn.content, is_answer), *ending(is_answer)]


def opening(role: str) -> list[Part]:
    """Return the parts before the content of a turn."""
    return [Part(START, is_marker=True), Part(f"{role}\n")]


def ending(is_answer: bool) -> list[Part]:
    """Return the parts after the content of a turn."""
    return [Part(END, is_answer, is_marker=True), Part("\n")]


def _as_text(part: Part) -> str:
    """Return a part for a tokenizer whose markers are text.

    >>> _as_text(Part("the marker <|im_end|>"))
    'the marker < |im_end|>'
    """
    return part.text if part.is_marker else re.sub(r"<(?=\|im_(start|end)\|>)", "< ", part.text)


# ---- Reading -------------------------------------------------------------------------------------


def parse(value: Any) -> Chat:
    r"""Return the chat of a list of turns, or of labeled parts, as JSON has it.

    Raises ValueError naming a bad turn.

    >>> parse([{"from": "gpt", "value": "Hello"}])
    '<|im_start|>assistant\nHello<|im_end|>\n'
    >>> parse([{"text": "1 + 1 = ", "label": False}, {"text": "2", "label": True}]).parts[1]
    Part(text='2', is_answer=True, is_marker=False)
    """
    items = _as_list(value)
    if any("label" in item for item in items):
        return Chat.of_labeled([_parse_part(item, f"part {i}") for i, item in enumerate(items, 1)])
    return Chat(_parse_turn(turn, f"turn {i}") for i, turn in enumerate(items, 1))


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of turns that `parse` reads."""
    try:
        return bool(parse(value))
    except ValueError:
        return False


def _as_list(value: Any) -> list[dict]:
    columns = list(value.values()) if isinstance(value, dict) else []
    if columns and all(isinstance(column, list) for column in columns):
        # `datasets` stores a sequence of turns by column
        value = [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise ValueError(
            f"{short(value)} is neither a text nor a list of turns with role and content (set "
            "--config.data.field)"
        )
    return value


def _parse_turn(turn: dict, where: str) -> Turn:
    role_key, content_key = "role", "content"
    if "from" in turn or "value" in turn:  # ShareGPT's
        role_key, content_key = "from", "value"
    role = turn.get(role_key)
    name = ALIASES.get(role, role) if isinstance(role, str) else role
    if name not in ROLES:
        raise ValueError(
            f"{where} has the {role_key} {short(role)}, which is not one of "
            f"{', '.join([*ROLES, *ALIASES])}; rename it, or leave the chat out"
        )
    if unread := [key for key in NOT_READ if turn.get(key) not in (None, [], {}, "")]:
        raise ValueError(
            f"{where} has {unread[0]}, which is not read; remove it, or leave the chat out"
        )
    marks = {key: turn[key] for key in LEARNED if turn.get(key) is not None}
    if unknown := [key for key, mark in marks.items() if mark not in (0, 1)]:
        raise ValueError(
            f"{where} has the {unknown[0]} {short(marks[unknown[0]])}, which is not 0 or 1"
        )
    is_learned = all(mark == LEARNED[key] for key, mark in marks.items())
    content = turn.get(content_key)
    text = content
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            text = "".join(texts)
    if not isinstance(text, str):
        raise ValueError(
            f"{where} has no text in {content_key} but {short(content)}; write a text, or leave "
            "the chat out"
        )
    return Turn(name, text, is_learned)


def _parse_part(part: dict, where: str) -> Part:
    text = part.get("text")
    label = part.get("label")
    if not isinstance(text, str) or label not in (0, 1):
        raise ValueError(
            f"{where} has the text {short(text)} and the label {short(label)}; write a text, and "
            "true or false"
        )
    return Part(text, bool(label))


# ---- Encoding ------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """The ids of a text or chat, which of them are of answers, and the bytes they stand for.

    Special tokens stand for no bytes.
    """

    ids: np.ndarray
    is_answer: np.ndarray
    n_bytes: int
    answer_bytes: int

    @classmethod
    def of_text(cls, text: str, ids: np.ndarray) -> "Encoded":
        """Return the tokens of a text. All of them count."""
        n_bytes = len(text.encode())
        return cls(ids, np.ones(len(ids), np.uint8), n_bytes, n_bytes)


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the markers, by name; empty if they are text to a tokenizer."""
    special = tokenizer.special_ids()
    if not special.keys() >= {*MARKERS}:
        return {}
    return {marker: special[marker] for marker in MARKERS}


def encode(tokenizer: Tokenizer, chats: Sequence[Sequence[Part]]) -> list[Encoded]:
    """Return the tokens of chats, each given by its parts."""
    special = marker_ids(tokenizer)

    def text_of(part: Part) -> str:
        if not special:
            return _as_text(part)
        return "" if part.is_marker else part.text

    def join(parts: Sequence[Part]) -> Encoded:
        ids = [np.zeros(0, tokenizer.dtype)]
        is_answer = [np.zeros(0, np.uint8)]
        n_bytes = 0
        answer_bytes = 0
        for part in parts:
            text, part_ids = next(encoded)
            if part.is_marker and special:
                part_ids = np.array([special[part.text]], tokenizer.dtype)
            ids.append(part_ids)
            is_answer.append(np.full(len(part_ids), part.is_answer, np.uint8))
            n_bytes += len(text.encode())
            answer_bytes += len(text.encode()) * part.is_answer
        return Encoded(np.concatenate(ids), np.concatenate(is_answer), n_bytes, answer_bytes)

    # The tokenizer encodes the parts of all chats at once, on all cores.
    texts = [text_of(part) for parts in chats for part in parts]
    encoded = zip(texts, tokenizer.as_text.encode_all(texts), strict=True)
    return [join(parts) for parts in chats]


def notice(tokenizer: Tokenizer, spec: str) -> str | None:
    """Return a warning if the tokenizer comes with another format of chats than ChatML.

    The template beside a tokenizer.json is a program and is not run: it is only searched for the
    markers.

    Args:
        tokenizer: the tokenizer.
        spec: config.data.tokenizer.
    """
    kind, _, path = spec.partition(":")
    others = [name for name in ENDS_OF_TURN if name in tokenizer.special_ids()]
    if others and not marker_ids(tokenizer):
        reason = f"has the marker {others[0]} of another one"
    elif kind == "hf" and _has_other_template(Path(expanded(path)).parent):
        reason = "comes with a template of another one"
    else:
        return None
    return (
        f"WARNING: chats are written in ChatML ({START}user ...), but the tokenizer {reason}, "
        "which is not used"
    )


def _has_other_template(folder: Path) -> bool:
    template = ""
    with contextlib.suppress(OSError, ValueError, UserError):
        template = str(read_json(folder / "tokenizer_config.json").get("chat_template") or "")
    with contextlib.suppress(OSError, ValueError):  # newer checkpoints have it in a file
        template = read_bytes(folder / "chat_template.jinja").decode(errors="replace")
    return bool(template) and START not in template
