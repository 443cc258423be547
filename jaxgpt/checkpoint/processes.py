"""The little that processes must agree on around a checkpoint; with one process nothing happens.

All of it goes through the key-value store: it needs no device, so it may run in a thread beside the
training steps, and ends in time where a process is missing.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxgpt.checkpoint.record import Damaged
from jaxgpt.errors import ConfigError, StorageError, one_line
from jaxgpt.runtime import store

T = TypeVar("T")
# Seconds for the slowest process to read, check or prepare what another has done already.
PATIENCE = 7200.0


def is_first() -> bool:
    """Return whether this process owns names, records and deletions."""
    return store.process_index() == 0


def barrier(name: str, timeout: float) -> None:
    """Wait until every process is here; raises StorageError after `timeout` seconds."""
    try:
        store.decide(f"checkpoint/{name}", 0, len, timeout)
    except (TimeoutError, ConnectionError) as error:
        raise StorageError(str(error)) from None


def appears(path: Path, patience: float = 60.0) -> bool:
    """Return whether `path` exists; only the first process sees its own files at once."""
    deadline = time.monotonic() + (0.0 if is_first() else patience)
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


def check_shared(path: Path, patience: float = 60.0) -> None:
    """Raise ConfigError unless this process reads in `path` what the first one wrote there.

    On file systems of many hosts it may take a while to be seen, at most `patience` seconds.
    """
    written, deadline = from_first(_content(path)), time.monotonic() + patience
    while _content(path) != written:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{path.parent}: process {store.process_index()} ({socket.gethostname()}) does not "
                "see what process 0 wrote there; run.dir must be one folder, on a file system that "
                "all hosts share"
            )
        time.sleep(0.5)


def _content(path: Path) -> int:
    """Return 32 bits that tell the contents of files apart; -1 for no file."""
    try:
        return zlib.crc32(path.read_bytes())
    except OSError:
        return -1


def from_first(value: int) -> int:
    """Return the first process's `value`; raises StorageError where it does not come."""
    try:
        return store.from_first("checkpoint/first", value, PATIENCE)
    except (TimeoutError, ConnectionError) as error:
        raise StorageError(str(error)) from None


def together(action: Callable[[], T], name: str = "outcome", timeout: float = PATIENCE) -> T:
    """Return `action()`; when it raises in one process, the others raise Damaged or StorageError.

    A `name` is used by one thread at a time. Whoever does not come in `timeout` seconds has failed.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    if store.num_processes() > 1:
        mine = 0 if error is None else 1 if isinstance(error, Damaged) else 2
        said = [mine, -store.process_index(), one_line(error or "")]
        try:
            worst, number, text = store.decide(f"checkpoint/{name}", said, max, timeout)
            text = f"process {-number}: {text}"
        except (TimeoutError, ConnectionError) as missing:
            worst, text = 2, str(missing)
        if error is None and worst:
            error = Damaged(text) if worst == 1 else StorageError(text)
    if error is not None:
        raise error
    return result
