"""Write special_tokens.json beside this file: ids of tiktoken 0.14 for texts with special tokens, for tests/data.

Run once by hand, with tiktoken installed: PYTHONPATH=. python tests/references/make_special_tokens.py. The tokenizer is
a small byte-level BPE with the pattern and the end of text of GPT-2, and the two markers of Qwen's chats.
"""

import json
import pathlib
import random

import tiktoken
from tokenizers import AddedToken, Tokenizer

from lm.data.hf_tokenizer import END_OF_TEXT, train_bpe

# The pattern of tiktoken's encoding "gpt2".
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
TEXT = "the cat sat on the mat, and the end of the text isn't the end of the tale: 1234 12 'tis so\n\n  or not <| |>"
SPECIAL = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
PARTS = (*SPECIAL, "<|endof", "text|>", "<|im_", "<|", "|>", "|", " ", "\n", "  ", "The cat", "'s", "é", "😀", "12")


def make_tokenizer() -> str:
    """Return a tokenizer.json."""
    tokenizer = Tokenizer.from_str(train_bpe([TEXT * 9], 320).json)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL[1:]])
    return tokenizer.to_str()


def to_tiktoken(tokenizer: str) -> tiktoken.Encoding:
    """Return the tokenizer.json of a byte-level BPE as an encoding of tiktoken."""
    spec = json.loads(tokenizer)
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    # GPT-2 writes each byte as a character: printable ones as themselves, the others from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    ranks = {
        bytes(bytes_of[character] for character in name): i
        for name, i in spec["model"]["vocab"].items()
        if name not in added
    }
    return tiktoken.Encoding("small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=added)


def random_texts(n: int) -> list[str]:
    """Return texts in which special tokens, and parts of them, are adjacent and overlap."""
    rng = random.Random(0)
    return ["".join(rng.choices(PARTS, k=rng.randint(1, 12))) for _ in range(n)]


def main():
    tokenizer = make_tokenizer()
    encoding = to_tiktoken(tokenizer)
    cases = [
        [text, encoding.encode(text, allowed_special="all"), encoding.encode(text, disallowed_special=())]
        for text in random_texts(60)
    ]
    content = {"tokenizer": json.loads(tokenizer), "cases": cases}
    path = pathlib.Path(__file__).with_name("special_tokens.json")
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
