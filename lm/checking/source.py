"""The line of the source at which a property first fails."""

import linecache
import traceback
from pathlib import Path

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from lm import model
from lm.checking.subject import Subject, V

ROOT = Path(model.__file__).parent
# Files whose lines are named: where equations stand. What they call is a part of the calling line.
EQUATIONS = ("model.py", "step.py", "ideas/", "layers/attention.py")


def _is_program(x) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def inner_programs(eqn) -> list:
    """Return the programs that an operation calls."""
    leaves = jax.tree.leaves(eqn.params, is_leaf=_is_program)
    return [getattr(x, "jaxpr", x) for x in leaves if _is_program(x)]


def all_equations(program):
    """Yield the operations of a jaxpr and of all that it calls, in their order."""
    for eqn in program.eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from all_equations(inner)


def line_of(eqn) -> str:
    """Return "ideas/mine.py:12: the line", the innermost line of an equation of an operation."""
    lines = _lines(eqn)
    return lines[-1] if lines else "unknown line"


def _lines(eqn) -> list[str]:
    lines: list[str] = []
    trace = eqn.source_info.traceback
    if trace is None:
        return lines
    for frame, number in traceback.walk_tb(trace.as_python_traceback()):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            continue
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(EQUATIONS) and file != "ideas/__init__.py":
            text = linecache.getline(str(path), number).strip()
            lines.append(f"lm/{file}:{number}: {text}")
    return lines


def first_difference(one: dict, other: dict, limit: float = 1e-4) -> tuple[str, str]:
    """Return the last equal intermediate before the first that differs, and this one."""
    last = "tokens"
    for name, x in one.items():
        y = other[name]
        size = max(float(np.abs(x).max(initial=0)), 1e-30)
        if not float(np.abs(x - y).max(initial=0)) <= limit * size:
            return last, name
        last = name
    return last, ""


def where_it_starts(s: Subject, error: Exception) -> str:
    """Return the intermediate at which a failure starts, and the line of an idea before it."""
    where = getattr(error, "where", None)
    if where is None:
        return ""
    if isinstance(where, str):
        return _between(s, "", where).removeprefix(": ")
    one, other = where
    if not isinstance(one, dict):  # position `one` depends on token `other`
        where = _with_another_token(s, int(one), int(other))
    last, first = first_difference(*where)
    if not first:
        return ""
    lines = _between(s, last, first)
    return f"starts at {first}, after {last}{lines}"


def _with_another_token(s: Subject, position: int, token: int) -> tuple[dict, dict]:
    """Return the intermediates at a position, of the packed texts and with another token."""
    tokens_BT, *documents = s.packed
    tokens_BT = tokens_BT.copy()
    tokens_BT[:, token] = (tokens_BT[:, token] + 1) % V
    changed = s.run(s.c, s.params, tokens_BT, *documents)
    length = tokens_BT.shape[1]
    own = [name for name, x in changed.items() if x.shape[1:2] == (length,)]
    one, other = ({name: x[name][:, position] for name in own} for x in (s.outputs, changed))
    return one, other


def _between(s: Subject, last: str, first: str) -> str:
    """Return the lines of ideas, or else of the model, between two intermediates."""

    def tap(here, name, x):
        return checkpoint_name(x, f"tap:{here.named(name)}")

    program = jax.make_jaxpr(lambda p: s.observed(s.c, p, tap))(s.params)
    inside = last in ("", "tokens")
    lines: list[str] = []
    for eqn in all_equations(program.jaxpr):
        marked = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
        if marked == f"tap:{first}":
            break
        if inside:
            lines += [line for line in _lines(eqn)[-1:] if line not in lines]
        if marked == f"tap:{last}":
            inside = True
            lines = []
        elif marked.startswith("tap:") and not last:
            lines = []
    of_ideas = [line for line in lines if line.startswith("lm/ideas/")]
    chosen = of_ideas or lines
    return f": {'; '.join(chosen[:3])}" if chosen else ""
