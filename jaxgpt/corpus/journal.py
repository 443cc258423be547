"""Unfinished work in the folder of a store: who may write there, and what is finished.

`<store>/.prepare/` holds `key.json` (what the work is for), `inputs.jsonl` (the partitions and
their files) and, for each partition that is done, `<index>.json` with its result, written only when
its shards lie under their names. One process may own the folder, or several may share it, each with
its own share i of n of the partitions. Locks are the system's and end with their holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from jaxgpt.corpus.generations import JOURNAL, Finished, changes, withdraw
from jaxgpt.corpus.workers import SPLITS
from jaxgpt.durable import sync_directory, write_atomic
from jaxgpt.errors import DataError

KEY, INPUTS, MODEL = "key.json", "inputs.jsonl", "tokenizer.model"


class Share(NamedTuple):
    """One of `count` shares of the partitions; `number` counts from 1."""

    number: int
    count: int

    def holds(self, index: int) -> bool:
        """Return whether a partition belongs to this share."""
        return index % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@contextlib.contextmanager
def hold(store: Path, share: Share | None = None) -> Iterator[None]:
    """Hold a folder alone, or one share of it; DataError names who holds it already."""
    with contextlib.ExitStack() as held:
        whole = held.enter_context(open(store / ".lock", "a+"))
        if not _lock(whole, fcntl.LOCK_SH if share else fcntl.LOCK_EX):
            raise DataError(f"{store}: another process prepares here already: {_holder(store)}")
        mine = whole
        if share:
            mine = held.enter_context(open(store / f".lock-{share.number}-of-{share.count}", "a+"))
            if not _lock(mine, fcntl.LOCK_EX):
                raise DataError(
                    f"{store}: another process prepares share {share} already: {_text(mine)}"
                )
        mine.truncate(0)
        mine.write(f"pid {os.getpid()} on {socket.gethostname()}")
        mine.flush()
        yield


def _lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks; shards are still written apart and renamed
    return True


def _holder(store: Path) -> str:
    """Return who holds a share of a folder, else who holds it alone."""
    for path in sorted(store.glob(".lock-*")):
        with open(path) as file:
            if not _lock(file, fcntl.LOCK_SH):
                return f"{_text(file)}, share {path.name.removeprefix('.lock-')}"
    with open(store / ".lock") as file:
        return _text(file)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200).strip() or "just started"


def open_journal(
    store: Path,
    key: dict,
    inputs: bytes,
    model: bytes,
    finished: Finished,
    share: Share | None = None,
) -> dict[int, dict]:
    """Return the results of finished partitions by index, and make the folder ready for more.

    The tokenizer `model` is written beside the splits, `inputs` beside the key.

    Unfinished work for another key is thrown away, back to the `finished` store; but where others
    may be at it, in a folder held by shares, it is refused (DataError).
    """
    journal = store / JOURNAL
    with open(store / ".lock-setup", "a+") as setup:
        with contextlib.suppress(OSError):
            fcntl.flock(setup, fcntl.LOCK_EX)  # held for moments: shares start one after another
        found = read_key(store)
        if share and found not in (None, key):
            raise DataError(
                f"{store} holds unfinished work for something else: {changes(found, key)}; "
                "finish that first or choose another data.store"
            )
        if found != key:
            discard(store, finished)
            for folder in (journal, *(store / split for split in SPLITS)):
                folder.mkdir(exist_ok=True)
            write_atomic(journal / INPUTS, inputs)
        _write_if_new(store / MODEL, model)
        if found != key:
            write_atomic(journal / KEY, json.dumps(key).encode())
    mine = f"run-{share.number}-of-{share.count}-*" if share else "run-*"
    for left in journal.glob(mine):  # of a killed run; its last workers may still write there
        shutil.rmtree(left, ignore_errors=True)
    return finished_results(store)


def _write_if_new(path: Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def read_key(store: Path) -> dict | None:
    """Return what the unfinished work in a folder is for; None where there is no such work."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        return json.loads((store / JOURNAL / KEY).read_bytes())
    return None


def finished_results(store: Path) -> dict[int, dict]:
    """Return the results of the partitions that are journaled in a folder and have their shards."""
    found = {}
    for path in sorted((store / JOURNAL).glob("[0-9]*.json"), key=lambda path: int(path.stem)):
        result = json.loads(path.read_bytes())
        shards = [(store / split / s["name"], s["size"]) for split in SPLITS for s in result[split]]
        if all(shard.is_file() and shard.stat().st_size == size for shard, size in shards):
            found[int(path.stem)] = result
    return found


def discard(store: Path, finished: Finished) -> None:
    """Remove unfinished work: the key first, so that no later run trusts what remains.

    The folder of the journal stays: it tells that half-made splits beside it are `prepare`'s own.
    """
    (store / JOURNAL / KEY).unlink(missing_ok=True)
    withdraw(store, finished)
    for path in (store / JOURNAL).glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def close_journal(store: Path, finished: Finished) -> None:
    """Leave only what the `finished` store consists of; the caller holds the folder alone."""
    discard(store, finished)
    shutil.rmtree(store / JOURNAL, ignore_errors=True)
    for lock in store.glob(".lock-*"):
        lock.unlink(missing_ok=True)


def run_folder(store: Path, share: Share | None = None) -> Path:
    """Make and return a folder of this run, in which its workers write.

    Only the process that leads the run moves shards from there into the store, so what a killed run
    left running cannot touch what a later one has published. Its name is unique across machines.
    """
    label = f"{share.number}-of-{share.count}-" if share else ""
    folder = (store / JOURNAL / f"run-{label}{uuid.uuid4().hex[:12]}").absolute()
    for split in SPLITS:
        (folder / split).mkdir(parents=True)
    return folder


def record(store: Path, index: int, result: dict, folder: Path) -> None:
    """Move the shards of a finished partition from `folder` into the store, then journal it."""
    for split in SPLITS:
        for shard in result[split]:
            os.replace(folder / split / shard["name"], store / split / shard["name"])
        sync_directory(store / split)
    write_atomic(store / JOURNAL / f"{index:06}.json", json.dumps(result).encode())


def missing(key: dict, done: Iterable[int]) -> list[int]:
    """Return the partitions of a key that have no result."""
    return sorted(set(range(key["first"], key["first"] + key["partitions"])) - set(done))
