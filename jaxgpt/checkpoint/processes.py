"""The little that processes must agree on around a checkpoint; with one process nothing happens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxgpt.checkpoint.record import Damaged
from jaxgpt.errors import JaxgptError, StorageError

T = TypeVar("T")
_barriers = itertools.count()  # a barrier's name works once; all processes count alike


def is_first() -> bool:
    """Return whether this process owns names, records and deletions."""
    return jax.process_index() == 0


def barrier(name: str, timeout: float) -> None:
    """Wait until every process is here, at most `timeout` seconds.

    Safe in a background thread, for it uses no device.
    """
    if jax.process_count() > 1:
        key = f"jaxgpt-checkpoint-{name}-{next(_barriers)}"
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(1000 * timeout))


def appears(path: Path, patience: float = 60.0) -> bool:
    """Return whether `path` exists; only the first process sees its own files at once."""
    deadline = time.monotonic() + (0.0 if is_first() else patience)
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


def from_first(value: int) -> int:
    """Return the first process's `value`, -1 <= value < 2**61, in two words of JAX's 32 bits."""
    if jax.process_count() == 1:
        return value
    words = np.array([(value + 1) >> 31, (value + 1) & 0x7FFFFFFF], np.int32)
    high, low = (int(word) for word in multihost_utils.broadcast_one_to_all(words))
    return (high << 31 | low) - 1


def together(action: Callable[[], T]) -> T:
    """Return `action()`; when one process fails as Damaged or StorageError, all of them do."""
    error: JaxgptError | None = None
    try:
        result = action()
    except (Damaged, StorageError) as caught:
        error = caught
    if jax.process_count() > 1:
        mine = 0 if error is None else 1 if isinstance(error, Damaged) else 2
        worst = int(np.max(multihost_utils.process_allgather(np.int32(mine))))
        if error is None and worst:
            kind = Damaged if worst == 1 else StorageError
            error = kind("another process failed; see its message")
    if error is not None:
        raise error
    return result
