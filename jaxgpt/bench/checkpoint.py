"""Saving and restoring alone, beside the plain files of the same disk.

Each turn saves the state, writes as many bytes as plain files of the same sizes with fsync, and
reads both back. What the system keeps of the files in memory is dropped before they are read, as
after a restart on another machine. The first turn, which compiles, is reported on its own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt import config
from jaxgpt.checkpoint.store import Checkpointer
from jaxgpt.config import Config
from jaxgpt.durable import sync_directory
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.training import optimizer
from jaxgpt.training import state as states

PIECE = 1 << 24  # bytes that plain files are written and read in


def measure(
    cfg: Config, *, folder: str | None, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return seconds and bytes per second of saves, restores, and plain files below `folder`.

    Without a folder it is a temporary one. `ratio`s are medians over turns of the seconds of the
    checkpoint to those of plain files, so 1 is as fast as the disk. Raises StorageError as saving
    does; nothing is left in the folder.
    """
    mesh = meshes.make_mesh(cfg.mesh)
    meshes.check_run(mesh, cfg)
    shapes = parameters.abstract(parameters.specs(cfg.model), cfg.train.param_dtype)
    tx = optimizer.build(cfg, cfg.train.num_steps, shapes)
    abstract = states.abstract_state(cfg, tx, mesh)
    state = jax.block_until_ready(states.create(cfg, tx, mesh, states.shardings(abstract)))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    turns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="jaxgpt-bench-", dir=folder) as scratch:
        root, plain = Path(scratch, "ckpt"), Path(scratch, "plain")
        ckpt = Checkpointer(
            root, keep=1, identity={}, config_dict=config.to_dict(cfg), log=lambda line: None
        )
        with contextlib.closing(ckpt):
            for number in range(repeats + 1):  # the first turn compiles
                turns.append(_save(ckpt, number, state))
                sizes = _sizes(root / str(number))
                turns[-1] |= {"plain_write_seconds": _write(plain, sizes)}
                turns[-1] |= {"plain_read_seconds": _read(plain, sizes)}
                turns[-1] |= _restore(ckpt, root / str(number), abstract)
                said = ", ".join(f"{key} {value:.2f}" for key, value in turns[-1].items())
                say(f"turn {number}: {said}")
    first, rest = turns[0], turns[1:]
    medians = {key: statistics.median(turn[key] for turn in rest) for key in first}
    return {
        "state_bytes": state_bytes,
        "checkpoint_bytes": sum(sizes),
        "files": len(sizes),
        **{f"{key}_median": round(value, 4) for key, value in medians.items()},
        **{f"{key}_first": round(value, 4) for key, value in first.items() if "plain" not in key},
        **{
            f"{key.removesuffix('_seconds')}_bytes_per_sec_median": round(sum(sizes) / value, 1)
            for key, value in medians.items()
            if key != "blocked_seconds"
        },
        "save_ratio_median": _ratio(rest, "save_seconds", "plain_write_seconds"),
        "restore_ratio_median": _ratio(rest, "restore_seconds", "plain_read_seconds"),
        "blocked_share_median": _ratio(rest, "blocked_seconds", "save_seconds"),
        "repeats": repeats,
    }


def _ratio(turns: list[dict[str, float]], mine: str, other: str) -> float:
    return round(statistics.median(turn[mine] / turn[other] for turn in turns), 4)


def _save(ckpt: Checkpointer, step: int, state: Any) -> dict[str, float]:
    began = time.perf_counter()
    ckpt.save(step, state, position=step, meta={})
    blocked = time.perf_counter() - began
    while ckpt.durable_step != step:
        ckpt.poll()
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    ckpt.wait()  # until older steps are deleted, too
    return {"blocked_seconds": blocked, "save_seconds": seconds}


def _restore(ckpt: Checkpointer, directory: Path, abstract: Any) -> dict[str, float]:
    for path in _files(directory):
        drop(path)
    began = time.perf_counter()
    restored = ckpt.restore_latest(abstract)
    jax.block_until_ready(restored.state)
    return {"restore_seconds": time.perf_counter() - began}


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sizes(directory: Path) -> list[int]:
    return [path.stat().st_size for path in _files(directory)]


def _write(folder: Path, sizes: Sequence[int]) -> float:
    """Return the seconds in which files of these sizes are written and durable."""
    folder.mkdir(exist_ok=True)
    for path in _files(folder):
        path.unlink()
    content = memoryview(np.random.default_rng(0).bytes(PIECE))  # no file system shortens it
    began = time.perf_counter()
    for number, size in enumerate(sizes):
        with open(folder / f"{number:06}", "wb", buffering=0) as file:
            for at in range(0, size, PIECE):
                file.write(content[: size - at])
            os.fsync(file.fileno())
    sync_directory(folder)
    return time.perf_counter() - began


def _read(folder: Path, sizes: Sequence[int]) -> float:
    """Return the seconds in which those files are read from the disk."""
    buffer = memoryview(bytearray(PIECE))
    for path in _files(folder):
        drop(path)
    began = time.perf_counter()
    for number in range(len(sizes)):
        with open(folder / f"{number:06}", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def drop(path: Path) -> None:
    """Have the system forget what it holds in memory of a file that is on disk, where it can."""
    with open(path, "rb") as file, contextlib.suppress(AttributeError):  # macOS has no such call
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
