"""Compare the speed of generating text with transformers' cached `generate`.

    python -m benchmarks.generation --pin

All sides have the same weights (shape G: 6 layers, 6 heads, width 384, vocabulary 65), compute in
float32 in one process, and take the likeliest token. The benchmark checks that all draw the same
tokens and times them in alternation. The sides with a cache fill the context of 256 tokens from
prompts of one token. The cost of a step without a cache depends on the length only, so these sides
draw one token at each of 4 lengths, evenly spaced over the context.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.compare import (
    alternate,
    argument_parser,
    format_ratio,
    parse_arguments,
    publish,
    ratio,
)
from benchmarks.shapes import config_of, named, transformers_fields, transformers_params
from lm.system.errors import with_exit_code
from lm.system.text_tables import markdown_table

BATCHES = (1, 16)
CHECKED = 4  # tokens that all sides must agree on
N_LENGTHS = 4


@with_exit_code
def main() -> int:
    parser = argument_parser("generation", __doc__)
    parser.add_argument(
        "--shape", default="G", help="a GPT-2 of benchmarks/shapes.py [%(default)s]"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=BATCHES, help="batch sizes [1 16]"
    )
    parser.add_argument(
        "--accelerator", action="store_true", help="use the GPU if there is one, in full float32"
    )
    a = parse_arguments(parser)
    if a.accelerator:  # GPUs would compute float32 products in TF32
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"  # must be set before jax is imported
    import torch

    from lm.system.malloc import retain_freed_memory

    retain_freed_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sides = make_sides(a.shape, "cuda" if a.accelerator and torch.cuda.is_available() else "cpu")
    rows = [row for batch in a.batches for row in compare(sides, named(a.shape).seq_len, batch, a)]
    publish(a, rows, table(rows))
    return 0


def make_sides(name: str, device: str = "cpu") -> dict[str, tuple[bool, Callable]]:
    """Return {name: (whether it has a cache, (ids (B, T), n_tokens) -> drawn ids (B, n_tokens))}."""
    import jax

    from lm import parameters
    from lm.generation.decoding import make_decoder
    from lm.generation.filters import Sampling

    config = config_of(name, "unread", {"model.activation": "gelu"})  # the exact GELU
    c = config.model
    seq_len = config.train.seq_len
    # Noise is added because a model with tied embeddings and initial parameters repeats its last
    # token.
    noise = np.random.default_rng(0)
    flat = parameters.flat(jax.device_get(parameters.init_params(c, 0)))
    arrays = {
        path: p + np.float32(0.05) * noise.standard_normal(p.shape, np.float32)
        for path, p in flat.items()
    }
    params = jax.device_put(parameters.nest(arrays))
    decoder = make_decoder(params, c, seq_len=seq_len)

    def ours(ids_BT, n_tokens):
        return decoder.generate(ids_BT.tolist(), n_tokens, Sampling(temperature=0.0))

    return {
        "ours": (True, ours),
        "ours, uncached": (False, ours_uncached(params, c, seq_len)),
        "transformers": (True, transformers_side(config, params, device)),
    }


def ours_uncached(params, c, seq_len: int) -> Callable:
    """Return a side without a cache: every token runs the model on the whole context, padded."""
    import jax
    import jax.numpy as jnp

    from lm import model

    @functools.partial(jax.jit, static_argnames="n_tokens")
    def generate(params, ids_BT, length, n_tokens):
        def step(i, ids_BT):
            tokens_B = jnp.argmax(model.logits(params, c, ids_BT)[:, length + i - 1], axis=-1)
            return ids_BT.at[:, length + i].set(tokens_B)

        return jax.lax.fori_loop(0, n_tokens, step, ids_BT)

    def padded(ids_BT, n_tokens):
        length = ids_BT.shape[1]
        padding = ((0, 0), (0, seq_len - length))
        return np.asarray(generate(params, np.pad(ids_BT, padding), length, n_tokens))[
            :, length : length + n_tokens
        ]

    return padded


def transformers_side(config, params: dict, device: str) -> Callable:
    """Return the side of `generate` of transformers with our parameters, which has a cache."""
    import torch

    from benchmarks.peers import built

    model = built(
        transformers_fields(config), transformers_params(config, params), attention="sdpa"
    ).eval()
    model = model.to(device)

    @torch.no_grad()
    def generate(ids_BT, n_tokens):
        ids_BT = torch.from_numpy(ids_BT.astype(np.int64)).to(device)
        options = {"attention_mask": torch.ones_like(ids_BT), "do_sample": False, "pad_token_id": 0}
        drawn = model.generate(ids_BT, max_new_tokens=n_tokens, **options)[:, ids_BT.shape[1] :]
        return drawn.cpu().numpy()

    return generate


def compare(sides: dict, seq_len: int, batch: int, a) -> list[dict]:
    """Check that all sides draw the same tokens, time them in turns; return a row each."""
    ids_BT = np.random.default_rng(0).integers(0, 19, (batch, seq_len)).astype(np.int32)
    checked = min(CHECKED, seq_len - 1)
    drawn = {name: draw(ids_BT[:, :1], checked) for name, (_, draw) in sides.items()}
    for name, tokens in drawn.items():
        np.testing.assert_array_equal(
            tokens, drawn["ours"], err_msg=f"{name} draws other tokens than ours"
        )
    timers = {name: timer(draw, ids_BT, has_cache) for name, (has_cache, draw) in sides.items()}
    for name in [name for name in timers if name.startswith("ours")]:
        timers[name]()  # compile
    rounds = dict(zip(sides, alternate(a.rounds, *timers.values()), strict=True))
    seconds = {
        name: {clock: [once[clock] for once in side] for clock in ("cpu", "wall")}
        for name, side in rounds.items()
    }
    clock = "cpu" if a.pin else "wall"
    rows = []
    for name, own in seconds.items():
        row = {
            "batch": batch,
            "side": name,
            "clock": clock,
            "threads": len(os.sched_getaffinity(0)),
        }
        row |= {"seconds_per_step": own, "tokens_per_second": batch / statistics.median(own[clock])}
        rows.append(
            row | {"ratio": {clock: ratio(seconds["ours"][clock], own[clock]) for clock in own}}
        )
        print(
            f"batch {batch}, {name}: {rows[-1]['tokens_per_second']:.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )
    return rows


def timer(draw: Callable, ids_BT, has_cache: bool) -> Callable[[], dict]:
    """Return a function that measures the mean CPU and wall seconds of drawing one token per text.

    The prompts are beginnings of ids_BT, whose length is the context. With a cache, the context is
    filled in one call; without, one token is drawn at each of N_LENGTHS lengths.
    """
    seq_len = ids_BT.shape[1]
    lengths = [round((i + 0.5) * (seq_len - 1) / N_LENGTHS) for i in range(N_LENGTHS)]
    calls = [(1, seq_len - 1)] if has_cache else [(max(1, length), 1) for length in lengths]

    def once() -> dict:
        began = time.perf_counter(), time.process_time()
        for length, n_tokens in calls:
            draw(ids_BT[:, :length], n_tokens)
        n = sum(n_tokens for _, n_tokens in calls)
        return {
            "wall": (time.perf_counter() - began[0]) / n,
            "cpu": (time.process_time() - began[1]) / n,
        }

    return once


def table(rows: list[dict]) -> str:
    clock = rows[0]["clock"]
    header = [
        "batch",
        "side",
        f"tokens/s ({clock})",
        f"ms a step ({clock})",
        "time / ours",
        "by wall time",
    ]
    cells = [
        [
            str(r["batch"]),
            r["side"],
            f"{r['tokens_per_second']:.0f}",
            f"{1e3 * statistics.median(r['seconds_per_step'][clock]):.1f}",
            "" if r["side"] == "ours" else format_ratio(r["ratio"][clock]),
            "" if r["side"] == "ours" else f"{r['ratio']['wall']['median']:.2f}",
        ]
        for r in rows
    ]
    n = rows[0]["threads"]
    return markdown_table(header, cells) + f"\n\n{n} thread{'s' * (n > 1)} for each side."


if __name__ == "__main__":
    sys.exit(main())
