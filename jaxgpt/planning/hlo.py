"""Compiled HLO text as records: computations, their instructions, and how often each one runs.

What is read is what `Compiled.as_text()` prints, on TPU, GPU and CPU, from JAX 0.10 to 0.12. Sizes
are those of the logical arrays: padding of tiled layouts is not in them. Nothing here knows about
meshes or models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Bits per element; a shape of another type (token, opaque) takes no memory.
BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4, "c64": 64, "c128": 128}
ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+\w*|c64|c128)\[([\d,<=]*)\]")
NAME = re.compile(r"%?([\w.\-]+)")
CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
TRIP_COUNT = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
END = re.compile(r'\}(, execution_thread="[^"]*")?')
COPIES = {"copy", "bitcast", "convert", "copy-start", "copy-done"}


class Instruction(NamedTuple):
    """One line: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str  # such as bf16[8,128]{1,0}; a tuple's in parentheses
    opcode: str
    operands: tuple[str, ...]  # names; of a constant, its text
    attributes: str
    root: bool

    def called(self) -> Iterator[tuple[str, str]]:
        """Yield (attribute, computation) of everything that this instruction runs."""
        for kind, text in CALLED.findall(self.attributes):
            for name in NAME.findall(text):
                yield kind, name

    @property
    def op_name(self) -> str:
        """What the program was doing, as JAX names it: jit(train_step)/.../attention/..."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


Lines = tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """The computations of a module, by name, in the order of the text; `entry` is run once."""

    computations: dict[str, Lines]
    entry: str
    header: str

    @cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation is run per execution; both branches of a choice count."""
        return _runs(self)

    @cached_property
    def passes(self) -> dict[str, int | None]:
        """How often each loop's body is run each time; None where the text does not tell."""
        return _passes(self)

    @cached_property
    def fused(self) -> set[str]:
        """The computations inside fusions, of which no value but the last reaches memory."""
        return {
            callee
            for lines in self.computations.values()
            for line in lines
            if line.opcode == "fusion"
            for _, callee in line.called()
        }

    @cached_property
    def places(self) -> dict[str, tuple[str, Instruction]]:
        """What first runs each computation but the entry: in which one it stands, and the line."""
        return {
            callee: (computation, line)
            for computation, lines in reversed(self.computations.items())
            for line in reversed(lines)
            for _, callee in line.called()
        }

    def caller_op_name(self, computation: str) -> str:
        """Return what the instruction was doing that runs a computation."""
        found = self.places.get(computation)
        return found[1].op_name if found else ""

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Names of the loops of unknown length; they are counted as one pass."""
        return tuple(name for name, passes in self.passes.items() if passes is None)


def parse(text: str) -> Program:
    """Return the program of an HLO text. Raises ValueError where there is no entry computation."""
    computations: dict[str, Lines] = {}
    header, entry, name = text.partition("\n")[0], "", ""
    pieces: list[str] = []  # of the computation that is being read, one for each instruction
    for line in text.splitlines():
        if not name:
            if line.endswith("{") and " -> " in line:
                name = NAME.match(line.removeprefix("ENTRY ")).group(1)  # type: ignore[union-attr]
                entry = name if line.startswith("ENTRY ") else entry
        elif END.fullmatch(line):
            found = (_instruction(piece) for piece in pieces)
            computations[name] = tuple(one for one in found if one is not None)
            name, pieces = "", []
        elif line.startswith("  "):
            pieces.append(line)
        elif pieces:  # what a kernel says of itself may have lines
            pieces[-1] += line
    if not entry:
        raise ValueError("no HLO text: it has no ENTRY computation")
    return Program(computations, entry, header)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return (type, dimensions) of every array of a shape, those of tuples in order."""
    found = ARRAY.findall(shape)
    return [(t, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)) for t, dims in found]


def num_bytes(shape: str) -> int:
    """Return the bytes of a shape's elements, of all arrays of a tuple together."""
    return sum(math.ceil(_bits(t) * math.prod(dims) / 8) for t, dims in arrays(shape))


def parts(shape: str) -> list[str]:
    """Return the shapes that a tuple holds, themselves perhaps tuples; of an array, only it."""
    if not shape.startswith("("):
        return [shape]
    pieces, depth, start = [], 0, 1
    for i, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            pieces.append(re.sub(r"/\*.*?\*/", "", shape[start:i]).strip())
            start = i + 1
            if depth == 0:
                break
    return [piece for piece in pieces if piece]


def _bits(element: str) -> int:
    if element in BITS:
        return BITS[element]
    return int(re.search(r"\d+", element).group())  # type: ignore[union-attr]


def _instruction(line: str) -> Instruction | None:
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return None
    root = left.startswith("ROOT ")
    end = _closing(right) if right.startswith("(") else right.find(" ")
    shape, rest = right[:end], right[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    inside, attributes = rest[: end - 1], rest[end:]
    if opcode == "constant":
        operands: tuple[str, ...] = (inside.strip(),)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    name = left.removeprefix("ROOT ").lstrip("%")
    return Instruction(name, shape, opcode, operands, attributes, root)


def _closing(text: str) -> int:
    """Return the index after the parenthesis that closes the first character."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _passes(program: Program) -> dict[str, int | None]:
    result: dict[str, int | None] = {}
    for lines in program.computations.values():
        for line in lines:
            if line.opcode == "while":
                known = TRIP_COUNT.search(line.attributes)
                result[line.name] = int(known.group(1)) if known else _counted(program, lines, line)
    return result


def _counted(program: Program, lines: Lines, loop: Instruction) -> int | None:
    """Return the passes of a loop that counts to a constant, as libtpu prints them, or None.

    The condition is `element i of the tuple < n`, the body adds a constant to it, and it starts
    from a constant.
    """
    called = dict(loop.called())
    condition = program.computations.get(called.get("condition", ""), ())
    body = program.computations.get(called.get("body", ""), ())
    test, end = _root(condition), _root(body)
    start = _source(lines, loop.operands[0])
    if not (test and end and start) or test.opcode != "compare":
        return None
    if "direction=LT" not in test.attributes or not end.opcode == start.opcode == "tuple":
        return None
    element = _source(condition, test.operands[0])
    index = re.search(r"index=(\d+)", element.attributes) if element else None
    limit = _constant(condition, test.operands[1])
    if index is None or limit is None:
        return None
    first = _constant(lines, start.operands[int(index.group(1))])
    step = _source(body, end.operands[int(index.group(1))])
    if first is None or step is None or step.opcode != "add":
        return None
    by = next(filter(None, (_constant(body, operand) for operand in step.operands)), None)
    return max(0, math.ceil((limit - first) / by)) if by else None


def _root(lines: Lines) -> Instruction | None:
    return next((line for line in lines if line.root), None)


def _source(lines: Lines, name: str) -> Instruction | None:
    """Return the instruction that made a value, through copies of it."""
    line = next((line for line in lines if line.name == name), None)
    while line is not None and line.opcode in COPIES:
        line = next((other for other in lines if other.name == line.operands[0]), None)
    return line


def _constant(lines: Lines, name: str) -> int | None:
    """Return the integer that a name stands for, if it is one."""
    line = _source(lines, name)
    if line is None or line.opcode != "constant" or not re.fullmatch(r"-?\d+", line.operands[0]):
        return None
    return int(line.operands[0])


def _runs(program: Program) -> dict[str, int]:
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen or name not in program.computations:
            return
        seen.add(name)
        for line in program.computations[name]:
            for _, callee in line.called():
                visit(callee)
        order.append(name)

    visit(program.entry)
    runs = dict.fromkeys(program.computations, 0)
    runs[program.entry] = 1
    for name in reversed(order):  # callers before what they call
        for line in program.computations[name]:
            # An asynchronous call names its computation at each of its stages.
            if line.opcode.endswith(("-done", "-update")):
                continue
            for kind, callee in line.called():
                if callee in runs:
                    passes = program.passes[line.name] if kind in ("body", "condition") else 1
                    runs[callee] += runs[name] * (1 if passes is None else passes)
    return runs
