"""README's walk-through "Change one thing" is carried out on a copy of the code, and the copy trained."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT

TRY = """
import dataclasses, sys
import jax.numpy as jnp
from lm import model, parameters, train
from lm.config import Config, ModelConfig

def logits(**keys):
    config = Config(model=ModelConfig(d_model=16, n_layers=1, n_heads=2, **keys))
    c = parameters.resolve(config, 7).model
    return model.logits(parameters.init_params(c, 0), c, jnp.arange(10)[None] % 7)

for key, value in KEYS.items():
    assert jnp.abs(logits(**{key: value}) - logits()).max() > 1e-3, f"{key}={value} changes nothing"
sys.exit(train.main(ARGUMENTS))
"""


def changes():
    """(header, code) of each block of the section whose first line says where it goes, and the keys it names."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Change one thing")[2]
    blocks = re.findall(r"```python\n# (.*?)\n(.*?)```", section, re.DOTALL)
    return blocks, dict(re.findall(r"`--config\.model\.(\w+)=(\w+)`", section))


def apply(copy: Path, header: str, code: str) -> None:
    file, _, place = header.partition(", ")
    path = copy / file
    text = path.read_text(encoding="utf-8")
    if place == "at the end":
        path.write_text(f"{text}\n\n{code}", encoding="utf-8")
        return
    if choice := re.fullmatch(r"in the choices of (\w+)", place):
        pattern = rf"(\n    {choice[1]}: str = key\([^#]*?choices=\([^)]*)\)"
        new = rf"\1, {code.strip()})"
    else:
        pattern, new = rf"(\n{place[3:]} = \{{)", rf"\1\n    {code.strip()}"
    text, n = re.subn(pattern, new, text, count=1)
    assert n == 1, f"README's place {header!r} was not found"
    path.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_change_one_thing(tmp_path):
    blocks, keys = changes()
    assert keys.keys() == {"activation", "norm", "positions"}
    assert len(blocks) == 8
    for package in ("lm", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 80)
    for header, code in blocks:
        apply(tmp_path, header, code)
    small = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "train.seq_len": 16, "train.batch_size": 2}
    small |= {"train.steps": 3, "train.steps_per_dispatch": 1, "eval.sample_tokens": 0, "log.tensorboard": "false"}
    small |= {"optimizer.warmup_steps": 1}
    small |= {"data.source": f"text:{tmp_path / 'text.txt'}"} | {f"model.{key}": value for key, value in keys.items()}
    arguments = ["--config=configs/shakespeare.py", "--workdir=run", *(f"--config.{k}={v}" for k, v in small.items())]
    script = TRY.replace("KEYS", repr(keys)).replace("ARGUMENTS", repr(arguments))
    env = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
