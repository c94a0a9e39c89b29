"""Export the model of a run as a checkpoint of Hugging Face."""

from collections.abc import Callable
from pathlib import Path

from lm.config import saved_config
from lm.data import tokenizers
from lm.errors import UserError
from lm.huggingface.config_files import export_fields
from lm.huggingface.safetensors_files import SHARD_BYTES
from lm.huggingface.writing import write_checkpoint
from lm.workdir import checkpoints
from lm.workdir.saved_run import check_meta

SETTINGS = "huggingface"  # the directory within a workdir with the settings of an imported checkpoint


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
        export_fields(saved_config(meta["config"]))  # raises before anything large is read
        return params

    step, params, meta = checkpoints.restore_params(workdir, step, choose=choose)
    tokenizer = None if meta["tokenizer"] is None else tokenizers.from_json(meta["tokenizer"])
    if tokenizer is None:
        say(f"WARNING: {workdir} was trained on token ids, so no tokenizer is written")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be created: {error.strerror}") from None
    config, settings = saved_config(meta["config"]), Path(workdir) / SETTINGS
    files = write_checkpoint(target, config, params, tokenizer, settings=settings, shard_bytes=shard_bytes)
    say(f"{output}: step {step} of {workdir}, in {', '.join(files)}")
