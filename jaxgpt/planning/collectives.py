"""What devices exchange in one step, read off the compiled text: axes, bytes, how often.

Bytes are what each device sends where the exchange takes no more than it must: of n bytes and a
group of g, an all-reduce sends 2 n (g-1)/g, all others n (g-1)/g, and a permutation n, n being the
larger of operand and result. Groups are numbers of devices in the order of the mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxgpt.planning import hlo

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
GROUPS = re.compile(
    r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? \{[^}]*\}|"
    r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?)*\})"
)
# What keeps a device busy while an exchange is under way.
WORK = {"fusion", "dot", "convolution", "custom-call", "call", "while", "conditional"}
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """One exchange. It is run `runs` times a step, and each time a device sends `bytes`."""

    name: str
    kind: str  # of KINDS; an all-reduce of which each device keeps its part is a reduce-scatter
    axes: tuple[str, ...]  # of the mesh that its groups span; () where nothing is exchanged
    partial: bool  # only over a part of these axes
    group: int  # devices that take part together
    dtype: str  # of the largest array
    shape: tuple[int, ...]  # of the largest array, on the side where it is whole
    whole_bytes: int  # of all arrays, on that side
    bytes: int
    runs: int
    overlapped: bool  # other work lies between its start and the place where it is awaited
    op_name: str

    @property
    def bytes_per_step(self) -> int:
        return self.bytes * self.runs


class Row(NamedTuple):
    """All exchanges of one kind over the same axes, per step."""

    axes: tuple[str, ...]
    kind: str
    count: int
    bytes: int


def collectives(program: hlo.Program | str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return the exchanges of a compiled program, those that send most first.

    `mesh`: axis sizes in the order of the mesh (`mesh.shape`).
    """
    if isinstance(program, str):
        program = hlo.parse(program)
    found = [_collective(program, where, line, mesh) for where, line in _lines(program)]
    return tuple(sorted(found, key=lambda one: -one.bytes_per_step))


def table(found: Sequence[Collective]) -> tuple[Row, ...]:
    """Return the sums by axes and kind, the largest first."""
    sums: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}
    for one in found:
        count, sent = sums.get((one.axes, one.kind), (0, 0))
        sums[one.axes, one.kind] = (count + one.runs, sent + one.bytes_per_step)
    rows = [Row(axes, kind, *both) for (axes, kind), both in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def replica_groups(text: str, num_devices: int) -> np.ndarray:
    """Return the groups [number, size] that an attribute `replica_groups=` spells out.

    Three spellings: lists, `[4,2]<=[2,4]T(1,0)` (numbers 0.. reshaped, transposed, reshaped), and
    `mesh['a'=2,'b'=4] {'b'}` (an axis, or `'b':(1)2` for 2 of its parts, 1 part before them).
    """
    if text.startswith("mesh["):
        return _groups_of_axes(text)
    if iota := IOTA.fullmatch(text):
        return _iota(iota)
    lists = [_numbers(inner) for inner in re.findall(r"\{([\d,]+)\}", text)]
    return np.array(lists) if lists else np.arange(num_devices)[None]


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], bool]:
    """Return the mesh axes along which the members of a group differ, and whether only in part."""
    names, sizes = list(mesh), tuple(mesh.values())
    places = np.stack(np.unravel_index(groups, sizes), -1)  # [number, size, axes]
    differ = (places != places[:, :1]).any((0, 1))
    axes = tuple(name for name, differs in zip(names, differ, strict=True) if differs)
    return axes, groups.shape[1] < math.prod(mesh[axis] for axis in axes)


def _lines(program: hlo.Program) -> Iterator[tuple[str, hlo.Instruction]]:
    """Yield the computation and instruction of each exchange, of libtpu's pieces only the first.

    libtpu spreads one over other work as `AsyncCollectiveStart`, fusions that repeat it, and
    `AsyncCollectiveDone`.
    """
    for computation, lines in program.computations.items():
        if not program.runs[computation]:
            continue
        marks = " ".join(line.attributes for line in lines if line.opcode == "custom-call")
        piece = "AsyncCollectiveDone" in marks or computation.startswith("async_collective_fusion")
        if piece and "AsyncCollectiveStart" not in marks:
            continue
        for line in lines:
            if line.opcode.removesuffix("-start") in KINDS:
                yield computation, line


def _collective(
    program: hlo.Program, computation: str, line: hlo.Instruction, mesh: Mapping[str, int]
) -> Collective:
    kind = line.opcode.removesuffix("-start")
    started = line.opcode != kind
    shapes = hlo.parts(line.shape)
    # Started, it also carries its operands, but for an all-reduce.
    shape = shapes[1] if started and kind != "all-reduce" and len(shapes) > 1 else line.shape
    num_devices = math.prod(mesh.values())
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{([{}\d,]*)\}", line.attributes)
        groups = np.array(
            [
                _numbers(pair)
                for pair in re.findall(r"\{([\d,]+)\}", pairs.group(1) if pairs else "")
            ]
            or [[0]]
        )
        group = num_devices
    else:
        spelled = GROUPS.search(line.attributes)
        groups = replica_groups(spelled.group(1) if spelled else "{}", num_devices)
        group = groups.shape[1]
    axes, partial = axes_of(groups, mesh)
    lines = program.computations[computation]
    fused = computation in program.fused
    if kind == "all-reduce" and fused and _keeps_a_part(lines, hlo.num_bytes(shape)):
        kind = "reduce-scatter"  # libtpu's: fused with the slice; its shape is the whole already
    elif kind == "reduce-scatter":
        shape = _times(shape, group)
    arrays = hlo.arrays(shape) or [("", ())]
    dtype, dims = max(arrays, key=lambda array: math.prod(array[1]))
    whole = hlo.num_bytes(shape)
    if kind == "collective-permute":
        sent, partial = whole, False
    else:
        sent = whole * (group - 1) // group * (2 if kind == "all-reduce" else 1)
    return Collective(
        line.name,
        kind,
        axes,
        partial,
        group,
        dtype,
        dims,
        whole,
        sent if axes else 0,
        program.runs[computation],
        _overlapped(program, computation, line),
        line.op_name or program.caller_op_name(computation),
    )


def _overlapped(program: hlo.Program, computation: str, line: hlo.Instruction) -> bool:
    """Tell whether a device has other work while an exchange is under way.

    A scheduled text is in the order in which it is run. What is not awaited in its computation is
    awaited by a loop's next pass.
    """
    if '"is_sync":true' in line.attributes:  # XLA for GPU: started and awaited as one
        return False
    place, start = computation, line
    if not line.opcode.endswith("-start"):
        if not any("AsyncCollectiveStart" in one.attributes for one in program.computations[place]):
            return False
        place, start = program.places[computation]  # of the fusion that starts it
    after = iter(program.computations[place])
    for _ in itertools.takewhile(lambda one: one is not start, after):
        pass
    passed_on, works = {start.name}, False
    for one in after:
        if not passed_on.isdisjoint(one.operands):
            if one.opcode.endswith("-done") or _ends(program, one):
                return works or "is_scheduled=true" not in program.header
            if one.opcode in ("get-tuple-element", "bitcast", "tuple"):
                passed_on.add(one.name)
                continue
        works |= one.opcode in WORK
    return True


def _ends(program: hlo.Program, line: hlo.Instruction) -> bool:
    """Tell whether a fusion is the last of the pieces of one of libtpu's exchanges."""
    return any(
        "AsyncCollectiveDone" in one.attributes
        for _, callee in line.called()
        for one in program.computations.get(callee, ())
        if one.opcode == "custom-call"
    )


def _keeps_a_part(lines: hlo.Lines, whole: int) -> bool:
    """Tell whether a computation with an all-reduce of so many bytes gives back slices of it."""
    root = next((line for line in lines if line.root), None)
    slices = any(line.opcode == "dynamic-slice" for line in lines)
    return root is not None and slices and 4 * hlo.num_bytes(root.shape) <= 3 * whole


def _times(shape: str, group: int) -> str:
    """Return the arrays of a shape with their first dimension (of a scalar: one) times `group`.

    Which dimension is whole does not matter for bytes.
    """
    whole = [
        f"{t}[{','.join(str(d) for d in (dims[0] * group, *dims[1:]))}]"
        for t, dims in ((t, dims or (1,)) for t, dims in hlo.arrays(shape))
    ]
    return ", ".join(whole)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(found: re.Match[str]) -> np.ndarray:
    shape, dims = _numbers(found.group(1)), _numbers(found.group(2))
    order = _numbers(found.group(3)) if found.group(3) else None
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)


def _order(text: str) -> np.ndarray:
    """Return the devices that `[2,4]T(1,0)` (0.. reshaped, transposed) or a list stands for."""
    found = re.search(r"\[([\d,]+)\]T\(([\d,]+)\)", text)
    if not found:
        return np.array(_numbers(text))
    dims = _numbers(found.group(1))
    return np.arange(math.prod(dims)).reshape(dims).transpose(_numbers(found.group(2))).ravel()


def _groups_of_axes(text: str) -> np.ndarray:
    """Return the groups of `mesh['a'=2,'b'=4], device_ids=(...) {'a','b':(2)2}`."""
    inside = text[text.index("[") + 1 : text.index("]")]
    sizes = {n.strip("'"): int(s) for n, s in (item.split("=") for item in inside.split(","))}
    order = np.arange(math.prod(sizes.values()))
    if ids := re.search(r"device_ids=\((.*)\) \{", text):
        order = _order(ids.group(1))
    cuts = {name: [size] for name, size in sizes.items()}  # an axis as major, middle, minor parts
    taken = {name: [False] for name in sizes}
    axes = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", text[text.rindex("{") :])
    for name, before, size in axes:
        if not size:
            taken[name] = [True]
            continue
        low, high = int(before), int(before) * int(size)
        edges = sorted({*np.cumprod([1, *cuts[name]]).tolist(), low, high})
        old = _spans(cuts[name], taken[name])
        cuts[name] = [b // a for a, b in zip(edges, edges[1:], strict=False)]
        taken[name] = [
            (low <= a and b <= high) or any(x <= a and b <= y for x, y in old)
            for a, b in zip(edges, edges[1:], strict=False)
        ]
    split = [size for name in sizes for size in cuts[name]]
    flags = [flag for name in sizes for flag in taken[name]]
    kept = [i for i, flag in enumerate(flags) if not flag]
    together = [i for i, flag in enumerate(flags) if flag]
    grid = order.reshape(split).transpose(*kept, *together)
    return grid.reshape(-1, math.prod(split[i] for i in together))


def _spans(cuts: list[int], taken: list[bool]) -> list[tuple[int, int]]:
    edges = np.cumprod([1, *cuts]).tolist()
    return [(a, b) for a, b, t in zip(edges, edges[1:], taken, strict=False) if t]
