"""From the stream of a store to rows of T inputs and T targets.

`concat`: row r covers stream positions [rT, (r+1)T). Best fit: a row holds the pieces that its
packing index lists. Either way the target of an input is the id after it in the stream, so every id
of every document, its first included, is a target exactly once per epoch, each document is closed
by one target E, and padding has weight 0. An input E opens its document, whose segment is
E d1 ... dn; where a tokenizer from elsewhere has a begin-of-text id, that id is the input in E's
place. Pure NumPy; any rows in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flax import struct

from jaxgpt.data.best_fit import PackingIndex
from jaxgpt.data.store import Store

PAD_ID = 0


@struct.dataclass
class Batch:
    """Rows for one or more micro-batches; NumPy or JAX arrays, all of shape [..., T].

    `weights` is 1 where the target counts and 0 in padding. `segment_ids` number the documents of a
    row from 1 (0 is padding) and `positions` count from 0 in each segment; both are None for plain
    causal attention over the whole row.
    """

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32
    weights: np.ndarray  # float32
    segment_ids: np.ndarray | None = None  # int32
    positions: np.ndarray | None = None  # int32


@dataclass(frozen=True)
class Layout:
    """Rows as `gather` reads them: T, the ids of a row and their dtype, whether segments count."""

    seq_len: int
    width: int
    dtype: np.dtype
    document_mask: bool
    opening: tuple[int, int]  # E, and the input that stands in its place


@dataclass(frozen=True)
class Rows:
    """The rows of a store: end to end without an index, else the pieces that it lists."""

    store: Store
    seq_len: int
    index: PackingIndex | None = None

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return self.index.num_rows if self.index else num_rows(self.store.stream_len, self.seq_len)

    def layout(self, document_mask: bool) -> Layout:
        """Return the layout of what `gather` reads of these rows."""
        # T inputs and T targets, of which rows laid end to end share all but one.
        width = 2 * self.seq_len if self.index else self.seq_len + 1
        opening = self.store.eos_id, self.store.start_id
        return Layout(self.seq_len, width, self.store.dtype, document_mask, opening)

    def fill(self, rows: np.ndarray) -> np.ndarray:
        """Return how many inputs of each row [M] are not padding, int64 [M]."""
        if self.index:
            return self.index.fill(rows)
        return np.minimum(self.seq_len, self.store.stream_len - rows * self.seq_len)

    def usage(self, rows: np.ndarray) -> np.ndarray:
        """Return the inputs of rows [M] together that are tokens, padding, and tokens left out of
        the loss: int64 [3]."""
        tokens = int(self.fill(rows).sum())
        return np.array([tokens, len(rows) * self.seq_len - tokens, 0], np.int64)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return the (stream position, inputs) of each stretch of the stream in a row."""
        if self.index:
            return [(start, length) for start, length in self.index.row(row).tolist()]
        start = row * self.seq_len
        return [(start, min(self.seq_len, self.store.stream_len - start))]


def num_rows(stream_len: int, seq_len: int) -> int:
    """Return the rows of one epoch without an index: ceil(stream_len / seq_len)."""
    return -(-stream_len // seq_len)


def gather(rows: Sequence[tuple[Rows, int] | None], layout: Layout) -> tuple[np.ndarray, ...]:
    """Read rows, given as (source, row number) or None for all padding.

    Returns ids [M, width], of which the first T are inputs and the last T targets, lengths int32
    [M] (inputs that are not padding) and, with the document mask, opens bool [M, T] (inputs that
    open a segment). Raises DataError or StorageError of the store for damaged or unreadable shards.
    """
    ids = np.empty((len(rows), layout.width), layout.dtype)
    lengths = np.zeros(len(rows), np.int32)
    opens = np.zeros((len(rows), layout.seq_len), bool) if layout.document_mask else None
    by_source: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row is not None:
            by_source.setdefault(id(row[0]), []).append(number)
    for numbers in by_source.values():
        source = rows[numbers[0]][0]
        wanted = np.array([rows[number][1] for number in numbers])
        read = _read_pieces if source.index else _read_stretches
        read(source, wanted, numbers, ids, lengths, opens)
    return (ids, lengths) if opens is None else (ids, lengths, opens)


def _read_stretches(
    source: Rows,
    wanted: np.ndarray,
    numbers: list[int],
    ids: np.ndarray,
    lengths: np.ndarray,
    opens: np.ndarray | None,
) -> None:
    """Read rows `wanted` [n] of a store laid end to end into rows `numbers` of the arrays."""
    store, seq_len = source.store, source.seq_len
    starts = wanted * seq_len
    fill = np.minimum(seq_len, store.stream_len - starts)
    lengths[numbers] = fill
    whole = store.read_rows(starts, ids, numbers)
    for n in np.flatnonzero(~whole).tolist():
        store.read_into(int(starts[n]), ids[numbers[n], : int(fill[n]) + 1])
    if opens is not None:
        for number, start, length in zip(numbers, starts.tolist(), fill.tolist(), strict=True):
            opens[number, store.opens(start, start + length)] = True
            opens[number, 0] = True  # a row that starts inside a document starts a segment too


def _read_pieces(
    source: Rows,
    wanted: np.ndarray,
    numbers: list[int],
    ids: np.ndarray,
    lengths: np.ndarray,
    opens: np.ndarray | None,
) -> None:
    """Read rows `wanted` [n] of a packing index into rows `numbers` of the arrays."""
    store, seq_len = source.store, source.seq_len
    pieces = [source.pieces(row) for row in wanted.tolist()]
    for parts in pieces:
        for start, length in parts:  # all reads are under way before the first is waited for
            store.expect(start, start + length + 1)
    for number, parts in zip(numbers, pieces, strict=True):
        at = 0
        for start, length in parts:
            piece = np.empty(length + 1, ids.dtype)
            store.read_into(start, piece)
            ids[number, at : at + length] = piece[:-1]
            ids[number, seq_len + at : seq_len + at + length] = piece[1:]
            if opens is not None:
                opens[number, at] = True
            at += length
        lengths[number] = at


def cut(read: tuple[np.ndarray, ...], layout: Layout) -> Batch:
    """Make a Batch [..., T] of what `gather` read; leading axes may have been reshaped."""
    ids, lengths, *opens = read
    seq_len = layout.seq_len
    tokens = ids[..., :seq_len].astype(np.int32)
    targets = ids[..., -seq_len:].astype(np.int32)
    end, start = layout.opening
    if start != end:
        np.copyto(tokens, start, where=tokens == end)
    short = np.argwhere(lengths < seq_len).tolist()
    weights = _ones(tokens.shape).copy() if short else _ones(tokens.shape)
    batch = Batch(tokens, targets, weights)
    if opens:
        index = np.arange(seq_len, dtype=np.int32)
        segments = np.cumsum(opens[0], axis=-1, dtype=np.int32)
        positions = index - np.maximum.accumulate(np.where(opens[0], index, 0), axis=-1)
        batch = Batch(tokens, targets, weights, segments, positions)
    for row in map(tuple, short):
        end = lengths[row]
        tokens[row][end:] = PAD_ID  # the E that closes a store is no input
        targets[row][end:] = PAD_ID
        weights[row][end:] = 0
        if opens:
            segments[row][end:] = positions[row][end:] = 0
    return batch


@functools.lru_cache(maxsize=4)
def _ones(shape: tuple[int, ...]) -> np.ndarray:
    """Return weights without padding, made once: a third of what would be written per batch."""
    ones = np.ones(shape, np.float32)
    ones.flags.writeable = False
    return ones


def split(group: Batch) -> list[Batch]:
    """Return the batches of a group, whose arrays have an axis of them before all others."""
    count, leaves = len(group.tokens), (group.segment_ids, group.positions)
    more = ([None] * count if leaf is None else leaf for leaf in leaves)
    return list(map(Batch, group.tokens, group.targets, group.weights, *more))
