"""The matmul rate that utilisation (MFU) is a share of: published for accelerators, else measured.

On a CPU there is no published figure that a program can reach, so the denominator is the best
product ever timed on this processor with this library; it is kept in the user's cache and can only
rise, because a measurement on a busy machine is too low, and a low peak would flatter.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib
import numpy as np
from jax.typing import DTypeLike

from jaxgpt import chips
from jaxgpt.parallel.xla_options import of_dtype
from jaxgpt.runtime import processor

# Rows, depth and columns of the products timed; the small ones stay in a CPU's cache.
CPU_SHAPES = ((512, 768, 3072), (1024, 1024, 1024), (2048, 1024, 1024))
ACCELERATOR_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
RATES = "matmul_peak.json"  # in the user's cache


@dataclass(frozen=True)
class Peak:
    """The matmul rate of all devices together, in FLOP/s, and where the figure comes from."""

    flops: float
    source: str


def measure_matmul_peak(
    dtype: DTypeLike, devices: Sequence[jax.Device], processors: int = 1, *, again: bool = True
) -> Peak:
    """Return the peak of `devices` for products in `dtype`, measuring at most about half a second.

    Simulated CPU devices share the cores of a machine, and so may processes: CPUs count as the
    `processors` that they are. A rate that is stored for a CPU is measured only `again`: it takes
    0.7 s of a core, as programs that call oneDNN cannot be kept compiled.
    """
    name = np.dtype(dtype).name
    kind, platform = devices[0].device_kind, devices[0].platform
    chip = chips.by_kind(kind)
    if name == "bfloat16" and chip is not None:
        source = f"published dense bfloat16 peak of {kind} x {len(devices)}"
        return Peak(chip.flops * len(devices), source)
    count = processors if platform == "cpu" else len(devices)
    hardware = f"{processor.num_cores()} CPU cores" if platform == "cpu" else kind
    source = f"best {name} matmul measured on {hardware}" + (f" x {count}" if count > 1 else "")
    known = _known_rate(name, platform) if platform == "cpu" and not again else None
    return Peak((known or _best_rate(name, platform)) * count, source)


def _known_rate(dtype: str, platform: str) -> float | None:
    key, folder = _place(dtype, jax.local_devices(backend=platform)[0])
    return _read_rates(folder / RATES).get(key) if folder else None


def _place(dtype: str, device: jax.Device) -> tuple[str, Path | None]:
    """Return the name of a rate, and the folder where it is stored, if there is one."""
    hardware = f"{processor.cpu_key()}x{processor.num_cores()}"
    if device.platform != "cpu":
        hardware = device.device_kind
    return f"{hardware} jaxlib {jaxlib.__version__} {dtype}", processor.cache_folder()[0]


@functools.cache
def _best_rate(dtype: str, platform: str) -> float:
    """Return the best rate, FLOP/s, of one device: timed now, or in an earlier process here."""
    device = jax.local_devices(backend=platform)[0]
    key, folder = _place(dtype, device)
    known = _read_rates(folder / RATES) if folder else {}
    rate = _matmul_rate(dtype, device, seconds=0.15 if key in known else 0.5)
    if folder and rate > known.get(key, 0.0):
        _write_rates(folder / RATES, known | {key: rate})
    return max(rate, known.get(key, 0.0))


def _matmul_rate(dtype: str, device: jax.Device, seconds: float) -> float:
    """Return the best FLOP/s of a few products on `device`, compiling included in `seconds`."""
    end = time.perf_counter() + seconds
    shapes = CPU_SHAPES if device.platform == "cpu" else ACCELERATOR_SHAPES
    # With the options of training, or the peak would be that of another matmul library.
    options = of_dtype(dtype, device.platform)
    product = jax.jit(lambda a, b: a @ b, compiler_options=options)
    numbers = np.random.default_rng(0)
    best = 0.0
    for m, k, n in shapes:
        a, b = (
            jax.device_put(numbers.random(shape, np.float32).astype(dtype), device)
            for shape in ((m, k), (k, n))
        )
        product(a, b).block_until_ready()  # compiles
        enough = time.perf_counter() + 0.05
        while best == 0.0 or time.perf_counter() < min(enough, end):
            began = time.perf_counter()
            product(a, b).block_until_ready()
            best = max(best, 2 * m * k * n / (time.perf_counter() - began))
        if time.perf_counter() > end:
            break
    return best


def _read_rates(path: Path) -> dict[str, float]:
    """Return the stored rates; whatever cannot be read counts as nothing stored."""
    try:
        stored = json.loads(path.read_bytes())
        return {k: v for k, v in stored.items() if isinstance(v, float) and 0 < v < math.inf}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_rates(path: Path, rates: dict[str, float]) -> None:
    """Store the rates for later processes; without a writable cache each one measures anew."""
    with contextlib.suppress(OSError):
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(rates, indent=1))
        temporary.replace(path)
