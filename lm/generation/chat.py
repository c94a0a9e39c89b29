"""A chat with a model: turns are written as in training (lm/data/chats.py), and read once."""

from collections.abc import Callable, Iterator

from lm.data import chats
from lm.data.chats import Part, Turn
from lm.data.tokenizers import Tokenizer
from lm.generation.decoding import CachedText, Decoder
from lm.generation.filters import Sampling
from lm.generation.text import Continuation
from lm.system.errors import UserError
from lm.system.text_tables import plural


class Conversation:
    """The turns of a user and a model.

    The model sees at most decoder.seq_len tokens. Before an answer, the oldest turns except the
    system's are forgotten until there is room for it: n_tokens, or half of the context.

    Attributes:
        text: all tokens that the model sees, markers included; None before the first answer.
        interrupted: set it to end the answer that is being written.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        sampling: Sampling,
        n_tokens: int,
        *,
        system: str = "",
        seed: int = 0,
    ):
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.n_tokens = n_tokens
        self.sampling = sampling
        self.seed = seed
        turns = chats.render(Turn("system", system)) if system else []
        self.head = tokenizer.begin(self._encode(turns)).tolist()  # what is never forgotten
        self.text: CachedText | None = None
        self.starts: list[int] = []  # of the user's turns in the text
        self.interrupted = False

    def _encode(self, parts: list[Part]):
        return chats.encode(self.tokenizer, [parts])[0].ids

    def answer(self, content: str, say: Callable[[str], None]) -> Iterator[str]:
        """Yield the answer to a turn of the user, in parts, as it is drawn.

        Args:
            content: what the user says.
            say: receives a line if turns are forgotten or the answer is cut.

        Raises:
            UserError: if the turn cannot be encoded or is too long; the conversation stays as it
                was.
        """
        turn = [*chats.render(Turn("user", content)), *chats.opening("assistant")]
        self._add(self._encode(turn).tolist(), say)
        assert self.text is not None
        special = chats.marker_ids(self.tokenizer)
        stop = () if special else (chats.END,)
        row = Continuation("", 0, prompt_ids=self.text.ids.copy())
        n_shown = 0
        self.interrupted = False
        while not (row.finish or self.interrupted or self.text.is_full):
            row.add([self.text.draw()], self.tokenizer, stop, self.n_tokens)
            yield row.text[n_shown:]
            n_shown = len(row.text)
        if row.finish is None and not self.interrupted:
            say(f"the context of {self.decoder.seq_len:,} tokens is full: the answer is cut")
        if row.finish == "length":
            say(f"the answer is cut after {self.n_tokens:,} tokens (--tokens)")
        self._end_turn(row.finish, special)

    def _add(self, new: list[int], say: Callable[[str], None]) -> None:
        """Append the tokens of a turn, and forget old turns if there is no room for an answer."""
        seq_len = self.decoder.seq_len
        least = len(self.head) + len(new)
        if least >= seq_len:
            of_system = f" and the system's {len(self.head):,}" if self.head else ""
            raise UserError(
                f"the message has {len(new):,} tokens with its markers{of_system}, too many for "
                f"the context of {seq_len:,}; write a shorter one"
            )
        room = max(least, seq_len - min(self.n_tokens, seq_len // 2))
        ids = self.text.ids if self.text else self.head
        # if 0, 1, ... messages with answers are forgotten
        kept_from = [len(self.head), *self.starts[1:], len(ids)]
        n = next(n for n, first in enumerate(kept_from) if least + len(ids) - first <= room)
        if n:
            say(
                f"the context of {seq_len:,} tokens is full: forgot the oldest "
                f"{plural(n, 'message')}"
            )
        if n or self.text is None:
            self.starts = [start - kept_from[n] + len(self.head) for start in self.starts[n:]]
            kept = [*self.head, *ids[kept_from[n] :]]
            self.text = CachedText(self.decoder, kept, self.sampling, self.seed)
        self.starts.append(len(self.text.ids))
        self.text.ids += new

    def _end_turn(self, finish: str | None, special: dict[str, int]) -> None:
        """Append what is missing of the end of an answer that was cut, or ended like a document."""
        assert self.text is not None
        marker, newline = chats.ending(is_answer=True)
        ids = self.text.ids
        missing = [marker, newline]
        if finish == "stop" or (finish == "end_of_text" and ids[-1] == special.get(chats.END)):
            missing = [newline]
        elif finish == "end_of_text":
            ids.pop()  # another token ended the answer
        ids += self._encode(missing).tolist()
