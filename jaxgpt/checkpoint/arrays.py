"""Arrays to and from disk with Orbax: a flat table of leaves by path, one folder per step.

A flat table makes every state one that Orbax can hold: empty nodes do not appear, zero-size leaves,
which Orbax refuses, are made anew, and a part is restored by naming it. Nothing here decides
whether what was read is right; that is the business of the record and the fingerprints.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.model.params import Params, restack

if TYPE_CHECKING:  # 0.3 s of a core, which no start waits for
    import orbax.checkpoint as ocp

Array = jax.Array
FILE_BYTES = 1 << 28  # about that of a data file, so that several are read and hashed at once
PARTS = "parts"  # folder of a step that was written part by part, see `parts`
_IN_LAYER = re.compile(r"(?:.*\.)?(layers\.[0-9]+)\.[^.]+")


def open_writer(timeout: float) -> ocp.AsyncCheckpointer:
    """Return the writer of this process; a save that takes longer than `timeout` seconds fails.

    Uncompressed: zstd takes less than a tenth off weights and competes with the step for cores.
    """
    import orbax.checkpoint as ocp

    quiet_orbax()
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(use_compression=False),
        async_options=ocp.AsyncOptions(
            timeout_secs=max(1, int(timeout)), create_directories_asynchronously=False
        ),
    )


def quiet_orbax() -> None:
    """Keep off the terminal the tracebacks that it prints of errors that we report."""
    logging.getLogger("absl").addFilter(_not_orbax)


def _not_orbax(message: logging.LogRecord) -> bool:
    return "orbax" not in message.pathname


def start_write(writer: ocp.AsyncCheckpointer, directory: Path, state: Any) -> None:
    """Start writing the leaves of `state`; on return the device no longer needs them."""
    import orbax.checkpoint as ocp

    leaves = {name: leaf for name, leaf in named_leaves(state).items() if leaf.size}
    args = ocp.args.PyTreeSave(leaves, ocdbt_target_data_file_size=FILE_BYTES)
    writer.save(directory, args=args)


def read(directory: Path, leaves: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """Return the named leaves, placed as their `sharding` says (default: the first device).

    The caller has compared shapes and dtypes with the record: Orbax would cast without a word.
    """
    import orbax.checkpoint as ocp

    if (directory / PARTS).is_dir():
        return _read_parts(directory / PARTS, leaves)
    stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
    placements = {name: _restore_args(leaf) for name, leaf in stored.items()}
    args = ocp.args.PyTreeRestore(item=stored, restore_args=placements, partial_restore=True)
    restored = {}
    if stored:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restored = reader.restore(directory, args=args)
    return {
        name: restored[name] if name in stored else _empty(leaf) for name, leaf in leaves.items()
    }


def part_of(leaf: str) -> str:
    """Return the part that holds a leaf: `layers.3` of `params.layers.3.wq`, else its last word."""
    match = _IN_LAYER.fullmatch(leaf)
    return match[1] if match else leaf.rpartition(".")[2]


def _read_parts(folder: Path, leaves: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    groups: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(part_of(name), {})[name] = leaf
    values: dict[str, Array] = {}
    for part, group in groups.items():
        values |= read(folder / part, group)
    return {name: values[name] for name in leaves}


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
    import orbax.checkpoint as ocp

    return ocp.ArrayRestoreArgs(
        sharding=_placement(leaf), global_shape=leaf.shape, dtype=leaf.dtype, strict=True
    )


def _empty(leaf: jax.ShapeDtypeStruct) -> Array:
    make = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=_placement(leaf))
    return make(leaf.shape, leaf.dtype)


def _placement(leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def holds_arrays(directory: Path) -> bool:
    """Return whether Orbax has written (or begun to write) arrays here."""
    written = ("_CHECKPOINT_METADATA", "manifest.ocdbt", PARTS)
    return any((directory / name).exists() for name in written)


# Layouts of the parameters.


def layout_of(state: Any) -> str:
    """Return "stacked" or "per-layer" for a state that holds parameters, "none" for any other."""
    nodes = [node for node in jax.tree.leaves(state, is_leaf=_is_params) if _is_params(node)]
    if not nodes:
        return "none"
    return "per-layer" if isinstance(nodes[0].layers, tuple) else "stacked"


def convert(state: Any, layout: str) -> Any:
    """Return `state` with every `Params` in it, parameters and moments alike, in `layout`."""
    return jax.tree.map(
        lambda node: restack(node, layout == "stacked") if _is_params(node) else node,
        state,
        is_leaf=_is_params,
    )


def convert_abstract(state: Any, layout: str) -> Any:
    """Return the `jax.ShapeDtypeStruct`s of `convert(state, layout)`, placed like those of `state`.

    The layer axis of a stacked leaf is not split, so its layers are placed like the leaf.
    """
    placed = {_without_layer(name): leaf for name, leaf in named_leaves(state).items()}
    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    shapes = jax.eval_shape(lambda tree: convert(tree, layout), plain)
    leaves = [
        _place_like(leaf, placed[_without_layer(name)])
        for name, leaf in named_leaves(shapes).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _is_params(node: Any) -> bool:
    return isinstance(node, Params)


def _without_layer(name: str) -> str:
    """Return the path without the number after `layers`, equal in both layouts."""
    head, separator, tail = name.rpartition("layers.")
    number, _, rest = tail.partition(".")
    return f"{head}{separator}{rest if number.isdigit() else tail}"


def _place_like(leaf: jax.ShapeDtypeStruct, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = like.sharding
    if isinstance(sharding, jax.sharding.NamedSharding) and leaf.ndim != like.ndim:
        spec = (None, *sharding.spec) if leaf.ndim > like.ndim else sharding.spec[1:]
        spec = jax.sharding.PartitionSpec(*spec)
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
