"""A step that is written part by part, so that no more than a part of it is ever in memory.

`save` makes step 0 of weights that come from elsewhere. Its folder holds `parts/`, in it an Orbax
folder for each layer and each leaf outside of layers; `arrays.read` finds leaves by their names.
Record, fingerprints and checks are those of any other step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxgpt.checkpoint import commit, describe, fingerprint
from jaxgpt.checkpoint.arrays import PARTS, part_of, quiet_orbax
from jaxgpt.checkpoint.record import Record
from jaxgpt.durable import storage_errors, storage_reason
from jaxgpt.errors import StorageError
from jaxgpt.model.params import Params

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def save(
    root: Path,
    shapes: Params,
    parts: Iterable[dict[str, Any]],
    *,
    identity: dict[str, str],
    meta: dict[str, Any],
    config: dict[str, Any],
) -> Record:
    """Write step 0 below `root` from arrays that come part by part, and publish its record last.

    `shapes` are `jax.ShapeDtypeStruct`s; each part names its leaves as `fingerprint.named_leaves`
    does those of `{"params": shapes}`. Raises StorageError; ValueError for a part that is not what
    `shapes` says.
    """
    state = {"params": shapes}
    expected = fingerprint.named_leaves(state)
    record = describe.draft(state, step=0, position=0, identity=identity, meta=meta, config=config)
    directory, numbers, finite = root / "0", {}, True
    with storage_errors(f"{directory}: not saved"):
        root.mkdir(parents=True, exist_ok=True)
        commit.mark_pending(root, 0)
        (directory / PARTS).mkdir(parents=True)
        with _writer() as writer:
            for part in parts:
                found, whole = _write_part(writer, directory, part, expected)
                numbers |= found
                finite &= whole
        if missing := sorted(set(expected) - set(numbers)):
            raise ValueError(f"never written: {missing[:8]}")
        leaves = tuple(replace(leaf, fingerprint=numbers[leaf.path]) for leaf in record.leaves)
        files = commit.seal(directory)
        record = replace(record, leaves=leaves, finite=finite, files=files)
        commit.publish(root, record)
    return record


def _writer() -> ocp.Checkpointer:
    import orbax.checkpoint as ocp

    quiet_orbax()
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _write_part(
    writer: ocp.Checkpointer,
    directory: Path,
    part: dict[str, Any],
    expected: dict[str, jax.ShapeDtypeStruct],
) -> tuple[dict[str, int], bool]:
    """Write one part and return its fingerprints, and whether it is free of NaN and infinity."""
    import orbax.checkpoint as ocp

    (folder,) = {part_of(name) for name in part}
    for name, array in part.items():
        if (array.shape, array.dtype) != (expected[name].shape, expected[name].dtype):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {expected[name]}")
    values = jax.device_put(part)
    started = fingerprint.dispatch(values)
    try:
        writer.save(directory / PARTS / folder, args=ocp.args.PyTreeSave(values))
    except Exception as error:  # Orbax reports failing storage in many types
        raise StorageError(f"{directory}: not saved: {storage_reason(error)}") from error
    return fingerprint.collect(started)
