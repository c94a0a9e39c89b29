"""An adapter for EleutherAI's lm-evaluation-harness (package lm-eval, in the extra [eval]).

Importing this module registers the model "lm" with the harness:

    import lm_eval
    from lm.scoring.evaluation_harness import HarnessModel

    lm_eval.simple_evaluate(HarnessModel("runs/mine"), tasks=["hellaswag"])
"""

import functools
import itertools
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.utils
import numpy as np
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager, _yaml_loader
from tqdm import tqdm

import lm
from lm.data import trusted
from lm.data.chats import NO_TEMPLATE
from lm.data.hf_tokenizer import HFTokenizer
from lm.generation.filters import Sampling
from lm.generation.log_probabilities import Likelihood, Window, likelihoods, split_text
from lm.generation.options import check_options
from lm.generation.text import Continuation, stream_texts
from lm.huggingface.tokenizer_files import named_tokens, special_names
from lm.system.errors import UserError, first_line
from lm.trained_model import TrainedModel

WINDOWS = ("training", "harness")
SUPPORTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}


@register_model("lm")
class HarnessModel(TemplateLM):
    """A trained model for the harness.

    Contexts and continuations are encoded like in the harness's own "hf" models: together, with the
    spaces between them in the continuation. They start with the tokenizer's begin of text, if it
    has one. A long context loses its first tokens. A text without context follows the bos_token of
    the checkpoint's settings, else its eos_token; without settings, the begin of text, else the end
    of text. If there is none, the first token of such a text has no probability. Special tokens
    that are generated are left out of texts.

    Args:
        workdir: the directory of a run or of a Hugging Face checkpoint; or a model that is loaded.
        step: a step, "latest", or "best" by validation loss.
        batch_size: number of texts that are computed at once; "auto": as many as fit the memory of
            most machines.
        windows: how tasks of type loglikelihood_rolling (perplexity, bits per byte) split a text
            that is longer than the context. "training": like the evaluation of a run, into
            consecutive windows, without the first token. "harness": like the harness's own models,
            with an end of text before the first token and a full last window.
        max_batch_size, device: not used; the harness gives them to all models.

    Raises:
        UserError: if there is no such run, or it has no tokenizer.
    """

    max_gen_toks = 256  # default of tasks

    def __init__(
        self,
        workdir: str | Path | TrainedModel,
        step: int | str = "best",
        batch_size: int | str = "auto",
        windows: str = "training",
        max_batch_size=None,
        device=None,
    ):
        super().__init__()
        if windows not in WINDOWS:
            raise UserError(f"windows: {windows!r} is not one of {', '.join(WINDOWS)}")
        if batch_size != "auto" and (not str(batch_size).isdigit() or int(batch_size) < 1):
            raise UserError(f"batch_size: {batch_size!r} is not auto or an integer of at least 1")
        self.trained: Any = workdir if isinstance(workdir, TrainedModel) else lm.load(workdir, step)
        if self.trained.tokenizer is None:
            raise UserError(
                f"{workdir}: this run was trained on token ids and has no tokenizer; a task needs "
                "one"
            )
        self.windows = windows
        self.batch_size = None if batch_size == "auto" else int(batch_size)

    # ---- The tokenizer ---------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        return self.trained.tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        return self.trained.seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Encode a text, with begin_of_text unless add_special_tokens is False."""
        tokenizer = self.trained.tokenizer
        encode = tokenizer.encode if add_special_tokens is False else tokenizer.encode_prompt
        return encode(string).tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, ids = super()._encode_pair(context, continuation)
        if not ids:
            # Encoded together, a short continuation may become a part of the context's last token.
            ids = self.tok_encode(continuation, add_special_tokens=False)
        return context_ids or self._prefix(), ids

    def _prefix(self) -> list[int]:
        """Return the token that precedes a text without context, or no token."""
        if "tokenizer_config.json" in self.trained.settings:
            names = named_tokens(self.trained.settings)
            if ids := self._ids_of(names.get("bos_token"), names.get("eos_token")):
                return ids[:1]
        if self.trained.tokenizer.begin_of_text:
            return list(self.trained.tokenizer.begin_of_text)
        return [] if self.eot_token_id is None else [self.eot_token_id]

    def _ids_of(self, *names: str | None) -> list[int]:
        """Return the ids of those of these tokens that the tokenizer has."""
        tokenizer = self.trained.tokenizer
        if not isinstance(tokenizer, HFTokenizer):
            return []
        ids = [tokenizer.model.token_to_id(name) for name in names if name is not None]
        return [i for i in ids if i is not None]

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        """Return the ids that the harness's own models leave out of texts."""
        named = self._ids_of(*special_names(self.trained.settings))
        return {*self.trained.tokenizer.special_ids().values(), *named}

    def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
        raise UserError(NO_TEMPLATE)

    def chat_template(self, chat_template=False) -> str | None:
        raise UserError(NO_TEMPLATE)

    @property
    def tokenizer_name(self) -> str:
        raise UserError(NO_TEMPLATE)  # the harness asks for it only with --apply_chat_template

    def get_model_info(self) -> dict:
        return {"model_step": self.trained.step, "model_windows": self.windows}

    # ---- Log-likelihoods -------------------------------------------------------------------------

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy) of continuations given their contexts."""
        pairs = []
        for request in requests:
            context, text = request.args
            if context:
                encoded = self._encode_pair(context, text)
            else:
                encoded = self._prefix(), self.tok_encode(text, add_special_tokens=False)
            pairs.append((request.args, *encoded))
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **_
    ) -> list[tuple[float, bool]]:
        pairs = [(context or ids[:1], ids[not context :]) for _, context, ids in requests]
        by_pair = self._likelihoods(pairs, full_last=True, disable_tqdm=disable_tqdm)
        results = []
        for (strings, _, _), windows in zip(requests, by_pair, strict=True):
            result = (sum(w.log_p for w in windows), all(w.is_greedy for w in windows))
            results.append(result)
            self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probabilities of texts.

        The harness divides them by the bytes of all tokens. A first token that has no probability,
        because no token precedes it, therefore counts as the mean of the others.
        """
        in_training = self.windows == "training"
        texts = [
            self.tok_encode(request.args[0], add_special_tokens=not in_training)
            for request in requests
        ]
        prefix = list(self.trained.tokenizer.begin_of_text) if in_training else self._prefix()
        pairs = [(prefix or ids[:1], ids[not prefix :]) for ids in texts]
        results = []
        by_text = self._likelihoods(pairs, full_last=not in_training, disable_tqdm=disable_tqdm)
        for request, ids, windows in zip(requests, texts, by_text, strict=True):
            total = math.fsum(w.log_p for w in windows)
            if ids and not prefix:
                n = len(ids) - 1
                total += total / n if n else -math.log(self.trained.config.model.vocab_size)
            results.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return results

    def _likelihoods(self, pairs, *, full_last: bool, disable_tqdm: bool) -> list[list[Likelihood]]:
        """Return the likelihoods of the windows of each pair (context, ids)."""
        c = self.trained.config.model
        seq_len = self.trained.seq_len
        windows: list[Window] = []
        ends = [0]
        for context, ids in pairs:
            windows += split_text(context, ids, seq_len, full_last=full_last)
            ends.append(len(windows))
        with tqdm(total=len(windows), desc="Scoring windows", disable=disable_tqdm) as bar:
            options = {"seq_len": seq_len, "batch_size": self.batch_size, "on_batch": bar.update}
            every = likelihoods(self.trained.params, c, windows, **options)
        return [every[start:end] for start, end in itertools.pairwise(ends)]

    # ---- Generation ------------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to one of its stop strings."""
        groups = defaultdict(list)
        results = [""] * len(requests)
        for i, request in enumerate(requests):
            groups[repr(request.args[1])].append(i)  # requests of a batch share their options
        with tqdm(total=len(requests), desc="Generating texts", disable=disable_tqdm) as bar:
            for group in groups.values():
                contexts = [requests[i].args[0] for i in group]
                texts = self._generate(contexts, requests[group[0]].args[1], bar)
                for i, text in zip(group, texts, strict=True):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return results

    def _generate(self, contexts: Sequence[str], options: dict, bar) -> list[str]:
        """Return continuations; contexts that occur several times get different samples."""
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        if unknown := sorted(set(options) - SUPPORTED):
            logging.getLogger(__name__).warning(
                "WARNING: not supported and ignored: %s", ", ".join(unknown)
            )
        drawing: dict[str, Any] = {
            "temperature": options.get("temperature", 1.0 if options["do_sample"] else 0.0)
        }
        if drawing["temperature"] != 0:  # at 0, filters change nothing
            drawing |= {"top_p": options.get("top_p")}
            # 0: all, as in transformers
            drawing |= {name: options.get(name) or None for name in ("top_k", "min_p")}
        check_options(drawing, "generation_kwargs.{}".format)
        sampling = Sampling(**drawing)
        n_tokens = options["max_gen_toks"]
        stop = [text for text in options["until"] if text]
        keys = [tuple(self._prompt(context, n_tokens)) for context in contexts]
        n_samples = max(Counter(keys).values()) if sampling.temperature else 1
        prompts = sorted(set(keys), key=lambda ids: (-len(ids), ids))
        stream = stream_texts(
            self.trained.decoder,
            self.trained.tokenizer,
            prompts,
            n_tokens,
            sampling,
            n_samples=n_samples,
            stop=stop,
            batch_size=self.batch_size or 16,
        )
        texts: dict[tuple, str] = {}
        for rows in stream:
            while len(texts) < len(rows) and (row := rows[len(texts)]).finish:
                texts[tuple(row.prompt_ids), row.sample] = self._without_special(row, stop)
                bar.update()
        samples: defaultdict = defaultdict(itertools.count)
        return [texts[key, next(samples[key]) % n_samples] for key in keys]

    def _without_special(self, row: Continuation, stop: Sequence[str]) -> str:
        """Return the text of a continuation without its special tokens."""
        kept = [i for i in row.ids if i not in self._special_ids]
        if len(kept) == len(row.ids):
            return row.text
        again = Continuation(row.prompt, row.sample, prompt_ids=row.prompt_ids)
        again.add(kept, self.trained.tokenizer, stop, n_tokens=len(kept))
        return again.text

    def _prompt(self, context: str, n_tokens: int) -> list[int]:
        """Encode a context, without its first tokens if the model could not see n_tokens more."""
        ids = self.tok_encode(context) or self._prefix()
        if not ids:
            raise UserError(
                "a task asks for text without a context, and this model's tokenizer has no end of "
                "text"
            )
        return ids[-max(self.max_length - n_tokens, self.max_length // 2, 1) :]


# ---- Task files of other people ------------------------------------------------------------------

OWN_TASKS = Path(_yaml_loader.__file__).parent
if not (hasattr(_yaml_loader, "_import_func_in_yml") and hasattr(lm_eval.utils, "env")):
    raise UserError(
        f"lm-eval {metadata.version('lm-eval')} reads task files in an unknown way; install 0.4.13"
    )
_load_function = _yaml_loader._import_func_in_yml


def check_functions(check: Callable[[Path], None]) -> None:
    """Have task files run functions (!function) only after `check` of their folder.

    The harness's own task files are not checked.
    """

    def load(name: str, folder: Path) -> Any:
        if not folder.is_relative_to(OWN_TASKS):
            check(folder)
        return _load_function(name, folder)

    _yaml_loader._import_func_in_yml = load


def _in_sandbox(templates) -> SandboxedEnvironment:
    """Return the harness's environment of Jinja templates, in which they cannot run Python code."""
    sandbox = SandboxedEnvironment(
        loader=templates.loader,
        undefined=templates.undefined,
        keep_trailing_newline=templates.keep_trailing_newline,
    )
    sandbox.filters = templates.filters
    return sandbox


check_functions(trusted.check_tasks)
lm_eval.utils.env = _in_sandbox(lm_eval.utils.env)


# ---- Tasks during a run --------------------------------------------------------------------------


def load_tasks(names: Sequence[str]) -> dict:
    """Load tasks and groups with their data, by name or by path of a YAML file."""
    random.seed(0)  # as simple_evaluate does: some tasks shuffle while they load
    np.random.seed(1234)
    try:
        loaded = TaskManager().load(list(names))
    except UserError:
        raise
    # of the harness, of the task's own code, or of what downloads its data
    except Exception as error:
        raise UserError(
            f"config.eval.harness_tasks: {', '.join(names)} cannot be loaded "
            f"({first_line(error)}); `lm_eval ls tasks` lists the tasks, and a YAML file's path is "
            "one, too"
        ) from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def task_scores(trained: TrainedModel, tasks: dict, limit: int | None) -> dict[str, float]:
    """Return the loaded tasks' metrics by TASK/METRIC, of `limit` examples each (None: all)."""
    for task in tasks["tasks"].values():
        # the harness's own; so each evaluation has the same examples in its prompts
        task.set_fewshot_seed(seed=1234)
    # simple_evaluate does the same, and then describes the machine, which takes seconds.
    try:
        options = {"limit": limit, "bootstrap_iters": 0, "log_samples": False}
        results = lm_eval.evaluate(HarnessModel(trained), tasks, **options)["results"]
    except UserError:
        raise
    except Exception as error:  # of the task's own code
        names = ", ".join(tasks["tasks"])
        raise UserError(
            f"config.eval.harness_tasks: {names}: {first_line(error)}; leave the task out"
        ) from error
    scores = {}
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "_stderr" not in metric:
                scores[f"{task}/{metric.removesuffix(',none')}"] = float(value)
    return scores
