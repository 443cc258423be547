"""What must and must not stand in the compiled text of the train step.

Each check gives findings of one line, which name the instruction, its bytes and mesh axes; none
means that the step is as meant. Sizes are compared with those of the state's leaves, known from
`planning.facts`, so nothing here knows the model's form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxgpt.planning import hlo
from jaxgpt.planning.collectives import Collective
from jaxgpt.planning.facts import Facts, Leaf

# What the child prints on stderr before it compiles: lines before it are of other programs.
BEGIN = "jaxgpt: compiling the train step"
INVOLUNTARY = re.compile(r"[Ii]nvoluntary full rematerialization.*")
WIDTH = 100  # characters of an operation's name, of which JAX writes up to 2,000; its end tells
# Smaller exchanges are sums of losses and counters, not gradients.
SMALL = 64 * 1024
# A layer's share of a parameter; biases of heads [N, H] are smaller, and whole by rule.
LARGE = 2**20
# These name a buffer that another instruction has made.
PASS_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}


class Finding(NamedTuple):
    """Something that should not be: which check, of what instruction, how large, over which axes.

    `bytes` are of the buffer, or sent by each device per step.
    """

    check: str
    instruction: str
    bytes: int
    axes: tuple[str, ...]
    line: str


def findings(
    program: hlo.Program, found: Sequence[Collective], known: Facts
) -> tuple[Finding, ...]:
    """Return everything that is wrong with a compiled step, in the order of the checks below."""
    return (
        *full_logits(program, known),
        *not_donated(program, known),
        *not_split(known),
        *gathered_stacks(found, known),
        *gathered_float32(found, known),
        *gathered_often(found, known),
        *reduced_whole(found, known),
        *data_in_micro_batches(found, known),
        *missing_kernel(program, known),
    )


def full_logits(program: hlo.Program, known: Facts) -> Iterator[Finding]:
    """Find float32 buffers [tokens, vocabulary] of more tokens than the loss has in a chunk.

    Also those whose vocabulary is split over `tensor`, as long as it divides.
    """
    tensor = known.mesh.get("tensor", 1)
    widths = {known.vocab_size, known.vocab_size // tensor}
    weights = {tuple(sorted(leaf.local)) for leaf in known.leaves}
    weights |= {tuple(sorted(leaf.shape)) for leaf in known.leaves}
    for computation, lines in program.computations.items():
        if computation in program.fused or not program.runs[computation]:
            continue
        for line in lines:
            for dtype, dims in hlo.arrays(line.shape) if line.opcode not in PASS_ON else ():
                real = tuple(size for size in dims if size > 1)
                width = next((size for size in real if size in widths), 0)
                if dtype != "f32" or not width or tuple(sorted(real)) in weights:
                    continue
                tokens = math.prod(real) // width
                if tokens > known.chunk_tokens:
                    size = 4 * math.prod(dims)
                    yield Finding(
                        "full_logits", line.name, size, (),
                        f"{line.name}: float32 logits of {tokens:,} tokens, {_size(size)}; the "
                        f"loss works in chunks of {known.chunk_tokens:,}{_inside(line.op_name)}",
                    )  # fmt: skip


def not_donated(program: hlo.Program, known: Facts) -> Iterator[Finding]:
    """Find leaves of the state whose buffer is not reused for the new state."""
    start = program.header.find("input_output_alias={")
    block = program.header[start : program.header.find(" }", start)] if start >= 0 else ""
    donated = {int(number) for number in re.findall(r"\((\d+), \{", block)}
    for number, leaf in enumerate(known.leaves):
        if number not in donated:
            yield Finding(
                "not_donated", leaf.path, leaf.local_bytes, (),
                f"{leaf.path}: {_size(leaf.local_bytes)} per device are not donated",
            )  # fmt: skip


def not_split(known: Facts) -> Iterator[Finding]:
    """Find parameters that each device holds whole, though fsdp or expert should split them."""
    if known.mesh.get("fsdp", 1) * known.mesh.get("expert", 1) == 1:
        return
    for leaf in known.matrices:
        size = leaf.local_bytes // (leaf.local[0] if known.is_stacked(leaf) else 1)
        if leaf.local == leaf.shape and size > LARGE:
            yield Finding(
                "not_split", leaf.path, leaf.local_bytes, (),
                f"{leaf.path} {list(leaf.shape)}: whole on each device, {_size(leaf.local_bytes)}",
            )  # fmt: skip


def gathered_stacks(found: Sequence[Collective], known: Facts) -> Iterator[Finding]:
    """Find all-gathers of a parameter of all layers at once, where a layer at a time would do."""
    if known.num_layers < 2:
        return
    stacks = [leaf for leaf in known.matrices if known.is_stacked(leaf)]
    for one in found:
        if one.kind != "all-gather" or known.num_layers not in one.shape[:2]:
            continue
        leaf = next((s for s in stacks if math.prod(s.local) * one.group == _count(one)), None)
        if leaf is not None:
            yield _exchange(
                "gathered_stack", one, f"gathers {leaf.path} of all {known.num_layers} layers"
            )


def gathered_float32(found: Sequence[Collective], known: Facts) -> Iterator[Finding]:
    """Find weights that are gathered as float32, though they are computed with as bfloat16.

    XLA:CPU puts the cast behind the gather by itself.
    """
    if not known.half or known.platform == "cpu":
        return
    for one in found:
        if (
            one.kind == "all-gather"
            and one.dtype == "f32"
            and _over_weights(one, known)
            and any(_gathers(one, leaf, known) for leaf in known.matrices)
        ):
            yield _exchange("gathered_float32", one, "gathers a float32 weight; cast it first")


def gathered_often(found: Sequence[Collective], known: Facts) -> Iterator[Finding]:
    """Find weights that are gathered more often than each pass of a micro-batch needs them.

    See `_passes`; never once per chunk of the loss. Weights of one size are counted together; a
    pipeline's stages pass more often, so theirs are not counted.
    """
    for size, gathers in _by_size(found, known).items():
        of_size = [leaf for leaf in known.matrices if known.layer_size(leaf) == size]
        if known.mesh.get("stage", 1) > 1 and any("/layers" in leaf.path for leaf in of_size):
            continue
        most = known.micro_batches * sum(_passes(leaf, known) for leaf in of_size)
        if (runs := sum(one.runs for one in gathers)) > most:
            names = ", ".join(leaf.path.removeprefix("params/") for leaf in of_size)
            worst = max(gathers, key=lambda one: one.bytes_per_step)
            what = f"{names} gathered {runs} times a step, {most} would do"
            yield _exchange("gathered_often", worst, what)


def reduced_whole(found: Sequence[Collective], known: Facts) -> Iterator[Finding]:
    """Find gradients of split weights that every device gets whole: twice the bytes, and memory.

    XLA:CPU knows no other way. libtpu also gathers weights so, as sums with zeros, over all chips
    of a 3-D torus (seen for 4x4x4 and larger; not over two of its dimensions).
    """
    if known.platform == "cpu":
        return
    for one in found:
        if (
            one.kind == "all-reduce"
            and _over_weights(one, known)
            and _count(one) >= known.smallest_table * one.group
            and one.whole_bytes > SMALL
        ):
            what = "all-reduces what should be gathered or reduce-scattered"
            if one.group == known.torus:
                what += (
                    "; over all of a 3-D torus libtpu always does, but not where mesh.data or "
                    "mesh.tensor takes one of its dimensions"
                )
            yield _exchange("reduced_whole", one, what)


def data_in_micro_batches(found: Sequence[Collective], known: Facts) -> Iterator[Finding]:
    """Find exchanges over `data` that are made for each micro-batch, not once a step."""
    if known.micro_batches < 2:
        return
    for one in found:
        often = one.runs >= known.micro_batches - 1 and one.runs > 1
        if "data" in one.axes and often and one.whole_bytes > SMALL:
            yield _exchange("data_in_micro_batch", one, f"runs {one.runs} times a step over data")


def missing_kernel(program: hlo.Program, known: Facts) -> Iterator[Finding]:
    """Find that the attention kernel is not there: then it is computed by score matrices."""
    for wanted in known.kernels:
        if not any(wanted in name for name in kernels(program)):
            yield Finding(
                "missing_kernel", wanted, 0, (),
                f"no {wanted} custom call: attention is not computed by that kernel",
            )  # fmt: skip


def involuntary(log: str) -> tuple[Finding, ...]:
    """Return what XLA's partitioner wrote to stderr about arrays that it had to make whole."""
    text = log.rpartition(BEGIN)[2]
    results = []
    for found in dict.fromkeys(INVOLUNTARY.findall(text)):
        name = re.search(r"%([\w.\-]+) = ([^ ]+)", found)
        size = hlo.num_bytes(name.group(2)) if name else 0
        results.append(
            Finding(
                "involuntary",
                name.group(1) if name else "",
                size,
                (),
                f"made whole on each device to change its sharding: {found[:200]}",
            )  # fmt: skip
        )
    return tuple(results)


def lines(found: Sequence[Finding]) -> list[str]:
    """Return findings for people, one line for each check: its largest, and how many more."""
    by_check: dict[str, list[Finding]] = {}
    for one in found:
        by_check.setdefault(one.check, []).append(one)
    return [_together(of_check) for of_check in by_check.values()]


def _together(found: list[Finding]) -> str:
    worst = max(found, key=lambda one: one.bytes)
    if len(found) == 1:
        return worst.line
    size = sum(one.bytes for one in found)
    return f"{worst.line}; and {len(found) - 1:,} more of the kind, {_size(size)} in all"


def kernels(program: hlo.Program) -> dict[str, int]:
    """Return the custom calls of a program and how often each is run per step.

    A Pallas kernel for TPU is `tpu_custom_call:` and its name.
    """
    counts: dict[str, int] = {}
    for computation, lines in program.computations.items():
        for line in lines:
            target = re.search(r'custom_call_target="([^"]+)"', line.attributes)
            if line.opcode == "custom-call" and target and program.runs[computation]:
                name = target.group(1)
                if name == "tpu_custom_call":
                    name += ":" + re.sub(r"[.\d]+$", "", line.name)
                counts[name] = counts.get(name, 0) + program.runs[computation]
    return counts


def _over_weights(one: Collective, known: Facts) -> bool:
    """Tell whether an exchange is over an axis that splits weights as well as the batch."""
    return any(axis in one.axes for axis in ("fsdp", "expert"))


def _by_size(found: Sequence[Collective], known: Facts) -> dict[int, list[Collective]]:
    """Return the all-gathers of weights, by the elements that a device held of the weight."""
    sizes = {
        known.layer_size(leaf)
        for leaf in known.matrices
        if leaf.local != leaf.shape and leaf.local_bytes > SMALL
    }
    result: dict[int, list[Collective]] = {}
    for one in found:
        if one.kind == "all-gather" and _over_weights(one, known) and "f" in one.dtype:
            held = _count(one) // one.group
            if held in sizes:
                result.setdefault(held, []).append(one)
    return result


def _passes(leaf: Leaf, known: Facts) -> int:
    """Return how many times a parameter is needed whole for a micro-batch.

    A block's forward, recomputed and backward (libtpu keeps an MLP's matrices for the third, but
    not attention's); all others once per loss, as the head's gradient is made with its logits.
    """
    if "/layers" in leaf.path:
        return 3 * (known.num_layers if known.is_stacked(leaf) else 1)
    return known.losses


def _gathers(one: Collective, leaf: Leaf, known: Facts) -> bool:
    """Tell whether an all-gather has the size of a parameter, of one layer or of all."""
    local = math.prod(leaf.local)
    layer = local // leaf.local[0] if known.is_stacked(leaf) else local
    return _count(one) in (local * one.group, layer * one.group)


def _count(one: Collective) -> int:
    return math.prod(one.shape)


def _exchange(check: str, one: Collective, what: str) -> Finding:
    line = (
        f"{one.name} {one.dtype}{list(one.shape)} over {', '.join(one.axes)}: {what}; "
        f"{_size(one.bytes_per_step)} per step{_inside(one.op_name)}"
    )
    return Finding(check, one.name, one.bytes_per_step, one.axes, line)


def _inside(name: str) -> str:
    """Return in parentheses the end of an operation's name: whole parts, at most `WIDTH` long."""
    if len(name) > WIDTH:
        last = name[3 - WIDTH :]
        name = "..." + (last[last.index("/") :] if "/" in last else last)
    return f" ({name})" if name else ""


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.2f} MB"
