"""From the stream of a store to rows of T inputs and T targets.

`concat`: row r covers stream positions [rT, (r+1)T). Best fit: a row holds the pieces that its
packing index lists. Either way the target of an input is the id after it in the stream, so every id
of every document, its first included, is a target exactly once per epoch, each document is closed
by one target E, and padding has weight 0. An input E opens its document, whose segment is
E d1 ... dn; where a tokenizer from elsewhere has a begin-of-text id, that id is the input in E's
place. Pure NumPy; any rows in any order.
"""

from __future__ import annotations

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
    pieces = [row[0].pieces(row[1]) if row else [] for row in rows]
    for row, parts in zip(rows, pieces, strict=True):
        for start, length in parts:  # all reads are under way before the first is waited for
            row[0].store.expect(start, start + length + 1)
    for number, (row, parts) in enumerate(zip(rows, pieces, strict=True)):
        if row is not None:
            marks = None if opens is None else opens[number]
            read = _read_pieces if row[0].index else _read_stretch
            lengths[number] = read(row[0].store, parts, ids[number], marks)
    return (ids, lengths) if opens is None else (ids, lengths, opens)


def _read_stretch(
    store: Store, parts: list[tuple[int, int]], ids: np.ndarray, opens: np.ndarray | None
) -> int:
    ((start, length),) = parts
    store.read_into(start, ids[: length + 1])
    if opens is not None:
        opens[store.opens(start, start + length)] = True
        opens[0] = True  # a row that starts inside a document starts a segment too
    return length


def _read_pieces(
    store: Store, parts: list[tuple[int, int]], ids: np.ndarray, opens: np.ndarray | None
) -> int:
    at, seq_len = 0, len(ids) // 2
    for start, length in parts:
        piece = np.empty(length + 1, ids.dtype)
        store.read_into(start, piece)
        ids[at : at + length] = piece[:-1]
        ids[seq_len + at : seq_len + at + length] = piece[1:]
        if opens is not None:
            opens[at] = True
        at += length
    return at


def cut(read: tuple[np.ndarray, ...], layout: Layout) -> Batch:
    """Make a Batch [..., T] of what `gather` read; leading axes may have been reshaped."""
    ids, lengths, *opens = read
    seq_len = layout.seq_len
    tokens = ids[..., :seq_len].astype(np.int32)
    targets = ids[..., -seq_len:].astype(np.int32)
    end, start = layout.opening
    if start != end:
        np.copyto(tokens, start, where=tokens == end)
    weights = np.ones(tokens.shape, np.float32)
    padding = None
    if (lengths < seq_len).any():
        padding = np.arange(seq_len, dtype=np.int32) >= lengths[..., None]
        np.copyto(tokens, PAD_ID, where=padding)  # the E that closes a store is no input
        np.copyto(targets, PAD_ID, where=padding)
        np.copyto(weights, 0, where=padding)
    if not opens:
        return Batch(tokens, targets, weights)
    segments = np.cumsum(opens[0], axis=-1, dtype=np.int32)
    index = np.arange(seq_len, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(opens[0], index, 0), axis=-1)
    if padding is not None:
        np.copyto(segments, 0, where=padding)
        np.copyto(positions, 0, where=padding)
    return Batch(tokens, targets, weights, segments, positions)
