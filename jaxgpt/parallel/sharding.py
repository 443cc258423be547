"""Where arrays lie: one table from logical axis names to mesh axes, and what follows from it.

Parameters name their axes in their specs, activations where they are made; only `RULES` knows mesh
axes. A dimension that its mesh axes do not divide is kept whole on each device, and reported.
Batches are [A, B, T]: B is split over data and fsdp, A (micro-batches in time) and T are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import ConfigError
from jaxgpt.model.params import ParamSpec
from jaxgpt.parallel.mesh import BATCH_AXES, batch_shards

Array = jax.Array

# Logical axis -> mesh axes that split it. Axes that are not named here are never split.
RULES: dict[str, tuple[str, ...]] = {
    # of parameters
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "layers": ("stage",),
    # of activations, whose width is never split, so that norms stay local
    "batch": BATCH_AXES,
    "seq": ("context",),
}


class Unsharded(NamedTuple):
    """A parameter dimension that the rules would split but that does not divide."""

    path: str  # such as layers/0/wq
    shape: tuple[int, ...]
    axis: str  # logical name
    size: int  # of the dimension
    parts: int  # devices it should be split over
    bytes: int  # what each device holds of the parameter, in float32


def partition(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
    """Return how an array is split: by `RULES`, where the size divides, each mesh axis once."""
    used: set[str] = set()
    entries: list[tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        names = _wanted(mesh, axis)
        fits = names and not used & set(names) and size % _parts(mesh, names) == 0
        entries.append(names if fits else None)
        used |= set(names) if fits else set()
    return PartitionSpec(*entries)


def tree_shardings(mesh: Mesh, specs: Any) -> Any:
    """Return the NamedSharding of each `ParamSpec` of a tree."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, partition(mesh, spec.shape, spec.axes)), specs
    )


def unsharded_table(mesh: Mesh, specs: Any) -> list[Unsharded]:
    """Return each dimension that is kept whole only because it does not divide, largest first.

    Vectors (norms, most biases) and position tables' length are whole by rule and not listed.
    """
    rows = []
    for path, spec in jax.tree.leaves_with_path(specs):
        split = partition(mesh, spec.shape, spec.axes)
        for size, axis, entry in zip(spec.shape, spec.axes, split, strict=True):
            parts = _parts(mesh, _wanted(mesh, axis))
            if entry is None and parts > 1:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                held = bytes_per_device(mesh, spec)
                rows.append(Unsharded(name, spec.shape, str(axis), size, parts, held))
    return sorted(rows, key=lambda row: -row.bytes)


def describe_unsharded(mesh: Mesh, specs: Any) -> str | None:
    """Return one line on the parameters of `unsharded_table` and what they cost; None for none."""
    rows = unsharded_table(mesh, specs)
    if not rows:
        return None
    held = sum({row.path: row.bytes for row in rows}.values())
    share = held / bytes_per_device(mesh, specs)
    worst, places = rows[0], len({row.path for row in rows})
    return (
        f"{places} parameters are not split as the mesh would allow, {held / 1e6:,.1f} MB "
        f"({share:.0%} of the parameters on each device): the largest is {worst.path} "
        f"{list(worst.shape)}, whose {worst.axis} = {worst.size} does not divide by {worst.parts}"
    )


def bytes_per_device(mesh: Mesh, specs: Any, itemsize: int = 4) -> int:
    """Return what each device holds of the parameters; `itemsize` bytes each (float32: 4)."""
    leaves: list[ParamSpec] = jax.tree.leaves(specs)
    return itemsize * sum(
        math.prod(NamedSharding(mesh, partition(mesh, s.shape, s.axes)).shard_shape(s.shape))
        for s in leaves
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that each device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of [A, B, T]: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def rows_of_process(mesh: Mesh, micro_rows: int) -> slice:
    """Return which of the `micro_rows` rows of a micro-batch the devices of this process hold.

    Raises ConfigError when they are not one contiguous range, as a batch is read by range.
    """
    shards, columns = batch_shards(mesh), mesh.shape["fsdp"]
    held = sorted(
        {
            data * columns + part
            for (data, part, *_), device in np.ndenumerate(mesh.devices)
            if device.process_index == jax.process_index()
        }
    )
    if not held or held != list(range(held[0], held[-1] + 1)):
        raise ConfigError(
            f"mesh {dict(mesh.shape)}: process {jax.process_index()} holds the row shards {held}, "
            "which are not contiguous; let mesh.fsdp x mesh.tensor fill whole hosts"
        )
    return slice(held[0] * micro_rows // shards, (held[-1] + 1) * micro_rows // shards)


def to_global(mesh: Mesh, batch: Any) -> Any:
    """Return a batch on the devices of the mesh, from the rows that this process supplies.

    `batch`: a tree of NumPy arrays [A, rows of this process, T]; the result's arrays are
    [A, B, T], sharded by `batch_sharding`. B is inferred from the share this process holds.
    """
    sharding, shards = batch_sharding(mesh), batch_shards(mesh)
    here = rows_of_process(mesh, shards)

    def place(local: Any) -> Array:
        A, rows, *rest = local.shape
        if here.stop - here.start == shards:
            return jax.device_put(local, sharding)
        shape = (A, rows * shards // (here.stop - here.start), *rest)
        return jax.make_array_from_process_local_data(sharding, local, shape)

    return jax.tree.map(place, batch)


def constrain(x: Array, axes: tuple[str | None, ...], *, mesh: Mesh | None) -> Array:
    """Return x, which the compiler must place by the rules for its logical `axes`.

    Without a mesh, or on one device, x as it is. A dimension that does not divide is whole.
    """
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition(mesh, x.shape, axes)))


def on_shards(
    f: Callable[..., Array],
    arrays: tuple[Array | None, ...],
    axes: tuple[tuple[str | None, ...], ...],
    out_axes: tuple[str | None, ...],
    *,
    mesh: Mesh | None,
) -> Array:
    """Return f(*arrays), which each device computes from the part of the arrays that it holds.

    `axes` name those of each array, `out_axes` those of the result; a name is split by the rules if
    it divides in all arrays that have it, and is whole otherwise. Nothing is exchanged inside. A
    name that only some arrays have, as one that f sums over, must be an axis of the result too:
    of size 1 from each device, so that the caller adds the parts.
    """
    if mesh is None or mesh.size == 1:
        return f(*arrays)
    split = {}
    for array, names in zip(arrays, axes, strict=True):
        for size, name in zip(array.shape if array is not None else (), names, strict=False):
            wanted = split.get(name, _wanted(mesh, name))
            split[name] = wanted if size % _parts(mesh, wanted) == 0 else ()

    def spec(names: tuple[str | None, ...]) -> PartitionSpec:
        return PartitionSpec(*(split[name] or None for name in names))

    # Outputs name every axis that splits an input, so gradients are right without checked types.
    in_specs = tuple(spec(names) for names in axes)
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=spec(out_axes), check_vma=False
    )(*arrays)


def _wanted(mesh: Mesh, axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that the rules give to a logical axis."""
    return tuple(name for name in RULES.get(axis or "", ()) if mesh.shape[name] > 1)


def _parts(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)
