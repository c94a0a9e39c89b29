"""One side of a comparison, in a process of its own: python -m benchmarks.worker JSON

Each line of JSON on its standard input is a question, answered by a line on its standard output:

    {"losses": k}      the losses of k steps on fixed batches
    {"run": n}         the seconds of n steps
    {"facts": true}    its memory, and for our side the attention it uses and the device
    {"save": path}     writes the parameters, with transformers' names
    {"profile": path, "steps": n}    the files of a trace of n steps, and of the compiled program

JSON is {"side": "ours" | "theirs" | "nanogpt", "shape", "overrides", "data", "fields", "params", "workdir",
"dtype", "compiled"}.
"""

import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.shapes import config_of, named, transformers_params


def main(job: dict) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is not an answer
    side = {"ours": ours, "theirs": theirs, "nanogpt": nanogpt}[job["side"]](job)
    for line in sys.stdin:
        print(json.dumps(answer(job, side, json.loads(line))), file=answers, flush=True)


def answer(job: dict, side, asked: dict) -> dict:
    """Return the answer of a side, an `Ours` or a `Peer` of benchmarks/peers.py, to a question."""
    if "losses" in asked:
        s = named(job["shape"])
        draw = np.random.default_rng(1)
        size = (asked["losses"], s.batch_size, s.seq_len + 1)
        return {"losses": side.losses(draw.integers(0, s.vocab_size, size, np.int32))}
    if "save" in asked:
        return {"saved": side.save(asked["save"])}
    if "profile" in asked:
        return side.profile(Path(asked["profile"]), asked["steps"])
    if "run" in asked:
        began = time.perf_counter(), time.process_time()
        side.run(asked["run"])
        return {"wall": time.perf_counter() - began[0], "cpu": time.process_time() - began[1]}
    peak = side.peak_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak} | side.facts()


def ours(job: dict):
    from lm.parallel.mesh import use_mesh
    from lm.system.runtime import start_jax
    from lm.training.run import prepare

    config = config_of(job["shape"], job["data"], job["overrides"])
    start_jax(config.data.cache_dir, deterministic=config.train.deterministic)
    run = prepare(config, say=lambda text: None)
    use_mesh(run.mesh_sizes).__enter__()  # for the life of this process
    return Ours(run, Path(job["workdir"]))


def theirs(job: dict):
    from benchmarks.peers import Peer, built, tokens_in

    shape = named(job["shape"])
    with np.load(job["params"]) as archive:
        params = dict(archive)  # read each array once, not once per layer
    model = built(job["fields"], params)
    return Peer(shape, model, tokens_in(Path(job["data"]), shape), job["dtype"], job["compiled"])


def nanogpt(job: dict):
    from benchmarks.gpu.nanogpt import NanoGPT
    from benchmarks.peers import tokens_in

    shape = named(job["shape"])
    tokens = tokens_in(Path(job["data"]), shape)
    side = NanoGPT(shape, tokens, job["dtype"], compiled=job["compiled"])
    side.run(2)  # compiles
    return side


class Ours:
    """The training loop of lm.train with batches and log, but no setup or final evaluation."""

    def __init__(self, run, workdir: Path):
        from lm.training.batch_source import BatchSource
        from lm.training.job import first_state
        from lm.training.loop import Loop, compile_steps
        from lm.training.progress import Progress
        from lm.training.wall_time import WallTime
        from lm.workdir.metrics import MetricsWriter

        progress = Progress(run.config.train.steps, open(workdir / "log.txt", "w"))  # noqa: SIM115 - to the end
        self.state, _ = first_state(run, None, None)
        source = BatchSource(run.corpus.split("train"), run.config)
        program, self.compiled, _ = compile_steps(run, source, self.state)
        self.loop = Loop(
            run=run,
            writer=MetricsWriter(workdir),
            progress=progress,
            checkpoints=None,
            signals=None,
            program=program,
            sources={"train": source},
            record={},
            scorers={},
            clock=WallTime({}),
        )

    def run(self, n_steps: int) -> None:
        from lm.training.signals import Signals

        config = self.loop.run.config
        train = dataclasses.replace(config.train, steps=int(self.state.step) + n_steps)
        run = dataclasses.replace(self.loop.run, config=dataclasses.replace(config, train=train))
        with Signals(print) as signals:
            self.state, status = dataclasses.replace(self.loop, run=run, signals=signals).train(
                self.state
            )
        if status != "finished":
            raise RuntimeError("training stopped early")

    def losses(self, batches) -> list[float]:
        import jax

        from lm.kernels.platform import compiler_options, target
        from lm.step import train_step

        changed = self.loop.run.config.train.compiler_options
        options = compiler_options(target(), jax.devices()[0].device_kind, changed) or None
        step = jax.jit(
            train_step, static_argnames="config", donate_argnames="state", compiler_options=options
        )
        losses = []
        for tokens in batches:
            self.state, out = step(self.state, {"tokens": tokens}, self.loop.run.config)
            losses.append(float(out["loss"]))
        return losses

    def save(self, path: str) -> None:
        """Save the parameters, for the other side to start from."""
        np.savez(path, **transformers_params(self.loop.run.config, self.state.params))

    def profile(self, directory: Path, n_steps: int) -> dict:
        """Trace n steps; return the paths of the trace (None: there is none) and the program."""
        import jax

        with jax.profiler.trace(str(directory)):
            self.run(n_steps)
        program = directory / "program.txt"
        program.write_text(self.compiled.as_text())
        traces = sorted(map(str, directory.rglob("*.trace.json.gz")))
        return {"trace": traces[-1] if traces else None, "program": str(program)}

    def peak_bytes(self) -> int | None:
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def facts(self) -> dict:
        """Return the compiled program's bytes (arguments, temporaries), attention and device."""
        import jax

        from lm.cost.memory import attention_implementation

        memory = self.compiled.memory_analysis()
        size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        attention, _ = attention_implementation(
            self.loop.run.config, jax.devices()[0], self.loop.run.mesh_sizes
        )
        return {
            "program_bytes": size,
            "attention": attention,
            "device": jax.devices()[0].device_kind,
        }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
