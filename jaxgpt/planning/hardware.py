"""Machines by their product names: `v5p-128`, `v6e-256`, `2*v6e-256`, `h100x64`, `v5p-4x4x8`.

A target is so many slices of so many devices: within a TPU slice every device has links to its
neighbours in a torus, GPUs of a host have a switch, and between slices or hosts there is only the
network. What a chip can do is in `jaxgpt.chips`; here is what a mesh axis gets of its links.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxgpt.chips import CHIPS, Chip
from jaxgpt.errors import ConfigError

# Chips of a slice that is no multiple of a cube of 64 (docs.cloud.google.com/tpu/docs/v5p); no host
# of 4 is divided.
SMALL_3D = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
# docs.cloud.google.com/tpu/docs/v6e; only the whole pod has links around both ends.
SIZES_2D = {
    1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
    256: (16, 16),
}  # fmt: skip
LARGEST_CUBES = 144  # of 64 chips: a pod of 9,216 TPU7x
# Between the two devices of a TPU7x chip: "six times faster than a 1D ICI link" (its docs).
DIE_TO_DIE = 6
GPU_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
FASTEST_FIRST = ("tensor", "context", "expert", "fsdp", "data", "stage")


# The dimensions of a torus that a mesh axis takes: devices, and links of each to send over.
Rings = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Target:
    """A machine. `topology` are the chips of a slice along each axis; of GPUs, those of a host."""

    name: str
    chip: Chip
    num_slices: int  # TPU slices; of GPUs the hosts, as NVLink ends there
    topology: tuple[int, ...]

    @property
    def devices_per_slice(self) -> int:
        return math.prod(self.topology) * self.chip.per_chip

    @property
    def num_devices(self) -> int:
        return self.num_slices * self.devices_per_slice

    @property
    def num_hosts(self) -> int:
        if self.chip.platform == "gpu":
            return self.num_slices
        # Slices of 8 v5e or v6e chips have one host of 8; larger ones have hosts of 4.
        one = 8 if self.chip.torus == 2 else self.chip.per_host
        if self.devices_per_slice <= one:
            return self.num_slices
        return self.num_devices // self.chip.per_host

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Return along which axes of a slice the last chip has a link to the first."""
        if self.chip.torus == 3:
            cubes = all(size % 4 == 0 for size in self.topology)
            return tuple(cubes for _ in self.topology)
        return tuple(size == 16 for size in self.topology)

    @property
    def usable(self) -> float:
        """Return the bytes of a device that programs can have, as JAX is set up by default."""
        return self.chip.usable * (gpu_fraction() if self.chip.platform == "gpu" else 1.0)

    def describe(self) -> str:
        """Return the machine in words."""
        chip, shape = self.chip, "x".join(map(str, self.topology))
        if chip.platform == "gpu":
            where = f"{self.num_slices} host{'s' * (self.num_slices > 1)} of {self.topology[0]}"
        else:
            slices = f"{self.num_slices} slices of {shape}" if self.num_slices > 1 else shape
            where = f"{slices} chips, {self.num_hosts} host{'s' * (self.num_hosts > 1)}"
        return (
            f"{self.name}: {self.num_devices:,} x {chip.kinds[0]} ({where}); of each device "
            f"{chip.flops / 1e12:,.1f} TFLOP/s bfloat16, {self.usable / 1e9:.1f} GB for "
            f"programs, {chip.bandwidth / 1e12:.2f} TB/s"
        )


def gpu_fraction() -> float:
    """Return the share of a GPU's memory that JAX takes: 0.75 unless the environment says."""
    try:
        return float(os.environ.get(GPU_FRACTION, 0.75))
    except ValueError:
        return 0.75


def parse(name: str) -> Target:
    """Return the machine called `name`; raises ConfigError, with the nearest names, for none.

    `CHIP-N` is a slice by its product's number (TensorCores for v4, v5p and tpu7x, chips for v5e
    and v6e), `CHIP-AxBxC` one by its shape, `CHIPxN` so many GPUs, 8 a host, and `S*...` so many
    slices.
    """
    match = re.fullmatch(
        r"(?:(\d+)\*)?([a-z][a-z0-9-]*?)([x-])(\d+(?:x\d+)*)", name.strip().lower()
    )
    chip = None
    if match:
        wanted = {"v5litepod": "v5e", "v7x": "tpu7x", "a100": "a100-80"}.get(match[2], match[2])
        chip = next((chip for chip in CHIPS if chip.name == wanted), None)
    if match is None or chip is None or (match[3] == "x") != (chip.platform == "gpu"):
        raise ConfigError(_unknown(name))
    slices, numbers = int(match[1] or 1), tuple(map(int, match[4].split("x")))
    if slices < 1 or 0 in numbers:
        raise ConfigError(_unknown(name))
    if chip.platform == "gpu":
        return _gpus(name, chip, slices * math.prod(numbers))
    if len(numbers) == 1:
        numbers = _standard(name, chip, numbers[0])
    elif numbers not in (shapes := _shapes(chip)):
        near = sorted(shapes, key=lambda s: abs(math.prod(s) - math.prod(numbers)))[:3]
        words = ", ".join("x".join(map(str, shape)) for shape in near)
        raise ConfigError(f"{name}: no slice of {chip.name} has this shape; nearest: {words}")
    return Target(name, chip, slices, numbers)


def _gpus(name: str, chip: Chip, count: int) -> Target:
    if count > chip.per_host and count % chip.per_host:
        below = count // chip.per_host * chip.per_host
        raise ConfigError(
            f"{name}: hosts have {chip.per_host} GPUs; nearest: {chip.name}x{below}, "
            f"{chip.name}x{below + chip.per_host}"
        )
    hosts = max(1, count // chip.per_host)
    return Target(name, chip, hosts, (count // hosts,))


def _standard(name: str, chip: Chip, number: int) -> tuple[int, ...]:
    """Return the shape of the slice whose product's name has this number."""
    sizes = _standard_shapes(chip)
    if number not in sizes:
        near = sorted(sizes, key=lambda size: (abs(size - number), size))[:3]
        words = ", ".join(f"{chip.name}-{size}" for size in sorted(near))
        raise ConfigError(f"{name}: no such slice ({chip.name} counts {chip.counted}); {words}")
    return sizes[number]


def _standard_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Return the shape of each slice of `chip`, by the number in its name."""
    if chip.torus == 2:
        return dict(SIZES_2D)
    shapes = dict(SMALL_3D)
    for cubes in range(1, LARGEST_CUBES + 1):
        # As near to a cube as can be: the standard shape of that size.
        best = min(_triples(cubes), key=sum)
        shapes[64 * cubes] = tuple(4 * side for side in best)
    return {2 * chips: shape for chips, shape in shapes.items()}


def _shapes(chip: Chip) -> set[tuple[int, ...]]:
    """Return all shapes that a slice of `chip` can be asked for in."""
    if chip.torus == 2:
        return set(SIZES_2D.values())
    cubes = itertools.chain.from_iterable(_triples(n) for n in range(1, LARGEST_CUBES + 1))
    return {*SMALL_3D.values(), *(tuple(4 * side for side in shape) for shape in cubes)}


def _triples(number: int) -> list[tuple[int, int, int]]:
    """Return all a <= b <= c whose product is `number`."""
    return [
        (a, b, number // (a * b))
        for a in range(1, round(number ** (1 / 3)) + 1)
        if number % a == 0
        for b in range(a, math.isqrt(number // a) + 1)
        if number // a % b == 0
    ]


def _unknown(name: str) -> str:
    examples = [
        *(f"{chip.name}-{n}" for chip in CHIPS if chip.torus for n in _standard_shapes(chip)),
        *(f"{chip.name}x{n}" for chip in CHIPS if not chip.torus for n in (1, 8, 64, 512)),
    ]
    near = difflib.get_close_matches(name, examples, 3, 0.5) or ["v5p-128", "v6e-256", "h100x8"]
    return (
        f"{name!r} is no machine that is known here; nearest: {', '.join(near)} (chips: "
        f"{', '.join(chip.name for chip in CHIPS)}; slices: 2*v6e-256)"
    )


def axis_rings(target: Target, fast: Mapping[str, int]) -> dict[str, Rings]:
    """Return what each mesh axis has of a slice's links.

    `fast` are the devices per axis and slice. GPUs have their switch for any axis. On a torus, mesh
    axes take its dimensions from the fastest axis on, whole ones where they divide; a dimension
    sends both ways around (two links), or as a line (one link) where it has no link from end to
    end or is taken in part.
    """
    chip = target.chip
    if chip.platform == "gpu":
        return {axis: ((n, 1),) for axis, n in fast.items()}
    left = [
        [size, 2 if wrap else 1] for size, wrap in zip(target.topology, target.wraps, strict=True)
    ]
    dies = chip.per_chip
    result: dict[str, Rings] = {}
    for axis in (a for a in FASTEST_FIRST if a in fast):
        n, rings = fast[axis], []
        if dies > 1 and n % dies == 0:
            if n == dies:
                rings.append((dies, DIE_TO_DIE * dies))
            n, dies = n // dies, 1
        whole = _subset([size for size, _ in left], n)
        if whole:
            rings += [(left[i][0], left[i][1] if left[i][0] > 2 else 1) for i in whole]
            for i in whole:
                left[i] = [1, 1]
        else:
            for dimension in sorted(left, key=lambda d: -d[0]):
                common = math.gcd(n, dimension[0])
                if common > 1:
                    rings.append((common, 1))
                    n, dimension[0], dimension[1] = n // common, dimension[0] // common, 1
        result[axis] = tuple(rings)
    return result


def _subset(sizes: list[int], product: int) -> list[int] | None:
    """Return the indices of sizes above 1 with this product, most of them first; None for none."""
    real = [i for i, size in enumerate(sizes) if size > 1]
    for count in range(len(real), 0, -1):
        for chosen in itertools.combinations(real, count):
            if math.prod(sizes[i] for i in chosen) == product:
                return list(chosen)
    return None
