"""The processes of `prepare`: each turns one partition of documents into shards of token ids.

A partition gives the same shards whoever makes it. Ids are made in batches, or piece by piece for a
huge document, and what cannot be written yet waits in a file: memory grows neither with a partition
nor with a document. Workers import neither JAX nor TensorFlow (but for `tfds:` sources) and end
when their parent does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

from jaxgpt.config import DataConfig
from jaxgpt.corpus import counts as counting
from jaxgpt.corpus import sources
from jaxgpt.corpus.encoding import BATCH_CHARS, Spool, encode, no_counts
from jaxgpt.corpus.formats import Piece
from jaxgpt.corpus.sources import Partition
from jaxgpt.data.shard import Encoded, write_shard
from jaxgpt.durable import storage_errors
from jaxgpt.errors import DataError, Interrupted
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import Tokenizer

SPLITS = ("valid", "train")  # in the order of publication
SHARD_SUFFIX = ".shard"
SHOWN_PROBLEMS = 1000


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

    A result is plain JSON: manifest entries under "train" and "valid", "source", "counts" (those of
    `encoding.no_counts`), "places" of bad records, and "skipped_files" with path and reason.

    A partition that is refused does not stop the others: a DataError at the end names all of them.
    Any other problem ends the run at once. Closing the iterator stops the workers within a MiB of
    text.
    """
    problems: list[DataError] = []
    with contextlib.closing(_attempts(tasks, workers)) as attempts:
        for task, attempt in attempts:
            try:
                result = attempt()
            except BrokenProcessPool as error:
                raise DataError(
                    "a worker process was killed (out of memory?); `prepare` goes on from here "
                    "when started again, and fewer workers need less memory"
                ) from error
            except DataError as error:
                problems.append(error)
                continue
            yield task, result
    raise_all(problems)


def raise_all(problems: list[DataError]) -> None:
    """Raise the problem of each partition that failed, if any did: several as one, line by line."""
    lines = list(dict.fromkeys(map(str, problems)))
    if len(lines) == 1:
        raise problems[0]
    if lines:
        more = len(lines) - SHOWN_PROBLEMS
        shown = lines[:SHOWN_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
        raise DataError("\n  ".join([f"{len(problems)} partitions cannot be prepared:", *shown]))


def _attempts(tasks: list[Task], workers: int) -> Iterator[tuple[Task, Callable[[], dict]]]:
    """Yield each task with a function that returns its result or raises, and does not wait long."""
    if workers <= 1:
        yield from ((task, functools.partial(prepare_partition, task)) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can deadlock
    stop = context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (stop,))
    try:
        futures = {pool.submit(prepare_partition, task): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_stop: Event | None = None  # in a worker: set when its run ends early


def _start_worker(stop: Event) -> None:
    global _stop
    _stop = stop
    for number in (signal.SIGINT, signal.SIGHUP):  # the pool itself ends workers by SIGTERM
        signal.signal(number, signal.SIG_IGN)  # the parent gets it too, and decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies; without work it would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _until_stopped(pieces: Iterable[Piece]) -> Iterator[Piece]:
    size = 0
    for piece in pieces:
        size += len(piece.text or "")
        if size >= BATCH_CHARS:  # asking for each piece would take a tenth of the time
            size = 0
            if _stop and _stop.is_set():
                raise Interrupted("another part of this run has failed or was interrupted")
        yield piece


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
    counts = no_counts()
    pieces = _until_stopped(sources.documents(task.cfg, task.partition, bad))
    with storage_errors(Path(task.folder)), Spool(task.folder) as spool:
        shards = _write(task, tok, encode(tok, pieces, task.cfg, counts, spool), spool)
    counts |= {"bad_replaced": bad.replaced, "bad_skipped": bad.skipped}
    counts["empty_files"] = bad.empty_files
    counting.refuse_mostly_bad(task.partition.source, counts, bad.places, " in one partition")
    return shards | {
        "source": task.partition.source,
        "counts": counts,
        "places": bad.places,
        "skipped_files": bad.skipped_files,
    }


def is_held_out(digest: bytes, share: float) -> bool:
    """Return whether a document, by the digest of its text alone, belongs to the held-out `share`.

    Equal documents fall on one side, and a document stays where it is when others are added.
    """
    return int.from_bytes(digest[:8]) < share * 2.0**64


def _write(
    task: Task, tok: Tokenizer, encoded: Iterator[Encoded], spool: Spool
) -> dict[str, list[dict]]:
    """Write documents to shards of about partition_bytes of text; return the entries by split."""
    entries: dict[str, list[dict]] = {split: [] for split in SPLITS}
    for number in itertools.count():
        first = list(itertools.islice(encoded, 1))
        if not first:
            break
        held_out: list[Encoded] = []
        train = _until_full(itertools.chain(first, encoded), held_out, spool, task.cfg)
        valid = (entry._replace(ids=spool.read(entry.ids)) for entry in held_out)
        for split, documents in (("train", train), ("valid", valid)):
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
        spool.cut(0)
    return entries


def _until_full(
    encoded: Iterable[Encoded], held_out: list[Encoded], spool: Spool, cfg: DataConfig
) -> Iterator[Encoded]:
    """Yield the training documents of the next shard; leave the others in the spool and list."""
    size = 0
    for document in encoded:
        stored = isinstance(document.ids, range)
        if is_held_out(document.digest, cfg.valid_share):
            place = document.ids if stored else spool.append(document.ids)
            held_out.append(document._replace(ids=place))
        elif stored:
            yield document._replace(ids=spool.read(document.ids))
            spool.cut(document.ids.start)
        else:
            yield document
        size += document.num_bytes
        if size >= cfg.partition_bytes:
            return
