"""Generate text: encode prompts, decode what the model draws, and stop at a string or at the end of a document."""

import dataclasses
from collections.abc import Iterator, Sequence

from lm.data.tokenizers import Tokenizer
from lm.errors import UserError
from lm.generation.decoding import Decoder
from lm.generation.filters import Sampling

EVERY = 16  # tokens between two looks at the text
INCOMPLETE = "\ufffd"  # what tokenizers decode from a part of a character


@dataclasses.dataclass
class Continuation:
    """The continuation of one prompt, which grows while it is generated.

    Attributes:
        prompt: the prompt.
        sample: the number of the sample.
        text: the text so far, without characters that the next tokens may still change.
        ids: the ids that were drawn, up to the end of the text.
        finish: None while the text grows, then "length", "stop" (a stop string, which is cut off) or "end_of_text".
    """

    prompt: str
    sample: int
    text: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None

    def add(self, ids: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str], n_tokens: int) -> None:
        """Add drawn ids, unless the text has ended."""
        if self.finish:
            return
        for i in ids:
            if i == tokenizer.end_of_text:
                self.finish = "end_of_text"
                break
            self.ids.append(int(i))
        if self.finish is None and len(self.ids) >= n_tokens:
            self.finish = "length"
        text = _decode_after(tokenizer, self.prompt, self.ids)
        if found := [text.index(string) for string in stop if string in text]:
            self.text, self.finish = text[: min(found)], "stop"
            while self.ids and _decode_after(tokenizer, self.prompt, self.ids[:-1]).startswith(self.text):
                self.ids.pop()
        elif self.finish:
            self.text = text
        else:
            text = text.rstrip(INCOMPLETE)
            self.text = text[: len(text) - max((_overlap(text, string) for string in stop), default=0)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string may begin.

    >>> _overlap("one, t", ", two"), _overlap("one", "two")
    (3, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _decode_after(tokenizer: Tokenizer, prompt: str, ids: Sequence[int]) -> str:
    """Decode ids that follow a prompt; some tokenizers drop the space before the first word of a text."""
    prompt_ids = tokenizer.encode(prompt).tolist()
    before, text = tokenizer.decode(prompt_ids), tokenizer.decode([*prompt_ids, *ids])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(ids)


def stream_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    n_tokens: int,
    sampling: Sampling,
    *,
    n_samples: int = 1,
    seed: int = 0,
    stop: Sequence[str] = (),
    batch_size: int = 16,
) -> Iterator[list[Continuation]]:
    """Continue prompts, and yield all continuations, those of one prompt together, each time that they have grown.

    Args:
        decoder: the model.
        tokenizer: its tokenizer.
        prompts: texts of at least one token each.
        n_tokens: the most tokens to add to each.
        sampling: the distribution to draw from.
        n_samples: how many continuations of each prompt.
        seed: another seed gives other texts.
        stop: a text ends before the first of these strings.
        batch_size: how many texts are generated together.

    Raises:
        UserError: if the tokenizer makes no token of a prompt, or if n_tokens is less than 1.
    """
    if n_tokens < 1:
        raise UserError(f"n_tokens: {n_tokens} must be at least 1")
    for prompt in prompts:
        if len(tokenizer.encode(prompt)) == 0:
            raise UserError(f"prompt: this tokenizer makes no token of {prompt!r}; use a word, for example")
    rows = [Continuation(prompt, sample) for prompt in prompts for sample in range(n_samples)]
    if not rows:
        yield rows
    for part in (rows[i : i + batch_size] for i in range(0, len(rows), batch_size)):
        ids, samples = [tokenizer.encode(row.prompt).tolist() for row in part], [row.sample for row in part]
        for drawn_BT in decoder.stream(ids, n_tokens, sampling, seed=seed, samples=samples, every=EVERY):
            for row, drawn in zip(part, drawn_BT.tolist(), strict=True):
                row.add(drawn, tokenizer, stop, n_tokens)
            yield rows
            if all(row.finish for row in part):
                break


def generate_texts(
    decoder: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], *args, **options
) -> list[Continuation]:
    """Return the finished continuations. Arguments as for `stream_texts`."""
    *_, rows = stream_texts(decoder, tokenizer, prompts, *args, **options)
    return rows
