"""README, docs/ and benchmarks/: links, keys, commands and paths exist, worked changes of the model
work.
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from running import ROOT

from lm.config.schema import schema

FOLDERS = ("docs", "benchmarks", "launch")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
CHANGES = ROOT / "docs" / "changing-the-model.md"
# Keys that pages name but the schema does not have: those of worked changes, and a misspelled one.
NEW_KEYS = {
    "changing-the-model.md": {"model.head_scale", "train.head_l2"},
    "getting-started.md": {"model.n_head"},
}
# files that a page tells the reader to write
NEW_PATHS = {"sweeps.md": {"configs/sweeps/qk_norm.py"}}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_links_resolve():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
            if re.match(r"\w+:", link):  # another site
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page}: {link}: no such file"
            assert not anchor or anchor in anchors(target), f"{page}: {link}: no such heading"


def test_keys_modules_and_paths_exist():
    """Paths: files and folders of the repository that a page names in backticks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        known = set(schema()) | NEW_KEYS.get(page.name, set())
        sections = {key.rpartition(".")[0] for key in known}
        for key in re.findall(r"--config\.([a-z][a-z0-9_.]*[a-z0-9_])", text):
            assert key in known | sections, f"{page}: --config.{key}: no such key"
        for module in re.findall(r"python3? -m ((?:lm|launch|benchmarks)[\w.]*\w)", text):
            assert importlib.util.find_spec(module), f"{page}: python3 -m {module}: no such module"
        named = re.findall(r"`((?:lm|configs|tests|docs|launch|benchmarks)/[\w./*-]*)`", text)
        for path in set(named) - NEW_PATHS.get(page.name, set()):
            assert list(ROOT.glob(path.rstrip("/"))), f"{page}: {path}: no such path"


@pytest.mark.slow
def test_the_site_builds(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    pytest.importorskip("material", reason="the extra [docs] is not installed")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    # strict: a warning is an error
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    assert (tmp_path / "index.html").exists()


# ---- The worked changes --------------------------------------------------------------------------

# Check that each key alone changes the update of the output head in one step of SGD, then train
# with all of them.
EXPERIMENT = """
import sys

import jax
import jax.numpy as jnp
from tiny import state_of, tiny

from lm import train
from lm.step import train_step

def head_after_one_step(changed):
    sections = {"model": {"qk_norm": False}, "optimizer": {"name": "sgd", "learning_rate": 0.1}}
    for key, value in changed.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config = tiny(**sections)
    batch = {"tokens": jnp.arange(36).reshape(4, 9) * 5 % 19}
    state, metrics = jax.jit(train_step, static_argnames="config")(state_of(config), batch, config)
    assert metrics["finite"]
    return state.params["head"]["w_DV"]

base = head_after_one_step({})
for key, value in KEYS.items():
    assert jnp.abs(head_after_one_step({key: value}) - base).max() > 1e-5, f"{key} = {value} changes nothing"
sys.exit(train.main(ARGUMENTS))
"""


def changes() -> list[tuple[str, str, str]]:
    """Return (file, place, code) of each block of docs/changing-the-model.md."""
    blocks = re.findall(
        r"```python\n# (\S+), (.*?)\n(.*?)```", CHANGES.read_text(encoding="utf-8"), re.DOTALL
    )
    return [(file, place, code.rstrip("\n")) for file, place, code in blocks]


def changed_keys() -> dict[str, object]:
    """Return the values that the page trains with, by key."""
    found = re.findall(r"`--config\.([\w.]+)=(\w[\w.]*)`", CHANGES.read_text(encoding="utf-8"))
    return {key: {"true": True, "0.01": 0.01}.get(value, value) for key, value in found}


def apply(text: str, place: str, code: str) -> str:
    """Return the text of a file with one change applied at its place. A page shows some files as
    they are.
    """
    if place == "as it is":
        assert code == text.rstrip("\n")
        return text
    if place == "a new file":
        return f"{code}\n"
    if place == "at the end":
        return f"{text}\n\n{code}\n"
    if choices := re.fullmatch(r"in the choices of (\w+)", place):
        start = re.search(rf"^    {choices[1]}: str = key\(", text, re.MULTILINE)
        assert start, f"the schema has no key {choices[1]}"
        end = text.index(")", text.index("choices=(", start.end()))
        return f"{text[:end]}, {code}{text[end:]}"
    if keys := re.fullmatch(r"in only= of (\w+) and (\w+)", place):
        for key in keys.groups():
            text, n = re.subn(
                rf'(\n    {key}: [^=]* = key\([^#]*?only=)"[^"]*"', rf"\g<1>{code}", text, count=1
            )
            assert n == 1, f"the schema has no key {key} with only="
        return text
    if dictionary := re.fullmatch(r"in ([A-Z_]+)", place):
        lines = re.findall(rf"\n{dictionary[1]}(?:: .*)? = {{", text)
        assert len(lines) == 1, f"there is no dictionary {dictionary[1]}"
        return text.replace(lines[0], f"{lines[0]}\n    {code},".replace(",,", ","))
    if site := re.fullmatch(r"in the site (\w+)", place):
        (line,) = re.findall(rf'\n    "{site[1]}": {{(?:  #.*)?(?=\n)', text)
        return text.replace(line, f"{line}\n        {code},")
    if beside := re.fullmatch(r'(before|in place of) "(.*)"', place):
        lines = [line for line in text.splitlines() if line.strip().startswith(beside[2])]
        assert len(lines) == 1, f"{len(lines)} lines start with {beside[2]!r}"
        indent = re.match(" *", lines[0])[0]
        new = textwrap.indent(code, indent) + ("\n" + lines[0] if beside[1] == "before" else "")
        return text.replace(f"\n{lines[0]}\n", f"\n{new}\n")
    raise AssertionError(f"unknown place {place!r}")


def test_the_loop_and_the_layers_of_architecture_run(command):
    code, layers = re.findall(
        r"^```python\n(.*?)^```", read(ROOT / "docs" / "architecture.md"), re.DOTALL | re.MULTILINE
    )
    tiny = [
        "train.steps=2",
        "train.batch_size=2",
        "train.seq_len=8",
        "model.d_model=16",
        "model.n_layers=1",
    ]
    code = code.replace("configs/", f"{ROOT}/configs/").replace(
        '"train.steps=100"', ", ".join(map(repr, tiny))
    )
    found: dict = {}
    _, output = command(lambda _: exec(code, found))
    assert found["state"].step == 2
    assert command(lambda _: exec(layers, {}))[1] == "(2, 10, 64)\n"
    assert f"\n1 {float(found['metrics']['loss'])}\n{{'loss': " in output


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_worked_changes_have_places():
    """The place that each change names exists in the present code."""
    files = {file: read(ROOT / file) for file, _, _ in changes()}
    for file, place, code in changes():
        files[file] = apply(files[file], place, code)
        compile(files[file], file, "exec")


def test_the_code_in_readme_is_that_of_a_worked_change_or_of_the_model():
    """The excerpt of the model has its lines, in their order."""
    blocks = re.findall(
        r"```python\n# lm/.*?```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    excerpts = [block for block in blocks if block.startswith("```python\n# lm/model.py")]
    assert len(blocks) > len(excerpts) == 1
    assert all(
        block in CHANGES.read_text(encoding="utf-8") for block in blocks if block not in excerpts
    )
    source = iter(
        [
            line.strip()
            for line in (ROOT / "lm" / "model.py").read_text(encoding="utf-8").splitlines()
        ]
    )
    for line in excerpts[0].splitlines()[2:-1]:
        assert line.strip() in source, line


@pytest.mark.slow
def test_worked_changes_train(tmp_path):
    """On a copy of the code each change has an effect, and a run with all of them finishes."""
    for package in ("lm", "configs"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 80)
    for file, place, code in changes():
        path = tmp_path / file
        path.write_text(apply(read(path), place, code), encoding="utf-8")
    keys = changed_keys()
    assert len(keys) == 4
    small = {
        "model.d_model": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "train.seq_len": 16,
        "train.batch_size": 2,
    }
    small |= {
        "train.steps": 3,
        "train.steps_per_dispatch": 1,
        "eval.sample_tokens": 0,
        "log.tensorboard": "false",
    }
    small |= {"optimizer.warmup_steps": 1, "data.source": f"text:{tmp_path / 'text.txt'}"}
    values = {key: str(value).lower() for key, value in keys.items()}
    arguments = ["--config=configs/shakespeare.py", "--workdir=run"]
    arguments += [f"--config.{key}={value}" for key, value in (small | values).items()]
    script = EXPERIMENT.replace("KEYS", repr(keys)).replace("ARGUMENTS", repr(arguments))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no effect with model" not in done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
