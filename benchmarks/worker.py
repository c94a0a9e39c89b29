"""One side of a comparison, in a process of its own: python -m benchmarks.worker JSON

It answers each line of JSON on its standard input with one on its standard output: {"losses": k} the losses of k steps
on fixed batches, {"run": n} the seconds of n steps, {"facts": true} its memory and choices; {"save": path} writes
parameters. JSON: {"side": "ours" | "theirs", "shape", "overrides", "data", "params", "workdir", "dtype", "compiled",
"nanogpt"}
"""

import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.shapes import config_of, named


def main(job: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    side = {"ours": ours, "theirs": theirs}[job["side"]](job)
    for line in sys.stdin:
        print(json.dumps(answer(job, side, json.loads(line))), file=answers, flush=True)


def answer(job: dict, side, asked: dict) -> dict:
    if "losses" in asked:
        s, draw = named(job["shape"]), np.random.default_rng(1)
        size = (asked["losses"], s.batch_size, s.seq_len + 1)
        return {"losses": side.losses(draw.integers(0, s.vocab_size, size, np.int32))}
    if "save" in asked:
        return {"saved": side.save(asked["save"])}
    if "run" in asked:
        began = time.perf_counter(), time.process_time()
        side.run(asked["run"])
        return {"wall": time.perf_counter() - began[0], "cpu": time.process_time() - began[1]}
    peak = side.peak_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak} | side.facts()


def resolved(job: dict):
    """Our config, and the corpus it trains on."""
    from lm import data
    from lm.runtime import start_jax
    from lm.training.run import resolve_config

    config = config_of(job["shape"], job["data"], job["overrides"])
    start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    corpus = data.open_corpus(config.data, seq_len=config.train.seq_len, say=lambda text: None)
    return resolve_config(config, corpus), corpus


def ours(job: dict):
    return Ours(*resolved(job), Path(job["workdir"]))


def theirs(job: dict):
    from benchmarks.peers import Peer, tokens_in

    shape = named(job["shape"])
    with np.load(job["params"]) as archive:
        params = dict(archive)  # each array is read once, not once a layer
    return Peer(shape, params, tokens_in(Path(job["data"]), shape), job["dtype"], job["compiled"], job["nanogpt"])


class Ours:
    """A run of lm.train without its beginning and end: the loop of lm/training/loop.py with its feeds and its log."""

    def __init__(self, config, corpus, workdir: Path):
        from lm.train import first_state
        from lm.training import metrics
        from lm.training.loop import Loop
        from lm.training.progress import Progress

        self.config = config
        progress = Progress(config.train.steps, open(workdir / "log.txt", "w"))  # noqa: SIM115 - to the end
        state, _ = first_state(config, None, False, None)
        self.loop = Loop(config, corpus, state, metrics.MetricsWriter(workdir), progress, None, {})
        self.loop.compile()

    def run(self, n_steps: int) -> None:
        from lm.training.loop import Signals

        train = dataclasses.replace(self.config.train, steps=self.loop.step + n_steps)
        self.loop.config = dataclasses.replace(self.config, train=train)
        with Signals(print) as signals:
            if self.loop.run(signals) != "finished":
                raise RuntimeError("training stopped early")

    def losses(self, batches) -> list[float]:
        import jax

        from lm.step import train_step

        step, found = jax.jit(train_step, static_argnames="config", donate_argnames="state"), []
        for tokens in batches:
            self.loop.state, out = step(self.loop.state, {"tokens": tokens}, self.config)
            found.append(float(out["loss"]))
        self.loop.step = int(self.loop.state.step)
        return found

    def save(self, path: str) -> None:
        """The parameters, for the other side to start from."""
        import jax

        from lm.parameters import flat

        np.savez(path, **jax.device_get(flat(self.loop.state.params)))

    def peak_bytes(self) -> int | None:
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def facts(self) -> dict:
        """The bytes of the compiled program (its arguments, the state above all, and what it holds in between)."""
        from lm.training.run import attention_of

        memory = self.loop.program.memory_analysis()
        size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        return {"program_bytes": size, "attention": attention_of(self.config, self.loop.corpus)[0]}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
