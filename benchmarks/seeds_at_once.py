"""Compare training several seeds in one program with training one seed.

    python -m benchmarks.seeds_at_once --shape G@64 --seeds 5

Rounds alternate between both. Prints JSON: the median tokens/s of each, summed over its seeds, and the ratio. With 5
seeds, a ratio of 1 means that one program saves nothing; 5 means that it takes no longer than one seed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import ratio
from benchmarks.shapes import SHAPES, config_of, named, write_tokens


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds_at_once", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="G@64", help=f"{', '.join(SHAPES)}, or NAME@BATCH [%(default)s]")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds train together [%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument("--rounds", type=int, default=9, help="how many times each is timed [%(default)s]")
    a = parser.parse_args()
    try:
        named(a.shape)
    except ValueError as error:
        parser.error(str(error))
    if min(a.seeds, a.rounds) < 1:
        parser.error("--seeds and --rounds must be at least 1")
    print(json.dumps(compare(a.shape, a.seeds, a.dtype, a.rounds)))
    return 0


def compare(shape: str, n_seeds: int, dtype: str, rounds: int) -> dict:
    """Time n_seeds seeds in one program and one seed on one device, in alternation; returns the printed JSON."""
    from lm.runtime import start_jax
    from lm.sweeps.training.throughput import Workload, measure
    from lm.training.run import prepare

    with tempfile.TemporaryDirectory() as directory:
        write_tokens(Path(directory) / "data", named(shape))
        overrides = {"train.steps_per_dispatch": 10, "model.compute_dtype": dtype}
        config = config_of(shape, f"{directory}/data", overrides)
        start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
        run = prepare(config, say=lambda text: None)
        speeds = measure({n: Workload(run.config, run.corpus, n, 1) for n in {1, n_seeds}}, rounds)
    return {
        "shape": shape, "dtype": dtype, "seeds": n_seeds,
        "tokens_per_second": {n: statistics.median(values) for n, values in speeds.items()},
        "ratio": ratio(speeds[1], speeds[n_seeds]),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
