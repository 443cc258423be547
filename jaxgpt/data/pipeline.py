"""From a position to a batch: the sample at a global position is a pure function of that position.

`open_data` fixes everything the stream depends on; `sample_rows` is the function; `batches` runs it
ahead of the consumer on tf.data, whose only input is a range of batch numbers, so that resuming is
a seek and closing loses nothing. Neither hosts, mesh, batch size, threads nor prefetching change
what a position holds. Evaluation needs none of this: its rows come in order from plain NumPy.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data import order
from jaxgpt.data.feeder import BatchStream
from jaxgpt.data.mixture import Mixture, draws, make_mixture, visits_before
from jaxgpt.data.packing import Batch, cut, gather, num_rows
from jaxgpt.data.store import Store, open_store
from jaxgpt.errors import ConfigError, DataError

log = logging.getLogger(__name__)

STREAM_VERSION = 1  # part of the digest; raise it with any change of what a position holds
MAX_SEQ_LEN = 2**31 - 1
MAX_POSITION = order.MAX_ROWS


@dataclass(frozen=True)
class Data:
    """Everything the stream of samples depends on, and nothing else.

    Per source, in the order of their digests: `stores`, `mixture` (names and proportions) and
    `num_rows` (rows of one epoch). `digest` identifies the stream: where it is the same, so is the
    sample at every position, wherever the stores lie.
    """

    stores: tuple[Store, ...]
    mixture: Mixture
    num_rows: tuple[int, ...]
    seed: int
    seq_len: int
    document_mask: bool
    digest: str
    tokenizer_digest: str
    vocab_size: int
    eos_id: int


def open_data(cfg: DataConfig, *, seq_len: int, seed: int, split: str = "train") -> Data:
    """Open the stores of `cfg.store` and check that they make one stream.

    Raises ConfigError for weights or a seq_len that cannot be used and for a store named twice;
    DataError for stores of different tokenizers, without documents, or shorter than one row.
    """
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        raise ConfigError(f"model.seq_len: {seq_len} is not in 1..{MAX_SEQ_LEN}")
    table = cfg.store if isinstance(cfg.store, dict) else {cfg.store: 1.0}
    if "" in table:
        raise ConfigError("data.store: names no store; give the folder that `prepare` wrote")
    max_open = max(4, 64 // max(1, len(table)))  # file descriptors, over all stores together
    opened = [(open_store(name, split, max_open=max_open), name) for name in table]
    opened.sort(key=lambda item: item[0].digest)  # the order of a table is not part of the stream
    for (first, name), (second, other) in zip(opened, opened[1:], strict=False):
        if first.digest == second.digest:
            raise ConfigError(f"data.store: {name} and {other} hold the same data; add the weights")
    mixture = make_mixture({name: table[name] for _, name in opened})
    stores = tuple(store for store, _ in opened)
    for store, name in opened:
        _check_source(store, name, stores[0], opened[0][1], seq_len)
    sources = [[s.digest, int(count)] for s, count in zip(stores, mixture.counts, strict=True)]
    facts = [STREAM_VERSION, order.VERSION, cfg.packing, seq_len, cfg.document_mask, seed, sources]
    return Data(
        stores=stores,
        mixture=mixture,
        num_rows=tuple(num_rows(store.stream_len, seq_len) for store in stores),
        seed=seed,
        seq_len=seq_len,
        document_mask=cfg.document_mask,
        digest=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        tokenizer_digest=stores[0].tokenizer_digest,
        vocab_size=stores[0].vocab_size,
        eos_id=stores[0].eos_id,
    )


def _check_source(store: Store, name: str, first: Store, first_name: str, seq_len: int) -> None:
    for field in ("tokenizer_digest", "vocab_size", "eos_id"):
        ours, theirs = getattr(store, field), getattr(first, field)
        if ours != theirs:
            raise DataError(
                f"data.store: {name} has {field} {ours}, {first_name} has {theirs}; "
                "stores of one run need one tokenizer"
            )
    if store.num_docs == 0:
        raise DataError(f"data.store: {name} holds no documents; prepare it with some text")
    if seq_len > store.stream_len:
        raise DataError(
            f"data.store: {name} has {store.stream_len} tokens ({store.num_docs} documents), fewer "
            f"than one row of model.seq_len={seq_len}; add text or lower seq_len"
        )


def locate(data: Data, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (source, epoch, row), int64 [M] each, of the samples at global positions [M]."""
    source, visit = draws(data.mixture, positions)
    epoch, row = np.empty_like(visit), np.empty_like(visit)
    for number in np.unique(source):
        mine = source == number
        digest, rows = data.stores[number].digest, data.num_rows[number]
        epoch[mine], row[mine] = order.visit(data.seed, digest, rows, visit[mine])
    return source, epoch, row


def sample_rows(data: Data, positions: np.ndarray) -> Batch:
    """Return the samples at global positions int64 [M], each >= 0, as a Batch [M, T]."""
    return cut(*_read(data, positions))


def _read(data: Data, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    source, _, row = locate(data, positions)
    rows = [(data.stores[s], r) for s, r in zip(source.tolist(), row.tolist(), strict=True)]
    return gather(rows, data.seq_len, data.document_mask)


def epochs(data: Data, position: int) -> dict[str, float]:
    """Return how many passes over each source lie before a global position."""
    visits = visits_before(data.mixture, position).tolist()
    passes = [visit / rows for visit, rows in zip(visits, data.num_rows, strict=True)]
    return dict(zip(data.mixture.names, passes, strict=True))


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
    call `close`. A batch may straddle epochs: nothing is dropped. An error of the data is raised by
    `next`, with its type and the position.
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
    width = data.seq_len
    layout = [(np.int32, (*lead, width + 1)), (np.int32, lead), (np.bool_, (*lead, width))]

    def read(number: int) -> tuple[np.ndarray, ...]:
        first = position + number * global_batch
        grid = np.arange(first, first + global_batch).reshape(accum_steps, micro_rows)
        arrays = _read(data, grid[:, part].ravel())
        return tuple(array.reshape(*lead, *array.shape[1:]) for array in arrays)

    most = (MAX_POSITION - position) // global_batch
    return BatchStream(
        read,
        lambda arrays: cut(*arrays),
        lambda number: f"batch at position {position + number * global_batch}",
        layout=layout if data.document_mask else layout[:2],
        num_batches=most if num_batches is None else min(num_batches, most),
        prefetch=prefetch,
    )


def eval_batches(
    store: Store,
    *,
    seq_len: int,
    batch: int,
    document_mask: bool,
    max_rows: int | None = None,
    rows: slice | None = None,
) -> Iterator[Batch]:
    """Yield rows 0, 1, ... of a store in order as Batches [1, batch, T]; each row exactly once.

    The last batch is filled with rows of weight 0. `max_rows` (0 or None: all) ends earlier; `rows`
    selects this process's part of each batch.
    """
    count = min(num_rows(store.stream_len, seq_len), max_rows or MAX_POSITION)
    for first in range(0, count, batch):
        numbers = range(first, first + batch)[rows or slice(None)]
        picked = [(store, number) if number < count else None for number in numbers]
        read = gather(picked, seq_len, document_mask)
        yield cut(*(array[None] for array in read))  # [1, B, T]
