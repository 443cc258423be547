"""Bytes from anywhere: files, folders and globs, local or on gs://, s3:// and other schemes.

Local paths are opened by the operating system itself, so that any name works; what has a scheme
goes through fsspec. Listings come in byte order of the whole path, independent of locale and file
system. Whatever keeps a file from being read is an UnreadableFile with its name and the reason.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from jaxgpt.corpus import remote
from jaxgpt.corpus.compression import is_compressed, unpack, unpacked_name
from jaxgpt.corpus.remote import is_remote
from jaxgpt.errors import DataError, one_line, show_path

BLOCK_BYTES = 1 << 20
Kind = Literal["text", "json", "parquet", "arrow"]


class UnreadableFile(DataError):
    """A file that cannot be opened or read: no permission, gone, not regular, failing medium."""


class FileStatus(NamedTuple):
    """Size in bytes; a stamp that changes with the content; an identity, the same under all names.

    The stamp holds the size and the time of change in ns, or what an object store calls a version.
    """

    size: int
    stamp: str
    identity: int | str


def base_name_kind(path: str) -> Kind:
    """Return how the name of a file, without .gz and the like, says that it is to be read."""
    name = unpacked_name(path)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    if name.endswith((".arrow", ".feather", ".ipc")):
        return "arrow"
    return "parquet" if name.endswith(".parquet") else "text"


def expand(source: str) -> list[str]:
    """Return the files that a file, folder or glob pattern stands for, in byte order.

    Includes what cannot be read, such as folders that cannot be listed. Raises DataError when there
    is none, or a folder that is reached twice through links.
    """
    return [path for path, _ in _found(source)]


def listing(source: str) -> Iterator[tuple[str, FileStatus | UnreadableFile]]:
    """Yield each file of `expand(source)` with its status, or why it cannot be read.

    Lazy, and for object stores one request per page of the listing rather than per file.
    """
    for path, info in _found(source):
        try:
            yield path, status(path) if info is None else _remote_status(path, info)
        except UnreadableFile as error:
            yield path, error


def status(path: str) -> FileStatus:
    """Return what a file is now; UnreadableFile when it is none, or may not be read."""
    if is_remote(path):
        with _readable(path):
            info = remote.read_info(path)
        return _remote_status(path, info)
    try:
        found = os.stat(path)
        allowed = os.access(path, os.R_OK)
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(found.st_mode):
        raise UnreadableFile(f"{show_path(path)}: a folder that cannot be listed")
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableFile(f"{show_path(path)}: not a regular file")
    if not allowed:
        raise UnreadableFile(f"{show_path(path)}: cannot read it: Permission denied")
    stamp = f"{found.st_size}-{found.st_mtime_ns}"
    return FileStatus(found.st_size, stamp, found.st_dev << 64 | found.st_ino)


class RawFile:
    """The bytes of a file as they are; whatever goes wrong in reading them is an UnreadableFile.

    Seekable, a context manager, and enough of a binary file for gzip and pyarrow.
    """

    closed = False

    def __init__(self, path: str):
        self._path, self._errors = path, Exception if is_remote(path) else OSError
        self._at = 0
        if is_remote(path):
            with _readable(path):
                self._file = remote.open_file(path)
            return
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise _unreadable(path, error) from error

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read(size)
        except self._errors as error:
            raise _unreadable(self._path, error, f" at byte {self._at}") from error
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            self._at = self._file.seek(offset, whence)
        except self._errors as error:
            raise _unreadable(self._path, error) from error
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        self.closed = True

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exists(path: str) -> bool:
    """Return whether there is a file or folder of this name; UnreadableFile when none can tell."""
    if not is_remote(path):
        return os.path.lexists(path)
    with _readable(path):
        return remote.exists(path)


def open_binary(path: str) -> RawFile:
    """Return a file opened for reading, not decompressed; UnreadableFile when that fails."""
    return RawFile(path)


def blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of at most 1 MiB, decompressed by its suffix.

    `start` skips bytes of a file that is not compressed. Raises UnreadableFile when it cannot be
    read, DataError for a damaged or truncated archive.
    """
    with open_binary(path) as raw:
        if is_compressed(path):
            yield from unpack(raw, path, show_path(path), BLOCK_BYTES)
            return
        raw.seek(start)
        while block := raw.read(BLOCK_BYTES):
            yield block


def _found(source: str) -> Iterator[tuple[str, dict | None]]:
    """Yield the paths of `expand`, those of an object store with what its listing says of them."""
    found: Iterable[tuple[str, dict | None]]
    if is_remote(source):
        with _readable(source):
            found = remote.find_files(source)
    else:
        found = ((path, None) for path in _local_files(source))
    empty = True
    for item in found:
        empty = False
        yield item
    if empty:
        raise DataError(f"data.sources: {source!r} matches no file")


def _local_files(source: str) -> Iterator[str]:
    path = os.path.expanduser(source)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if not os.path.lexists(path):
            found = glob.glob(path, recursive=True, include_hidden=True)
            found = [name for name in found if not os.path.isdir(name)] + _closed_folders(path)
            yield from sorted(found, key=os.fsencode)
            return
        is_folder = False  # a link to nothing, which `status` refuses
    except OSError:
        is_folder = False  # `status` says why
    if is_folder:
        yield from _walk(path)
    else:
        yield path


def _walk(folder: str) -> Iterator[str]:
    """Yield all files below a folder in byte order, and folders that cannot be listed.

    Memory follows the entries of the folders on the way to one file, not the number of files.
    """
    seen: dict[tuple[int, int], str] = {}
    todo = [(b"", folder, True)]
    while todo:
        _, path, is_folder = todo.pop()
        if not is_folder:
            yield path
            continue
        try:
            found = os.stat(path)
            with os.scandir(path) as entries:
                inside = [_entry(entry) for entry in entries]
        except OSError:
            yield path
            continue
        identity = found.st_dev, found.st_ino
        if identity in seen:
            both = f"{show_path(path)} and {show_path(seen[identity])}"
            raise DataError(f"data.sources: {both} are the same folder; remove the link")
        seen[identity] = path
        todo += sorted(inside, reverse=True)


def _entry(entry: os.DirEntry[str]) -> tuple[bytes, str, bool]:
    """Return sort key, path, and whether it is a folder (links are followed)."""
    try:
        is_folder = entry.is_dir()
    except OSError:  # a loop of links
        is_folder = False
    # With the "/" that follows it in longer paths, a folder sorts as those paths do.
    return os.fsencode(entry.name) + b"/" * is_folder, entry.path, is_folder


def _closed_folders(pattern: str) -> list[str]:
    """Return the folders that a pattern has to list but may not; glob passes over them silently."""
    closed: dict[str, None] = {}
    while glob.has_magic(pattern):
        head, name = os.path.split(pattern)
        folders = [head or "."]
        if name == "**" or glob.has_magic(head):
            below = os.path.join(pattern if name == "**" else head, "")
            folders += glob.glob(below, recursive=True, include_hidden=True)
        for folder in folders:
            if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
                closed[folder.rstrip("/")] = None
        pattern = head
    return list(closed)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Make everything that goes wrong with a remote file an UnreadableFile that names it."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{show_path(path)}: {one_line(error)}: pip install jaxgpt[cloud]"
        ) from error
    except Exception as error:  # each store has its own types, for HTTP, credentials, buckets
        raise _unreadable(path, error) from error


def _remote_status(path: str, info: dict) -> FileStatus:
    if info["type"] == "directory":
        raise UnreadableFile(f"{show_path(path)}: a folder, not a file")
    size = int(info.get("size") or 0)
    identity: int | str = path
    if "ino" in info:  # file://, which a plain path may name as well
        identity = os.stat(info["name"]).st_dev << 64 | info["ino"]
    return FileStatus(size, f"{size}-{remote.version(info)}", identity)


def _unreadable(path: str, error: BaseException, place: str = "") -> UnreadableFile:
    return UnreadableFile(f"{show_path(path)}: cannot read it{place}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = one_line(error)
    return text if isinstance(error, OSError | EOFError) else f"{type(error).__name__}: {text}"
