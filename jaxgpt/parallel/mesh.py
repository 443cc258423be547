"""The device mesh: six named axes, their sizes resolved and checked, and how a batch divides.

`data` replicates parameters, `fsdp` splits them, `tensor` splits heads, MLP width and vocabulary,
`context` sequences, `expert` experts, `stage` layers; data, fsdp and expert split the rows of a
batch. In a mesh the axes are ordered from the slowest to the fastest links. An axis may lie partly
across slices (TPU slices, or groups of GPUs without NVLink between them): that part is its slowest.
Everything is refused here, before anything compiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxgpt import ramp
from jaxgpt.config import Config, MeshConfig
from jaxgpt.errors import ConfigError
from jaxgpt.validation import MESH_AXES

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")  # from slow to fast links
BATCH_AXES = ("data", "fsdp", "expert")  # split the rows of a batch, the first most coarsely
CROSS_SLICES = ("data", "stage", "fsdp")  # what lies across slices unless mesh.slow says it


def axis_sizes(cfg: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return the devices per axis, with -1 replaced by what remains, in the order of `AXES`.

    Raises ConfigError when the sizes do not multiply to `num_devices`, naming both.
    """
    sizes = {axis: getattr(cfg, axis) for axis in MESH_AXES}
    text = ", ".join(f"mesh.{axis} = {n}" for axis, n in sizes.items() if n != 1) or "all axes 1"
    if any(n == 0 or n < -1 for n in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ConfigError(f"{text}: each axis is a number of devices, or -1 (once) for the rest")
    fixed = math.prod(n for n in sizes.values() if n != -1)
    filled = {axis: num_devices // fixed if n == -1 else n for axis, n in sizes.items()}
    if math.prod(filled.values()) != num_devices:
        wanted, advice = str(fixed), "choose sizes whose product is that, or set one axis to -1"
        if -1 in sizes.values():
            wanted, advice = f"a multiple of {fixed}", "choose sizes that divide them"
        raise ConfigError(f"{text}: needs {wanted} devices, but there are {num_devices}; {advice}")
    return {axis: filled[axis] for axis in AXES}


def in_words(sizes: Mapping[str, int]) -> str:
    """Return the axes that split anything, as "data 2, fsdp 4"."""
    return ", ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "all axes 1"


def slow_sizes(cfg: MeshConfig, sizes: Mapping[str, int], num_slices: int) -> dict[str, int]:
    """Return into how many slices each axis reaches; their product is `num_slices`.

    Raises ConfigError where `mesh.slow` asks for another number, or nothing of it divides.
    """
    slow = dict(cfg.slow)
    if not slow and num_slices > 1:
        axis = next((a for a in CROSS_SLICES if sizes[a] % num_slices == 0), None)
        if axis is None:
            raise ConfigError(
                f"the devices lie in {num_slices} slices, which divides none of "
                + ", ".join(f"mesh.{a} = {sizes[a]}" for a in CROSS_SLICES)
                + "; set mesh.slow = {axis = parts}, parts whose product is that"
            )
        slow = {axis: num_slices}
    if (parts := math.prod(slow.values())) != num_slices:
        raise ConfigError(
            f"mesh.slow = {slow}: {parts} parts, but the devices lie in {num_slices} slices"
        )
    for axis, parts in slow.items():
        if sizes[axis] % parts:
            raise ConfigError(
                f"mesh.slow.{axis} = {parts}: must divide mesh.{axis} = {sizes[axis]}"
            )
    return {axis: slow.get(axis, 1) for axis in sizes}


def make_mesh(
    cfg: MeshConfig, devices: Sequence[jax.Device] | None = None, *, apart: str = "slice_index"
) -> Mesh:
    """Return the mesh over `devices` (default: all devices of all processes).

    Neighbours in `tensor`, then `context`, are placed on the fastest links; an axis of a TPU mesh
    takes whole dimensions of the torus where it can, and parts of them where not. `apart`: what
    differs between slices; "process_index" for GPUs that are only compiled for, of which JAX says
    no slice.
    Raises ConfigError as `axis_sizes` and `slow_sizes` do.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(cfg, len(devices))
    slices = {getattr(device, apart, 0) for device in devices}
    slow = slow_sizes(cfg, sizes, len(slices))
    if len(slices) == 1:
        placed = mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices, allow_split_physical_axes=True
        )
    else:
        placed = arrange(devices, sizes, slow, apart)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(
    devices: Sequence[jax.Device],
    sizes: Mapping[str, int],
    slow: Mapping[str, int],
    apart: str = "slice_index",
) -> np.ndarray:
    """Return devices of several slices as an array of `sizes`; see `slow_sizes`, `make_mesh`."""
    fast = [sizes[axis] // slow[axis] for axis in sizes]
    return mesh_utils.create_hybrid_device_mesh(
        fast,
        [slow[axis] for axis in sizes],
        devices,
        process_is_granule=apart == "process_index",
        allow_split_physical_axes=True,
    )


def batch_shards(mesh: Mesh | None) -> int:
    """Return into how many parts the rows of a micro-batch are split (1 without a mesh)."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def platform(mesh: Mesh | None) -> str:
    """Return the platform of the mesh's devices ("cpu", "gpu", "tpu"), or the default one."""
    name = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def _undivided(sizes: Mapping[str, int], cfg: Config) -> Iterator[str]:
    m, context, expert = cfg.model, sizes["context"], sizes["expert"]
    if context > 1 and m.seq_len % (2 * context):
        yield (
            f"model.seq_len = {m.seq_len}: must be a multiple of 2 x mesh.context = {2 * context}, "
            "as each device takes an early and a late part of a sequence"
        )
    if expert > 1 and not m.num_experts:
        yield f"mesh.expert = {expert}: the model has no experts; use mesh.fsdp"
    elif m.num_experts % expert:
        yield f"model.num_experts = {m.num_experts}: must be a multiple of mesh.expert = {expert}"


def _pipeline(sizes: Mapping[str, int], cfg: Config) -> Iterator[str]:
    m, stage, rounds = cfg.model, sizes["stage"], cfg.mesh.rounds
    if stage == 1:
        return
    if not m.stacked:
        yield f"mesh.stage = {stage}: needs model.stacked = true"
    if m.num_layers % (stage * rounds):
        yield (
            f"model.num_layers = {m.num_layers}: must be a multiple of mesh.stage x mesh.rounds = "
            f"{stage * rounds}"
        )
    elif (
        m.sliding_window and m.global_every and (m.num_layers // (stage * rounds)) % m.global_every
    ):
        yield (
            f"model.global_every = {m.global_every}: must divide the "
            f"{m.num_layers // (stage * rounds)} layers of a stage, so that all stages are alike"
        )
    for rows, key in ramp.batch_sizes(cfg.train).items():
        micro = rows // (cfg.train.micro_batch or rows)
        if rounds > 1 and micro < stage:
            yield (
                f"{key} = {rows}: {micro} micro-batches are fewer than mesh.stage = {stage}, which "
                "mesh.rounds > 1 needs; lower train.micro_batch"
            )


def check_run(mesh: Mesh, cfg: Config) -> None:
    """Raise ConfigError unless model and batches of all sizes divide over the mesh."""
    check_sizes(mesh.shape, cfg, _processes(mesh))


def check_sizes(sizes: Mapping[str, int], cfg: Config, processes: int = 1) -> None:
    """Raise ConfigError, with all reasons, unless model and batches divide over axes of `sizes`.

    A message names the numbers, the key that asks for so many rows, and the nearest sizes that
    would work; nothing is ever rounded.
    """
    rows = (
        problem
        for rows, key in ramp.batch_sizes(cfg.train).items()
        for problem in _rows(sizes, rows, cfg.train.micro_batch or rows, key, processes)
    )
    if problems := [*dict.fromkeys(rows), *_undivided(sizes, cfg), *_pipeline(sizes, cfg)]:
        raise ConfigError(*problems)


def _processes(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _rows(
    sizes: Mapping[str, int], global_batch: int, micro_rows: int, key: str, processes: int
) -> Iterator[str]:
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    if micro_rows < 1 or global_batch % micro_rows:
        yield f"{key} = {global_batch} is not a multiple of train.micro_batch = {micro_rows}"
    if micro_rows % shards:
        name = key if micro_rows == global_batch else "train.micro_batch"
        axes = " x ".join(
            f"mesh.{axis} {sizes[axis]}"
            for axis in BATCH_AXES
            if axis != "expert" or sizes[axis] > 1
        )
        yield (
            f"{name} = {micro_rows} rows do not divide over {shards} devices "
            f"({axes}){_over(processes)}; nearest: {_nearest(micro_rows, shards)}"
        )


def _nearest(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    return " or ".join(str(n) for n in (below, below + divisor) if n)


def _over(processes: int) -> str:
    return f" of {processes} processes" if processes > 1 else ""
