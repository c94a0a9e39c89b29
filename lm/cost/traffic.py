"""Bytes that the kernels of a program move between device and memory, from XLA's text.

The sum is an upper limit: all operands and results of each kernel count, as if there were no cache.
Where a kernel reads slices of an operand, or replaces a part of an array in place, only these
slices count. The workspace of a product of cuBLAS does not.
"""

import dataclasses
import re
from collections.abc import Iterable

from lm.cost import hlo

PRODUCTS = "matrix products"
ATTENTION = "attention kernels"
COLLECTIVES = "collectives"
REDUCTIONS = "reductions"
COPIES = "copies"
OTHER = "element by element"

_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)"
)
# JAX 0.12 writes %t#1 for element 1 of the tuple t, and %t#1#0 for an element of that.
_OPERAND = re.compile(r"%([\w.-]+(?:#\d+)*)")
_FUSED = re.compile(r"calls=%?([\w.-]+)")
# Arrays with their layout; XLA:TPU marks those outside of the device's memory, in VMEM for
# instance, by S(1).
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[[\d,]*\](?P<layout>\{[^}]*\})?")
_OWNER = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
# Instructions that move nothing themselves. The end of an asynchronous one belongs to its start.
_NO_KERNEL = {
    "parameter", "get-tuple-element", "bitcast", "tuple", "constant", "after-all", "while", "conditional", "call",
    "opt-barrier", "partition-id", "replica-id", "async-start", "iota", "add-dependency", "domain",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
# Targets are in quotes; operands are named after targets, too.
_PRODUCT = re.compile(r' (?:dot|convolution)\(|"[^"]*(?:gemm|cublas)')
_CUBLAS = re.compile(r'custom_call_target="__cublas')
_ATTENTION = re.compile(r'"[^"]*(?:fmha|tpu_custom_call|splash|flash)')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that moves bytes.

    Attributes:
        kind: "matrix products", "attention kernels", "collectives", "reductions", "copies" or
            "element by element".
        owner: JAX's name of the operation, such as
            "jit(train_step)/jvp()/layers/0/ffn/dot_general".
        moved: bytes of one run.
        times: runs in one run of the program.
    """

    kind: str
    owner: str
    moved: int
    times: int

    @property
    def total(self) -> int:
        return self.moved * self.times


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    op: str
    operands: list[str]
    line: str


def kernels(text: str) -> list[Kernel]:
    """Return the kernels of a compiled program (`compiled.as_text()`), in the order of its text.

    A loop whose trip count is not known counts once.
    """
    bodies, times = hlo.scheduled(text)
    computations = {name: _parse(lines) for name, lines in bodies.items()}
    moving = []
    for name, computation in computations.items():
        if not times[name]:
            continue
        for i in computation.values():
            if i.op in _NO_KERNEL or i.op.endswith(("-done", "-update")):
                continue
            fused = computations.get(_called(i), {})
            moved = _read(i, computation, computations) + _written(i, computation, fused)
            owner = _OWNER.search(i.line)
            kind = _kind(i, fused.values())
            moving.append(Kernel(kind, owner[1] if owner else i.name, moved, times[name]))
    return moving


def _parse(lines: list[str]) -> dict[str, _Instruction]:
    instructions: dict[str, _Instruction] = {}
    for match in filter(None, map(_INSTRUCTION.match, lines)):
        name = match["name"]
        operands = _OPERAND.findall(match["rest"].split("), ")[0])
        for operand in operands:
            _add_element(operand, instructions)
        instructions[name] = _Instruction(name, match["type"], match["op"], operands, match.string)
    return instructions


def _add_element(operand: str, instructions: dict[str, _Instruction]) -> None:
    """Add the instruction that takes an element of a tuple; see _OPERAND."""
    value, mark, index = operand.rpartition("#")
    if not mark or operand in instructions:
        return
    _add_element(value, instructions)
    type = _elements(instructions[value].type)[int(index)]
    instructions[operand] = _Instruction(operand, type, "get-tuple-element", [value], "")


def _elements(type: str) -> list[str]:
    """Return the types of a tuple's elements.

    >>> _elements("(f32[2,3]{1,0:T(8,128)}, (s32[], pred[]), /*index=2*/u8[0]{0})")
    ['f32[2,3]{1,0:T(8,128)}', '(s32[], pred[])', '/*index=2*/u8[0]{0}']
    """
    elements = [""]
    depth = 0
    for letter in type[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += letter
    return [element.strip() for element in elements]


def _called(i: _Instruction) -> str:
    """Return the computation of a fusion, "" for other instructions."""
    called = _FUSED.search(i.line) if i.op == "fusion" else None
    return called[1] if called else ""


def _is_root(i: _Instruction) -> bool:
    return i.line.lstrip().startswith("ROOT")


def _kind(i: _Instruction, fused: Iterable[_Instruction]) -> str:
    text = "\n".join([i.line.split(", metadata=")[0], *(part.line for part in fused)])
    if i.op.removesuffix("-start") in hlo.KINDS:
        return COLLECTIVES
    if _ATTENTION.search(text):
        return ATTENTION
    if _PRODUCT.search(text):
        return PRODUCTS
    if " reduce(" in text or "reduce-window(" in text:
        return REDUCTIONS
    if i.op.startswith("copy") or " transpose(" in text:
        return COPIES
    return OTHER


def _read(i: _Instruction, computation: dict, computations: dict) -> int:
    """Return the bytes that an instruction reads."""
    total = 0
    for number, operand in enumerate(i.operands):
        if operand in computation:
            whole = _bytes(computation[operand].type)
            used = _used_by(i, number, computations)
            total += whole if used is None else min(used, whole)
    return total


def _used_by(user: _Instruction, number: int, computations: dict) -> int | None:
    """Return how many bytes of an operand an instruction uses, None: all."""
    if user.op == "fusion":
        fused = computations.get(_called(user), {})
        for part in fused.values():
            if part.op == "parameter" and f" parameter({number})" in part.line:
                return _used(part, fused, computations)
    if number == 0 and user.op in _SLICES:
        return _bytes(user.type)
    if number == 0 and user.op == "dynamic-update-slice":
        return 0
    return None


def _used(value: _Instruction, fused: dict, computations: dict) -> int | None:
    """Return how many bytes of a value the other instructions of a fusion use, None: all."""
    if _is_root(value):
        return None
    total = 0
    for user in fused.values():
        for number, operand in enumerate(user.operands):
            if operand != value.name:
                continue
            if user.op in ("bitcast", "convert"):
                used = _used(user, fused, computations)
            else:
                used = _used_by(user, number, computations)
            if used is None:
                return None
            if used and user.op == "convert":  # what is read has the width of its operand
                used = used * _bytes(value.type) // _bytes(user.type)
            total += used
    return total


def _written(i: _Instruction, computation: dict, fused: dict) -> int:
    """Return the bytes that an instruction writes."""
    if i.op.endswith("-start"):  # (result, operand, ...), or (operand, result, ...)
        return max((_bytes(part) for part in _arrays(i.type)), default=0)
    if not fused and i.op == "dynamic-update-slice":
        return _bytes(computation[i.operands[1]].type)
    root = next(filter(_is_root, fused.values()), None)
    if _CUBLAS.search(root.line if root else i.line):  # (result, ..., workspace)
        return sum(_bytes(part) for part in _arrays(i.type)[:-1])
    if root is None:
        return _bytes(i.type)
    results = [root]
    if root.op == "tuple":
        results = [fused[name] for name in root.operands if name in fused]
    updates = [_update(result, fused) for result in results]
    # What stays outside of the device's memory is marked on the fusion's own type only.
    if not any(updates):
        return _bytes(i.type)
    return sum(
        update or _bytes(result.type) for update, result in zip(updates, results, strict=True)
    )


def _update(result: _Instruction, fused: dict) -> int:
    """Return the bytes of the slice that a result replaces in place; 0 of another result."""
    while result.op == "bitcast" and result.operands[0] in fused:
        result = fused[result.operands[0]]
    if result.op != "dynamic-update-slice":
        return 0
    return _bytes(fused[result.operands[1]].type)


def _arrays(text: str) -> list[str]:
    arrays = _ARRAY.finditer(text)
    return [match[0] for match in arrays if not re.search(r"S\([1-9]", match["layout"] or "")]


def _bytes(text: str) -> int:
    return sum(hlo.array_bytes(part) for part in _arrays(text))
