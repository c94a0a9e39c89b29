"""Parse the collectives of a compiled program from its HLO text, with the trip counts of its loops."""

import dataclasses
import math
import re

from lm.cost.communication import ring_bytes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that communicates.

    Attributes:
        kind: one of KINDS.
        shapes: (dtype, shape) of each result on one device.
        n: devices in a group.
        times: how often one run of the program executes the instruction.
        where: JAX's name of the operation that it was compiled from.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    n: int
    times: int
    where: str

    @property
    def payload(self) -> int:
        """Return the bytes of the full array that a device starts or ends with, whichever is larger."""
        result = sum(_itemsize(dtype) * math.prod(shape) for dtype, shape in self.shapes)
        return result * self.n if self.kind == "reduce-scatter" else result

    @property
    def sent(self) -> float:
        """Return the bytes that each device sends in one run, with ring algorithms (Thakur et al. 2005)."""
        return ring_bytes(self.kind, self.n, self.payload) * self.times


def parse_collectives(hlo: str) -> list[Collective]:
    """Return the collectives of a compiled program (`compiled.as_text()`), in the order of its text.

    Raises:
        ValueError: a loop contains collectives and XLA does not know its trip count.
    """
    bodies, entry = _computations(hlo)
    times = dict.fromkeys(bodies, 0)
    unknown = set()

    def visit(name: str, n: int, counted: bool) -> None:
        times[name] += n
        if not counted:
            unknown.add(name)
        for line in bodies[name]:
            trips = _TRIPS.search(line)
            is_loop = " while(" in line
            callees = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
            for callee in callees:
                if callee in bodies:
                    visit(
                        callee, n * int(trips[1]) if is_loop and trips else n, counted and not (is_loop and not trips)
                    )

    visit(entry, 1, True)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            if (match := _INSTRUCTION.search(line)) and times[name]:
                if name in unknown:
                    raise ValueError(f"{name}: a collective in a loop of unknown trip count: {line.strip()[:200]}")
                found.append(_collective(match, line, times[name]))
    return found


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by name, and the name of the entry computation."""
    bodies, name, entry = {}, None, None
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif line.startswith("}"):
            name = None
        elif name is not None:
            bodies[name].append(line)
    return bodies, entry


def _collective(match, line: str, times: int) -> Collective:
    arrays = [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(match["type"])]
    if match["start"] and match["kind"] != "all-reduce":  # asynchronous: operands, then results
        arrays = arrays[len(arrays) // 2 :]
    where = re.search(r'op_name="([^"]*)"', line)
    return Collective(match["kind"], tuple(arrays), _group_size(line), times, where[1] if where else "")


def _group_size(line: str) -> int:
    """Return the devices in a group, from replica_groups={{0,1},{2,3}}, =[2,2]<=[4], or =mesh['x'=2,'y'=2] {'y'}."""
    if explicit := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return explicit[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"('[\w.]+')=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis.strip()]) for axis in mesh[2].split(","))
    return 2  # a permutation's pairs


def _itemsize(dtype: str) -> int:
    return 1 if dtype == "pred" else max(1, int(re.search(r"\d+", dtype)[0]) // 8)
