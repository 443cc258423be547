"""Processes that the checkpoint tests kill, and processes that save together.

python checkpoint_child.py crash FOLDER POINT:OCCURRENCE ...
    runs `saves` once per argument, each in FOLDER/POINT:OCCURRENCE, killed there by SIGKILL;
    a line per argument tells the status in which it ended
python checkpoint_child.py together FOLDER PORT RANK
    saves steps 1 and 2 from two processes of two devices each
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.checkpoint.store import Checkpointer

IDENTITY = {"model": "m1", "data": "d1"}
STEPS = 4


def host_state(step: int) -> dict[str, Any]:
    """Return the state of a step as numpy arrays; every value depends on the step."""
    return {
        "step": np.int32(step),
        "w": np.arange(64, dtype=np.float32).reshape(8, 8) / 7 + step,
        "b": np.arange(8, dtype=np.float32) * step,
    }


def place(state: dict[str, Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return the state on the mesh, `w` split over its first axis."""

    def put(name: str, value: Any) -> jax.Array:
        value = np.asarray(value)
        spec = PartitionSpec(mesh.axis_names[0]) if name == "w" else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {name: put(name, value) for name, value in state.items()}


def abstract(state: Any) -> Any:
    """Return the shapes, dtypes and placements of `state`."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def saves(folder: Path, last: int, log: Any = lambda line: None) -> None:
    """Resume or begin, then save every step up to `last`."""
    state = place(host_state(0), jax.make_mesh((jax.device_count(),), ("data",)))
    checkpointer = Checkpointer(folder, keep=2, identity=IDENTITY, config_dict={}, log=log)
    restored = checkpointer.restore_latest(abstract(state))
    first = restored.record.step + 1 if restored else 1
    for step in range(first, last + 1):
        state = place(host_state(step), state["w"].sharding.mesh)
        checkpointer.save(step, state, position=100 * step, meta={})
    checkpointer.close()


def crash(folder: Path, faults: list[str]) -> None:
    # Forked from one process that has imported everything but started nothing: 3 s less for each.
    for fault in faults:
        child = os.fork()
        if child == 0:
            os.environ["JAXGPT_FAULT"] = f"{fault}:kill"
            saves(folder / fault, STEPS)
            os._exit(0)
        print(fault, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def together(folder: Path, port: str, rank: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    saves(folder, 2)


if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    if mode == "crash":
        crash(Path(folder), rest)
    else:
        together(Path(folder), rest[0], int(rest[1]))
