"""Concatenate-and-cut packing: from stream windows to rows of T inputs and T targets.

Row r of a store covers stream positions [rT, (r+1)T); the target of an input is the id after it.
So every id of every document, its first included, is a target exactly once per epoch, each document
is closed by one target E, and no row is dropped: the last is padded with weight 0. An input E opens
its document, whose segment is E d1 ... dn. Pure NumPy; any rows in any order.
"""

from __future__ import annotations

import numpy as np
from flax import struct

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


def num_rows(stream_len: int, seq_len: int) -> int:
    """Return the rows of one epoch: ceil(stream_len / seq_len)."""
    return -(-stream_len // seq_len)


def gather(
    rows: list[tuple[Store, int] | None], seq_len: int, document_mask: bool
) -> tuple[np.ndarray, ...]:
    """Read rows, given as (store, row number) or None for all padding.

    Returns stream int32 [M, T+1], lengths int32 [M] (inputs that are not padding) and, with
    `document_mask`, opens bool [M, T] (inputs that open a document). Raises DataError or
    StorageError of the store for damaged or unreadable shards.
    """
    stream = np.full((len(rows), seq_len + 1), PAD_ID, np.int32)
    lengths = np.zeros(len(rows), np.int32)
    opens = np.zeros((len(rows), seq_len), bool) if document_mask else None
    for index, row in enumerate(rows):
        if row is None:
            continue
        store, number = row
        start = number * seq_len
        length = lengths[index] = min(seq_len, store.stream_len - start)
        starts = store.read_into(start, stream[index, : length + 1])
        if opens is not None:
            opens[index, starts[starts < length]] = True
    return (stream, lengths) if opens is None else (stream, lengths, opens)


def cut(stream: np.ndarray, lengths: np.ndarray, opens: np.ndarray | None = None) -> Batch:
    """Make a Batch [..., T] of what `gather` read; leading axes may have been reshaped."""
    index = np.arange(stream.shape[-1] - 1, dtype=np.int32)
    real = index < lengths[..., None]
    segments = {}
    if opens is not None:
        begins = opens | (index == 0)  # a row that starts inside a document starts a segment too
        offset = np.maximum.accumulate(np.where(begins, index, 0), axis=-1)
        segments["segment_ids"] = np.cumsum(begins, axis=-1, dtype=np.int32) * real
        segments["positions"] = (index - offset) * real
    return Batch(
        tokens=np.where(real, stream[..., :-1], PAD_ID),  # the E that closes a store is no input
        targets=stream[..., 1:].copy(),
        weights=real.astype(np.float32),
        **segments,
    )
