"""Parameters in a checkpoint, leaf by leaf and in either layout, for what never holds them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jaxgpt import config
from jaxgpt.checkpoint import load
from jaxgpt.checkpoint.record import Leaf, Record
from jaxgpt.checkpoint.verify import read_verified
from jaxgpt.interop.tensors import Entry
from jaxgpt.model import params

GROUP_BYTES = 1 << 26  # read at once; an export takes two to three times as much


@dataclass(frozen=True)
class Stored:
    """The leaves of one step by path in `Params`, in the layout that they were saved in."""

    directory: Path
    record: Record
    leaves: dict[str, Leaf]

    def place(self, name: str) -> tuple[str, int | None]:
        """Return the leaf that holds `layers.3.wq`, and the index in it; None: the whole leaf."""
        if name in self.leaves:
            return name, None
        _, layer, weight = name.split(".")
        return f"layers.{weight}", int(layer)

    def dtype(self, name: str) -> str:
        return self.leaves[self.place(name)[0]].dtype

    @property
    def dtypes(self) -> str:
        """Return the dtype of all leaves, or the several that there are, by name."""
        return ", ".join(sorted({leaf.dtype for leaf in self.leaves.values()}))

    def groups(self, entries: tuple[Entry, ...]) -> Iterator[tuple[Entry, ...]]:
        """Yield all entries in groups whose leaves take about GROUP_BYTES.

        Orbax reads a leaf whole, so the layers of a stacked one belong together.
        """
        order = {name: number for number, name in enumerate(self.leaves)}
        if self.record.layout == "stacked":
            entries = tuple(sorted(entries, key=lambda e: order[self.place(e.leaves[0])[0]]))
        group: list[Entry] = []
        held: set[str] = set()
        for entry in entries:
            more = {self.place(name)[0] for name in entry.leaves} - held
            if group and more and self._bytes(held | more) > GROUP_BYTES:
                yield tuple(group)
                group, held = [], set()
            group.append(entry)
            held |= {self.place(name)[0] for name in entry.leaves}
        yield tuple(group)

    def _bytes(self, names: set[str]) -> int:
        return sum(
            int(np.prod(leaf.shape)) * jax.numpy.dtype(leaf.dtype).itemsize
            for leaf in (self.leaves[name] for name in names)
        )

    def read(self, entries: tuple[Entry, ...]) -> dict[str, np.ndarray]:
        """Return the leaves of some entries by path, each proven to be what was saved.

        Raises Damaged if one is not, and StorageError if the files cannot be read.
        """
        places = {name: self.place(name) for entry in entries for name in entry.leaves}
        where = jax.sharding.SingleDeviceSharding(host_device())
        wanted = {
            leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
            for leaf in (self.leaves[stored] for stored, _ in places.values())
        }
        values = read_verified(self.directory, self.record, wanted)
        arrays = {path: np.asarray(value) for path, value in values.items()}
        whole = {name: arrays[self.leaves[stored].path] for name, (stored, _) in places.items()}
        return {
            name: whole[name] if index is None else whole[name][index]
            for name, (_, index) in places.items()
        }


def open_stored(directory: Path, record: Record, weights: Literal["last", "ema"]) -> Stored:
    """Return the leaves of the last weights in one step, or of their moving average.

    Raises Damaged when the record does not hold the parameters that its configuration names.
    """
    specs = params.specs(config.from_dict(record.config).model)
    return Stored(directory, record, load.saved_leaves(directory, record, weights, specs))


def host_device() -> jax.Device:
    """Return the CPU, so that no accelerator is filled; the default device where it is hidden."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
