"""Writing files so that a crash never shows half of one, and naming the file that could not be."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.errors import StorageError


def storage_reason(error: BaseException) -> str:
    """Return the cause in one line: `No space left on device (ENOSPC): path` where it is known."""
    number = error.errno if isinstance(error, OSError) else None
    path = str(error.filename) if isinstance(error, OSError) and error.filename else ""
    if found := re.search(r"os_error_code='([0-9]+)'", str(error)):  # as TensorStore reports it
        number = int(found[1])
    if number:
        name = errno.errorcode.get(number, str(number))
        return f"{os.strerror(number)} ({name})" + (f": {path}" if path else "")
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


@contextlib.contextmanager
def storage_errors(where: str | Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that begins with `where`."""
    try:
        yield
    except OSError as error:
        reason = storage_reason(error).removesuffix(f": {where}")
        raise StorageError(f"{where}: {reason}") from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that after any crash `path` holds the old bytes or all of the new."""
    temporary = path.with_name(path.name + ".partial")
    with storage_errors(path):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
