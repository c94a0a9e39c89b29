"""Read the tokenizer of a checkpoint, and write one for an exported model. Imports no jax."""

import json
from pathlib import Path
from typing import Any

from lm.config import Resolved
from lm.data.hf_tokenizer import HFTokenizer
from lm.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer, make
from lm.huggingface.config_files import MAX_TOKENIZER_BYTES, find_file, find_tokenizer
from lm.system.errors import UserError
from lm.system.files import parse_json, read_bytes, to_json

# Files with settings that an exported model should have again. Of config.json these are the family
# and the token ids.
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
# those that have the ids at which a generated text ends
ENDS = ("generation_config.json", "config.json")
# The first of TOKEN_KEYS in transformers' own classes, where the settings name none.
CLASS_TOKENS: dict[str, tuple[str | None, ...]] = {
    "GPT2Tokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "GPTNeoXTokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "Qwen2Tokenizer": (None, "<|endoftext|>"),
    "LlamaTokenizer": ("<s>", "</s>", "<unk>"),
    "GemmaTokenizer": ("<bos>", "<eos>", "<unk>"),
}
TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# lm.data.tokenizers.WORD in the syntax of `tokenizers`, whose \w includes combining marks.
WORD = r" ?[\p{L}\p{N}_]+(?:['-][\p{L}\p{N}_]+)*|[\s\S]"


def load_tokenizer(directory: str | Path, config: Resolved) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, or None if it has none.

    Raises:
        UserError: if it is damaged, or has more ids than the model.
    """
    path = find_tokenizer(directory)
    if path is None:
        return None
    tokenizer = make(f"hf:{path}", (), special_tokens=config.data.special_tokens)
    assert isinstance(tokenizer, HFTokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{path} has ids up to {tokenizer.vocab_size - 1}, but vocab_size in config.json is "
            f"{config.model.vocab_size}; delete tokens that the model lacks from its added_tokens "
            "(that of images in Gemma 3), or use the tokenizer of this checkpoint"
        )
    tokenizer.end_ids = sorted(find_end_ids(read_settings(directory, ENDS)))
    return tokenizer


def find_end_ids(settings: dict[str, str]) -> set[int]:
    """Return the ids that end a generated text: eos_token_id of the config files."""
    end_ids = set()
    for name in ENDS:
        ids = _fields(settings, name).get("eos_token_id")
        for i in ids if isinstance(ids, list) else [ids]:
            if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                end_ids.add(i)
    return end_ids


def named_tokens(settings: dict[str, str]) -> dict[str, str]:
    """Return the special tokens of a checkpoint's settings: bos_token, eos_token, ..."""
    config = _fields(settings, "tokenizer_config.json")
    of_class = CLASS_TOKENS.get(str(config.get("tokenizer_class")).removesuffix("Fast"), ())
    tokens: dict[str, Any] = dict(zip(TOKEN_KEYS, of_class, strict=False))
    tokens |= {key: config[key] for key in TOKEN_KEYS if key in config}
    if "added_tokens_decoder" not in config:  # else transformers does not read the older file
        legacy = _fields(settings, "special_tokens_map.json")
        tokens |= {key: legacy[key] for key in TOKEN_KEYS if legacy.get(key)}
    return {key: name for key, token in tokens.items() if (name := _content(token))}


def special_names(settings: dict[str, str]) -> set[str]:
    """Return the names of tokens that transformers leaves out of text, beside tokenizer.json's."""
    config = _fields(settings, "tokenizer_config.json")
    tokens: list[Any] = list(named_tokens(settings).values())
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        dicts = [token for token in added.values() if isinstance(token, dict)]
        tokens += [token for token in dicts if token.get("special") is True]
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens += more
    return {*filter(None, map(_content, tokens))}


def _fields(settings: dict[str, str], name: str) -> dict:
    fields = json.loads(settings.get(name, "{}"))
    return fields if isinstance(fields, dict) else {}


def _content(token) -> str | None:
    """Return the name of a token, which is a text or a dict with it; None for anything else."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def read_settings(directory: str | Path, names: tuple[str, ...] = SETTINGS) -> dict[str, str]:
    """Return the text of each of these files that there is; raises UserError if one is damaged."""
    settings = {}
    for name in names:
        # the larger limit, because Gemma 3 lists 6,000 tokens in its settings
        path = find_file(directory, name, MAX_TOKENIZER_BYTES)
        if path is None:
            continue
        try:
            settings[name] = read_bytes(path).decode()
            if path.suffix == ".json":
                parse_json(settings[name])
        except ValueError as error:
            raise UserError(f"{path} is corrupted: {error}; download it again") from None
    return settings


def tokenizer_settings(tokenizer: Tokenizer, seq_len: int) -> str:
    """Return the tokenizer_config.json of one of our tokenizers, for models of `seq_len` tokens."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.end_of_text is not None:
        settings["eos_token"] = tokenizer.decode([tokenizer.end_of_text])
    if getattr(tokenizer, "unk", False):
        settings["unk_token"] = "<unk>"
    return to_json(settings, indent=2) + "\n"


def to_tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the tokenizer.json that encodes like one of our tokenizers.

    >>> import tokenizers
    >>> json = to_tokenizer_json(CharTokenizer("hello"))
    >>> tokenizers.Tokenizer.from_str(json).encode("hole").ids
    [1, 3, 2, 0]
    """
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.json
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Model

    if isinstance(tokenizer, ByteTokenizer):
        # Printable characters of Latin-1 stand for their bytes, and those from U+0100 on for the
        # others, in order.
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        others = iter(sorted(alphabet - set(map(chr, range(256)))))
        vocabulary = {}
        for byte in range(256):
            vocabulary[chr(byte) if chr(byte) in alphabet else next(others)] = byte
        model = Model(models.BPE(vocabulary, []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = decoders.ByteLevel()
        return model.to_str()
    assert isinstance(tokenizer, CharTokenizer | WordTokenizer)
    pattern = r"[\s\S]" if isinstance(tokenizer, CharTokenizer) else WORD
    unknown = {"unk_token": "<unk>"} if tokenizer.unk else {}
    model = Model(
        models.WordLevel({piece: i for i, piece in enumerate(tokenizer.pieces)}, **unknown)
    )
    model.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    model.decoder = decoders.Fuse()
    return model.to_str()
