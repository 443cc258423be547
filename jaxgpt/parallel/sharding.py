"""Where arrays lie: one table from logical axis names to mesh axes, and what follows from it.

Parameters name their axes in their specs, activations where they are made; only `RULES` knows mesh
axes. A dimension that its mesh axes do not divide is kept whole on each device, and reported.
Batches are [A, B, T]: rows are split over data, fsdp and expert, sequences over context, and A
(micro-batches in time) is whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import ConfigError
from jaxgpt.model.params import ParamSpec
from jaxgpt.model.shards import Names, Whole
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel.mesh import BATCH_AXES, batch_shards

Array = jax.Array

# Logical axis -> mesh axes that split it. Axes that are not named here are never split.
RULES: dict[str, tuple[str, ...]] = {
    # of parameters
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "layers": ("stage",),
    # of activations, whose width is never split, so that norms stay local
    "batch": BATCH_AXES,
    "seq": ("context",),
    "replicas": ("data",),
    "stages": ("stage",),  # what the stages of a pipeline compute at the same time
}


class Unsharded(NamedTuple):
    """A parameter dimension that the rules would split but that does not divide."""

    path: str  # such as layers/0/wq
    shape: tuple[int, ...]
    axis: str  # logical name
    size: int  # of the dimension
    parts: int  # devices it should be split over
    bytes: int  # what each device holds of the parameter, in float32


def partition(
    mesh: Mesh, shape: tuple[int, ...], axes: Names, taken: tuple[str, ...] = ()
) -> PartitionSpec:
    """Return how an array is split: by `RULES`, where the size divides, each mesh axis once.

    An axis of the array takes what those before it have left: the width of an expert's matrix is
    split over fsdp alone, as its experts have taken the axis expert. `taken` are mesh axes that
    split something around the array.
    """
    used = set(taken)
    entries: list[tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(name for name in _wanted(mesh, axis) if name not in used)
        fits = names and size % _parts(mesh, names) == 0
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
    """Return the sharding of [A, B, T]: rows over data, fsdp and expert, sequences over context."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, "context"))


def rows_of_process(mesh: Mesh, micro_rows: int) -> slice:
    """Return which of the `micro_rows` rows of a micro-batch the devices of this process hold.

    Raises ConfigError when they are not one contiguous range, as a batch is read by range.
    """
    shards = batch_shards(mesh)
    held = sorted(row_shards(mesh).get(jax.process_index(), ()))
    if not held or held != list(range(held[0], held[-1] + 1)):
        raise ConfigError(
            f"mesh {dict(mesh.shape)}: process {jax.process_index()} holds the row shards {held}, "
            "which are not contiguous; let mesh.fsdp x mesh.tensor fill whole hosts"
        )
    return slice(held[0] * micro_rows // shards, (held[-1] + 1) * micro_rows // shards)


def row_shards(mesh: Mesh) -> dict[int, set[int]]:
    """Return by process which parts of the rows of a micro-batch its devices hold."""
    batch = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    sizes = [mesh.devices.shape[i] for i in batch]
    held: dict[int, set[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        part = int(np.ravel_multi_index([place[i] for i in batch], sizes))
        held.setdefault(device.process_index, set()).add(part)
    return held


def to_global(mesh: Mesh, batch: Any) -> Any:
    """Return a batch on the devices of the mesh, from the rows that this process supplies.

    `batch`: a tree of NumPy arrays [A, rows of this process, T]; the result's arrays are
    [A, B, T], sharded by `batch_sharding`. B is inferred from the share this process holds.
    """
    sharding, shards = batch_sharding(mesh), batch_shards(mesh)
    here = rows_of_process(mesh, shards)

    def place(local: Any) -> Array:
        A, rows, T = local.shape
        if here.stop - here.start == shards:
            return jax.device_put(local, sharding)
        B = rows * shards // (here.stop - here.start)
        first = here.start * B // shards

        def part(index: tuple[slice, ...]) -> Any:
            micro, row, token = index
            return local[micro, (row.start or 0) - first : (row.stop or B) - first, token]

        return jax.make_array_from_callback((A, B, T), sharding, part)

    return jax.tree.map(place, batch)


@dataclass(frozen=True)
class Placement:
    """The devices of a mesh, as a model sees them: see `model.shards.Shards`.

    `taken` are mesh axes that a surrounding `jax.vmap(..., spmd_axis_name=...)` splits. Without a
    mesh, or on one device, everything is whole.
    """

    mesh: Mesh | None
    taken: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        return meshes.platform(self.mesh)

    def split(self, name: str) -> int:
        return 1 if self.mesh is None else _parts(self.mesh, self._axes(name))

    def constrain(self, x: Array, names: Names) -> Array:
        if self.mesh is None or self.mesh.size == 1:
            return x
        spec = partition(self.mesh, x.shape, names, self.taken)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def on_shards(
        self,
        f: Callable[..., Any],
        arrays: tuple[Array | None, ...],
        names: tuple[Names, ...],
        out_names: Names | tuple[Names, ...],
        exchange: tuple[str, ...] = (),
    ) -> Any:
        if self.mesh is None or self.mesh.size == 1:
            return Whole(self.platform).on_shards(f, arrays, names, out_names, exchange)
        split: dict[str | None, tuple[str, ...]] = {}
        for array, of_array in zip(arrays, names, strict=True):
            for size, name in zip(() if array is None else array.shape, of_array, strict=False):
                wanted = split.get(name, self._axes(name))
                split[name] = wanted if size % _parts(self.mesh, wanted) == 0 else ()

        def spec(of_array: Names) -> PartitionSpec:
            used: set[str] = set()
            entries = []
            for name in of_array:
                axes = tuple(axis for axis in split.get(name, ()) if axis not in used)
                used |= set(axes)
                entries.append(axes or None)
            return PartitionSpec(*entries)

        if exchange:
            axes = {name: split.get(name, ()) for name in exchange}
            inner = f
            f = lambda *parts: inner(*parts, axes)  # noqa: E731
        several = bool(out_names) and isinstance(out_names[0], tuple)
        # Outputs name every axis that splits an input, or f has summed over it, so gradients are
        # right without checked types.
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=tuple(spec(of_array) for of_array in names),
            out_specs=tuple(map(spec, out_names)) if several else spec(out_names),
            check_vma=False,
        )(*arrays)

    def over(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        if self.mesh is None or not (axes := self._axes(name)):
            return jax.vmap(functools.partial(f, self))
        inner = Placement(self.mesh, (*self.taken, *axes))
        return jax.vmap(functools.partial(f, inner), spmd_axis_name=axes)

    def _axes(self, name: str | None) -> tuple[str, ...]:
        return tuple(axis for axis in _wanted(self.mesh, name) if axis not in self.taken)


def _wanted(mesh: Mesh, axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that the rules give to a logical axis."""
    return tuple(name for name in RULES.get(axis or "", ()) if mesh.shape[name] > 1)


def _parts(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)
