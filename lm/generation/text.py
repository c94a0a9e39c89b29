"""Generate text: encode prompts, decode the drawn tokens, and end at a stop string or at the end of a document."""

import dataclasses
from collections.abc import Iterator, Sequence

from lm.data.tokenizers import Tokenizer
from lm.errors import UserError
from lm.generation.decoding import Decoder
from lm.generation.filters import Sampling

EVERY = 16  # tokens to draw before the text is checked for stop strings
INCOMPLETE = "\ufffd"  # tokenizers decode an incomplete character to this one


@dataclasses.dataclass
class Continuation:
    """The continuation of one prompt, which grows during generation.

    Attributes:
        prompt: the prompt.
        sample: the index of the sample.
        text: the text so far, without a last part that further tokens may change.
        ids: the drawn ids, up to the end of the text.
        finish: None while the text grows; then "length", "stop" (the stop string is removed) or "end_of_text" (of a
            document, or of a turn in a chat).
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
            if i in tokenizer.stop_ids:
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
    """Return the length of the longest suffix of the text that is a proper prefix of the stop string.

    >>> _overlap("one, t", ", two"), _overlap("one", "two")
    (3, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _decode_after(tokenizer: Tokenizer, prompt: str, ids: Sequence[int]) -> str:
    """Decode ids together with their prompt, because some tokenizers drop a space at the start of a text."""
    prompt_ids = tokenizer.encode_prompt(prompt).tolist()
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
    """Continue prompts, and yield all continuations, ordered by prompt, each time that some have grown.

    Args:
        decoder: the model.
        tokenizer: its tokenizer.
        prompts: texts of at least one token each.
        n_tokens: maximum number of tokens to generate for each.
        sampling: the distribution to draw from.
        n_samples: number of continuations of each prompt.
        seed: random seed.
        stop: strings before which a text ends.
        batch_size: number of texts generated in one batch.

    Raises:
        UserError: if the tokenizer encodes a prompt to no tokens.
    """
    for prompt in prompts:
        if len(tokenizer.encode_prompt(prompt)) == 0:
            raise UserError(f"prompt: this tokenizer encodes {prompt!r} to no tokens; use a longer prompt")
    rows = [Continuation(prompt, sample) for prompt in prompts for sample in range(n_samples)]
    if not rows:
        yield rows
    for part in (rows[i : i + batch_size] for i in range(0, len(rows), batch_size)):
        ids, samples = [tokenizer.encode_prompt(row.prompt).tolist() for row in part], [row.sample for row in part]
        for drawn_BT in decoder.stream(ids, n_tokens, sampling, seed=seed, samples=samples, every=EVERY):
            for row, drawn in zip(part, drawn_BT.tolist(), strict=True):
                row.add(drawn, tokenizer, stop, n_tokens)
            yield rows
            if all(row.finish for row in part):
                break


def generate_texts(
    decoder: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], *args, **options
) -> list[Continuation]:
    """Return the finished continuations. The arguments are those of `stream_texts`."""
    *_, rows = stream_texts(decoder, tokenizer, prompts, *args, **options)
    return rows
