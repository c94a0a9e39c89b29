"""A trained model for notebooks and commands: `lm.load("runs/mine")`."""

import dataclasses
import functools
import html
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm import model, parameters
from lm.config import Resolved, checks, saved_config
from lm.data import tokenizers
from lm.data.hf_tokenizer import HFTokenizer
from lm.data.tokenizers import Tokenizer
from lm.generation import log_probabilities, options
from lm.generation.decoding import Decoder, make_decoder
from lm.generation.diffusion import make_sampler
from lm.generation.filters import Sampling
from lm.generation.text import Continuation, stream_texts
from lm.huggingface.config_files import is_checkpoint, read_config
from lm.huggingface.tokenizer_files import find_end_ids, load_tokenizer, read_settings
from lm.huggingface.weights import load_params
from lm.ideas import masked_diffusion
from lm.system.errors import UserError
from lm.system.files import expanded
from lm.system.text_tables import say
from lm.workdir import checkpoints
from lm.workdir.saved_run import SETTINGS, check_meta, is_step


@dataclasses.dataclass(frozen=True, repr=False)
class TrainedModel:
    """A trained model. Methods accept a text or a sequence of token ids; prompts must be texts.

    Attributes:
        path: the directory of the run, or of the checkpoint of Hugging Face.
        step: the step of the run's checkpoint, or a text that says what was averaged; 0 for one of
            Hugging Face.
        config: the resolved config.
        params: parameters, as nested dicts; see lm/parameters.py.
        tokenizer: None if the run trained on token ids, or if the checkpoint has no tokenizer.json.
        settings: files of the checkpoint of Hugging Face that the model came from, by name; see
            `read_settings`.
    """

    path: Path
    step: int | str
    config: Resolved
    params: dict
    tokenizer: Tokenizer | None
    settings: dict[str, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join(f"{name:<12}{value}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        m = self.config.model
        n_params = sum(x.size for x in jax.tree.leaves(self.params))
        shape = (
            f"{m.n_layers} layers, d_model {m.d_model}, {m.n_heads} heads, vocabulary "
            f"{m.vocab_size:,}"
        )
        return [
            ("model", f"{self.path}, step {self.step}"),
            ("size", f"{n_params:,} parameters in {m.param_dtype}: {shape}"),
            (
                "context",
                f"{self.seq_len} tokens, "
                f"{'no tokenizer' if self.tokenizer is None else 'with a tokenizer'}",
            ),
        ]

    @property
    def seq_len(self) -> int:
        """Return the maximum number of tokens that the model sees at once."""
        return self.config.train.seq_len

    def encode(self, text: str | Sequence[int]) -> np.ndarray:
        """Return token ids (T,).

        Raises:
            UserError: if the tokenizer does not know a character, if there is no tokenizer, or if
                an id is outside the vocabulary.
        """
        if isinstance(text, str):
            return self._tokenizer.encode_prompt(text)
        vocab_size = self.config.model.vocab_size
        try:
            ids = np.asarray(text)
        except ValueError:  # lists of different lengths
            ids = np.empty(())
        is_list = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
        if not is_list or ((ids < 0) | (ids >= vocab_size)).any():
            raise UserError(f"ids: expected one list of integers from 0 to {vocab_size - 1}")
        return ids.astype(np.int64)

    def logits(self, text: str | Sequence[int]) -> np.ndarray:
        """Return the logits for the next token after each token of a text, float32 (T, V).

        Raises:
            UserError: if the text is empty or longer than the context.
        """
        self.require_next_token("a logit of the next token")
        ids = self.encode(text)
        if not 0 < len(ids) <= self.seq_len:
            raise UserError(f"text: {len(ids)} tokens; this model accepts 1 to {self.seq_len}")
        # one compiled program for texts of all lengths
        padded_1T = np.zeros((1, self.seq_len), np.int32)
        padded_1T[0, : len(ids)] = ids
        return np.asarray(_logits(self.params, padded_1T, self.config.model)[0, : len(ids)])

    def require_next_token(self, what: str) -> None:
        """Raise UserError if the model does not predict the next token, which `what` needs."""
        masked_diffusion.refuse(self.config.model, what)

    def loss(self, text: str | Sequence[int]) -> float:
        """Return the mean loss of a text in nats per token, over all tokens but the first.

        Each token is predicted once, in windows of seq_len tokens, as in the evaluation of a run.

        Raises:
            UserError: if the text has fewer than two tokens.
        """
        ids = self.encode(text)
        if len(ids) < 2:
            raise UserError(f"text: {len(ids)} tokens; a loss needs at least two")
        first, *rest = ids.tolist()
        windows = list(log_probabilities.split_text([first], rest, self.seq_len, full_last=False))
        likelihoods = log_probabilities.likelihoods(
            self.params, self.config.model, windows, seq_len=self.seq_len
        )
        return -math.fsum(x.log_p for x in likelihoods) / (len(ids) - 1)

    def generate(
        self, prompts: str | Sequence[str], n_tokens: int = 300, **arguments
    ) -> str | list[str]:
        """Return the continuation of a prompt, or a list of continuations. The arguments are those
        of `stream`.
        """
        *_, rows = self.stream(
            [prompts] if isinstance(prompts, str) else prompts, n_tokens, **arguments
        )
        texts = [row.text for row in rows]
        return texts[0] if isinstance(prompts, str) and len(texts) == 1 else texts

    def stream(
        self,
        prompts: Sequence[str],
        n_tokens: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        n_samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
        batch_size: int = 16,
    ) -> Iterator[list[Continuation]]:
        """Continue prompts, and yield all continuations each time that some have grown.

        Args:
            prompts, n_tokens, n_samples, seed, stop, batch_size: see lm/generation/text.py.
            temperature, top_k, top_p, min_p: see `Sampling` in lm/generation/filters.py.

        Raises:
            UserError: if an argument is out of the range in lm/generation/options.py, or if the
                tokenizer does not know a character of a prompt, or encodes it to no tokens.
        """
        filters: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
        }
        others: dict[str, Any] = {
            "n_samples": n_samples,
            "seed": seed,
            "stop": stop,
            "batch_size": batch_size,
        }
        options.check_options({"prompts": prompts, "n_tokens": n_tokens} | filters | others)
        return stream_texts(
            self.decoder, self._tokenizer, prompts, n_tokens, Sampling(**filters), **others
        )

    def with_special_tokens(self, special_tokens: bool = True) -> "TrainedModel":
        """Return this model, with special tokens of texts encoded as tokens, or as ordinary text.

        By default, they are encoded as in the data of the run (config.data.special_tokens).

        Raises:
            UserError: if the tokenizer has no special tokens.
        """
        return dataclasses.replace(
            self, tokenizer=self._tokenizer.with_special_tokens(special_tokens)
        )

    @functools.cached_property
    def decoder(self) -> Decoder:
        """Return the model prepared for generation; see lm/generation/decoding.py."""
        n_ids = self.tokenizer.vocab_size if self.tokenizer else None
        c = self.config.model
        make = make_sampler if c.masked_diffusion else make_decoder
        return make(self.params, c, seq_len=self.seq_len, n_ids=n_ids)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"{self.path}: this model has no tokenizer; only logits() and loss() take ids"
            )
        return self.tokenizer


def load(path: str | Path, step: int | str = "best") -> TrainedModel:
    """Load the model of a run, or of a checkpoint of Hugging Face; see `lm.load` and
    `checkpoints.restore_params`.

    A parameter that is NaN or infinite gives a warning on standard error.

    Raises:
        UserError: if there is no such checkpoint, or it is corrupted or not supported.
    """
    path = Path(expanded(path))
    step = int(step) if isinstance(step, str) and is_step(step) else step
    if is_checkpoint(path):
        if step not in ("best", "latest", 0):
            raise UserError(f"{path} is a checkpoint of Hugging Face, which has no step {step}")
        step = 0
        config = read_config(path)
        settings = read_settings(path)
        tokenizer = load_tokenizer(path, config)
        params = load_params(path, config)
    else:
        step, params, meta = checkpoints.restore_params(path, step)
        config, tokenizer = read_meta(meta, params, f"{path}, step {step}")
        # This device may not support the implementation of attention that the run used.
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, attention="auto")
        )
        settings = meta.get(SETTINGS, {})
        if (
            isinstance(tokenizer, HFTokenizer) and settings
        ):  # of the checkpoint that training began from
            tokenizer.end_ids = sorted(find_end_ids(settings))
    finite = _are_finite(parameters.flat(params))
    if wrong := [name for name, is_finite in finite.items() if not is_finite]:
        say(
            f"WARNING: {path}, step {step}: {len(wrong)} of {len(finite)} parameters have NaN or "
            f"infinite values, the first is {wrong[0]}",
            sys.stderr,
        )
    return TrainedModel(path, step, config, params, tokenizer, settings)


def read_meta(meta: dict, params: dict, where: str) -> tuple[Resolved, Tokenizer | None]:
    """Return the config and the tokenizer in the record of a checkpoint, whose parameters are
    given.

    Raises:
        UserError: it is not the record of a run, or its parts contradict each other; `where` is the
            checkpoint.
    """
    check_meta(meta, where)
    try:
        config = saved_config(meta["config"])
        if problems := [text for _, text in checks.problems(config, checks.OF_THE_MODEL)]:
            raise UserError(*problems)
        tokenizer = None if meta["tokenizer"] is None else tokenizers.from_json(meta["tokenizer"])
    except UserError as error:
        raise UserError(*(f"{where}: {problem}" for problem in error.problems)) from None
    table = parameters.parameter_table(config.model)
    found = parameters.flat(params)
    for path in sorted(table.keys() | found.keys()):
        shapes = [tuple(of[path].shape) if path in of else "absent" for of in (table, found)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{where}: its parameters are not those of its config: {path} is {shapes[1]}, not "
                f"{shapes[0]}"
            )
    if tokenizer and tokenizer.vocab_size > config.model.vocab_size:
        n = tokenizer.vocab_size
        known = config.model.vocab_size
        raise UserError(
            f"{where}: its tokenizer has {n:,} ids, and its config.model.vocab_size is {known:,}"
        )
    return config, tokenizer


@jax.jit
def _are_finite(params: dict):
    return {path: jnp.isfinite(p).all() for path, p in params.items()}


@functools.partial(jax.jit, static_argnames="c")
def _logits(params, tokens_BT, c):
    return model.logits(params, c, tokens_BT)
