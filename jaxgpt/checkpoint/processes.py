"""The little that processes must agree on around a checkpoint; with one process nothing happens.

All of it goes through the key-value store: it needs no device, so it may run in a thread beside the
training steps, and ends in time where a process is missing.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from jaxgpt.checkpoint import commit
from jaxgpt.checkpoint.record import Damaged
from jaxgpt.errors import ConfigError, StorageError, one_line
from jaxgpt.runtime import store

T = TypeVar("T")
ONE = "run.dir must be one folder, on a file system that all hosts share"
# Seconds for the slowest process to read, check or prepare what another has done already.
PATIENCE = 7200.0
# Seconds that a process whose write failed waits for those in which it may have failed as well.
FAILED = 20.0
# Seconds until a host sees what another wrote: NFS looks again after 30, and 60 at most.
SEEN = 45.0


class Alone(StorageError):
    """A failure that other processes may not share: they wait for this one, which has to end."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Raise Alone for storage that fails inside, where a library makes others wait for it."""
    try:
        yield
    except OSError as error:  # what is left of a process that was lost has other types
        if store.num_processes() == 1:
            raise
        raise Alone(f"process {store.process_index()}: {one_line(error)}") from error


def is_first() -> bool:
    """Return whether this process owns names, records and deletions."""
    return store.process_index() == 0


def barrier(name: str, timeout: float) -> None:
    """Wait until every process is here; raises StorageError after `timeout` seconds."""
    try:
        store.decide(f"checkpoint/{name}", 0, len, timeout)
    except (TimeoutError, ConnectionError) as error:
        raise StorageError(str(error)) from None


def appears(path: Path) -> bool:
    """Return whether `path` exists; only the first process sees its own files at once."""
    return becomes(path.exists, 0.0 if is_first() else SEEN)


def check_shared(path: Path, patience: float = SEEN) -> None:
    """Raise ConfigError unless this process reads in `path` what the first one wrote there.

    On file systems of many hosts it may take a while to be seen, at most `patience` seconds.
    """
    written = from_first(_content(path))
    if not becomes(lambda: _content(path) == written, patience):
        raise ConfigError(f"{path.parent}: {_me()} does not see what process 0 wrote there; {ONE}")


def agree_on_newest(root: Path, newest: int, patience: float = SEEN) -> int:
    """Return the newest step that any process sees in `root`, once this one sees it too.

    `newest` is the step that this process sees, -1 for none. Raises ConfigError where it does not
    come to see it in `patience` seconds, for going back would throw steps away.
    """
    try:
        seen = [newest, -store.process_index()]
        step, number = store.decide("checkpoint/newest", seen, max, PATIENCE)
    except (TimeoutError, ConnectionError) as error:
        raise StorageError(str(error)) from None
    record = root / f"{step}{commit.SUFFIX}"
    if step > newest and not becomes(record.exists, patience):
        raise ConfigError(f"{record}: {_me()} does not see what process {-number} sees; {ONE}")
    return step


def check_visible(paths: Sequence[Path], patience: float = SEEN) -> None:
    """Raise StorageError where a process does not see files that the first one does.

    That is a fault of its host, or takes a while; it must not pass for a damaged checkpoint.
    """
    if store.num_processes() == 1:
        return
    there = from_first(sum(path.is_file() for path in paths) == len(paths))
    if there and not becomes(lambda: all(path.is_file() for path in paths), patience):
        lost = next(path for path in paths if not path.is_file())
        raise StorageError(f"{lost}: {_me()} does not see what process 0 sees; {ONE}")


def becomes(condition: Callable[[], bool], patience: float) -> bool:
    """Return whether a condition holds, now or within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


def _me() -> str:
    return f"process {store.process_index()} ({socket.gethostname()})"


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


def together(
    action: Callable[[], T],
    name: str = "outcome",
    timeout: float = PATIENCE,
    grace: float = PATIENCE,
) -> T:
    """Return `action()`; when it raises in one process, the others raise Damaged or StorageError.

    A `name` is used by one thread at a time. Whoever does not come in `timeout` seconds has failed.
    Where `action` itself waits for other processes, one in which it raises would keep them in it:
    `grace` seconds later, if they have not come, it raises Alone.
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
            limit = min(timeout, timeout if error is None else grace)
            worst, number, text = store.decide(f"checkpoint/{name}", said, max, limit)
            text = f"process {-number}: {text}"
        except (TimeoutError, ConnectionError) as missing:
            worst, text = 2, str(missing)
            if error is not None and limit < timeout:
                error = Alone(str(error))
        if error is None and worst:
            error = Damaged(text) if worst == 1 else StorageError(text)
    if error is not None:
        raise error
    return result
