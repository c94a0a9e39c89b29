"""Export the model of a run as a checkpoint of Hugging Face."""

from collections.abc import Callable
from pathlib import Path

from lm.config import Config, from_dict
from lm.data import tokenizers
from lm.data.tokenizers import Tokenizer
from lm.errors import UserError
from lm.files import read_json, to_json, write_text
from lm.huggingface.config_files import export_fields
from lm.huggingface.safetensors_files import SHARD_BYTES, write_tensors
from lm.huggingface.tokenizer_files import copy_settings, write_tokenizer
from lm.huggingface.weights import exported_tensors, planned_tensors
from lm.training import checkpoints
from lm.training.workdir import check_meta

SETTINGS = "huggingface"  # the directory within a workdir with the settings of an imported checkpoint
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_run(
    workdir: str,
    output: str,
    *,
    step: int | str = "best",
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = print,
) -> None:
    """Write the weights, the config and the tokenizer of a run as files that transformers loads.

    Args:
        workdir: the directory of the run.
        output: the directory to write; it must not have files yet.
        step: a step, "latest", or "best" by validation loss.
        shard_bytes: see `write_tensors`.
        say: called with each line for the user.

    Raises:
        UserError: if the model has no equivalent, with all reasons; if there is no such checkpoint; or if `output` has
            files.
    """
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--output {output} is not an empty directory; give another")

    def choose(params: dict, meta: dict) -> dict:
        check_meta(meta, workdir)
        export_fields(from_dict(meta["config"]))  # raises before anything large is read
        return params

    step, params, meta = checkpoints.restore_params(workdir, step, choose=choose)
    tokenizer = None if meta["tokenizer"] is None else tokenizers.from_json(meta["tokenizer"])
    if tokenizer is None:
        say(f"WARNING: {workdir} was trained on token ids, so no tokenizer is written")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be created: {error.strerror}") from None
    config, settings = from_dict(meta["config"]), Path(workdir) / SETTINGS
    files = write_checkpoint(target, config, params, tokenizer, settings=settings, shard_bytes=shard_bytes)
    say(f"{output}: step {step} of {workdir}, in {', '.join(files)}")


def write_checkpoint(
    target: Path,
    config: Config,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    settings: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a checkpoint of Hugging Face, and return the names of its files.

    Args:
        target: an existing directory.
        config: a resolved config.
        params: parameters as nested dicts.
        tokenizer: None: write none.
        settings: a directory with other files to copy; see `copy_settings`.
        shard_bytes: see `write_tensors`.

    Raises:
        UserError: if the model has no equivalent, with all reasons.
    """
    family, fields = export_fields(config)
    tensors = exported_tensors(family, config.model, params)
    files = write_tensors(target, planned_tensors(family, config.model), tensors, shard_bytes=shard_bytes)
    copied = copy_settings(settings, target) if settings else []
    if tokenizer is not None:
        files += write_tokenizer(target, tokenizer, seq_len=config.train.seq_len, keep=copied)
    if "generation_config.json" in copied:
        ids = read_json(target / "generation_config.json", advice="delete it in the workdir")
    else:
        ids = {"eos_token_id": tokenizer and tokenizer.end_of_text}
        write_text(target / "generation_config.json", to_json(ids, indent=2) + "\n")
        files.append("generation_config.json")
    fields |= {name: ids[name] for name in TOKEN_IDS if name in ids}
    # Last: a directory without it is not a checkpoint.
    write_text(target / "config.json", to_json(fields, indent=2) + "\n")
    return [*files, *copied, "config.json"]
