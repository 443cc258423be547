"""What a commit record says of a state: its leaves, its mesh, and what it was made with."""

from __future__ import annotations

import functools
import platform
from dataclasses import replace
from importlib import metadata
from typing import Any

import jax

from jaxgpt.checkpoint import arrays, fingerprint
from jaxgpt.checkpoint.record import Leaf, Record, encode

PACKAGES = ("jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def draft(
    state: Any,
    *,
    step: int,
    position: int,
    identity: dict[str, str],
    meta: dict[str, Any],
    config: dict[str, Any],
) -> Record:
    """Return the record of `state` without fingerprints and files.

    Raises ValueError or TypeError for what no record can hold, before anything is written.
    """
    leaves = fingerprint.named_leaves(state)
    record = Record(
        step=step,
        position=position,
        finite=False,
        layout=arrays.layout_of(state),
        leaves=tuple(
            Leaf(name, tuple(leaf.shape), str(leaf.dtype), 0) for name, leaf in leaves.items()
        ),
        files=(),
        identity=identity,
        meta=meta,
        config=config,
        mesh=_mesh(leaves),
        versions=dict(_versions()),
    )
    encode(record)
    return record


def with_fingerprints(record: Record, numbers: dict[str, Any]) -> Record:
    """Return `record` completed by `numbers`, as `fingerprint.hold` returned them; waits."""
    fingerprints, finite = fingerprint.collect(numbers)
    leaves = tuple(replace(leaf, fingerprint=fingerprints[leaf.path]) for leaf in record.leaves)
    return replace(record, leaves=leaves, finite=finite)


def _mesh(leaves: dict[str, Any]) -> dict[str, int]:
    axes: dict[str, int] = {}
    for leaf in leaves.values():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            axes = dict(sharding.mesh.shape)
            break
    return {**axes, "processes": jax.process_count()}


@functools.cache  # reads the metadata of every package, 30 ms
def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree
            versions[name] = "not installed"
    device = jax.local_devices()[0]
    versions["python"] = platform.python_version()
    versions["device"] = f"{device.platform} {device.device_kind}"
    return versions
