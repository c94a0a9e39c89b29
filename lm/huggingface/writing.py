"""Write a model as a checkpoint of Hugging Face: weights, config.json and tokenizer."""

import json
from pathlib import Path

from lm.config import Resolved
from lm.data.tokenizers import Tokenizer
from lm.huggingface import code_export
from lm.huggingface.config_files import export_fields
from lm.huggingface.safetensors_files import write_tensors
from lm.huggingface.tokenizer_files import to_tokenizer_json, tokenizer_settings
from lm.huggingface.weights import exported_tensors
from lm.system.files import to_json, write_text

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_checkpoint(
    target: Path,
    config: Resolved,
    params: dict,
    tokenizer: Tokenizer | None = None,
    settings: dict[str, str] | None = None,
    *,
    code: bool = False,
) -> list[str]:
    """Write a checkpoint of Hugging Face to an existing directory; return the names of its files.

    `settings` are the files of the checkpoint that the model came from, see `read_settings`; they
    are written again. `code`: write a modelling file in PyTorch, too, in place of a family's name.

    Raises:
        UserError: if the model has no equivalent, with all reasons.
    """
    settings = settings or {}
    texts = {name: text for name, text in settings.items() if name != "config.json"}
    if code:
        fields, tensors, files_of_code = code_export.export(config, params)
        texts |= files_of_code
    else:
        family, fields = export_fields(config, settings)
        tensors = exported_tensors(family, config.model, params)
    files = write_tensors(target, tensors)
    if tokenizer is not None:
        texts["tokenizer.json"] = to_tokenizer_json(tokenizer)
        texts.setdefault(
            "tokenizer_config.json", tokenizer_settings(tokenizer, config.train.seq_len)
        )
    ids = {"eos_token_id": tokenizer and tokenizer.end_of_text}
    for file in ("config.json", "generation_config.json"):
        before = json.loads(settings.get(file, "{}"))
        ids |= {name: before[name] for name in TOKEN_IDS if before.get(name) is not None}
    texts.setdefault("generation_config.json", to_json(ids, indent=2) + "\n")
    # Last: a directory without it is not a checkpoint.
    texts["config.json"] = to_json(fields | ids, indent=2) + "\n"
    for name, text in texts.items():
        write_text(target / name, text)
    return [*files, *texts]
