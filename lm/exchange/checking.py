"""Compare our model with transformers', layer by layer."""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import lm.model
from lm.config import Config
from lm.errors import UserError
from lm.huggingface.config_files import read_config
from lm.huggingface.tokenizer_files import load_tokenizer
from lm.huggingface.weights import load_params
from lm.text_tables import table
from lm.trained_model import load

N_RANDOM = 32  # ids, if none are given


def compare(
    directory: str,
    workdir: str | None = None,
    step: int | str = "best",
    *,
    text: str | None = None,
    ids: list[int] | None = None,
    tolerance: float = 1e-3,
    say: Callable[[str], None] = print,
) -> bool:
    """Print the differences between our activations and those of transformers, both in float32.

    Args:
        directory: a checkpoint of Hugging Face, which transformers loads.
        workdir: the run whose model is compared with it; None: the checkpoint, as `import` reads it.
        step: the run's checkpoint.
        text: the text to compare on.
        ids: the token ids to compare on; None without a text: random ones.
        tolerance: the largest accepted difference of logits.
        say: called with each line for the user.

    Returns:
        Whether all logits are within the tolerance.

    Raises:
        UserError: if torch is missing, the text or the ids do not fit the model, or the checkpoint is not supported.
    """
    require_torch()
    config, params, tokenizer = _our_model(directory, workdir, step)
    tokens_BT = _tokens(config, tokenizer, text, ids)
    c = dataclasses.replace(
        config.model, param_dtype="float32", compute_dtype="float32", scan_layers=False, remat="none", attention="auto"
    )
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    ours = our_activations(params, c, tokens_BT)
    theirs = their_activations(directory, tokens_BT)
    return report(ours, theirs, tolerance, say)


def require_torch() -> None:
    """Raise UserError if torch or transformers is not installed."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"check: {' and '.join(missing)} {verb} not installed; pip install -e '.[bench]'")


def _our_model(directory: str, workdir: str | None, step: int | str):
    if workdir is None:
        config = read_config(directory, dtype="float32")
        return config, load_params(directory, config), load_tokenizer(directory, config)
    run = load(workdir, step)
    return run.config, run.params, run.tokenizer


def _tokens(config: Config, tokenizer, text: str | None, ids: list[int] | None) -> np.ndarray:
    """Return the ids to compare on, (1, T)."""
    limit, vocab_size = config.train.seq_len, config.model.vocab_size
    if text is not None:
        if tokenizer is None:
            raise UserError("--prompt: this model has no tokenizer; give --ids")
        ids = tokenizer.encode(text).tolist()
    if ids is None:
        ids = np.random.default_rng(0).integers(0, vocab_size, min(N_RANDOM, limit)).tolist()
    if not 0 < len(ids) <= limit:
        raise UserError(f"{len(ids)} tokens to compare on; this model accepts 1 to {limit}")
    if max(ids) >= vocab_size:
        raise UserError(f"--ids: {max(ids)} is not in the vocabulary; ids are 0 to {vocab_size - 1}")
    return np.array([ids], np.int32)


def our_activations(params: dict, c, tokens_BT) -> dict[str, np.ndarray]:
    """Return the input of the first layer, the output of each layer, and the logits of our unrolled model, by name."""
    found = {}

    def tap(module, name, x_BTD):
        if name in ("embedding", "residual"):
            found["embeddings" if name == "embedding" else f"layer {len(found) - 1}"] = np.asarray(x_BTD)
        return x_BTD

    with jax.default_matmul_precision("highest"):
        found["logits"] = np.asarray(lm.model.logits(params, c, tokens_BT, tap=tap))
    return found


def their_activations(directory: str | Path, tokens_BT) -> dict[str, np.ndarray]:
    """Return the same activations of the model that transformers loads."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True, use_safetensors=True
        ).eval()
    except Exception as error:
        raise UserError(
            f"{directory}: transformers cannot load it ({str(error).strip().splitlines()[0][:300]})"
        ) from None
    found = {}
    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers

    def record(layer, arguments, options, out, name):
        x = arguments[0] if arguments else options["hidden_states"]
        found.setdefault("embeddings", x.numpy())
        found[name] = (out[0] if isinstance(out, tuple) else out).numpy()

    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *call, name=f"layer {i}": record(*call, name), with_kwargs=True)
    with torch.no_grad():
        found["logits"] = model(torch.tensor(np.asarray(tokens_BT, np.int64)), use_cache=False).logits.numpy()
    return found


def report(ours: dict, theirs: dict, tolerance: float, say: Callable[[str], None] = print) -> bool:
    """Print a table of differences, the largest one of the logits and where it arises.

    A difference arises where it first exceeds the tolerance, relative to the largest activation (if that is above 1).

    Args:
        ours, theirs: arrays by name, in the order of the computation, as from `our_activations`.
        tolerance: the largest accepted difference of logits.
        say: called with each line for the user.

    Returns:
        Whether all logits are within the tolerance.

    Raises:
        UserError: an array has different shapes, or exists in `theirs` only.
    """
    rows, arises = [("after", "largest difference", "largest value")], None
    for name, theirs_BTD in theirs.items():
        if name not in ours or ours[name].shape != theirs_BTD.shape:
            found = ours[name].shape if name in ours else "nothing"
            raise UserError(
                f"{name}: transformers has {theirs_BTD.shape}, the model here has {found}; they differ in size"
            )
        difference, value = np.abs(ours[name] - theirs_BTD).max(), np.abs(theirs_BTD).max()
        rows.append((name, f"{difference:.2e}", f"{value:.3g}"))
        if arises is None and not difference <= tolerance * max(1.0, value):
            arises = name
    say(table(rows, right=[1, 2]))
    differences_BTV = np.abs(ours["logits"] - theirs["logits"])
    b, t, v = np.unravel_index(np.argmax(differences_BTV), differences_BTV.shape)
    largest = differences_BTV[b, t, v]
    same = bool((ours["logits"].argmax(-1) == theirs["logits"].argmax(-1)).all())
    say(
        f"largest difference of logits: {largest:.2e}, at position {t} for token {v}; the likeliest tokens are "
        f"{'the same' if same else 'not the same'} at all positions"
    )
    equal = bool(largest <= tolerance)
    if not equal:
        say(f"WARNING: it is above the tolerance of {tolerance:g}" + (f"; it arises in: {arises}" if arises else ""))
    return equal
