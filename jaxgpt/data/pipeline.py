"""From a position to a batch: the sample at a global position is a pure function of that position.

`stream.open_data` fixes all that it depends on; `sample_rows` is the function; `batches` runs it
ahead of the consumer on tf.data, whose only input is a range of batch numbers, so that resuming is
a seek and closing loses nothing. Neither hosts, mesh, batch size, threads nor prefetching change
what a position holds. Evaluation needs none of this: its rows come in order from plain NumPy.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxgpt.data.feeder import BatchStream
from jaxgpt.data.packing import Batch, Rows, cut, gather, num_rows
from jaxgpt.data.store import Store
from jaxgpt.data.stream import MAX_POSITION, Data, locate
from jaxgpt.errors import ConfigError
from jaxgpt.ramp import Span

log = logging.getLogger(__name__)

LOCATED = 4096  # positions looked up at once: the same permutation costs 64 ten times as much each


def sample_rows(data: Data, positions: np.ndarray) -> Batch:
    """Return the samples at global positions int64 [M], each >= 0, as a Batch [M, T]."""
    source, _, row = locate(data, positions)
    return cut(gather(_rows(data, source, row), data.row_layout), data.row_layout)


def _rows(data: Data, source: np.ndarray, row: np.ndarray) -> list[tuple[Rows, int]]:
    return [(data.sources[s], r) for s, r in zip(source.tolist(), row.tolist(), strict=True)]


def batches(
    data: Data,
    *,
    position: int,
    global_batch: int,
    accum_steps: int = 1,
    rows: slice | None = None,
    num_batches: int | None = None,
    prefetch: int = 4,
) -> BatchStream:
    """Iterate over global batches from a position on; leaves are [A, B / A, T], NumPy.

    Batch k holds positions [position + k B, position + (k + 1) B), cut into A micro-batches; `rows`
    selects this process's part of each (axis 1), None all of it. Use it in a `with` statement, or
    call `close`. A batch may straddle epochs: nothing is dropped; only where the data ends, fewer
    than B positions may be left over. An error of the data is raised by `next`, with its type and
    the position.
    """
    if global_batch < 1 or global_batch % accum_steps or not 0 <= position < MAX_POSITION:
        raise ConfigError(
            f"train.global_batch: {global_batch} rows from position {position} cannot be cut into "
            f"{accum_steps} micro-batches"
        )
    if global_batch > sum(data.num_rows):
        log.warning(
            "train.global_batch=%d is more than the %d rows of one epoch: batches repeat rows",
            global_batch,
            sum(data.num_rows),
        )
    micro_rows = global_batch // accum_steps
    part = rows or slice(None)
    lead = (accum_steps, len(range(micro_rows)[part]))
    rows_read = data.row_layout
    layout = [(rows_read.dtype.type, (*lead, rows_read.width)), (np.int32, lead)]
    if data.document_mask:
        layout.append((np.bool_, (*lead, data.seq_len)))

    @functools.lru_cache(maxsize=8)
    def located(chunk: int) -> tuple[np.ndarray, ...]:
        first = position + chunk * LOCATED  # not before it: stores of the past may be gone
        return locate(data, np.arange(first, min(first + LOCATED, data.end)))

    def read(first: int, count: int) -> tuple[np.ndarray, ...]:
        grid = np.arange(first * global_batch, (first + count) * global_batch)
        wanted = grid.reshape(count, accum_steps, micro_rows)[..., part].ravel()
        source, row = np.empty_like(wanted), np.empty_like(wanted)
        for which in range(int(wanted[0]) // LOCATED, int(wanted[-1]) // LOCATED + 1):
            low, high = np.searchsorted(wanted, (which * LOCATED, (which + 1) * LOCATED))
            found, place = located(which), wanted[low:high] - which * LOCATED
            source[low:high], row[low:high] = found[0][place], found[2][place]
        arrays = gather(_rows(data, source, row), rows_read)
        return tuple(array.reshape(count, *lead, *array.shape[1:]) for array in arrays)

    most = max(0, (data.end - position) // global_batch)
    return BatchStream(
        read,
        lambda arrays: cut(arrays, rows_read),
        lambda number: f"batch at position {position + number * global_batch}",
        layout=layout,
        num_batches=most if num_batches is None else min(num_batches, most),
        prefetch=prefetch,
    )


def batches_of_spans(
    data: Data,
    spans: Iterable[Span],
    *,
    micro_batch: int = 0,
    rows: Callable[[int], slice] | None = None,
    prefetch: int = 4,
) -> Iterator[Batch]:
    """Iterate over the batches of spans, which differ in their rows; a generator, to be closed.

    Arguments and errors as `batches`; micro-batches of `micro_batch` rows (0: whole batches), of
    which `rows(micro_rows)` are this process's. Each span is read ahead on its own.
    """
    for span in spans:
        micro_rows = micro_batch or span.rows
        source = batches(
            data,
            position=span.position,
            global_batch=span.rows,
            accum_steps=span.rows // micro_rows,
            rows=rows(micro_rows) if rows else None,
            num_batches=span.updates,
            prefetch=prefetch,
        )
        with source:
            yield from source


def eval_batches(
    store: Store,
    *,
    seq_len: int,
    batch: int,
    document_mask: bool,
    max_rows: int | None = None,
    rows: slice | None = None,
) -> Iterator[Batch]:
    """Yield rows 0, 1, ... of a store, packed end to end, as Batches [1, batch, T], each row once.

    The last batch is filled with rows of weight 0. `max_rows` (0 or None: all) ends earlier; `rows`
    selects this process's part of each batch.
    """
    source = Rows(store, seq_len)
    layout = source.layout(document_mask)
    count = min(num_rows(store.stream_len, seq_len), max_rows or MAX_POSITION)
    for first in range(0, count, batch):
        numbers = range(first, first + batch)[rows or slice(None)]
        picked = [(source, number) if number < count else None for number in numbers]
        read = gather(picked, layout)
        yield cut(tuple(array[None] for array in read), layout)  # [1, B, T]
