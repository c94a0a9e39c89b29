"""One run of a speedrun: train in a process that is timed, then score its last weights in another that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.compare import ROOT, timed
from benchmarks.speedrun.tracks import MAX_CONTEXT, forced_values, n_predicted
from lm.config.values import show

# Prefixes of variables that change how JAX or malloc works: a record must depend on config and commit alone.
CLEARED = ("JAX_", "XLA_", "MALLOC_", "GLIBC_TUNABLES", "TF_", "OMP_")


def train_and_score(config: str, overrides: list[str], text: bytes, seed: int, directory: Path) -> dict:
    """Train from scratch, with empty caches, and score the last weights on the last tenth of the text.

    Args:
        config: path of the config file.
        overrides: changes to it, each "train.steps=20".
        text: the whole text, ASCII.
        seed: the seed of the run.
        directory: empty; the text, the caches, the workdir and the evaluation go there.

    Returns:
        {"seed"; "loss": nats per character; "cpu", "wall": seconds of the training process; "peak_bytes"; "load": load
        average of the machine in the minute before}.

    Raises:
        RuntimeError: with the end of the output, if training or scoring fails.
    """
    (directory / "text.txt").write_bytes(text)
    values = forced_values() | {"data.source": f"text:{directory / 'text.txt'}", "train.seed": seed}
    values["data.cache_dir"] = str(directory / "cache")
    keys = [*overrides, *(f"{name}={show(value)}" for name, value in values.items())]
    workdir, load = directory / "run", os.getloadavg()[0]
    command = [sys.executable, "-m", "lm.train", "--config", config, "--workdir", str(workdir)]
    found = timed([*command, *(f"--config.{key}" for key in keys)], clean_environment())
    costs = {"cpu": round(found["cpu"], 2), "wall": round(found["wall"], 2), "peak_bytes": found["peak_bytes"]}
    return {"seed": seed, "loss": score(workdir, n_predicted(text))} | costs | {"load": round(load, 2)}


def score(workdir: Path, n_characters: int) -> float:
    """Evaluate the last weights of a run on the validation split, in consecutive windows, in another process.

    Args:
        workdir: the run.
        n_characters: how many characters must be predicted: all of the split but the first.

    Returns:
        The mean loss in nats per character.

    Raises:
        RuntimeError: the evaluation fails, its windows are longer than MAX_CONTEXT, or it predicts another number of
            characters.
    """
    arguments = ["--split", "validation", "--step", "latest", "--no-baselines", "--json"]
    command = [sys.executable, "-m", "lm.evaluate", "--workdir", str(workdir), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    record = json.loads(done.stdout)
    plain = record["texts"][0]["plain"]
    if record["seq_len"] > MAX_CONTEXT or plain["predicted_tokens"] != n_characters:
        found = f"{plain['predicted_tokens']} predictions in windows of {record['seq_len']}"
        raise RuntimeError(f"{found}, not {n_characters} in windows of at most {MAX_CONTEXT}")
    return plain["loss"]


def clean_environment() -> dict[str, str]:
    """Return the environment without variables that change how JAX or malloc works, and with the CPU as the device."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
