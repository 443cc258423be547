"""Decompression of .gz, .zst, .bz2 and .xz files as a stream, in bounded memory.

Files of several members are read to their end. Damage, truncation and bytes that are no member are
refused with the place. Blocks are of limited size whatever an archive expands to.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jaxgpt.errors import DataError, one_line

SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
INPUT_BYTES = 1 << 16  # that are read at a time
MAX_DICTIONARY = 256 << 20  # bytes an .xz file may make its reader hold; xz -9 asks for 65 MiB


class Source(Protocol):
    """What is decompressed: its bytes in order, and how many have been read."""

    def read(self, size: int) -> bytes: ...
    def tell(self) -> int: ...


def is_compressed(path: str) -> bool:
    """Return whether the name of a file says that it must be decompressed."""
    return path.lower().endswith(SUFFIXES)


def unpacked_name(path: str) -> str:
    """Return the name of a file, in lower case, without the suffix of its compression."""
    name = path.lower()
    return name.rpartition(".")[0] if is_compressed(name) else name


def unpack(source: Source, path: str, name: str, block_bytes: int) -> Iterator[bytes]:
    """Yield what a compressed file holds in blocks of 1 to `block_bytes` bytes.

    The suffix of `path` says how it is compressed; `name` is what an error calls it. Raises
    DataError for a file that is damaged, truncated, empty, or compressed in another way.
    """
    blocks = _unpack(source, path.lower(), block_bytes)
    while True:
        try:
            block = next(blocks, b"")
            if not source.tell():
                raise EOFError("it is empty")
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            place = f"damaged or truncated near byte {source.tell()} of the file"
            reason = one_line(error)
            raise DataError(f"{name}: {place}: {reason}") from error
        if not block:
            return
        yield block


def _unpack(source: Source, path: str, block_bytes: int) -> Iterator[bytes]:
    stream: Any
    if path.endswith((".bz2", ".xz")):
        yield from _members(source, _new_bz2 if path.endswith(".bz2") else _new_xz, block_bytes)
        return
    if path.endswith(".gz"):
        stream = gzip.GzipFile(fileobj=source, mode="rb")
    else:
        import pyarrow  # zstandard's own reader takes a truncated file for a whole one

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(source, "r"), "zstd")
    while block := stream.read(block_bytes):
        yield block


def _new_bz2() -> bz2.BZ2Decompressor:
    return bz2.BZ2Decompressor()


def _new_xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_DICTIONARY)


def _members(source: Source, new: Callable[[], Any], block_bytes: int) -> Iterator[bytes]:
    """Yield what all members hold; zero bytes between them are padding.

    The file readers of bz2 and lzma silently drop what follows the first member if it is damaged.
    """
    decoder = new()
    while True:
        data = b""
        if decoder.eof:
            data = decoder.unused_data.lstrip(b"\0")
            while not data:
                if not (more := source.read(INPUT_BYTES)):
                    return
                data = more.lstrip(b"\0")
            decoder = new()
        elif decoder.needs_input:
            data = source.read(INPUT_BYTES)
            if not data:
                raise EOFError("it ends before its end mark")
        if block := decoder.decompress(data, block_bytes):
            yield block
