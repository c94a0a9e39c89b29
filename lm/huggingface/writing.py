"""Write a model as a checkpoint of Hugging Face: weights, config.json and tokenizer."""

from pathlib import Path

from lm.config import Resolved
from lm.data.tokenizers import Tokenizer
from lm.files import read_json, to_json, write_text
from lm.huggingface.config_files import export_fields
from lm.huggingface.safetensors_files import SHARD_BYTES, write_tensors
from lm.huggingface.tokenizer_files import copy_settings, write_tokenizer
from lm.huggingface.weights import exported_tensors

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_checkpoint(
    target: Path,
    config: Resolved,
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
        settings: a directory with other files to copy, see `copy_settings`, and a config.json, see `export_fields`.
        shard_bytes: see `write_tensors`.

    Raises:
        UserError: if the model has no equivalent, with all reasons.
    """
    family, fields = export_fields(config, settings)
    files = write_tensors(target, exported_tensors(family, config.model, params), shard_bytes)
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
