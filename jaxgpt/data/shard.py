"""One shard file: the content ids of its documents, self-describing and checksummed.

    header 4096 B | tokens | document starts uint64 [docs+1] | UTF-8 bytes uint64 [docs] |
    provenance | CRC-32 table uint32 [blocks] | footer

Everything is little-endian. Starts are positions in the shard's stream, in which the end-of-text id
E opens every document: document j has its E (not stored) at starts[j] and its ids at
tokens[starts[j]-j : starts[j+1]-j-1]. The table covers all bytes between header and table in blocks
of 1 MiB; header and table carry checksums of their own. Files are read with `pread` and not mapped:
a failing disk or server then is an error with a name, where a memory map would kill the process.
Knows neither manifests nor rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import time
import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxgpt.errors import DataError, StorageError

VERSION = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 20
HEADER_MAGIC = b"jaxgpt\x00S"
FOOTER_MAGIC = b"S\x00tpgxaj"
PREFIX = struct.Struct("<8sII")  # magic, version, length of the JSON text that follows
FOOTER = struct.Struct("<I8s")  # CRC-32 of the table, magic
RETRY_AFTER = (0.1, 0.5, 2.0)  # seconds before each new try at a block that cannot be read


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest dtype of all ids: uint16 when the largest is <= 65535, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_shard(
    path: Path,
    documents: Iterable[tuple[np.ndarray, int, str]],
    *,
    tokenizer_digest: str,
    vocab_size: int,
    eos_id: int,
) -> dict:
    """Write one shard and return its manifest entry.

    `documents` yields (content ids, UTF-8 bytes of the text, provenance) and is consumed once;
    memory is 16 bytes plus the provenance per document. The file appears under its name only when
    it is complete and durable. In the entry, `content` hashes what the stream is made of and
    `sha256` the whole file. Raises DataError for ids outside [0, vocab_size) or equal to `eos_id`,
    StorageError when writing fails.
    """
    path, dtype = Path(path), token_dtype(vocab_size)
    starts, doc_bytes, provenance = array("Q", [0]), array("Q"), []
    content = hashlib.sha256()
    temporary = path.with_name(path.name + ".partial")
    try:
        with storage_errors(path):
            file = open(temporary, "w+b")
        with file:
            file.write(bytes(HEADER_BYTES))
            for ids, num_bytes, origin in documents:  # an OSError of the source is not ours to name
                _check_ids(ids, f"{path.name}: document {len(doc_bytes)}", vocab_size, eos_id)
                data = np.asarray(ids, dtype).tobytes()
                with storage_errors(path):
                    file.write(data)
                content.update(data)
                starts.append(starts[-1] + 1 + len(ids))
                doc_bytes.append(num_bytes)
                provenance.append(origin.encode("utf-8", "surrogateescape"))
            numbers = np.array(starts, "<u8").tobytes() + np.array(doc_bytes, "<u8").tobytes()
            content.update(numbers)
            entry = {
                "num_docs": len(doc_bytes),
                "num_tokens": starts[-1] - len(doc_bytes),
                "num_bytes": sum(doc_bytes),
                "content": content.hexdigest(),
            }
            header = entry | {
                "dtype": dtype.name,
                "tokenizer_digest": tokenizer_digest,
                "vocab_size": vocab_size,
                "eos_id": eos_id,
            }
            with storage_errors(path):
                size = _finish(file, header, numbers, provenance)
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                os.replace(temporary, path)
                sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return {"name": path.name, "size": size, "sha256": sha256} | entry


def _check_ids(ids: np.ndarray, where: str, vocab_size: int, eos_id: int) -> None:
    assert np.ndim(ids) == 1 and len(ids), f"{where} is empty: skip and count it before"
    assert np.asarray(ids).dtype.kind in "iu", f"{where}: ids are integers"
    low, high = int(np.min(ids)), int(np.max(ids))
    if low < 0 or high >= vocab_size:
        raise DataError(f"{where} has ids {low}..{high}, the vocabulary has 0..{vocab_size - 1}")
    if np.any(np.equal(ids, eos_id)):
        raise DataError(f"{where} contains end-of-text id {eos_id}, which only separates documents")


def _finish(file: BinaryIO, header: dict, numbers: bytes, provenance: list[bytes]) -> int:
    """Append what follows the tokens, then write the header; fsync; return the size in bytes."""
    joined = b"\0".join(provenance)
    assert joined.count(b"\0") == max(0, len(provenance) - 1), "NUL in a provenance string"
    packed = zlib.compress(joined, 6)
    file.write(bytes(-file.tell() % 8) + numbers + packed)
    body_end = file.tell()
    file.seek(HEADER_BYTES)
    blocks = range(HEADER_BYTES, body_end, BLOCK_BYTES)
    crcs = [zlib.crc32(file.read(min(BLOCK_BYTES, body_end - at))) for at in blocks]
    table = np.array(crcs, "<u4").tobytes()
    file.seek(body_end)
    file.write(table + FOOTER.pack(zlib.crc32(table), FOOTER_MAGIC))
    size = file.tell()
    text = json.dumps(header | {"size": size, "provenance": [len(packed), len(joined)]}).encode()
    front = (PREFIX.pack(HEADER_MAGIC, VERSION, len(text)) + text).ljust(HEADER_BYTES - 4, b"\0")
    assert len(front) == HEADER_BYTES - 4, "the shard header does not fit in 4096 bytes"
    file.seek(0)
    file.write(front + struct.pack("<I", zlib.crc32(front)))
    file.flush()
    os.fsync(file.fileno())
    return size


@dataclass(frozen=True)
class Shard:
    """An open shard; its file descriptor is closed when the last reference to the record goes."""

    path: Path
    fd: int
    dtype: np.dtype
    vocab_size: int
    starts: memoryview  # [num_docs + 1] uint64; bisecting it takes 0.4 us and keeps the GIL
    tokens_end: int  # this and the next three are offsets in the file, in bytes
    doc_bytes_at: int
    provenance_at: int
    body_end: int
    provenance_len: int  # bytes when decompressed
    crcs: np.ndarray  # [blocks] uint32
    verified: bytearray  # [blocks] 1 where the block was found good


def read_header(path: Path, expected: dict) -> dict:
    """Read a shard's header and compare it with the file's size and with the manifest's values.

    `expected` must have `size`, and may have any field of the header. DataError if one differs.
    """
    with storage_errors(path):
        with open(path, "rb") as file:
            front, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    if size != expected["size"]:
        raise DataError(f"{path}: shard has {size} bytes, the manifest says {expected['size']}")
    magic, version, length = PREFIX.unpack_from(front)
    if magic != HEADER_MAGIC or zlib.crc32(front[:-4]) != int.from_bytes(front[-4:], "little"):
        raise DataError(f"{path}: the header is damaged or not that of a shard; restore the file")
    if version != VERSION:
        raise DataError(f"{path}: shard has version {version}, this program reads {VERSION}")
    header = json.loads(front[PREFIX.size : PREFIX.size + length])
    for key in expected.keys() & header.keys():
        if header[key] != expected[key]:
            raise DataError(f"{path}: shard has {key} {header[key]}, expected {expected[key]}")
    return header


def open_shard(path: Path, expected: dict, verified: bytearray | None = None) -> Shard:
    """Check a shard's header, size, CRC table and footer, and open it.

    Holds one file descriptor and 8 bytes per document. `verified` of the same shard opened earlier
    saves checking its blocks again. Raises DataError for damage, StorageError if it cannot be read.
    """
    header = read_header(path, expected)
    docs, tokens = header["num_docs"], header["num_tokens"]
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    packed_len, provenance_len = header["provenance"]
    tokens_end = HEADER_BYTES + tokens * dtype.itemsize
    starts_at = -(-tokens_end // 8) * 8
    doc_bytes_at = starts_at + 8 * (docs + 1)
    provenance_at = doc_bytes_at + 8 * docs
    body_end = provenance_at + packed_len
    blocks = len(range(HEADER_BYTES, body_end, BLOCK_BYTES))
    with storage_errors(path):
        fd = os.open(path, os.O_RDONLY)
    shard = Shard(
        path=path,
        fd=fd,
        dtype=dtype,
        vocab_size=header["vocab_size"],
        starts=memoryview(bytearray(8 * (docs + 1))).cast("Q"),
        tokens_end=tokens_end,
        doc_bytes_at=doc_bytes_at,
        provenance_at=provenance_at,
        body_end=body_end,
        provenance_len=provenance_len,
        crcs=np.empty(blocks, "<u4"),
        verified=bytearray(blocks) if verified is None else verified,
    )
    weakref.finalize(shard, os.close, fd)
    tail = _pread(shard, body_end, header["size"])
    if tail[4 * blocks :] != FOOTER.pack(zlib.crc32(tail[: 4 * blocks]), FOOTER_MAGIC):
        raise DataError(f"{path}: the checksum table or footer is damaged; restore the file")
    shard.crcs[:] = np.frombuffer(tail, "<u4", blocks)
    shard.starts[:] = memoryview(_read(shard, starts_at, doc_bytes_at)).cast("Q")
    return shard


def read_tokens(shard: Shard, begin: int, end: int) -> np.ndarray:
    """Return content ids [begin, end) of a shard, in its dtype.

    Here and below, a block is checked when it is first touched. Raises DataError for a damaged or
    shortened file, StorageError for one that cannot be read in 2.6 s of trying again.
    """
    size = shard.dtype.itemsize
    data = _read(shard, HEADER_BYTES + begin * size, HEADER_BYTES + end * size)
    return np.frombuffer(data, shard.dtype)


def read_doc_bytes(shard: Shard, begin: int, end: int) -> np.ndarray:
    """Return the UTF-8 bytes of documents [begin, end) of a shard as int64."""
    data = _read(shard, shard.doc_bytes_at + 8 * begin, shard.doc_bytes_at + 8 * end)
    return np.frombuffer(data, "<u8").astype(np.int64)


def read_provenance(shard: Shard) -> list[str]:
    """Return where each document of a shard came from."""
    packed = _read(shard, shard.provenance_at, shard.body_end)
    joined = zlib.decompressobj().decompress(packed, shard.provenance_len + 1)
    return [origin.decode("utf-8", "surrogateescape") for origin in joined.split(b"\0")]


def verify(shard: Shard) -> None:
    """Check every block of a shard; DataError names the first damaged one."""
    _check(shard, HEADER_BYTES, shard.body_end)


def _read(shard: Shard, start: int, stop: int) -> bytes:
    _check(shard, start, stop)
    return _pread(shard, start, stop)


def _check(shard: Shard, start: int, stop: int) -> None:
    """Check the CRC, and the range of the ids, of each unverified block of bytes [start, stop)."""
    first, last = (start - HEADER_BYTES) // BLOCK_BYTES, (stop - HEADER_BYTES - 1) // BLOCK_BYTES
    for block in range(first, last + 1):
        if not shard.verified[block]:
            at = HEADER_BYTES + block * BLOCK_BYTES
            data = _pread(shard, at, min(at + BLOCK_BYTES, shard.body_end))
            where = f"{shard.path}: block {block} (bytes {at}..{at + len(data)})"
            if zlib.crc32(data) != shard.crcs[block]:
                raise DataError(f"{where} fails its checksum; restore the file")
            tokens = data[: max(0, shard.tokens_end - at)]
            top = np.frombuffer(tokens, shard.dtype).max(initial=0)
            if top >= shard.vocab_size:
                raise DataError(f"{where} has id {top}, the vocabulary {shard.vocab_size}")
            shard.verified[block] = 1


def _pread(shard: Shard, start: int, stop: int) -> bytes:
    where = f"{shard.path}: bytes {start}..{stop}"
    for delay in (*RETRY_AFTER, None):
        try:
            data = os.pread(shard.fd, stop - start, start)
        except OSError as error:
            if delay is None:
                raise StorageError(f"{where} cannot be read: {error.strerror}") from error
            time.sleep(delay)
            continue
        if len(data) < stop - start:
            raise DataError(f"{where}: the file has become shorter; restore it")
        return data
    raise AssertionError("the last try returns or raises")
