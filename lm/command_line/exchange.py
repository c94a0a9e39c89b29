"""Exchange models with Hugging Face: import a checkpoint as a run, export a run, and compare one
with transformers.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm import ideas, parameters
from lm.config import applied_layers, to_dict
from lm.huggingface import code_export
from lm.huggingface.config_files import (
    MAX_BYTES,
    WITH_CODE,
    export_fields,
    find_file,
    read_config,
    read_fields,
)
from lm.huggingface.tokenizer_files import load_tokenizer, read_settings
from lm.huggingface.weights import exported_tensors, load_params
from lm.huggingface.writing import write_checkpoint
from lm.interpret import capture
from lm.layer_stack import layer_path
from lm.system.errors import UserError
from lm.system.files import expanded, read_bytes, refuse_url, to_json
from lm.system.locks import lock
from lm.system.text_tables import say, table
from lm.trained_model import TrainedModel, load, read_meta
from lm.workdir.checkpoints import Checkpoints, bytes_in_flight, restore_params
from lm.workdir.directory import Workdir
from lm.workdir.saved_run import SETTINGS, WEIGHTS_OF

N_RANDOM = 32  # ids to compare on


@contextlib.contextmanager
def written_whole(path: str, option: str) -> Iterator[Path]:
    """Yield a new directory that becomes `path` at the end, so that what exists there is complete.

    It lies beside `path`. What an interrupted command left there is deleted, so that a repeated
    command succeeds.

    Raises:
        UserError: `path`, which the command-line option `option` named, has files or cannot be
            created.
        TemporaryError: another process is writing it.
    """
    refuse_url(path, option)
    target = Path(os.path.realpath(expanded(path)))
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.is_mount()):
        raise UserError(f"{option} {path} is not an empty directory; give another")
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        with lock(partial, option):
            shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be created: {error.strerror}") from None
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def import_checkpoint(
    directory: str, workdir: str, *, seq_len: int | None = None, dtype: str | None = None
) -> None:
    """Write a run with the weights and the tokenizer of a checkpoint, as its step 0.

    seq_len, dtype: see `read_config`.

    Raises:
        UserError: if the checkpoint is damaged or not supported, or the workdir holds files.
    """
    config = read_config(directory, seq_len=seq_len, dtype=dtype)
    with written_whole(workdir, "--workdir") as partial:
        tokenizer = load_tokenizer(directory, config)
        if tokenizer is None:
            data = dataclasses.replace(config.data, tokenizer="none")
            config = dataclasses.replace(config, data=data)
        params = load_params(directory, config)
        digest = hashlib.sha256(to_json(to_dict(config)).encode()).hexdigest()
        source = {"name": f"{WEIGHTS_OF}{directory}", "fingerprint": digest}
        meta: dict[str, Any] = {
            "data": source["name"],
            "data_fingerprint": digest,
            "config": to_dict(config),
            "tokenizer": tokenizer and tokenizer.to_json(),
            SETTINGS: read_settings(directory),
        }
        with closing(Workdir(partial)) as run:
            for line in run.start(config, data=source):
                say(line)
            if tokenizer:
                run.write_text("tokenizer.json", tokenizer.to_json())
            limit = bytes_in_flight(params)
            with closing(Checkpoints(run.path, say=say, in_flight=limit)) as checkpoints:
                checkpoints.save(0, {"params": params}, meta)
                checkpoints.wait()
    if tokenizer is None:
        say(
            f"WARNING: {directory} has no tokenizer.json: the run has no tokenizer and takes token "
            "ids only"
        )
    n = parameters.count(parameters.parameter_table(config.model))
    m = config.model
    say(
        f"{workdir}: {n:,} parameters in {m.param_dtype}, {config.train.seq_len} positions; step 0 "
        "of a run"
    )


def export_run(workdir: str, output: str, step: int | str = "best", *, code: bool = False) -> None:
    """Write the weights, the config and the tokenizer of a run as files that transformers loads.

    For the step see `lm.load`. The directory `output` must be new or empty. `code`: write the model
    in PyTorch, too.

    Raises:
        UserError: if the model has no equivalent, with all reasons; if there is no such checkpoint;
            or if `output` has files.
    """

    def choose(params: dict, meta: dict) -> dict:
        """Check that the model can be exported before anything large is read."""
        config, _ = read_meta(meta, params, workdir)
        if code:
            code_export.export(config)
        else:
            exported_tensors(export_fields(config, meta.get(SETTINGS))[0], config.model)
        return params

    with written_whole(output, "--output") as partial, lock(partial, "--output"):
        step, params, meta = restore_params(workdir, step, choose=choose)
        config, tokenizer = read_meta(meta, params, workdir)
        if tokenizer is None:
            say(f"WARNING: {workdir} was trained on token ids, so no tokenizer is written")
        settings = meta.get(SETTINGS)
        files = write_checkpoint(partial, config, params, tokenizer, settings, code=code)
        (partial / ".lock").unlink()  # no part of a checkpoint
    say(f"{output}: step {step} of {workdir}, in {', '.join(files)}")
    if code:
        say(
            f"Compare it with the run in PyTorch: python -m lm.hf check {output} --workdir {workdir}"
        )


# ---- Comparison ----------------------------------------------------------------------------------


def compare(directory: str, workdir: str | None, step: int | str, tolerance: float) -> bool:
    """Print how our activations on random ids differ from those of transformers, in float32.

    Return whether all logits are within the tolerance.

    Args:
        directory: a checkpoint of Hugging Face, which transformers loads.
        workdir, step: the run whose model is compared with it; None: the checkpoint, as `import`
            reads it.
        tolerance: the largest accepted difference of logits.

    Raises:
        UserError: if torch is missing, the checkpoint is not supported, or an array of theirs is
            missing or differs in shape.
    """
    needed = ("torch", "transformers")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"check: {' and '.join(missing)} {verb} not installed; pip install -e '.[bench]'"
        )
    run = load(workdir or directory, step)
    with_code = read_fields(directory).get("model_type") == WITH_CODE
    if with_code:
        require_own_code(directory, run)
    shape = (1, min(N_RANDOM, run.seq_len))
    tokens_BT = np.random.default_rng(0).integers(0, run.config.model.vocab_size, shape)
    ours = our_activations(run, tokens_BT)
    theirs = their_activations(directory, tokens_BT, trust_remote_code=with_code)
    if ideas.applied("embedding", run.config.model):
        theirs.pop("embeddings")  # ours are those before these ideas
    return report(ours, theirs, tolerance)


def require_own_code(directory: str, run: TrainedModel) -> None:
    """Raise UserError unless the code that a directory would run is what we write for the run."""
    fields, _, texts = code_export.export(run.config)
    own = texts[code_export.FILE]
    path = find_file(directory, code_export.FILE, MAX_BYTES)
    same_map = read_fields(directory).get("auto_map") == fields["auto_map"]
    if path is None or read_bytes(path) != own.encode() or not same_map:
        raise UserError(
            f"{directory}: {code_export.FILE} is not the code of {run.path}, and is not run here; "
            "export the run again, or compare a changed file yourself"
        )


def our_activations(run: TrainedModel, tokens_BT) -> dict[str, np.ndarray]:
    """Return the input of the first layer, the output of each layer, and the logits, by name."""
    c = dataclasses.replace(run.config.model, param_dtype="float32", compute_dtype="float32")
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), run.params)
    run = dataclasses.replace(run, params=params, config=dataclasses.replace(run.config, model=c))
    last_turns = {layer: turn for turn, layer in applied_layers(c)}
    titles = {"embedding": "embeddings"}
    for layer, turn in sorted(last_turns.items()):
        titles[f"{layer_path(turn, layer)}/residual"] = f"layer {layer}"
    with jax.default_matmul_precision("highest"):
        logits_BTV, captured = capture(run, tokens_BT, titles)
    activations = {titles[name]: np.asarray(x) for name, x in captured.items()}
    return activations | {"logits": np.asarray(logits_BTV)}


def their_activations(
    directory: str | Path, tokens_BT, *, trust_remote_code: bool = False
) -> dict[str, np.ndarray]:
    """Return the same of the model that transformers loads; raises UserError if it loads none."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        ).eval()
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise UserError(f"{directory}: transformers cannot load it ({reason})") from None
    activations: dict[str, np.ndarray] = {}
    base = model.base_model

    def record(name, arguments, options, out):
        first = arguments[0] if arguments else options["hidden_states"]
        activations.setdefault("embeddings", first.numpy())
        activations[name] = (out[0] if isinstance(out, tuple) else out).numpy()

    for i, layer in enumerate(base.h if hasattr(base, "h") else base.layers):
        layer.register_forward_hook(
            lambda _, *call, name=f"layer {i}": record(name, *call), with_kwargs=True
        )
    with torch.no_grad():
        logits_BTV = model(torch.tensor(tokens_BT), use_cache=False).logits
    activations["logits"] = logits_BTV.numpy()
    return activations


def report(ours: dict, theirs: dict, tolerance: float) -> bool:
    """Print a table of differences, the largest one of the logits and where it arises.

    A difference arises where it first exceeds the tolerance, relative to the largest activation (if
    that is above 1).
    """
    rows = [("after", "largest difference", "largest value")]
    arises = None
    for name, x in theirs.items():
        if name not in ours or ours[name].shape != x.shape:
            own = ours[name].shape if name in ours else "nothing"
            raise UserError(
                f"{name}: transformers has {x.shape}, the model here has {own}; they differ in size"
            )
        difference = np.abs(ours[name] - x).max()
        value = np.abs(x).max()
        rows.append((name, f"{difference:.2e}", f"{value:.3g}"))
        if arises is None and not difference <= tolerance * max(1.0, value):
            arises = name
    say(table(rows, right=[1, 2]))
    differences_BTV = np.abs(ours["logits"] - theirs["logits"])
    _, t, v = np.unravel_index(np.argmax(differences_BTV), differences_BTV.shape)
    largest = differences_BTV.max()
    equal = np.array_equal(ours["logits"].argmax(-1), theirs["logits"].argmax(-1))
    same = "the same" if equal else "not the same"
    say(
        f"largest difference of logits: {largest:.2e}, at position {t} for token {v}; "
        f"the likeliest tokens are {same} at all positions"
    )
    if largest <= tolerance:
        return True
    place = f"; it arises in: {arises}" if arises else ""
    say(f"WARNING: it is above the tolerance of {tolerance:g}{place}")
    return False
