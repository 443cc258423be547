"""One shard: the stream of its documents, E d1 E d2 ..., and what is known of each of them.

A block file (see `blocks`) with the sections
    tokens      uint16 or uint32: the end-of-text id E and the content ids of each document
    starts      uint64 [docs+1]: stream position of each document's E, and of the end
    doc_bytes   uint64 [docs]: UTF-8 bytes of the text
    digests     [docs, 16]: first half of the SHA-256 of the text
    provenance  where each document came from, compressed
E never occurs inside a document, yet documents are found by `starts` and not by looking for E.
Knows neither manifests nor rows.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.data import blocks
from jaxgpt.data.blocks import BlockFile
from jaxgpt.durable import storage_errors
from jaxgpt.errors import DataError

MAGIC = b"jaxgpt\x00S"
DIGEST_BYTES = 16
WRITTEN_AT_ONCE = 1 << 15  # ids
LOADED_STARTS = 1 << 16  # of a shard with more documents, starts are read where they are needed


class Encoded(NamedTuple):
    """A document to be written; a huge one gives its ids as several arrays."""

    ids: np.ndarray | Iterable[np.ndarray]  # content ids, without E
    num_bytes: int  # of the text in UTF-8
    origin: str
    digest: bytes  # document_digest of the text


def document_digest(data: bytes) -> bytes:
    """Return what two texts, given in UTF-8, have in common only when they are equal."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def encoded_document(ids: np.ndarray, text: str, origin: str) -> Encoded:
    """Return a document to be written, of its content ids and the text they stand for."""
    data = text.encode()
    return Encoded(ids, len(data), origin, document_digest(data))


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest dtype of all ids: uint16 when the largest is <= 65535, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(
    path: Path,
    documents: Iterable[Encoded],
    *,
    tokenizer_digest: str,
    vocab_size: int,
    eos_id: int,
) -> dict:
    """Write one shard and return its manifest entry.

    `documents` is consumed once; memory is 32 bytes plus the provenance per document. The file
    appears under its name only when it is complete and durable. In the entry, `content` hashes what
    the stream is made of and `sha256` the whole file. Raises DataError for ids outside
    [0, vocab_size) or equal to `eos_id`, StorageError when writing fails.
    """
    path, dtype = Path(path), token_dtype(vocab_size)
    starts, doc_bytes, digests = array("Q", [0]), array("Q"), bytearray()
    provenance: list[bytes] = []
    content = hashlib.sha256()
    opening = np.array([eos_id])

    def tokens() -> Iterator[bytes]:
        pending: list[tuple[int, np.ndarray]] = []  # written together: documents can be tiny
        size = 0
        for number, (ids, num_bytes, origin, digest) in enumerate(documents):
            count = 0
            pending.append((number, opening))
            for part in [ids] if isinstance(ids, np.ndarray) else ids:
                assert part.ndim == 1 and part.dtype.kind in "iu", f"ids {part.dtype}{part.shape}"
                pending.append((number, part))
                count += len(part)
                size += len(part)
                if size >= WRITTEN_AT_ONCE:
                    yield flush(pending)
                    pending, size = [], 0
            assert count, f"{path.name}: document {number} is empty: skip and count it before"
            assert len(digest) == DIGEST_BYTES, f"a digest of {len(digest)} bytes"
            starts.append(starts[-1] + 1 + count)
            doc_bytes.append(num_bytes)
            digests.extend(digest)
            provenance.append(origin.encode("utf-8", "surrogateescape"))
        if pending:
            yield flush(pending)

    def flush(parts: list[tuple[int, np.ndarray]]) -> bytes:
        stream = np.concatenate([ids for _, ids in parts], dtype=np.int64)
        openings = sum(ids is opening for _, ids in parts)
        inside = stream.min() >= 0 and stream.max() < vocab_size
        if not inside or np.count_nonzero(stream == eos_id) != openings:
            content_ids = [(number, ids) for number, ids in parts if ids is not opening]
            _refuse(content_ids, path.name, vocab_size, eos_id)
        data = stream.astype(dtype).tobytes()
        content.update(data)
        return data

    def numbers(values: array) -> Iterator[bytes]:
        data = np.array(values, "<u8").tobytes()
        content.update(data)
        yield data

    def header() -> dict[str, Any]:
        return counts() | {
            "dtype": dtype.name,
            "tokenizer_digest": tokenizer_digest,
            "vocab_size": vocab_size,
            "eos_id": eos_id,
            "provenance_bytes": sum(map(len, provenance)) + max(0, len(provenance) - 1),
        }

    def counts() -> dict[str, Any]:
        return {
            "num_docs": len(doc_bytes),
            "num_tokens": starts[-1] - len(doc_bytes),
            "num_bytes": sum(doc_bytes),
            "content": content.hexdigest(),
        }

    sections = {
        "tokens": tokens(),
        "starts": numbers(starts),
        "doc_bytes": numbers(doc_bytes),
        "digests": (digests,),
        "provenance": map(_pack, (provenance,)),
    }
    size = blocks.write(path, MAGIC, header, sections)
    with storage_errors(path), open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "size": size, "sha256": sha256} | counts()


def _refuse(parts: list[tuple[int, np.ndarray]], name: str, vocab_size: int, eos_id: int) -> None:
    """Raise the DataError that names the document whose ids cannot be content."""
    for number, ids in parts:
        where, low, high = f"{name}: document {number}", ids.min(initial=0), ids.max(initial=0)
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"{where} has ids {low}..{high}, the vocabulary has 0..{vocab_size - 1}"
            )
        if (ids == eos_id).any():
            raise DataError(
                f"{where} contains end-of-text id {eos_id}, which only separates documents"
            )


def _pack(provenance: list[bytes]) -> bytes:
    joined = b"\0".join(provenance)
    assert joined.count(b"\0") == max(0, len(provenance) - 1), "NUL in a provenance string"
    return zlib.compress(joined, 6)


@dataclass(frozen=True)
class Shard:
    """An open shard; what it reads is checked on first touch."""

    file: BlockFile
    dtype: np.dtype
    num_docs: int
    tokens_at: int  # offset of the stream in the file, in bytes
    starts: Sequence[int]  # [docs + 1]

    @property
    def stream_len(self) -> int:
        """Ids of the stream, the E of each document included."""
        return self.file.header["num_tokens"] + self.num_docs


@dataclass(frozen=True)
class _StoredStarts(Sequence):
    """The starts of a shard with very many documents, read one by one: enough for a bisection."""

    file: BlockFile
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        at = self.file.section("starts")[0] + 8 * index
        return int.from_bytes(blocks.read(self.file, at, at + 8), "little")


def read_header(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Read a shard's header and compare it with the file's size and with the manifest's values."""
    return blocks.read_header(path, MAGIC, expected)


def open_shard(path: Path, expected: Mapping[str, Any], verified: bytearray | None = None) -> Shard:
    """Check a shard's header, size, CRC table and footer, and open it.

    `expected` may have any field of the header. Raises DataError for damage, StorageError if the
    file cannot be read.
    """

    def ids_in_range(at: int, data: bytes) -> None:
        if at < tokens_end:
            top = int(np.frombuffer(data[: tokens_end - at], dtype).max(initial=0))
            if top >= vocab_size:
                where = f"{path}: block at bytes {at}..{at + len(data)}"
                raise DataError(f"{where} has id {top}, the vocabulary {vocab_size}")

    file = blocks.open_file(path, MAGIC, expected, verified, ids_in_range)
    dtype, vocab_size = np.dtype(file.header["dtype"]).newbyteorder("<"), file.header["vocab_size"]
    tokens_at, tokens_end = file.section("tokens")
    count = file.header["num_docs"] + 1
    if count <= LOADED_STARTS:
        starts = memoryview(blocks.read(file, *file.section("starts"))).cast("Q")
    else:
        starts = _StoredStarts(file, count)
    return Shard(file, dtype, count - 1, tokens_at, starts)


def read_stream(shard: Shard, position: int, out: np.ndarray) -> None:
    """Fill `out`, contiguous and of the shard's dtype, with the stream from `position` on."""
    at = shard.tokens_at + position * shard.dtype.itemsize
    blocks.read_into(shard.file, at, memoryview(out))


def read_each(places: Iterable[tuple[Shard, int, int]], out: np.ndarray) -> None:
    """Fill rows of `out`, C-contiguous [M, W] of the dtype of all shards, with ids of streams.

    A place is a shard, a position in its stream, and the row that is filled from there on.
    """
    size = out.dtype.itemsize
    in_files = [(s.file, s.tokens_at + position * size, row) for s, position, row in places]
    blocks.read_each(in_files, out)


def expect_stream(shard: Shard, position: int, count: int) -> None:
    """Have the system fetch `count` ids from `position` on; see `blocks.expect`."""
    size = shard.dtype.itemsize
    blocks.expect(shard.file, shard.tokens_at + position * size, count * size)


def read_starts(shard: Shard, begin: int, end: int) -> np.ndarray:
    """Return starts [begin, end) of documents as int64."""
    return _numbers(shard, "starts", begin, end)


def starts_between(shard: Shard, low: int, high: int) -> np.ndarray:
    """Return the stream positions in [low, high) at which documents open, as int64."""
    first, last = bisect_left(shard.starts, low), bisect_left(shard.starts, high)
    last = min(last, shard.num_docs)
    return read_starts(shard, first, last)


def read_doc_bytes(shard: Shard, begin: int, end: int) -> np.ndarray:
    """Return the UTF-8 bytes of documents [begin, end) of a shard as int64."""
    return _numbers(shard, "doc_bytes", begin, end)


def _numbers(shard: Shard, section: str, begin: int, end: int) -> np.ndarray:
    at = shard.file.section(section)[0]
    return np.frombuffer(blocks.read(shard.file, at + 8 * begin, at + 8 * end), "<i8")


def read_digests(shard: Shard) -> np.ndarray:
    """Return the digests of all documents, uint64 [docs, 2]."""
    return np.frombuffer(blocks.read(shard.file, *shard.file.section("digests")), "<u8").reshape(
        -1, 2
    )


def read_provenance(shard: Shard) -> list[str]:
    """Return where each document of a shard came from."""
    packed = blocks.read(shard.file, *shard.file.section("provenance"))
    longest = shard.file.header["provenance_bytes"] + 1
    joined = zlib.decompressobj().decompress(packed, longest)
    return [origin.decode("utf-8", "surrogateescape") for origin in joined.split(b"\0")]


def documents(shard: Shard) -> Iterator[Encoded]:
    """Yield all documents of a shard, as they were given to `write_shard`."""
    origins, digests = read_provenance(shard), read_digests(shard)
    sizes = read_doc_bytes(shard, 0, shard.num_docs).tolist()
    for number in range(shard.num_docs):
        start, stop = shard.starts[number] + 1, shard.starts[number + 1]
        yield Encoded(
            _parts(shard, start, stop), sizes[number], origins[number], digests[number].tobytes()
        )


def _parts(shard: Shard, start: int, stop: int) -> Iterator[np.ndarray]:
    for at in range(start, stop, blocks.BLOCK_BYTES):
        part = np.empty(min(blocks.BLOCK_BYTES, stop - at), shard.dtype)
        read_stream(shard, at, part)
        yield part


def copy_shard(source: Shard, path: Path, keep: np.ndarray) -> dict:
    """Write a shard of the documents for which `keep`, bool [docs], is true; return its entry."""
    header = source.file.header
    kept = (doc for doc, wanted in zip(documents(source), keep, strict=True) if wanted)
    return write_shard(
        path,
        kept,
        tokenizer_digest=header["tokenizer_digest"],
        vocab_size=header["vocab_size"],
        eos_id=header["eos_id"],
    )


def verify(shard: Shard) -> None:
    """Check every block of a shard; DataError names the first damaged one."""
    blocks.verify(shard.file)
