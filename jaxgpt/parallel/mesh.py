"""The device mesh: six named axes, their sizes resolved and checked, and how a batch divides.

`data` replicates parameters, `fsdp` splits them (both split the batch), `tensor` splits heads, MLP
width and vocabulary; `context`, `expert` and `stage` have one device in this version. Axes are
ordered from the slowest to the fastest links. Everything is refused here, before anything compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxgpt.config import MeshConfig
from jaxgpt.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
BATCH_AXES = ("data", "fsdp")  # split the rows of a batch


def axis_sizes(cfg: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return the devices per axis, with -1 replaced by what remains.

    Raises ConfigError when the sizes do not multiply to `num_devices`, naming both.
    """
    sizes = {axis: getattr(cfg, axis) for axis in AXES}
    text = ", ".join(f"mesh.{axis} = {n}" for axis, n in sizes.items() if n != 1) or "all axes 1"
    if any(n == 0 or n < -1 for n in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ConfigError(f"{text}: each axis is a number of devices, or -1 (once) for the rest")
    fixed = math.prod(n for n in sizes.values() if n != -1)
    filled = {axis: num_devices // fixed if n == -1 else n for axis, n in sizes.items()}
    if math.prod(filled.values()) != num_devices:
        wanted = f"a multiple of {fixed}" if -1 in sizes.values() else str(fixed)
        raise ConfigError(
            f"{text}: needs {wanted} devices, but there are {num_devices}; "
            "choose sizes whose product is that, or set one axis to -1"
        )
    if late := {axis: n for axis, n in filled.items() if axis not in AXES[:3] and n != 1}:
        axis, n = next(iter(late.items()))
        raise ConfigError(f"mesh.{axis} = {n}: only 1 in this version; use data, fsdp, tensor")
    return filled


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh over `devices` (default: all devices of all processes).

    Neighbours in `tensor`, then `fsdp`, are placed on the fastest links. Raises ConfigError as
    `axis_sizes` does, and for devices of more than one TPU slice.
    """
    devices = jax.devices() if devices is None else devices
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        raise ConfigError(f"devices lie in {len(slices)} slices: this version runs on one slice")
    shape = tuple(axis_sizes(cfg, len(devices)).values())
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def batch_shards(mesh: Mesh | None) -> int:
    """Return into how many parts the rows of a micro-batch are split (1 without a mesh)."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def platform(mesh: Mesh | None) -> str:
    """Return the platform of the mesh's devices ("cpu", "gpu", "tpu"), or the default one."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def check_batch(
    mesh: Mesh, global_batch: int, micro_rows: int, key: str = "train.global_batch"
) -> None:
    """Raise ConfigError unless rows divide evenly over micro-batches and devices.

    The message names the numbers, by the `key` that asks for so many rows, and the nearest sizes
    that would work; nothing is ever rounded.
    """
    shards = batch_shards(mesh)
    processes = len({device.process_index for device in mesh.devices.flat})
    problems = []
    if micro_rows < 1 or global_batch % micro_rows:
        problems.append(
            f"{key} = {global_batch} is not a multiple of train.micro_batch = {micro_rows}"
        )
    if micro_rows % shards:
        name = key if micro_rows == global_batch else "train.micro_batch"
        problems.append(
            f"{name} = {micro_rows} rows do not divide over {shards} devices "
            f"(mesh.data {mesh.shape['data']} x mesh.fsdp {mesh.shape['fsdp']})"
            f"{_over(processes)}; nearest: {_nearest(micro_rows, shards)}"
        )
    if problems:
        raise ConfigError(*problems)


def _nearest(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    return " or ".join(str(n) for n in (below, below + divisor) if n)


def _over(processes: int) -> str:
    return f" of {processes} processes" if processes > 1 else ""
