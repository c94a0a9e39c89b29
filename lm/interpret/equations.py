"""The equations of one model: the lines of the program that a trace of its loss passes through.

No layer and no idea is known here. The loss is traced without values, and each operation of the
trace remembers the lines of the source that led to it. They are printed with what the config
decides filled in (`Simplified`), with shapes and parameters from the trace. Layers whose lines are
equal are printed once.
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm import ideas, layer_stack, model, parameters, step
from lm.config import Resolved, turns
from lm.kernels.platform import compiling_for

ROOT = Path(model.__file__).parent
# Files whose lines are printed. What they call elsewhere is a part of the calling line.
PRINTED = ("step.py", "model.py", "ideas/", "layers/attention.py", "layers/losses.py")
# Of these files, lines that only call other printed lines are printed, too.
CALLERS = ("step.py", "ideas/")
CALLING_FUNCTIONS = ("softmax_attention",)  # so are those of these functions
# A parameter is still itself after these operations.
MOVES = {"reshape", "convert_element_type", "broadcast_in_dim", "squeeze", "slice", "transpose"}
LETTERS = "BTVDFKNHGE"  # have one meaning everywhere: lm/layers/__init__.py
WIDTH = 110
COLUMN = 58  # of comments, if there is room


class Source(NamedTuple):
    """A statement, or the body of a lambda, and the outermost function around it."""

    file: str
    node: ast.AST
    function: ast.FunctionDef | None


@dataclasses.dataclass(eq=False)
class Line:
    """A line that the trace passes through, and the lines that it calls."""

    source: Any = None  # a `Source`, the number of a layer, or None: the whole program
    calls: list["Line"] = dataclasses.field(default_factory=list)
    made: dict = dataclasses.field(default_factory=dict)  # shapes of its own results, by value
    reads: dict = dataclasses.field(default_factory=dict)  # the parameters that it reads, by path
    operations: list[str] = dataclasses.field(default_factory=list)  # of JAX

    def called(self, sources: list) -> "Line":
        """Return the line at the end of these calls, a new one if it was not the last."""
        if not sources:
            return self
        if not self.calls or self.calls[-1].source != sources[0]:
            self.calls.append(Line(sources[0]))
        # A line that calls again what it has left is in the next turn of a loop.
        left = [line.source for line in self.calls[-1].calls[:-1]]
        if sources[1:] and sources[1] in left and sources[1] != self.calls[-1].calls[-1].source:
            self.calls.append(Line(sources[0]))
        return self.calls[-1].called(sources[1:])

    def all(self) -> Iterator["Line"]:
        """Yield this line and all that are called from it."""
        yield self
        for line in self.calls:
            yield from line.all()


class Trace:
    """The loss of a batch, traced with unrolled layers and all logits and attention scores at once.

    Attributes:
        root: the lines.
        program: the operations, a jaxpr.
    """

    def __init__(self, config: Resolved):
        c = dataclasses.replace(config.model, scan_layers=False, remat="none", attention="einsum")
        t = dataclasses.replace(config.train, loss_chunk=0)
        self.config = dataclasses.replace(config, model=c, train=t)
        self.table = parameters.parameter_table(c)
        shapes = {
            path: jax.ShapeDtypeStruct(p.shape, c.param_dtype) for path, p in self.table.items()
        }
        self.params = parameters.nest(shapes)
        there = {
            "segments": config.data.packing != "none",
            "is_target": config.data.targets != "all",
        }
        names = ["tokens", *(name for name in there if there[name])]
        tokens_BT = jax.ShapeDtypeStruct((t.batch_size, t.seq_len + 1), jnp.int32)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        numbers = {"n_targets": number, "fraction": number}
        keys_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), t.batch_size))
        inputs = shapes, dict.fromkeys(names, tokens_BT), numbers, keys_B
        with compiling_for("tpu"):  # on CPUs, products have forms of their own
            program = jax.make_jaxpr(self._loss)(*inputs)
        self.program = program.jaxpr
        self.root = Line()
        self.parameters = dict(enumerate(sorted(shapes)))  # paths by value, a number
        self.readers: dict[int, list[Line]] = {}  # by value
        self._n_values = len(self.program.invars)
        for i in self._follow(self.program, list(range(self._n_values)), [], None):
            self.readers.setdefault(i, []).append(self.root)

    def _loss(self, params: dict, batch: dict, numbers: dict, keys_B):
        fields = step.fields_read(batch, self.config.model)
        if self.config.model.dropout:
            fields["dropout_keys_B"] = keys_B
        return step.objective(parameters.nest(params), fields, self.config, **numbers)

    def _follow(self, program, inputs: list[int], caller: list, layer: int | None) -> list[int]:
        """Add the operations of a program to the lines. Values are numbers; returns its results."""
        values = dict(zip(program.invars, inputs, strict=True))

        def value(x) -> int:
            if hasattr(x, "val") or x not in values:  # a constant
                self._n_values += 1
                return self._n_values - 1
            return values[x]

        for eqn in program.eqns:
            read = [value(x) for x in eqn.invars]
            in_layer = re.match(r"(?:turns/\d+/)?layers/(\d+)", str(eqn.source_info.name_stack))
            number = int(in_layer[1]) if in_layer and layer is None else layer
            lines = _lines(eqn.source_info.traceback, number)
            if lines[: len(caller)] != caller:
                # Lines of a function that JAX traces begin in it, or are those of its first call.
                lines = caller if lines[:1] == caller[:1] else caller + lines
            inner = [p for p in jax.tree.leaves(eqn.params, is_leaf=_is_program) if _is_program(p)]
            inner = [getattr(p, "jaxpr", p) for p in inner]
            if len(inner) == 1 and _shapes(inner[0].invars) == _shapes(eqn.invars):  # a function
                made = self._follow(inner[0], read, lines, number)
                values |= zip(eqn.outvars, made, strict=True)
                continue
            for p in inner:  # of a loop or a branch
                given = [-1] * len(p.invars) + read
                self._follow(p, given[len(given) - len(p.invars) :], lines, number)
            made = [value(x) for x in eqn.outvars]
            values |= zip(eqn.outvars, made, strict=True)
            paths = [self.parameters[i] for i in read if i in self.parameters]
            if paths and eqn.primitive.name in MOVES:
                self.parameters[made[0]] = paths[0]
                continue
            line = self.root.called(lines)
            line.operations.append(eqn.primitive.name)
            line.made |= zip(made, _shapes(eqn.outvars), strict=True)
            line.reads |= dict.fromkeys(paths)
            for i in read:
                self.readers.setdefault(i, []).append(line)
        return [value(x) for x in program.outvars]

    def comment(self, line: Line) -> str:
        """Return the shapes of what a line itself gives to others, and the parameters that it reads."""
        inside = set(line.all())
        given = [i for i in line.made if not inside.issuperset(self.readers.get(i, []))]
        facts = list(dict.fromkeys(str(line.made[i]) for i in given))
        for path in line.reads:
            facts.append(f"{path.removeprefix('layers/')} {self.table[path].of_one_layer().shape}")
        return "  ".join(facts)


def _is_program(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def _shapes(variables) -> list:
    return [getattr(x.aval, "shape", None) for x in variables]


def _lines(trace, layer: int | None) -> list:
    """Return the printed lines that led to an operation, outermost first; a layer is its number."""
    lines: list = []
    for frame, number in traceback.walk_tb(trace.as_python_traceback()):
        path = Path(frame.f_code.co_filename)
        file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if (file, frame.f_code.co_name) == ("layer_stack.py", "_layer"):
            lines.append(layer)
        if file.startswith(PRINTED) and file != "ideas/__init__.py":
            source = _source(file, number, frame.f_code.co_name == "<lambda>")
            lines += [source] if lines[-1:] != [source] else []
    return lines


@functools.cache
def _source(file: str, number: int, in_lambda: bool) -> Source:
    nodes = [node for node in ast.walk(_parsed(file)) if _has_line(node, number)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    if in_lambda:
        innermost: ast.AST = [node.body for node in nodes if isinstance(node, ast.Lambda)][-1]
    else:
        innermost = [node for node in nodes if isinstance(node, ast.stmt)][-1]
    return Source(file, innermost, functions[0] if functions else None)


@functools.cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def _has_line(node: Any, number: int) -> bool:
    return hasattr(node, "lineno") and node.lineno <= number <= node.end_lineno


class Name(NamedTuple):
    """Stands for an array in the evaluation of a line."""

    text: str


class Names(dict):
    """Stands for a dict of parameters: each is its name."""

    def __missing__(self, name):
        return Name(name)


class Simplified(ast.NodeTransformer):
    """The text of a line with values of the config and names of parameters filled in.

    What does nothing is left out: sites without an idea, taps, and options that are off.
    """

    def __init__(self, source: Source, known: dict):
        self._scope = vars(sys.modules[f"lm.{source.file.removesuffix('.py').replace('/', '.')}"])
        self._known = dict(known)
        if source.function is not None:
            self._learn(source.function.body)
        node = self.visit(copy.deepcopy(source.node))
        self.text = ast.unparse(node).splitlines()[0]  # of a loop or a branch: its head
        if '"' not in self.text:
            self.text = self.text.replace("'", '"')

    def _value(self, node):
        """Return the value of an expression of what is known; raises an exception for others."""
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        if names.isdisjoint(self._known):
            raise LookupError
        return eval(ast.unparse(node), self._scope, self._known)

    def _learn(self, statements: list) -> None:
        """Add local variables that follow from what is known."""
        for node in statements:
            with contextlib.suppress(Exception):  # other values depend on arrays
                if isinstance(node, ast.With):
                    self._learn(node.body)
                elif isinstance(node, ast.If):
                    self._learn(node.body if self._value(node.test) else node.orelse)
                elif isinstance(node, ast.Assign) and not self._known.keys() & _assigned(node):
                    value = self._value(node.value)
                    exec(f"{ast.unparse(node.targets[0])} = value", {"value": value}, self._known)

    def visit(self, node):
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            with contextlib.suppress(Exception):
                return ast.parse(_text(self._value(node)), mode="eval").body
        return super().visit(node)

    def visit_Call(self, node):
        name = ast.unparse(node.func)
        if name == "here.tap":
            return self.visit(node.args[1])
        if name == "at" and not ideas.applied(node.args[0].value, self._known["c"]):
            return self.visit(node.args[2])
        node = self.generic_visit(node)
        for given in [k for k in node.keywords if k.arg is None and isinstance(k.value, ast.Dict)]:
            options = zip(given.value.keys, given.value.values, strict=True)
            node.keywords.remove(given)
            node.keywords += [ast.keyword(option.value, value) for option, value in options]
        with contextlib.suppress(Exception):
            signature = inspect.signature(eval(name, self._scope, self._known))
            defaults = {option: p.default for option, p in signature.parameters.items()}
            node.keywords = [k for k in node.keywords if not _is_off(k.value, defaults[k.arg])]
            names = list(defaults)
            while node.args and _is_off(node.args[-1], defaults[names[len(node.args) - 1]]):
                node.args.pop()
        return node


def _assigned(node) -> set[str]:
    stores = (n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store))
    return {n.id for n in stores if isinstance(n, ast.Name)}


def _text(value) -> str:
    """Return a plain value as an expression; raises TypeError for others."""
    if isinstance(value, Name):
        return value.text
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, dict) and not isinstance(value, Names):
        return "{" + ", ".join(f"{key!r}: {_text(x)}" for key, x in value.items()) + "}"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    raise TypeError


def _is_off(node, default) -> bool:
    if not isinstance(node, ast.Constant) or node.value != default:
        return False
    return not ideas.is_on(node.value) or node.value == 0


class Block(NamedTuple):
    """A printed line with the lines that it calls; blocks with equal keys are the same equations."""

    key: tuple
    rows: list[str]


def equations(config: Resolved) -> str:
    """Return the equations of a model as text, from the tokens to the loss."""
    traced = Trace(config)
    c, t = config.model, config.train
    head = jax.eval_shape(lambda params: model.head(params, c), traced.params)
    known = {"config": config, "c": c, "head": head, "fraction": Name("fraction")}
    known |= {"p": Names(), "params": Names()}
    windows = layer_stack.windows(c, t.seq_len if config.data.packing == "none" else None)

    def block(line: Line, indent: str, layer: int | None) -> list[Block]:
        window = None if layer is None else windows[layer]
        here = SimpleNamespace(c=c, p=Names(), prototype=layer, window=lambda: window)
        file = line.source.file
        to_ideas = any(_file(inner).startswith("ideas/") for inner in line.calls)
        function = line.source.function
        calls_only = file.startswith(CALLERS)
        calls_only |= function is not None and function.name in CALLING_FUNCTIONS
        if not (line.operations or to_ideas or calls_only):
            return blocks_of_calls(line, indent, layer)
        text = Simplified(line.source, known | {"here": here}).text
        inner = blocks_of_calls(line, indent + "  ", layer)
        key = (text, *line.reads, *(called.key for called in inner))
        return [Block(key, [*_rows(text, traced.comment(line), indent), *_together(inner, indent)])]

    def blocks_of_calls(line: Line, indent: str, layer: int | None) -> list[Block]:
        blocks: list[Block] = []
        layers: dict[tuple, list[int]] = {}
        file = _file(line)
        for called in line.calls:
            if isinstance(called.source, int):
                # of each turn of a loop
                inner = blocks_of_calls(called, indent + "  ", called.source)
                numbers = layers.setdefault(tuple(_together(inner, indent)), [])
                if called.source not in numbers:
                    numbers.append(called.source)
                continue
            if _file(called) not in (file, "step.py"):
                file = _file(called)
                if file.startswith("ideas/"):
                    blocks.append(Block((file,), [_title(file, indent)]))
            blocks += block(called, indent, layer)
        for rows, numbers in layers.items():
            title = f"{indent}{'layers' if len(numbers) > 1 else 'layer'} {_ranges(numbers)}:"
            blocks.append(Block((title,), ["", title, *rows, ""]))
        return blocks

    lengths = {"B": {t.batch_size}, "T": {t.seq_len}}
    for p in traced.table.values():
        for letter, n in zip(p.axes, p.shape, strict=True):
            lengths.setdefault(letter, set()).add(n)
    one = {letter: n for letter, (n, *more) in lengths.items() if letter in LETTERS and not more}
    rows = ["# " + "  ".join(f"{letter} {n}" for letter, n in one.items())]
    if weights := ideas.loss_weights(c, 0.0):
        rows.append(f"# weights of the terms of the loss at the first step: {weights}")
    if c.loops > 1:
        order = ", then ".join(f"{layers.start}-{layers.stop - 1}" for layers in turns(c))
        rows.append(f"# layers in the order in which they are applied: {order}")
    return "\n".join(rows + _together(blocks_of_calls(traced.root, "", None), ""))


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text.

    >>> _ranges([0, 1, 2, 4, 6, 7])
    '0-2, 4, 6-7'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _file(line: Line) -> str:
    return line.source.file if isinstance(line.source, Source) else ""


def _title(file: str, indent: str) -> str:
    """Return the name of the file of an idea, and the beginning of its docstring."""
    docstring = ast.get_docstring(_parsed(file)) or ""
    about = docstring.partition("\n\n")[0]
    title = textwrap.shorten(f"# lm/{file}: {about}", WIDTH - len(indent), placeholder=" ...")
    return indent + title


def _rows(text: str, comment: str, indent: str) -> list[str]:
    width = WIDTH - len(indent)
    rows = textwrap.wrap(text, width, subsequent_indent="    ")
    if not comment:
        return [indent + row for row in rows]
    padded = rows[-1].ljust(COLUMN - len(indent))
    for row in (padded, rows[-1]):
        if len(row) + len(comment) + 4 <= width:
            rows[-1] = f"{row}  # {comment}"
            break
    else:
        rows += textwrap.wrap(comment, width, initial_indent="    # ", subsequent_indent="    # ")
    return [indent + row for row in rows]


def _together(blocks: list[Block], indent: str) -> list[str]:
    """Return the rows of all blocks; a sequence of blocks that repeats itself is printed once."""
    rows: list[str] = []
    keys = [block.key for block in blocks]
    first = 0
    while first < len(blocks):
        size, n = 1, 1
        for period in range(1, (len(blocks) - first) // 2 + 1):
            again = first + period
            while keys[again : again + period] == keys[first : first + period]:
                size, n, again = period, n + 1, again + period
            if n > 1:
                rows.append(f"{indent}  # {n} times, with the shapes of the first time:")
                break
        rows += [row for block in blocks[first : first + size] for row in block.rows]
        first += n * size
    return rows
