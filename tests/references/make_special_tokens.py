"""Write special_tokens.json beside this file: ids of tiktoken 0.14 for texts with special tokens,
for tests/data.

Run by hand, with tiktoken installed: python tests/references/make_special_tokens.py. It reads the
tokenizer and the texts from the file and computes the ids again, with special tokens and without.
The tokenizer is a small byte-level BPE with the pattern and the end of text of GPT-2, and the two
markers of Qwen's chats. In the texts, special tokens and parts of them are adjacent and overlap.
"""

import json
import pathlib

import tiktoken

# The pattern of tiktoken's encoding "gpt2".
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)


def to_tiktoken(tokenizer: str) -> tiktoken.Encoding:
    """Return the tokenizer.json of a byte-level BPE as an encoding of tiktoken."""
    spec = json.loads(tokenizer)
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    # GPT-2 writes each byte as a character: printable ones as themselves, the others from U+0100
    # on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    ranks = {
        bytes(bytes_of[character] for character in name): i
        for name, i in spec["model"]["vocab"].items()
        if name not in added
    }
    return tiktoken.Encoding(
        "small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=added
    )


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("special_tokens.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    encoding = to_tiktoken(json.dumps(content["tokenizer"]))
    content["cases"] = [
        [
            text,
            encoding.encode(text, allowed_special="all"),
            encoding.encode(text, disallowed_special=()),
        ]
        for text, *_ in content["cases"]
    ]
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
