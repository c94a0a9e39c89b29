"""Prepare a run once: open its data, resolve its config, and build its parameter table."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lm import data, parameters
from lm.config import MESH_AXES, Config, Resolved, checks, to_dict
from lm.config.schema import SOURCES
from lm.cost import flops
from lm.cost.memory import attention_implementation
from lm.data import Corpus, mixtures, trusted
from lm.data.tokenizers import known_prompt
from lm.parallel import processes
from lm.parallel.mesh import check_mesh
from lm.step import optimizer
from lm.system.errors import UserError
from lm.system.files import expanded, matching_files, to_json
from lm.system.text_tables import table
from lm.system.urls import is_url


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that the result of training depends on."""

    config: Resolved  # the data and other keys have filled in its model section
    corpus: Corpus  # the tokens of each split, and the tokenizer
    table: parameters.Table  # the parameters by path
    mesh_sizes: dict[str, int]  # devices along each mesh axis

    @functools.cached_property
    def flops_per_token(self) -> float:
        """Return the floating-point operations to train on one token; a query counts keys it sees."""
        return flops.flops_per_token(self.config.model, self.config.train.seq_len)

    @functools.cached_property
    def flops_full_square(self) -> float:
        """Return the same, but count all keys for every query, as published MFU figures do."""
        return flops.flops_per_token(self.config.model, self.config.train.seq_len, full_square=True)

    @property
    def data_facts(self) -> dict[str, Any]:
        """Return what run.json records of the data."""
        corpus = self.corpus
        facts: dict[str, Any] = {"name": corpus.name, "fingerprint": corpus.fingerprint}
        chats = {name: split.n_chats for name, split in corpus.splits.items() if split.n_chats}
        if corpus.record:  # of its preparation
            facts["record"] = corpus.record
        if chats:
            facts["chats"] = chats
        return facts


def prepare(config: Config, say: Callable[[str], None]) -> Run:
    """Open the data and prepare the run of a checked config.

    Raises:
        UserError: if the data is missing or does not fit the config, if the mesh does not fit the
            devices, or if the processes of the run have different data or configs.
    """
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=say)
    with contextlib.suppress(UserError):
        trusted.remember(config.data)
    resolved = resolve_config(config, corpus)
    mesh_sizes = check_mesh(resolved, jax.device_count())
    processes.check_equal("the data", corpus.fingerprint)
    processes.check_equal("the config", to_json(to_dict(resolved)))
    if corpus.name.endswith("(fallback)"):  # the name must not claim text that was not trained on
        resolved = dataclasses.replace(resolved, name=f"{config.name}-{config.data.offline}")
    return Run(resolved, corpus, parameters.parameter_table(resolved.model), mesh_sizes)


def resolve_config(config: Config, corpus: Corpus) -> Resolved:
    """Check a config against the data and the device, and fill in what they decide.

    Raises:
        UserError: with all problems.
    """
    vocab_size = corpus.tokenizer.vocab_size if corpus.tokenizer else config.model.vocab_size
    if vocab_size is None:
        raise UserError(
            "config.model.vocab_size: these token shards name no tokenizer; set the size of the "
            "vocabulary"
        )
    resolved = parameters.resolve(config, vocab_size)
    problems = data.check_corpus(corpus, resolved.train.seq_len, resolved.model.vocab_size)
    if config.eval.every and "validation" not in corpus.splits:
        problems.append(
            f"config.eval.every: {config.eval.every}, but {corpus.name} has no validation split; "
            "use 0"
        )
    if config.eval.probes and vocab_size < 2:
        problems.append(
            "config.eval.probes: a probe has different tokens, but the tokenizer has one; use none"
        )
    problems += _mixture_problems(resolved, corpus)
    problems += _target_problems(resolved, corpus)
    problems += _sample_problems(config, corpus)
    device: Any = jax.local_devices()[0]
    try:
        attention_implementation(resolved, device, dict.fromkeys(MESH_AXES, 1))
        optimizer(resolved)  # under muP it refuses weights that it has no rate for
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)
    return resolved


def resolve_for_other_devices(config: Config, say: Callable[[str], None]) -> Resolved:
    """Fill in what the data decides, for an estimate of a run on other devices than those here.

    Raises:
        UserError: if the size of the vocabulary is not set and the data, which decides it, is
            missing or does not fit.
    """
    vocab_size = config.model.vocab_size
    if vocab_size is None:  # the tokenizer defines it, and may be trained on the text
        corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=say)
        # Another device decides which implementations of attention are available.
        anywhere = dataclasses.replace(
            config, model=dataclasses.replace(config.model, attention="auto")
        )
        vocab_size = resolve_config(anywhere, corpus).model.vocab_size
    return parameters.resolve(config, vocab_size)


def missing_data(config: Config) -> list[str]:
    """Return a note for each source that is not here: a run needs it, and an estimate may not."""
    notes = []
    for source in checks.sources(config):
        kind, _, path = source.partition(":")
        is_local = {f"{kind}:PATH", f"{kind}:DIR"} & set(SOURCES) and not is_url(path)
        if is_local and not os.path.exists(expanded(path)) and not matching_files(expanded(path)):
            notes.append(f"config.data.source: {source} is not on this machine; training needs it")
    return notes


def _mixture_problems(config: Resolved, corpus: Corpus) -> list[str]:
    """Return whether the sources of a mixture have too few windows for the run."""
    parts = corpus.splits["train"].parts if "train" in corpus.splits else ()
    t = config.train
    if not parts or min(n_windows := mixtures.windows_of(parts, config)) < 1:
        return []
    end = mixtures.plan(n_windows, config.data, t.batch_size, t.seed)[1] // t.batch_size
    if end >= (steps := max(t.steps, 1)):  # the program is compiled for the windows of step 1
        return []
    return [
        f"config.data.max_epochs: {config.data.max_epochs} and mixture_stages leave windows for "
        f"{end:,} of {steps:,} steps; use {f'--config.train.steps={end} or ' if end else ''}more "
        "epochs"
    ]


def _target_problems(config: Resolved, corpus: Corpus) -> list[str]:
    """Return whether answers are asked for, but there are none, or none where the run evaluates."""
    if config.data.targets == "all":
        return []
    if not any(split.targets for split in corpus.splits.values()):
        return [
            f"config.data.targets: {config.data.targets}, but {corpus.name} has no chats in the "
            f"field {config.data.field!r}; use all, or the field with the lists of turns: "
            "--config.data.field=messages, for example"
        ]
    most = config.eval.max_batches
    split = corpus.splits.get("validation")
    if not (most and split and split.targets and config.eval.every):
        return []
    n_windows = most * (config.eval.batch_size or config.train.batch_size)
    n_targets = n_windows if split.packed else n_windows * config.train.seq_len
    problems = []
    for part in split.all_parts:
        first = part.start if split.packed else part.start + 1  # the first token is no target
        if not np.any(split.targets.is_target[first : first + n_targets]):
            of = f" of {part.name}" if part.name else ""
            problems.append(
                f"config.eval.max_batches: {most} batches of the validation split{of} have no "
                "answers to predict; use more, or 0 for all"
            )
    return problems


def _sample_problems(config: Config, corpus: Corpus) -> list[str]:
    if not (config.eval.sample_tokens and corpus.tokenizer):
        return []
    try:
        prompt = known_prompt(config.eval.sample_prompt, corpus.tokenizer)
        n_tokens = len(corpus.tokenizer.encode_prompt(prompt))
    except UserError as error:
        return [f"config.eval.sample_prompt: {error}"]
    if n_tokens:
        return []
    return [
        f"config.eval.sample_prompt: this tokenizer encodes {config.eval.sample_prompt!r} to no "
        "tokens; use another"
    ]


def describe_parameters(parameter_table: parameters.Table) -> str:
    """Return the table of parameters as text: path, shape, axes, initializer and count of each."""
    rows = [("parameter", "shape", "axes", "initializer", "count")]
    for path, p in parameter_table.items():
        rows.append((path, str(p.shape), p.axes, p.initializer, f"{p.size:,}"))
    rows.append(("total", "", "", "", f"{parameters.count(parameter_table):,}"))
    return table(rows, right=[4])
