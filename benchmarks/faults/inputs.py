"""Random texts, damaged token shards, and changed tokenizers."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.caches import open_corpus
from benchmarks.faults.damage import WAYS, damage, replaced
from benchmarks.faults.judge import Outcome, Trial, judge
from benchmarks.faults.runs import Bench, call

N_TEXTS = 60
N_TOKENIZERS = 60
PARTS = (
    b"", b"\0", b"\n", b"\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\x80", b"a", "é".encode(), "\U0001f600".encode(),
    b"<|endoftext|>", b"\xed\xa0\x80", b"the cat sat ", b" " * 50, b"\x1b[2J",
)  # fmt: skip


def random_texts(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Tokenize random bytes: the tokens must decode to the text, or an error must name the file."""
    from lm.data import tokenizers

    path = bench.base / "random.txt"
    for _ in range(N_TEXTS):
        n_parts = draw.randint(0, 30)
        parts = [draw.choice(PARTS) * draw.randint(1, 30) for _ in range(n_parts)]
        path.write_bytes(b"".join(parts))
        if draw.random() < 0.1:
            path.write_bytes(draw.randbytes(draw.randint(0, 500)))
        tokenizer = draw.choice(("char", "byte", "word", "bpe:300"))
        settings = {"source": f"text:{path}", "tokenizer": tokenizer}
        outcome, corpus = open_corpus(settings | {"cache_dir": str(bench.base / "random_cache")})
        changed = []
        if outcome.code == 0 and tokenizer in ("char", "byte", "bpe:300"):
            made = tokenizers.from_json(corpus["tokenizer"])
            splits = [name for name in ("train", "validation", "test") if name in corpus]
            decoded = "".join(_decode(made, corpus[name]) for name in splits)
            if decoded != path.read_bytes().decode().removeprefix("\ufeff"):
                changed.append("the tokens do not decode to the text")
        yield judge(
            f"{tokenizer}: {path.read_bytes()[:60]!r}", outcome, changed, names=(path.name, "split")
        )


def _decode(tokenizer, split: tuple) -> str:
    import numpy as np

    return tokenizer.decode(np.frombuffer(split[0]["tokens"], tokenizer.dtype))


def damaged_shards(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of a folder of token shards, and open and verify it."""
    from lm.data import prepare

    whole = bench.base / "shards_whole"
    if not whole.exists():
        documents = bench.base / "documents.jsonl"
        lines = [line for line in bench.text.read_text().splitlines() if line.strip()]
        documents.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 3))
        arguments = [f"--input=jsonl:{documents}", f"--output={whole}", "--tokenizer=bpe:300"]
        arguments += ["--validation=0.3", "--unit_mb=0.004", "--workers=1"]
        assert call(prepare.main, arguments).code == 0

    def read(shards: Path) -> tuple[Outcome, dict]:
        settings = {"source": f"tokens:{shards}", "tokenizer": f"hf:{shards}/tokenizer.json"}
        outcome, corpus = open_corpus(settings | {"cache_dir": str(bench.base / "shards_cache")})
        verified = call(prepare.main, [f"--verify={shards}"])
        # A run does not read whole shards at its start: only --verify detects changed content.
        return (verified if outcome.code == 0 and verified.code else outcome), corpus

    yield from bench.damaged_and_read("corpus", whole, draw, read)


def random_tokenizers(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Tokenize with a tokenizer.json in which random values or bytes were changed."""
    from lm.data import tokenizers

    path = bench.base / "tokenizer.json"
    cache = str(bench.base / "tokenizer_cache")
    whole = tokenizers.make("bpe:280", [bench.text.read_text()]).to_json().encode()
    settings = {"source": f"text:{bench.text}", "tokenizer": f"hf:{path}", "cache_dir": cache}
    for _ in range(N_TOKENIZERS):
        path.write_bytes(whole)
        if draw.random() < 0.5:
            path.write_bytes(replaced(whole, draw))
        else:
            damage(path, draw.choice(WAYS[:-1]), draw)
        outcome, _ = open_corpus(settings)
        yield judge("tokenizer.json changed", outcome, names=(path.name, "split"))
