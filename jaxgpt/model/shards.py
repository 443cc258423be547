"""What a model is told of the devices that compute it: logical names, never mesh axes.

An activation is placed by the logical names of its axes (batch, seq, heads, kv_heads, mlp, vocab,
experts, embed), and a function that must see the part of one device, or exchange parts with others,
is run by `on_shards`. `parallel.sharding.Placement` does this for a mesh, `Whole` for one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

Array = jax.Array
Names = tuple[str | None, ...]
# Mesh axes by logical name, () where an axis is not split: what collectives take as `axis_name`.
MeshAxes = Mapping[str, tuple[str, ...]]


class Shards(Protocol):
    """The devices of one call of the model; hashable, so that it may be a static argument."""

    @property
    def platform(self) -> str:
        """Return "cpu", "gpu" or "tpu": of the devices, also of those that are not here."""
        ...

    def split(self, name: str) -> int:
        """Return into how many parts axes of this logical name are split where they divide."""
        ...

    def constrain(self, x: Array, names: Names) -> Array:
        """Return x, placed by the logical names of its axes; None is whole on each device."""
        ...

    def on_shards(
        self,
        f: Callable[..., Any],
        arrays: tuple[Array | None, ...],
        names: tuple[Names, ...],
        out_names: Names | tuple[Names, ...],
        exchange: tuple[str, ...] = (),
    ) -> Any:
        """Return f(*arrays), computed by each device from the part of the arrays that it holds.

        `names` are those of each array's axes, `out_names` those of the result (or of each of
        several). A name is split if it divides in all arrays that have it. With `exchange`, f gets
        one argument more: the mesh axes that split each of these names, for collectives. What f
        exchanges nothing of must be an axis of the result too, if it is split: of size 1 from each
        device where f sums over it, so that the caller adds the parts.
        """
        ...

    def over(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return g, g(*trees) = f(inner, *entries) for all entries of the trees' first axis.

        That axis has this logical name, and so has the first of each result: the devices that
        split it compute different entries at the same time. `inner` are those of one entry.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """One device, which holds everything."""

    platform: str

    def split(self, name: str) -> int:
        return 1

    def constrain(self, x: Array, names: Names) -> Array:
        return x

    def on_shards(
        self,
        f: Callable[..., Any],
        arrays: tuple[Array | None, ...],
        names: tuple[Names, ...],
        out_names: Names | tuple[Names, ...],
        exchange: tuple[str, ...] = (),
    ) -> Any:
        return f(*arrays, dict.fromkeys(exchange, ())) if exchange else f(*arrays)

    def over(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(functools.partial(f, self))


def here() -> Whole:
    """Return one device of the default platform."""
    return Whole(jax.default_backend())
