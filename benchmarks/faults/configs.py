"""Random config values and files, which must end with a config or an error for the user."""

import random
import string
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.judge import Trial, judge
from benchmarks.faults.runs import CONFIG, Bench, call

VALUES_PER_ROUND = 10_000
FILES_PER_ROUND = 500
WORDS = (
    "", "0", "-1", "1", "2", "none", "None", "true", "false", "nan", "inf", "-inf", "1e308", "1e400", "1e-320", "1_000",
    "9" * 400, "0x10", "²", "½", "()", "(", ",", "(1,", "[1]", "{}", "1,2,3", "((1,),)", "'", '"', "\\", "\0", "\ud800",
    "é" * 100, "a" * 5000, "text:", "text:/", "tokens:", "tfds:", "tfds:/", "bpe:", "bpe:0", "bpe:" + "9" * 30,
    "hf:", "hf:/", "lambda: 0", "__import__('os')", "1/0", "2**31", "2147483648", "4294967296", "-0.0", "1e3", "0.5",
    "char", "byte", "adamw", "muon", "rms", "float32", "bfloat16", "test,train", "validation+", "+", "data+data",
)  # fmt: skip
LINES = (
    "    config.train.steps = {}", "    config.model.d_model = {}", "    config.optimizer.learning_rate = {}",
    "    config.{} = 3", "    config = {}", "    return {}", "    raise {}", "import {}", "def {}():",
    "    config.data.{} = 0",
)  # fmt: skip
PIECES = (
    "None", "float('nan')", "10**400", "[]", "{}", "config", "object()", "lambda: 0", "SystemExit(0)",
    "ValueError('x')", "BaseException()", "KeyboardInterrupt", "config.model", "b'x'", "1j", "...", "type",
    "'\\ud800'", "x", "nothing", "{'a': {'b': 1}}", "range(3)", "(1, 2)", "set()", "-1", "0", "os", "get_config",
)  # fmt: skip


def random_values(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Load the tiny config with one to four random overrides, as lm.train's command line."""
    from lm.config.schema import schema

    names = list(schema())
    for _ in range(VALUES_PER_ROUND):
        overrides = [
            f"--config.{_name(names, draw)}{_value(draw)}" for _ in range(draw.randint(1, 4))
        ]
        yield _load([f"--config={CONFIG}", *overrides], " ".join(overrides))


def random_files(bench: Bench, draw: random.Random) -> Iterator[Trial]:
    """Load config files with random changes: lines and bytes inserted, deleted or replaced."""
    path = bench.base / "random_config.py"
    for _ in range(FILES_PER_ROUND):
        path.write_bytes(_changed_file(CONFIG.read_bytes(), draw))
        yield _load([f"--config={path}"], f"config file {path.read_bytes()[-120:]!r}", path)


def _load(arguments: list[str], fault: str, path: Path = CONFIG) -> Trial:
    """Load a config. An accepted config must not change when it is saved and loaded."""
    from lm.command_line.training import parse_arguments
    from lm.config import from_dict, to_dict
    from lm.system.errors import with_exit_code
    from lm.system.files import parse_json, to_json

    changed = []

    @with_exit_code
    def loading(argv: list[str]) -> int:
        _, config = parse_arguments(argv)
        if from_dict(parse_json(to_json(to_dict(config)))) != config:
            changed.append("saved and loaded, it is another config")
        return 0

    outcome = call(loading, arguments)
    # A Ctrl-C inside a config file is the only other documented outcome.
    documented = outcome._replace(code=2) if outcome.code == 130 else outcome
    return judge(
        fault[:300],
        documented,
        changed,
        names=("config.", "--config", path.name, "interrupted", "error:"),
    )


def _name(names: list[str], draw: random.Random) -> str:
    name = draw.choice(names)
    if draw.random() < 0.2:
        i = draw.randrange(len(name))
        name = draw.choice(
            (
                name[:i] + name[i + 1 :],
                name[:i] + "." + name[i:],
                name.partition(".")[0],
                name + ".x",
            )
        )
    return name


def _value(draw: random.Random) -> str:
    if draw.random() < 0.03:
        return ""
    if draw.random() < 0.3:
        return "=" + "".join(draw.choice(string.printable) for _ in range(draw.randint(0, 12)))
    if draw.random() < 0.3:
        return f"={draw.choice((draw.randint(-3, 300), 10 ** draw.randint(0, 30), draw.uniform(-2, 2)))}"
    return "=" + draw.choice(WORDS)


def _changed_file(content: bytes, draw: random.Random) -> bytes:
    lines = content.split(b"\n")
    for _ in range(draw.randint(1, 3)):
        i = draw.randrange(len(lines))
        kind = draw.randrange(4)
        if kind == 0:
            lines[i] = draw.choice(LINES).format(draw.choice(PIECES)).encode()
        elif kind == 1:
            lines.insert(i, draw.choice(LINES).format(draw.choice(PIECES)).encode())
        elif kind == 2:
            del lines[i]
        elif lines[i]:
            j = draw.randrange(len(lines[i]))
            lines[i] = lines[i][:j] + bytes([draw.randrange(256)]) + lines[i][j + 1 :]
        lines = lines or [b""]
    return b"\n".join(lines)
