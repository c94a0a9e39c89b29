"""Make a program for one config: decide its conditions, and leave out what is then unused.

The program reads the keys of the config as `c.KEY`. Comments and the form of lines stay.
"""

import ast
import builtins
import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


def specialized(source: str, keys: dict[str, Any], root: str) -> str:
    """Return a program in which all conditions on `c` alone are decided.

    A condition may begin with a part on `c` alone, as in `if c.moe and layer > 0`. Loops over
    `c.KEY` become straight lines, in which getattr(x, "name") is x.name.

    Args:
        source: the program, formatted, with an `else` on a line of its own.
        keys: the values of `c` by name.
        root: the definition that is used; others are left out if nothing reads them.

    >>> source = "if c.wide:\\n    n = 4\\nelse:\\n    n = 2\\n\\nclass A: size = n\\nclass B: pass"
    >>> print(specialized(source, {"wide": False}, root="A"))
    n = 2
    <BLANKLINE>
    class A: size = n
    <BLANKLINE>
    """
    c = SimpleNamespace(**keys)
    lines = source.splitlines()
    while decisions := _decisions(ast.parse("\n".join(lines))):
        for node in reversed(decisions):
            decide = _decide if isinstance(node, ast.If) else _unroll
            decide(lines, node, c)
    while unused := list(_unused(ast.parse("\n".join(lines)), root)):
        left_out = {n for node in unused for n in range(node.lineno - 1, node.end_lineno)}
        lines = [line for n, line in enumerate(lines) if n not in left_out]
    text = "\n".join(lines).strip() + "\n"
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return re.sub(r"\n{3,}(?= )", "\n\n", text)


def names_of_keys(source: str) -> set[str]:
    """Return the KEYs of all c.KEY.

    >>> names_of_keys("x = c.width * c.depth + layer.depth")  == {"width", "depth"}
    True
    """
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and _is_key(node)
    }


def _is_key(node: ast.AST) -> bool:
    """Return whether an expression is c.KEY."""
    return isinstance(node, ast.Attribute) and _name(node.value) == "c"


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_decided(expression: ast.expr) -> bool:
    """Return whether an expression reads nothing but `c` and constants."""
    names = {name for node in ast.walk(expression) if (name := _name(node))}
    return names <= {"c", *dir(builtins)}


def _decisions(node: Any) -> list[Any]:
    """Return what is decided: each `if` whose condition begins with a part on `c` alone, and each
    loop over one of our keys, in the order of the lines. Those inside of another one come later.
    """
    if isinstance(node, ast.If):
        test: Any = node.test
        first = test.values[0] if _is_and(test) else test
        if _is_decided(test) or _is_decided(first):
            return [node]
    if isinstance(node, ast.For) and _is_key(node.iter):
        return [node]
    return [found for child in ast.iter_child_nodes(node) for found in _decisions(child)]


def _is_and(test: Any) -> bool:
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)


def _decide(lines: list[str], node: Any, c: SimpleNamespace) -> None:
    """Put the branch that is taken in the place of a statement, or leave out the decided part."""
    first = node.test if _is_decided(node.test) else node.test.values[0]
    holds = eval(ast.unparse(first), {"c": c})
    start = node.lineno - 1
    end = node.end_lineno
    first_of_body = node.body[0].lineno - 1
    while not lines[first_of_body - 1].endswith(":"):  # comments
        first_of_body -= 1
    if holds and first is not node.test:
        indent = lines[start][: node.col_offset]
        others = node.test.values[1:]
        rest = _text(others[0] if len(others) == 1 else ast.BoolOp(ast.And(), others))
        lines[start:first_of_body] = [f"{indent}if {rest}:"]
    elif holds:
        body = lines[first_of_body : node.body[-1].end_lineno]
        lines[start:end] = _dedented(body)
    elif not node.orelse:
        del lines[start:end]
    else:
        line = node.orelse[0].lineno - 1
        if lines[line].lstrip().startswith("elif "):
            lines[start:end] = [lines[line].replace("elif", "if", 1), *lines[line + 1 : end]]
        else:
            while lines[line].strip() != "else:":
                line -= 1
            lines[start:end] = _dedented(lines[line + 1 : end])


class _Constants(ast.NodeTransformer):
    """Put constants in the place of names: getattr(self, f"{name}_norm") is self.ffn_norm."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def visit_Name(self, node):
        return ast.Constant(self.values[node.id]) if node.id in self.values else node

    def visit_JoinedStr(self, node):
        self.generic_visit(node)
        parts = [getattr(part, "value", part) for part in node.values]
        texts = [part.value if isinstance(part, ast.Constant) else part for part in parts]
        return ast.Constant("".join(texts))

    def visit_Call(self, node):
        self.generic_visit(node)
        if _name(node.func) == "getattr":
            return ast.Attribute(node.args[0], node.args[1].value)
        return node

    def visit_Expr(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and _name(node.value.func) == "setattr":
            owner, name, value = node.value.args
            return ast.Assign([ast.Attribute(owner, name.value)], value, lineno=node.lineno)
        return node


def _unroll(lines: list[str], node: Any, c: SimpleNamespace) -> None:
    """Put the bodies of all turns in the place of a loop."""
    indent = lines[node.lineno - 1][: node.col_offset]
    names = [name.id for name in node.target.elts]
    written = []
    for values in getattr(c, node.iter.attr):
        constants = _Constants(dict(zip(names, values, strict=True)))
        for statement in node.body:
            text = _text(constants.visit(copy.deepcopy(statement)))
            written += [f"{indent}{line}" for line in text.splitlines()]
    lines[node.lineno - 1 : node.end_lineno] = written


def _text(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def _dedented(lines: list[str]) -> list[str]:
    return [line.removeprefix("    ") for line in lines]


def _unused(tree: ast.Module, root: str) -> Iterator[Any]:
    """Yield definitions, and assignments to `c`, that nothing reads."""
    used = {root, *_loaded(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "c" not in _loaded(node):
            yield from (part for part in node.body if _assigned(part) == "c")
    for node in tree.body:
        name = _assigned(node) or getattr(node, "name", None)
        if isinstance(node, ast.Import):
            name = node.names[0].name
        if name is not None and name not in used:
            yield node


def _assigned(node: ast.stmt) -> str | None:
    return _name(node.targets[0]) if isinstance(node, ast.Assign) else None


def _loaded(tree: ast.AST) -> set[str]:
    """Return the names that are read."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}
