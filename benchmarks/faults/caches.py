"""Damaged caches: of tokens and tokenizers, and of JAX's compiled programs."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.faults.damage import WAYS, damage, files_below
from benchmarks.faults.judge import Outcome, Trial, judge
from benchmarks.faults.runs import Bench, call, differences

VARIANTS = (
    {"tokenizer": "char"},
    {"tokenizer": "bpe:300"},
    {"tokenizer": "word", "packing": "documents"},
)


def damaged_tokens(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage every file of a token cache in every way, and open the corpus."""
    for number, variant in enumerate(VARIANTS):

        def read(cache: Path, variant=variant):
            return open_corpus({"source": f"text:{bench.text}", "cache_dir": str(cache)} | variant)

        yield from bench.damaged_and_read("corpus", bench.base / f"tokens_{number}", draw, read)


def open_corpus(settings: dict) -> tuple[Outcome, dict]:
    """Open a corpus as lm.train does; return the outcome, and what a run depends on."""
    from lm import data
    from lm.config import DataConfig
    from lm.system.errors import with_exit_code

    contents = {}

    @with_exit_code
    def opening(_) -> int:
        corpus = data.open_corpus(DataConfig(**settings), seq_len=16, say=print)
        contents["fingerprint"] = corpus.fingerprint
        contents["tokenizer"] = corpus.tokenizer and corpus.tokenizer.to_json()
        for name, split in corpus.splits.items():
            arrays = {key: np.asarray(array[:]).tobytes() for key, array in split.arrays.items()}
            contents[name] = (arrays, split.n_tokens, split.n_bytes)
        return 0

    return call(opening, []), contents


def damaged_programs(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Damage all compiled programs in JAX's cache in every way, and train in a new process."""
    cache = bench.base / "cache"
    whole = bench.base / "cache_whole"
    workdir = bench.base / "programs_run"
    if bench.reference and not whole.exists():
        shutil.copytree(cache, whole)
    for way in WAYS:
        shutil.rmtree(workdir, ignore_errors=True)
        programs = files_below(cache / "lm" / "jax")
        assert programs
        for file in programs:
            damage(file, way, draw)
        outcome = bench.run("-m", "lm.train", *bench.arguments(workdir))
        changes = differences(workdir, bench.reference) if outcome.code == 0 else []
        yield judge(f"compiled programs {way}", outcome, changes, names=(str(cache),))
        shutil.rmtree(cache)
        shutil.copytree(whole, cache)
