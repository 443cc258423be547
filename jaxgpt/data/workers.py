"""The processes of `prepare`: each turns one partition of documents into shards of token ids.

A partition gives the same shards whoever makes it. Within one, ids are made in batches and written
as they come, so memory does not grow with its size. Workers import neither JAX nor TensorFlow (but
for `tfds:` sources) and end when their parent does.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data import sources, tokenizer, words
from jaxgpt.data.formats import Document
from jaxgpt.data.shard import storage_errors, write_shard
from jaxgpt.data.sources import Partition
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import DataError, Interrupted

SPLITS = ("valid", "train")  # in the order of publication
SHARD_SUFFIX = ".shard"
COUNTED = (
    "documents", "empty", "bytes", "tokens", "byte_tokens", "forced_cuts", "bad_replaced",
    "bad_skipped",
)  # fmt: skip
BATCH_CHARS = 1 << 20  # documents are encoded in batches of about this size

Encoded = tuple[np.ndarray, int, str]  # what write_shard takes: ids, UTF-8 bytes, origin


@dataclass(frozen=True)
class Task:
    """One partition, the folder that gets its shards, and what they are made with."""

    index: int
    partition: Partition
    folder: str
    cfg: DataConfig
    model: str
    digest: str


def run_tasks(tasks: list[Task], workers: int) -> Iterator[tuple[Task, dict]]:
    """Yield each task with its result as it is finished, in any order.

    A result has manifest entries under "train" and "valid", and "source", "counts" and "places" of
    bad records. Closing the iterator stops the workers within a batch.
    """
    if workers <= 1:
        for task in tasks:
            yield task, prepare_partition(task)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can deadlock
    stop = context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (stop,))
    try:
        futures = {pool.submit(prepare_partition, task): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed (out of memory?); `prepare` goes on from here when "
            "started again, and fewer workers need less memory"
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_stop: Event | None = None  # in a worker: set when its run ends early


def _start_worker(stop: Event) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies; without work it would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _load(model: str, digest: str) -> Tokenizer:
    tok = tokenizer.load(model)
    if tok.digest != digest:
        raise DataError(f"{model}: the tokenizer changed while it was used; prepare again")
    return tok


def prepare_partition(task: Task) -> dict:
    """Write the shards of a partition under `task.folder`; return its result (see `run_tasks`)."""
    tok = _load(task.model, task.digest)
    bad = sources.bad_records(task.cfg, task.partition)
    counts = Counter(dict.fromkeys(COUNTED, 0))
    documents = sources.documents(task.cfg, task.partition, bad)
    encoded = _encode(tok, documents, counts)
    with storage_errors(Path(task.folder)):
        shards = _write(task, tok, encoded)
    counts.update(bad_replaced=bad.replaced, bad_skipped=bad.skipped)
    return shards | {"source": task.partition.source, "counts": counts, "places": bad.places}


def is_held_out(data: bytes, share: float) -> bool:
    """Return whether a document, by its UTF-8 bytes alone, belongs to the held-out `share`.

    Equal documents fall on one side, and a document stays where it is when others are added.
    """
    return int.from_bytes(hashlib.sha256(data).digest()[:8]) < share * 2.0**64


def _encode(
    tok: Tokenizer, documents: Iterable[Document], counts: Counter
) -> Iterator[tuple[bytes, Encoded]]:
    """Yield the UTF-8 bytes and the encoded form of each document that has text."""
    for batch in _batches(documents):
        if _stop and _stop.is_set():
            raise Interrupted("another part of this run has failed or was interrupted")
        counts["empty"] += sum(not text for text, _ in batch)
        batch = [document for document in batch if document.text]
        encoded = tok.encode_batch([text for text, _ in batch])
        for (text, origin), ids in zip(batch, encoded, strict=True):
            data = text.encode()
            counts["documents"] += 1
            counts["bytes"] += len(data)
            counts["tokens"] += len(ids)
            counts["byte_tokens"] += int(np.count_nonzero(tok.is_byte[ids]))
            if len(text) >= words.LONGEST_WORD:
                counts["forced_cuts"] += words.forced_cuts(tok.word_pattern, text)
            yield data, (ids, len(data), origin)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + 1
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch


def _write(
    task: Task, tok: Tokenizer, encoded: Iterator[tuple[bytes, Encoded]]
) -> dict[str, list[dict]]:
    """Write documents to shards of about partition_bytes of text; return the entries by split."""
    entries: dict[str, list[dict]] = {split: [] for split in SPLITS}
    for number in itertools.count():
        first = list(itertools.islice(encoded, 1))
        if not first:
            break
        held_out: list[Encoded] = []
        train = _until_full(itertools.chain(first, encoded), held_out, task.cfg)
        for split, documents in (("train", train), ("valid", held_out)):
            path = Path(task.folder, split, f"{task.index:06}-{number:03}{SHARD_SUFFIX}")
            entry = write_shard(
                path,
                documents,
                tokenizer_digest=tok.digest,
                vocab_size=tok.vocab_size,
                eos_id=tok.eos_id,
            )
            if entry["num_docs"]:
                entries[split].append(entry)
            else:
                path.unlink()
    return entries


def _until_full(
    encoded: Iterable[tuple[bytes, Encoded]], held_out: list[Encoded], cfg: DataConfig
) -> Iterator[Encoded]:
    """Yield the training documents of the next shard and put the others into `held_out`."""
    size = 0
    for data, document in encoded:
        if is_held_out(data, cfg.valid_share):
            held_out.append(document)
        else:
            yield document
        size += len(data)
        if size >= cfg.partition_bytes:
            return
