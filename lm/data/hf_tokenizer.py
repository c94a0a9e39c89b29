"""Tokenizers of the library `tokenizers`: read from a tokenizer.json, or trained BPE."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from lm.data.tokenizer_base import Tokenizer, utf8
from lm.system.errors import UserError, first_line

END_OF_TEXT = "<|endoftext|>"
# of GPT-2 and Qwen, Llama 3, Llama 2, Gemma
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# A word of the byte-level BPE is a run of one of these kinds. Training takes time with the square
# of its length.
LONG_WORD = re.compile(r"[^\W\d_]{4096}|\d{4096}|(?:[^\w\s]|_){4096}|\s{4096}")
# of Qwen's, Llama 3's and Gemma's chats
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise ValueError where `tokenizers` panics: its PanicException is not an Exception."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ == "PanicException":
            raise ValueError(str(e)) from None
        raise


class HFTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `tokenizers`, trained by `train_bpe` or read from a file.

    Truncation, padding and BPE dropout are for batches of a model, not for a corpus: they drop, add
    or change tokens. They are switched off, also in `json`, and their names are in `switched_off`.

    Args:
        tokenizer: the content of tokenizer.json.
        special_tokens: encode the names of special tokens as these tokens, and begin documents and
            prompts as the tokenizer's post-processor does (<s>, <bos>). False: encode the names as
            ordinary text.
        end_ids: further ids that end a generated text, from the configs of a checkpoint.
    """

    kind = "hf"

    @_panics_as_errors()
    def __init__(self, tokenizer: str, special_tokens: bool = False, end_ids: Iterable[int] = ()):
        import tokenizers

        self.end_ids = sorted(end_ids)
        self.model = tokenizers.Tokenizer.from_str(tokenizer)
        self.switched_off = self._switch_off()
        self.json = self.model.to_str() if self.switched_off else tokenizer
        # the library's name for encoding them as text
        self.model.encode_special_tokens = not special_tokens
        vocabulary = self.model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("its vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        ends = [vocabulary[name] for name in ENDS_OF_TEXT if name in vocabulary]
        self.end_of_text = next(iter(ends), None)
        self.encodes_special_tokens = special_tokens
        if special_tokens:
            self.special_tokens = tuple(self.special_ids())
            self.begin_of_text = self._find_begin_of_text()
            if foreign := [i for i in self.begin_of_text if i >= self.vocab_size]:
                raise ValueError(
                    f"its post-processor begins a text with id {foreign[0]}, which the vocabulary "
                    "lacks"
                )

    def special_ids(self) -> dict[str, int]:
        added = self.model.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if token.special}

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that end a generated text, among them the ends of a turn and `end_ids`."""
        special = self.special_ids()
        ends_of_turn = {special[name] for name in ENDS_OF_TURN if name in special}
        return super().stop_ids | ends_of_turn | {*self.end_ids}

    @cached_property
    def as_text(self) -> "HFTokenizer":
        return self.with_special_tokens(False) if self.encodes_special_tokens else self

    def _find_begin_of_text(self) -> tuple[int, ...]:
        try:
            encoding = self.model.encode("a")
        except Exception:  # `tokenizers` raises bare Exception if it cannot encode the text
            return ()
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(i for i, added in itertools.takewhile(lambda pair: pair[1], marked))

    def _switch_off(self) -> list[str]:
        """Switch off what would drop, add or change tokens, and return its names."""
        names = []
        if self.model.truncation is not None:
            self.model.no_truncation()
            names.append("truncation")
        if self.model.padding is not None:
            self.model.no_padding()
            names.append("padding")
        if getattr(self.model.model, "dropout", None):  # only BPE has it
            self.model.model.dropout = None
            names.append("BPE dropout")
        return names

    def state(self):
        return {"tokenizer": self.json, "special_tokens": self.encodes_special_tokens}

    def to_json(self) -> str:
        return self._json(end_ids=self.end_ids)

    def with_special_tokens(self, special_tokens: bool) -> "HFTokenizer":
        return HFTokenizer(self.json, special_tokens, self.end_ids)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Encode several texts on all cores."""
        for text in texts:
            utf8(text)
        try:
            with _panics_as_errors():
                encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as e:  # `tokenizers` raises bare Exception
            raise UserError(
                f"tokenizer: cannot encode the text ({first_line(e)}); add the unknown token to "
                "the vocabulary of its tokenizer.json, or use a byte-level tokenizer"
            ) from None
        encoded = [np.array(encoding.ids, self.dtype) for encoding in encodings]
        if not self.encodes_special_tokens and (names := self._inseparable):
            for i in (i for ids in encoded for i in names.keys() & set(ids.tolist())):
                raise UserError(
                    f"tokenizer: the text has {names[i]!r}, which this tokenizer can only encode "
                    "as the special token; remove it from the text, or if it is trusted, use "
                    "--config.data.special_tokens=true"
                )
        return encoded

    @cached_property
    def _inseparable(self) -> dict[int, str]:
        """Return by id the special tokens whose names become these tokens even where they are text.

        Unigram and WordLevel models do, because the names are in their vocabularies. The token of
        unknown text, which any name may become, is left out.
        """

        model = json.loads(self.json)["model"]
        unknown = {model.get("unk_id"), self.model.token_to_id(model.get("unk_token") or "")}
        inseparable = {}
        for name, i in self.special_ids().items():
            # `tokenizers` raises bare Exception; it encodes some texts only
            with contextlib.suppress(Exception):
                ids = self.model.encode(name, add_special_tokens=False).ids
                if i in ids and i not in unknown:
                    inseparable[i] = name
        return inseparable

    def decode(self, ids) -> str:
        return self.model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def train_bpe(
    documents: Iterable[str],
    vocab_size: int,
    special_tokens: bool = False,
    markers: Sequence[str] = (),
) -> HFTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019); deterministic.

    Its vocabulary includes all 256 bytes, so it is lossless for every string that UTF-8 can encode.

    Args:
        vocab_size: at most this many ids; the last ones are END_OF_TEXT and the markers.
        special_tokens: encode the name END_OF_TEXT as this token; nothing is then learned from the
            name.
        markers: further special tokens, those of chats; nothing is learned from their names.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = vocab_size - 1 - len(markers)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    if names := [END_OF_TEXT] * special_tokens + [*markers]:
        separator = "|".join(map(re.escape, names))
        parts = (re.split(separator, document) for document in documents)
        documents = itertools.chain.from_iterable(parts)
    words = itertools.chain.from_iterable(map(_cut_long_words, documents))
    model.train_from_iterator(words, trainer)
    model.add_special_tokens([AddedToken(name, special=True) for name in (END_OF_TEXT, *markers)])
    return HFTokenizer(model.to_str(), special_tokens)


def _cut_long_words(text: str) -> Iterator[str]:
    """Yield the parts of a text, cut inside words of 4,096 characters and more, as in DNA."""
    start = 0
    for match in LONG_WORD.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]
