"""The collectives of a program in XLA's text form: their arrays, mesh axes and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
UNKNOWN = ("ragged-all-to-all", "collective-broadcast")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPERAND = re.compile(r"%([\w.\-]+)((?:#\d+)*)")
_ARRAY = re.compile(r"^(\w+?)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(\{.*?\}|%[\w.\-]+)"
)


class Moved(NamedTuple):
    """One collective of a program.

    Args:
        kind: kind of the collective, one of `KINDS`.
        axes: mesh axes along which the devices of a group differ.
        devices: number of devices in a group.
        bytes: bytes of the whole array on a device: the result of an all-gather, and the operand of the others.
        times: number of times that it runs.
        alike: key of collectives of one computation that could be combined into one if they were independent.
        level: number of collectives in its computation, among those with an equal ``alike``, that it waits for one
            after another. Those of the same level are independent.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    bytes: int
    times: int
    alike: tuple[str, ...]
    level: int


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    arguments: str
    operands: list[tuple[str, str]]  # names, and "#1" of the element of a tuple
    rest: str


def collectives_of(text: str, mesh_shape: Mapping[str, int]) -> Iterator[Moved]:
    """Yield the collectives of a partitioned program, each once for each computation that has it.

    Args:
        text: text of ``compiled.as_text()``, or of a dump behind XLA's SPMD partitioner.
        mesh_shape: sizes of the mesh's axes by name; the program's devices are numbered in its order.

    Raises:
        ValueError: for a collective that is not in `KINDS`, groups of another mesh, and a loop with collectives and an
            unknown number of iterations.

    >>> program = '''ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} all-reduce(%p), replica_groups=[2,2]<=[4], to_apply=%add
    ... }'''
    >>> [(moved.kind, moved.axes, moved.bytes) for moved in collectives_of(program, {"data": 2, "tensor": 2})]
    [('all-reduce', ('tensor',), 16)]
    """
    computations, entry = _parse(text)
    found = {name: _own_collectives(body, computations, mesh_shape) for name, body in computations.items()}
    inside: dict[str, bool] = {}

    def has_any(name: str) -> bool:
        if name not in inside:
            inside[name] = bool(found[name]) or any(map(has_any, _called(computations[name], computations)))
        return inside[name]

    def visit(name: str, times: int) -> Iterator[Moved]:
        for moved in found[name]:
            yield moved._replace(times=times, alike=(name, *moved.alike))
        for instruction in computations[name]:
            for called in _called([instruction], computations):
                if has_any(called):
                    yield from visit(called, times * _trips(instruction, computations))

    yield from visit(entry, 1)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        line = _COMMENT.sub("", line) if "/*" in line else line
        head = _INSTRUCTION.match(line)
        if head:
            body.append(_instruction(head[1], line[head.end() :]))
            continue
        start = _COMPUTATION.match(line)
        if start:
            body = computations[start[2]] = []
            entry = start[2] if start[1] else entry
    if not entry:
        raise ValueError("the text is not an HLO program; give that of compiled.as_text()")
    return computations, entry


def _instruction(name: str, text: str) -> _Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    opcode, _, arguments = rest.partition("(")
    stop = _closing("(" + arguments) - 1  # behind the bracket
    inside = arguments[: stop - 1]
    return _Instruction(name, kind, opcode, inside, _OPERAND.findall(inside), arguments[stop:])


def _closing(text: str) -> int:
    """Return the index after the bracket that closes the first one."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth:
            return index + 1
    return len(text)


def _own_collectives(
    body: list[_Instruction], computations: dict[str, list[_Instruction]], mesh_shape: Mapping[str, int]
) -> list[Moved]:
    """Return the collectives of one computation, without those of the computations that it calls."""
    types = {instruction.name: instruction.type for instruction in body}
    found = []
    for instruction in body:
        kind = instruction.opcode.removesuffix("-start")
        if kind in UNKNOWN:
            raise ValueError(f"{kind} %{instruction.name} is not counted; those that are: {', '.join(KINDS)}")
        if kind not in KINDS:
            continue
        arrays = [_element(types[name], path) for name, path in instruction.operands]
        axes, devices = _group(instruction.rest, mesh_shape)
        if devices == 1:
            continue  # a group of one device moves nothing
        size = sum(map(_bytes, arrays)) * (devices if kind == "all-gather" else 1)
        if kind == "all-reduce" and _is_sliced(instruction, body, size // devices):
            kind = "reduce-scatter"
        reducer = re.search(r"to_apply=%([\w.\-]+)", instruction.rest)
        # XLA combines collectives only if dtype and reduction are the same.
        reduced = computations[reducer[1]][-1].opcode if reducer and reducer[1] in computations else ""
        alike = (kind, *axes, str(devices), arrays[0].partition("[")[0], reduced)
        found.append((instruction.name, Moved(kind, axes, devices, size, 1, alike, 0)))
    return _with_levels(body, dict(found))


def _is_sliced(reduced: _Instruction, body: list[_Instruction], size: int) -> bool:
    """Return whether only a slice of so many bytes of a sum is used: the GPU compiler then reduce-scatters it."""
    users = [each for each in body if any(name == reduced.name for name, _ in each.operands)]
    while len(users) == 1 and users[0].opcode in ("bitcast", "copy", "reshape"):
        (user,) = users
        users = [each for each in body if any(name == user.name for name, _ in each.operands)]
    return len(users) == 1 and users[0].opcode == "dynamic-slice" and _bytes(users[0].type) == size


def _with_levels(body: list[_Instruction], found: dict[str, Moved]) -> list[Moved]:
    """Return collectives, given by name, with their levels: the number of those alike whose results they wait for."""
    levels: dict[str, int] = {}
    for alike in {moved.alike for moved in found.values()}:
        behind: dict[str, int] = {}  # number of collectives in a chain before a value
        for instruction in body:
            level = max((behind.get(name, 0) for name, _ in instruction.operands), default=0)
            moved = found.get(instruction.name)
            if moved is not None and moved.alike == alike:
                levels[instruction.name] = level
                level += 1
            if level:
                behind[instruction.name] = level
    return [moved._replace(level=levels[name]) for name, moved in found.items()]


def _element(of_all: str, path: str) -> str:
    """Return the type of an element of a tuple, ``name#1#0``, by the type of all."""
    for index in path.split("#")[1:]:
        of_all = _parts(of_all)[int(index)]
    return of_all


def _parts(of_tuple: str) -> list[str]:
    """Return the types of the elements of a tuple."""
    parts, start, depth = [], 1, 0
    for index, letter in enumerate(of_tuple):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (index == len(of_tuple) - 1):
            parts.append(of_tuple[start:index].strip())
            start = index + 1
    return parts


def _bytes(of_value: str) -> int:
    """Return the size of a value by its type, an array's or a tuple's."""
    if of_value.startswith("("):
        return sum(map(_bytes, _parts(of_value)))
    dtype, shape = _ARRAY.match(of_value).groups()  # type: ignore[union-attr]
    width = re.search(r"\d+", dtype)
    bits = int(width[0]) if width else 8  # pred
    return math.ceil(math.prod(int(size) for size in shape.split(",") if size) * bits / 8)


def _called(body: list[_Instruction], computations: Mapping[str, list[_Instruction]]) -> list[str]:
    names = []
    for instruction in body:
        # The end of an asynchronous operation names the operation that its start has called.
        if not instruction.opcode.endswith(("-done", "-update")) and "=" in instruction.rest:
            for called in _CALLED.findall(instruction.rest):
                names += re.findall(r"[\w.\-]+", called)
    return [name for name in names if name in computations]


def _trips(instruction: _Instruction, computations: Mapping[str, list[_Instruction]]) -> int:
    """Return the number of iterations of a while loop; 1 for other instructions."""
    if instruction.opcode != "while":
        return 1
    known = _TRIPS.search(instruction.rest)
    if known:
        return int(known[1])
    # XLA has not recorded it yet. A loop of jax.lax.scan counts from 0, by 1, while it is below a constant.
    condition = re.search(r"condition=%([\w.\-]+)", instruction.rest)
    body = computations.get(condition[1], []) if condition else []
    steps = {each.name: each for each in body}
    if body and body[-1].opcode == "compare" and "direction=LT" in body[-1].rest:
        limit = steps.get(body[-1].operands[1][0])
        while limit is not None and limit.opcode in ("copy", "convert", "bitcast", "reshape"):  # of Explicit meshes
            limit = steps.get(limit.operands[0][0])
        if limit is not None and limit.opcode == "constant" and limit.arguments.isdecimal():
            return int(limit.arguments)
    raise ValueError(f"the loop %{instruction.name} has collectives, and does not say how often it runs")


def _group(text: str, mesh_shape: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which the devices of a group differ, and how many devices it has."""
    total = math.prod(mesh_shape.values())
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
    if pairs:
        ends = np.array([int(number) for number in re.findall(r"\d+", pairs[1])]).reshape(-1, 2)
        _check_devices(ends, total)
        places = np.unravel_index(ends, tuple(mesh_shape.values()))
        axes = [axis for axis, place in zip(mesh_shape, places, strict=True) if (place[:, 0] != place[:, 1]).any()]
        return tuple(axes), math.prod(mesh_shape[axis] for axis in axes)
    group = _first_group(text, total)
    _check_devices(group, total)
    places = np.unravel_index(group, tuple(mesh_shape.values()))
    return tuple(axis for axis, place in zip(mesh_shape, places, strict=True) if np.ptp(place)), len(group)


def _first_group(text: str, total: int) -> np.ndarray:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if listed:
        return np.array(_integers(listed[1]))
    if "replica_groups={}" in text:
        return np.arange(total)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S+)", text)
    if iota:
        return _iota(iota[3]).reshape(int(iota[1]), int(iota[2]))[0]
    # The compiler's own mesh, whose axes it may have split: 'axis':(2)4 are 4 parts after 2.
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^{}]*)\}", text)
    if named is None:
        raise ValueError(f"cannot read the groups of a collective: {text[:200]}")
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
    numbers = (_iota(named[2]) if named[2] else np.arange(math.prod(sizes.values()))).reshape(tuple(sizes.values()))
    wanted = {axis: (before, part) for axis, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[3])}
    for dim, axis in enumerate(sizes):
        before, part = wanted.get(axis, ("", ""))
        if axis not in wanted:
            numbers = numbers.take([0], dim)
        elif part:
            numbers = numbers.take(range(0, sizes[axis] // int(before), sizes[axis] // int(before) // int(part)), dim)
    return numbers.reshape(-1)


def _iota(text: str) -> np.ndarray:
    """Return the numbers of ``[2,4]``, in the order of ``[2,4]T(1,0)``, or those of a list."""
    sizes = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", text)
    if sizes is None:
        return np.array(_integers(text))
    numbers = np.arange(math.prod(_integers(sizes[1]))).reshape(_integers(sizes[1]))
    return numbers.transpose(_integers(sizes[2]) if sizes[2] else None)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _check_devices(numbers: np.ndarray, total: int) -> None:
    if numbers.max() >= total:
        raise ValueError(
            f"the program has device {numbers.max()}, and the mesh {total} devices; give the mesh it is for"
        )
