"""Measure the peak rates of this machine.

    python -m benchmarks.peak --pin

Prints JSON: FLOP/s of the product of two large square matrices, by dtype, and bytes/s (read and written) of a copy.
"""

import argparse
import json
import time

from benchmarks.compare import pin_to_one_core


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak", description=__doc__.split("\n")[0])
    parser.add_argument("--pin", action="store_true", help="run on one core")
    if parser.parse_args().pin:
        pin_to_one_core()
    import jax
    import jax.numpy as jnp

    n = 2048 if jax.default_backend() == "cpu" else 8192
    flops = {}
    for name in ("float32", "bfloat16"):
        a = jnp.ones((n, n), name)
        wide = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
        flops[name] = 2 * n**3 / best_seconds(wide, a)
    x = jnp.zeros(2**27, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "flops": flops, "copy_bytes": 2 * x.nbytes / best_seconds(copy, x)}))


def best_seconds(f, x) -> float:
    """Return the shortest of seven calls, the one least disturbed by other processes."""
    f(x).block_until_ready()
    found = []
    for _ in range(7):
        began = time.perf_counter()
        f(x).block_until_ready()
        found.append(time.perf_counter() - began)
    return min(found)


if __name__ == "__main__":
    main()
