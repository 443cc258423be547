"""A checksummed file of named sections: what shards and packing indices are made of.

    header 4096 B | sections, each from a multiple of 8 B | CRC-32 table uint32 [blocks] | footer

Little-endian. The table covers the sections in blocks of 256 KiB, small enough that a random read
of one row checks little else and large enough that the table stays tiny; header and table carry
checksums of their own. A block is checked when it is first touched. Files are read with `pread` and
not mapped: a failing disk or server is an error with a name, where a map would kill the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxgpt.durable import storage_errors, sync_directory
from jaxgpt.errors import DataError, StorageError

VERSION = 2
HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 18
PREFIX = struct.Struct("<8sII")  # magic, version, length of the JSON text that follows
FOOTER = struct.Struct("<I8s")  # CRC-32 of the table, magic backwards
RETRY_AFTER = (0.1, 0.5, 2.0)  # seconds before each new try at a file that cannot be read
LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM}

T = TypeVar("T")
Check = Callable[[int, bytes], None]  # (offset in the file, data of a block)


@dataclass(frozen=True)
class BlockFile:
    """An open file; its descriptor is closed when the last reference to the record goes."""

    path: Path
    fd: int
    header: dict[str, Any]
    body_end: int  # offset in bytes of the CRC table
    crcs: np.ndarray  # [blocks] uint32
    verified: bytearray  # [blocks] 1 where the block was found good
    check: Check | None

    def section(self, name: str) -> tuple[int, int]:
        """Return the offsets in bytes at which a section starts and stops."""
        start, stop = self.header["sections"][name]
        return start, stop


_reading: dict[int, Path] = {}  # by thread


def reading() -> str:
    """Return in words which files are being opened or read at this moment, to name a stuck one."""
    paths = {str(path) for path in list(_reading.values())}
    return f"reading {', '.join(sorted(paths)) or 'no file'}"


class _Body:
    """Writes sections and sums up their blocks on the way."""

    def __init__(self, file: Any):
        self.file, self.at = file, HEADER_BYTES
        self.crcs: list[int] = []
        self._crc, self._room = 0, BLOCK_BYTES

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.at += len(data)
        view = memoryview(data).cast("B")
        while len(view):
            part, view = view[: self._room], view[self._room :]
            self._crc, self._room = zlib.crc32(part, self._crc), self._room - len(part)
            if not self._room:
                self.end_block()

    def end_block(self) -> None:
        if self._room < BLOCK_BYTES:
            self.crcs.append(self._crc)
            self._crc, self._room = 0, BLOCK_BYTES


def write(
    path: Path,
    magic: bytes,
    header: Callable[[], dict[str, Any]] | dict[str, Any],
    sections: Mapping[str, Iterable[bytes]],
) -> int:
    """Write a file whole or not at all, and return its size in bytes.

    Each section is consumed once, in order; `header` may be a function that is called after the
    last. Several processes may write the same path: the last to finish wins. Raises StorageError
    when writing fails; an error of a section passes through. Nothing is left behind by either.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    places: dict[str, tuple[int, int]] = {}
    try:
        with storage_errors(path):
            raw = open(temporary, "wb")
        with raw:
            raw.write(bytes(HEADER_BYTES))
            body = _Body(raw)
            for name, chunks in sections.items():
                with storage_errors(path):
                    body.write(bytes(-body.at % 8))
                start = body.at
                for chunk in chunks:  # an OSError of the section's own source is not ours to name
                    with storage_errors(path):
                        body.write(chunk)
                places[name] = start, body.at
            body.end_block()
            table = np.array(body.crcs, "<u4").tobytes()
            size = body.at + len(table) + FOOTER.size
            fields = header() if callable(header) else header
            text = json.dumps(fields | {"sections": places, "size": size}).encode()
            front = PREFIX.pack(magic, VERSION, len(text)) + text
            assert len(front) <= HEADER_BYTES - 4, "the header does not fit in 4096 bytes"
            front = front.ljust(HEADER_BYTES - 4, b"\0")
            with storage_errors(path):
                raw.write(table + FOOTER.pack(zlib.crc32(table), magic[::-1]))
                raw.seek(0)
                raw.write(front + struct.pack("<I", zlib.crc32(front)))
                raw.flush()
                os.fsync(raw.fileno())
        with storage_errors(path):
            os.replace(temporary, path)
            sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def read_header(path: Path, magic: bytes, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Read a header and compare it with the file's size and with `expected` fields.

    Raises DataError where one differs or the header is damaged, StorageError if it cannot be read.
    """
    with storage_errors(path):
        front, size = _patiently(path, _front, path)
    if size != expected.get("size", size):
        raise DataError(f"{path}: file has {size} bytes, the manifest says {expected['size']}")
    damaged = DataError(f"{path}: the header is damaged or not that of such a file; restore it")
    if len(front) < HEADER_BYTES or front[:8] != magic:
        raise damaged
    if zlib.crc32(front[:-4]) != int.from_bytes(front[-4:], "little"):
        raise damaged
    _, version, length = PREFIX.unpack_from(front)
    if version != VERSION:
        raise DataError(f"{path}: file has version {version}, this program reads {VERSION}")
    header = json.loads(front[PREFIX.size : PREFIX.size + length])
    if header["size"] != size:
        raise DataError(f"{path}: file has {size} bytes, its header says {header['size']}")
    for key, value in expected.items():
        if header.get(key, value) != value:
            raise DataError(f"{path}: file has {key} {header[key]}, expected {value}")
    return header


def open_file(
    path: Path,
    magic: bytes,
    expected: Mapping[str, Any],
    verified: bytearray | None = None,
    check: Check | None = None,
) -> BlockFile:
    """Check header, size, CRC table and footer of a file, and open it.

    `verified` of the same file opened earlier saves checking its blocks again; `check` is called on
    each block when it is first touched, to refuse what no checksum can. Raises DataError for
    damage, StorageError if the file cannot be read, both as `read_into` does.
    """
    header = read_header(path, magic, expected)
    body_end = max((stop for _, stop in header["sections"].values()), default=HEADER_BYTES)
    blocks = len(range(HEADER_BYTES, body_end, BLOCK_BYTES))
    with storage_errors(path):
        fd = _patiently(path, os.open, path, os.O_RDONLY)
    file = BlockFile(
        path=path,
        fd=fd,
        header=header,
        body_end=body_end,
        crcs=np.empty(blocks, "<u4"),
        verified=bytearray(blocks) if verified is None else verified,
        check=check,
    )
    weakref.finalize(file, os.close, fd)
    tail = bytearray(header["size"] - body_end)
    _pread(file, body_end, memoryview(tail))
    table = tail[: 4 * blocks]
    if tail[4 * blocks :] != FOOTER.pack(zlib.crc32(table), magic[::-1]):
        raise DataError(f"{path}: the checksum table or footer is damaged; restore the file")
    file.crcs[:] = np.frombuffer(table, "<u4")
    return file


def read(file: BlockFile, start: int, stop: int) -> bytearray:
    """Return bytes [start, stop) of a file; see `read_into`."""
    data = bytearray(stop - start)
    read_into(file, start, memoryview(data))
    return data


def read_into(file: BlockFile, start: int, buffer: memoryview) -> None:
    """Fill a contiguous `buffer` with the bytes of a file from `start` on.

    Blocks touched for the first time are checked. Raises DataError for a damaged or shortened
    file, StorageError for one that cannot be read in 2.6 s of trying again.
    """
    first = (start - HEADER_BYTES) // BLOCK_BYTES
    last = (start + buffer.nbytes - HEADER_BYTES - 1) // BLOCK_BYTES
    for block in range(first, last + 1):
        if not file.verified[block]:
            _verify_block(file, block)
    _pread(file, start, buffer)


def read_each(places: Sequence[tuple[BlockFile, int, int]], out: np.ndarray) -> None:
    """Fill rows of `out`, C-contiguous [M, W], each from a place: file, offset in bytes, row.

    As `read_into` for each, but with all reads under way before the first is waited for, and at 2
    us a row where the blocks are verified, most of it the call to the system.
    """
    view, size = memoryview(out).cast("B"), out.shape[1] * out.itemsize
    known = []
    for file, start, _ in places:
        first = (start - HEADER_BYTES) // BLOCK_BYTES
        last = (start + size - HEADER_BYTES - 1) // BLOCK_BYTES
        known.append(last - first < 2 and file.verified[first] and file.verified[last])
        if not known[-1]:
            expect(file, start, size)
    thread = threading.get_ident()
    for (file, start, row), verified in zip(places, known, strict=True):
        buffer = view[row * size : (row + 1) * size]
        if verified:
            _reading[thread] = file.path
            try:
                if os.preadv(file.fd, [buffer], start) == size:
                    continue
            except OSError:
                pass  # is tried again, and named if it lasts
            finally:
                del _reading[thread]
        read_into(file, start, buffer)


def expect(file: BlockFile, start: int, size: int) -> None:
    """Have the system fetch the blocks of `size` bytes from `start` on that are not verified yet.

    Returns at once, so that the reads of many rows are under way together; a hint, without errors.
    """
    first = (start - HEADER_BYTES) // BLOCK_BYTES
    last = (start + size - HEADER_BYTES - 1) // BLOCK_BYTES
    if not (file.verified[first] and file.verified[last]):
        at, length = HEADER_BYTES + first * BLOCK_BYTES, (last - first + 1) * BLOCK_BYTES
        with contextlib.suppress(OSError, AttributeError):  # macOS has no posix_fadvise
            os.posix_fadvise(file.fd, at, length, os.POSIX_FADV_WILLNEED)


def verify(file: BlockFile) -> None:
    """Check every block of a file again; DataError names the first damaged one."""
    for block in range(len(file.crcs)):
        _verify_block(file, block)


def _verify_block(file: BlockFile, block: int) -> None:
    at = HEADER_BYTES + block * BLOCK_BYTES
    data = bytearray(min(BLOCK_BYTES, file.body_end - at))
    _pread(file, at, memoryview(data))
    if zlib.crc32(data) != file.crcs[block]:
        where = f"{file.path}: block {block} (bytes {at}..{at + len(data)})"
        raise DataError(f"{where} fails its checksum; restore the file")
    if file.check:
        file.check(at, data)
    file.verified[block] = 1


def _front(path: Path) -> tuple[bytes, int]:
    with open(path, "rb") as file:
        return file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size


def _pread(file: BlockFile, start: int, buffer: memoryview) -> None:
    size, done = buffer.nbytes, 0
    while done < size:
        rest = buffer if not done else buffer.cast("B")[done:]
        try:
            count = _patiently(file.path, os.preadv, file.fd, [rest], start + done)
        except OSError as error:
            where = f"{file.path}: bytes {start}..{start + size}"
            raise StorageError(f"{where} cannot be read: {error.strerror}") from error
        if not count:
            where = f"{file.path}: bytes {start}..{start + size}"
            raise DataError(f"{where}: the file has become shorter; restore it")
        done += count


def _patiently(path: Path, action: Callable[..., T], *args: Any) -> T:
    """Return action(*args), tried again after an OSError that may pass; `reading` names the path.

    Storage may be away while a server restarts; a file that is not there will not come back.
    """
    thread = threading.get_ident()
    _reading[thread] = path
    try:
        for delay in RETRY_AFTER:
            try:
                return action(*args)
            except OSError as error:
                if error.errno in LASTING:
                    raise
                time.sleep(delay)
        return action(*args)
    finally:
        del _reading[thread]
