"""Best-fit packing: documents are put whole into rows of T inputs, and no target is lost.

Best fit decreasing within one shard at a time, its window: pieces are placed from long to short,
each into the fullest row it still fits. On web-like lengths that leaves 0.03 % padding at T = 2048
and cuts only the documents longer than a row (Ding et al. 2024, arXiv 2404.10830). A piece is a run
of stream positions, its targets are those one further; a document of n content ids has n + 1 pairs,
the last being the E that closes it. The index holds the rows of a store and lies in its folder; it
is a function of the store's contents, T and the algorithm alone. Knows nothing of order or batches.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxgpt.data import blocks
from jaxgpt.data.fitting import assign
from jaxgpt.data.store import Store
from jaxgpt.durable import storage_errors
from jaxgpt.errors import ConfigError, DataError, StorageError

VERSION = 1  # part of the digest; raise it with any change of what is in a row
MAGIC = b"jaxgpt\x00P"
MAX_SEQ_LEN = 2**31 - 1
MAX_WINDOW = 2**32 - 1  # stream positions of a shard: the index stores them in 32 bits
CHUNK = 1 << 16  # pieces of the index held in memory while searching for a position
REBUILD = "deleting it is safe: the next use builds it again"


class MissingIndex(DataError):
    """There is no packing index yet for this store, row length and kind."""


class Truncated(NamedTuple):
    """What `whole` leaves out: inputs, each with its target, and how many documents lose some."""

    tokens: int
    documents: int


class Packed(NamedTuple):
    """The rows of one window, ordered by their first stream position, as are pieces in a row.

    Row r holds pieces[row_starts[r] : row_starts[r + 1]], each (first stream position, inputs).
    """

    row_starts: np.ndarray  # int64 [rows + 1]
    pieces: np.ndarray  # int64 [M, 2]
    fills: np.ndarray  # int64 [rows], inputs that are not padding, 1..T
    truncated: Truncated


def pack(lengths: np.ndarray, seq_len: int, *, whole: bool) -> Packed:
    """Pack documents of `lengths` (int64 [docs], pairs: content ids + 1) into rows of `seq_len`.

    Documents lie end to end from stream position 0. One longer than a row is cut into pieces of a
    row and a rest, so that every pair is in exactly one row; with `whole` only its first `seq_len`
    pairs are kept, the others are counted, and no row begins inside a document. The result depends
    on nothing but the arguments: pieces of equal length are placed in stream order, and of rows
    with equal room the one that has had it longest is filled. Memory is O(pieces), whatever
    `seq_len` is. Raises ConfigError for a `seq_len` outside 1..2^31-1.
    """
    check_seq_len(seq_len)
    lengths = np.asarray(lengths, np.int64)
    assert lengths.ndim == 1 and lengths.min(initial=1) >= 1, "a document has at least one pair"
    starts = np.cumsum(lengths) - lengths
    parts = np.ones_like(lengths) if whole else -(-lengths // seq_len)
    lost = np.maximum(lengths - parts * seq_len, 0)
    before = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    before *= seq_len  # pairs of the document that lie in its earlier pieces
    start = np.repeat(starts, parts) + before
    length = np.minimum(np.repeat(lengths, parts) - before, seq_len)

    row = assign(length, seq_len)
    counts = np.bincount(row)  # pieces of each row
    firsts = start[np.argsort(row, kind="stable")[np.cumsum(counts) - counts]]
    by_position = np.argsort(firsts)
    rank = np.empty_like(by_position)
    rank[by_position] = np.arange(len(counts))
    order = np.argsort(rank[row], kind="stable")  # pieces are in stream order, and stay so
    row_starts = np.concatenate([[0], np.cumsum(counts[by_position])])
    filled = np.concatenate([[0], np.cumsum(length[order])])[row_starts]
    return Packed(
        row_starts=row_starts,
        pieces=np.stack([start[order], length[order]], axis=1),
        fills=np.diff(filled),
        truncated=Truncated(int(lost.sum()), int(np.count_nonzero(lost))),
    )


def check_seq_len(seq_len: int) -> None:
    """Raise ConfigError for a row length that cannot be."""
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        raise ConfigError(f"model.seq_len: {seq_len} is not in 1..{MAX_SEQ_LEN}")


def _key(store: Store, seq_len: int, whole: bool) -> dict:
    """Return everything that the contents of an index depend on."""
    check_seq_len(seq_len)
    return {"store": store.digest, "seq_len": seq_len, "whole": bool(whole), "algorithm": VERSION}


def _digest(key: dict) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def index_path(store: Store, seq_len: int, *, whole: bool) -> Path:
    """Return the file, beside the store's manifest, that holds its rows of `seq_len`."""
    return store.directory / f"packing-{_digest(_key(store, seq_len, whole))[:12]}.index"


def build_index(
    store: Store,
    seq_len: int,
    *,
    whole: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Pack every shard of a store, write the index beside its manifest, and return its path.

    `progress(shards done, shards in all)` is called after each. Memory is that of the largest
    shard. The file appears when it is complete; several processes may build it at once, for they
    write the same bytes. Raises DataError for a shard of 2^32 or more stream positions,
    StorageError when the folder cannot be written.
    """
    sizes = np.diff(store.shard_positions)
    if sizes.max(initial=0) > MAX_WINDOW:
        raise DataError(
            f"{store.directory}: shard {sizes.argmax()} has {sizes.max()} stream positions, above "
            f"the {MAX_WINDOW} of best-fit packing; prepare with a smaller data.partition_bytes"
        )
    shards = np.flatnonzero(sizes).tolist()  # empty ones are no part of a store's identity
    path, key = index_path(store, seq_len, whole=whole), _key(store, seq_len, whole)
    counts: list[tuple[int, int]] = []  # rows and pieces of each window
    total = {"rows": 0, "inputs": 0, "truncated_tokens": 0, "truncated_docs": 0}

    def windows() -> Iterator[bytes]:
        for done, shard in enumerate(shards, 1):
            packed = pack(np.diff(store.doc_starts(shard)), seq_len, whole=whole)
            counts.append((len(packed.fills), len(packed.pieces)))
            total["rows"] += len(packed.fills)
            total["inputs"] += int(packed.fills.sum())
            total["truncated_tokens"] += packed.truncated.tokens
            total["truncated_docs"] += packed.truncated.documents
            table = np.stack([packed.row_starts, np.append(packed.fills, 0)], axis=1)
            yield table.astype("<u4").tobytes()
            yield packed.pieces.astype("<u4").tobytes()
            if progress:
                progress(done, len(shards))

    def counted() -> Iterator[bytes]:  # consumed after the windows
        yield np.array(counts, "<u8").tobytes()

    def header() -> dict:
        padding = total["rows"] * seq_len - total["inputs"]
        return {"digest": _digest(key)} | key | total | {"padding": padding}

    try:
        blocks.write(path, MAGIC, header, {"windows": windows(), "counts": counted()})
    except StorageError as error:
        if not str(error).startswith(f"{path}:"):  # a shard that cannot be read
            raise
        remedy = "make the folder writable for this, or set data.packing to concat"
        raise StorageError(f"{error}; the packing index goes there: {remedy}") from error
    return path


@dataclass(frozen=True)
class PackingIndex:
    """The rows of a store, read from its index by position; safe to use from several threads.

    Windows, one per shard that has documents, follow each other in the section `windows` of the
    file: pairs of uint32 (first piece, inputs that are not padding) for each row and one after the
    last, then pairs (start in the shard's stream, inputs) for each piece. Section `counts` has
    uint64 (rows, pieces) of each window. Reads raise IndexError for a row that is not there,
    DataError for a damaged file, StorageError for one that cannot be read.
    """

    file: blocks.BlockFile
    digest: str  # identity of the rows
    seq_len: int
    num_rows: int
    inputs: int  # that are not padding
    truncated: Truncated
    counts: np.ndarray  # int64 [windows, 2], rows and pieces
    first_row: np.ndarray  # int64 [windows + 1]
    first_position: np.ndarray  # int64 [windows + 1], in the stream of the store
    offsets: np.ndarray  # int64 [windows + 1], of the row tables in the file

    @property
    def padding(self) -> float:
        """The share of all inputs that is padding."""
        return 1 - self.inputs / (self.num_rows * self.seq_len) if self.num_rows else 0.0

    def row(self, number: int) -> np.ndarray:
        """Return the pieces of a row, int64 [n, 2]: first stream position in the store, inputs."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of an index of {self.num_rows}")
        window = bisect_right(self.first_row, number) - 1
        local = number - int(self.first_row[window])
        return self._stretch(window, local, local + 1)[0]

    def rows(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return `row` of each number, int64 [M]; rows that follow each other are read at once."""
        wanted, which = np.unique(numbers, return_inverse=True)
        found = [row for run in self._runs(wanted) for row in self._stretch(*run)]
        return [found[index] for index in which.tolist()]

    def fill(self, numbers: np.ndarray) -> np.ndarray:
        """Return the inputs that are not padding, int64 [M], of each of the rows int64 [M]."""
        wanted, which = np.unique(numbers, return_inverse=True)
        found = [self._table(*run)[:, 1] for run in self._runs(wanted)]
        return np.concatenate([np.empty(0, np.int64), *found])[which]

    def row_of(self, position: int) -> tuple[int, int] | None:
        """Return the row of a stream position of the store and the offset in it; None if cut off.

        Searches the shard: O(its pieces) in time, 2^16 of them at a time in memory.
        """
        end = int(self.first_position[-1])
        if not 0 <= position < end:
            raise IndexError(f"stream position {position} of a store of {end}")
        window = bisect_right(self.first_position, position) - 1
        local = position - int(self.first_position[window])
        rows, pieces = self.counts[window].tolist()
        for first in range(0, pieces, CHUNK):
            part = self._pieces(window, first, min(first + CHUNK, pieces))
            hits = np.flatnonzero((part[:, 0] <= local) & (local < part.sum(axis=1)))
            if hits.size:
                piece, inside = first + int(hits[0]), local - int(part[hits[0], 0])
                break
        else:
            return None
        row = bisect_right(range(rows), piece, key=lambda row: self._first_piece(window, row)) - 1
        earlier = self._pieces(window, self._first_piece(window, row), piece)[:, 1].sum()
        return int(self.first_row[window]) + row, int(earlier) + inside

    def _runs(self, wanted: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield (window, low, high) of the runs of rows in ascending distinct numbers [M]."""
        if not wanted.size:
            return
        if wanted[0] < 0 or wanted[-1] >= self.num_rows:
            raise IndexError(f"rows {wanted[0]}..{wanted[-1]} of an index of {self.num_rows}")
        window = np.searchsorted(self.first_row, wanted, side="right") - 1
        local = wanted - self.first_row[window]
        cuts = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(window) != 0)) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(wanted)]):
            yield int(window[low]), int(local[low]), int(local[high - 1]) + 1

    def _stretch(self, window: int, low: int, high: int) -> list[np.ndarray]:
        first = self._table(window, low, high + 1)[:, 0].tolist()
        pieces = self._pieces(window, first[0], first[-1])
        pieces[:, 0] += self.first_position[window]
        return [pieces[a - first[0] : b - first[0]] for a, b in pairwise(first)]

    def _table(self, window: int, low: int, high: int) -> np.ndarray:
        return self._pairs(int(self.offsets[window]), low, high)

    def _first_piece(self, window: int, row: int) -> int:
        return int(self._table(window, row, row + 1)[0, 0])

    def _pieces(self, window: int, low: int, high: int) -> np.ndarray:
        after_table = int(self.offsets[window]) + 8 * (int(self.counts[window, 0]) + 1)
        return self._pairs(after_table, low, high)

    def _pairs(self, at: int, low: int, high: int) -> np.ndarray:
        data = _read(self.file, at + 8 * low, at + 8 * high)
        return np.frombuffer(data, "<u4").astype(np.int64).reshape(-1, 2)


def open_index(store: Store, seq_len: int, *, whole: bool) -> PackingIndex:
    """Open the packing index of a store; holds 40 bytes per shard.

    Raises MissingIndex when it has not been built, DataError when it is damaged or belongs to
    another store, row length, kind or algorithm, StorageError when it cannot be read.
    """
    path, key = index_path(store, seq_len, whole=whole), _key(store, seq_len, whole)
    with storage_errors(path):
        if not path.exists():
            raise MissingIndex(f"{path}: no packing index; `jaxgpt prepare` or first use builds it")
    try:
        file = blocks.open_file(path, MAGIC, key)
    except DataError as error:
        raise DataError(f"{error}; {REBUILD}") from error
    header = file.header
    counts = np.frombuffer(_read(file, *file.section("counts")), "<u8").astype(np.int64)
    counts = counts.reshape(-1, 2)
    start, stop = file.section("windows")
    sizes = 8 * (counts.sum(axis=1) + 1)  # a row table has one entry more than rows
    offsets = start + np.concatenate([[0], np.cumsum(sizes)])
    first_row = np.concatenate([[0], np.cumsum(counts[:, 0])])
    first_position = np.unique(store.shard_positions)  # of the shards that are not empty
    inputs, lost = header["inputs"], header["truncated_tokens"]
    found = offsets[-1], first_row[-1], len(counts), inputs + lost
    if found != (stop, header["rows"], len(first_position) - 1, first_position[-1]):
        raise DataError(f"{path}: the packing index does not add up; {REBUILD}")
    return PackingIndex(
        file=file,
        digest=header["digest"],
        seq_len=seq_len,
        num_rows=header["rows"],
        inputs=inputs,
        truncated=Truncated(lost, header["truncated_docs"]),
        counts=counts,
        first_row=first_row,
        first_position=first_position,
        offsets=offsets,
    )


def _read(file: blocks.BlockFile, start: int, stop: int) -> bytearray:
    try:
        return blocks.read(file, start, stop)
    except DataError as error:
        raise DataError(f"{error}; {REBUILD}") from error
