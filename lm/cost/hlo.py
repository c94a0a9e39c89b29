"""Read a compiled program from XLA's texts: collectives, cycles, trip counts and buffers."""

import dataclasses
import itertools
import math
import re

import numpy as np

from lm.cost.communication import ring_bytes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_OVER_SLICES = re.compile(
    r"= \((?P<type>.*?), u32.* send\(.*"
    r'_megascale_target="\{(?P<slices>[\d,]+)\}x.*_megascale_transfer_type="(?P<kind>\w+)"'
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_CONTROLLED = re.compile(r"(?:body|condition|true_computation|false_computation)=%?([\w.-]+)")
# Computations that are a part of the schedule, in contrast to those inside of a kernel.
_SCHEDULED = re.compile(
    r"(?:(?:body|condition|true_computation|false_computation)| call\(.*\bto_apply| async-start\(.*\bcalls)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
# XLA:TPU copies a collective that it overlaps with products into several fusions, with one of these
# attributes.
_OVERLAPPED = re.compile(r"(chain_id|async_collective_name)=\"([^\"]*)\"")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that communicates."""

    kind: str  # one of KINDS
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of each result on one device
    # numbers of the devices of one group, in the order of the mesh; or of TPU slices
    group: tuple[int, ...]
    times: int  # how often one run of the program executes the instruction
    overlapped: bool  # whether other operations run at the same time
    # one device of each TPU slice takes part; XLA:TPU writes a transfer of the host
    over_slices: bool = False

    @property
    def n(self) -> int:
        return len(self.group)

    @property
    def payload(self) -> int:
        """Return the bytes of the full array that a device starts or ends with, if larger."""
        result = _bytes(self.shapes)
        return result * self.n if self.kind == "reduce-scatter" else result

    @property
    def sent(self) -> float:
        """Return the bytes that each device sends in one run, by rings (Thakur et al. 2005)."""
        return ring_bytes(self.kind, self.n, self.payload) * self.times

    def axes(self, sizes: dict[str, int]) -> tuple[str, ...]:
        """Return the axes of a mesh along which the devices of a group differ, or "slices"."""
        if self.over_slices:
            return ("slices",)
        places = np.unravel_index(np.array(self.group), tuple(sizes.values()))
        return tuple(
            axis
            for axis, coordinates in zip(sizes, places, strict=True)
            if len(np.unique(coordinates)) > 1
        )


def parse_collectives(hlo: str) -> list[Collective]:
    """Return the collectives of a compiled program (`compiled.as_text()`), in order.

    Raises:
        ValueError: a loop contains collectives and its trip count cannot be found.
    """
    bodies, entry = _computations(hlo)
    times, unknown = _runs(bodies, entry, _CALLED)
    every_line = list(itertools.chain.from_iterable(bodies.values()))
    starts = [line for line in every_line if " async-start(" in line]
    asynchronous = {*itertools.chain.from_iterable(map(_CALLED.findall, starts))}
    collectives = []
    seen = set()
    for name, lines in bodies.items():
        for line in lines if times[name] else ():
            if match := _INSTRUCTION.search(line):
                if name in unknown:
                    raise ValueError(
                        f"{name}: a collective in a loop of unknown trip count: "
                        f"{line.strip()[:200]}"
                    )
                if copied := _OVERLAPPED.search(line):  # of the copies, the first counts
                    channel = re.search(r"channel_id=(\d+)", line)
                    key = (copied[2], channel and channel[1])
                    if key in seen:
                        continue
                    seen.add(key)
                overlapped = bool(copied or match["start"]) or name in asynchronous
                collective = _collective(match, line, times[name], overlapped)
                if "all-reduce-scatter" in name:
                    collective = _scattered(collective)
                collectives.append(collective)
            elif match := _OVER_SLICES.search(line):
                kind = match["kind"].lower().replace("_", "-")
                slices = tuple(map(int, match["slices"].split(",")))
                shapes = tuple(_arrays(match["type"]))
                collectives.append(Collective(kind, shapes, slices, times[name], False, True))
    return collectives


def compute_cycles(hlo: str) -> int:
    """Return XLA:TPU's estimate of the cycles of one run, from the text after code generation.

    Collectives and kernels of Pallas have no estimate.

    Raises:
        ValueError: the trip count of a loop cannot be found.
    """
    bodies, entry = _computations(hlo)
    times, unknown = _runs(bodies, entry, _CONTROLLED)
    total = 0
    for name, lines in bodies.items():
        estimates = re.findall(r'"estimated_cycles":"(\d+)"', "\n".join(lines))
        cycles = sum(map(int, estimates))
        if cycles and times[name] and name in unknown:
            raise ValueError(f"{name}: a loop of unknown trip count")
        total += cycles * times[name]
    return total


def scheduled(hlo: str) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the lines of each computation and how often the schedule executes it (kernels: 0)."""
    bodies, entry = _computations(hlo)
    times, _ = _runs(bodies, entry, _SCHEDULED)
    return bodies, times


def array_bytes(text: str) -> int:
    """Return the bytes of the arrays in a text such as "(f32[8]{0}, bf16[2,2])".

    >>> array_bytes("(f32[8]{0}, bf16[2,2])")
    40
    """
    return _bytes(_arrays(text))


def aliased_bytes(hlo: str) -> int:
    """Return the bytes of the arguments whose place outputs take."""
    header = hlo.split("\n", 1)[0].split("entry_computation_layout")[0]
    aliased = set(re.findall(r": \((\d+), \{", header))
    bodies, entry = _computations(hlo)
    total = 0
    for line in bodies[entry]:
        if (number := re.search(r" parameter\((\d+)\)", line)) and number[1] in aliased:
            total += _bytes(_arrays(line.split(" parameter(")[0]))
    return total


def largest_buffers(assignment: str, hlo: str, n: int) -> list[tuple[int, str]]:
    """Return the bytes of the n largest buffers in the device's memory, and their owners.

    Buffers that share an address at different times count as one, the largest. `assignment` is
    XLA's text of the assignment of buffers, and `hlo` the program.
    """
    owners = dict(
        re.findall(r'^ +(?:ROOT )?%?([\w.-]+) = .*?op_name="((?:[^"\\]|\\.)*)"', hlo, re.MULTILINE)
    )
    value = re.compile(r"value: <\d+ ([\w.-]+)\S* .*?\(size=(\d+),offset=(\d+)\)")
    buffers: dict[tuple[str, str], tuple[int, str]] = {}
    for text in assignment.split("\nallocation ")[1:]:
        number, rest = text.split(":", 1)
        if "color" in rest.split("\n", 1)[0]:  # another memory than the device's
            continue
        for name, size, offset in value.findall(rest):
            if int(size) > buffers.get((number, offset), (0, ""))[0]:
                owner = owners.get(name, name).replace("\\'", "'")
                buffers[number, offset] = (int(size), owner)
    return sorted(buffers.values(), reverse=True)[:n]


def _runs(
    bodies: dict[str, list[str]], entry: str, called: re.Pattern
) -> tuple[dict[str, int], set[str]]:
    """Return how often each computation runs, and the loops of unknown count (counted once)."""
    times = dict.fromkeys(bodies, 0)
    unknown = set()

    def visit(name: str, n: int, counted: bool) -> None:
        times[name] += n
        if not counted:
            unknown.add(name)
        for line in bodies[name]:
            trips = _trips(line, bodies) if " while(" in line else 1
            callees = called.findall(line)
            for branches in _BRANCHES.findall(line):
                callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
            for callee in callees:
                if callee in bodies:
                    visit(callee, n * (trips or 1), counted and trips is not None)

    visit(entry, 1, True)
    return times, unknown


def _trips(line: str, bodies: dict[str, list[str]]) -> int | None:
    """Return how often a loop runs, None if unknown; XLA:TPU states it in the condition only."""
    if known := _TRIPS.search(line):
        return int(known[1])
    named = re.search(r"condition=%?([\w.-]+)", line)
    condition = "\n".join(bodies.get(named[1], ())) if named else ""
    limits = re.findall(r"= s32\[\]\S* constant\((\d+)\)", condition)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in condition else None


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by name, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    name = None
    entry = ""
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            if line.startswith("ENTRY"):
                entry = name
            bodies[name] = []
        elif line == "}":  # a kernel's attributes may have other lines that start with }
            name = None
        elif name is not None:
            bodies[name].append(line)
    return bodies, entry


def _collective(match, line: str, times: int, overlapped: bool) -> Collective:
    arrays = _arrays(match["type"])
    if match["start"] and match["kind"] != "all-reduce":  # asynchronous: operands, then results
        arrays = arrays[len(arrays) // 2 :]
    return Collective(match["kind"], tuple(arrays), _group(line), times, overlapped)


def _scattered(c: Collective) -> Collective:
    """Return the reduce-scatter that XLA:TPU writes as a fusion of an all-reduce and slices."""
    parts = tuple((dtype, (math.prod(shape) // c.n,)) for dtype, shape in c.shapes)
    return dataclasses.replace(c, kind="reduce-scatter", shapes=parts)


def _group(line: str) -> tuple[int, ...]:
    """Return the first group of replica_groups={{0,1},{2,3}}, =[2,2]<=[4]T(0) or =mesh[...]."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", line):
        return tuple(int(n) for n in explicit[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape = [int(size) for size in iota[2].split(",")]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if iota[3]:
            numbers = numbers.transpose([int(axis) for axis in iota[3].split(",")])
        return tuple(numbers.ravel()[: int(iota[1])].tolist())
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line)
    if mesh is None:
        raise ValueError(f"a collective without groups: {line.strip()[:200]}")
    sizes = {axis: int(n) for axis, n in re.findall(r"'([\w.]+)'=(\d+)", mesh[1])}
    named = {axis.strip(" '") for axis in mesh[2].split(",")}
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    first = tuple(slice(None) if axis in named else 0 for axis in sizes)
    return tuple(numbers[first].ravel().tolist())


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(map(int, filter(None, sizes.split(",")))))
        for dtype, sizes in _ARRAY.findall(text)
    ]


def _bytes(arrays) -> int:
    return sum(_itemsize(dtype) * math.prod(shape) for dtype, shape in arrays)


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)  # none in pred
    return max(1, int(bits[0]) // 8) if bits else 1
