"""One store of the shares that several `prepare` runs made of it, byte for byte as one run would.

Each share is a folder in which `prepare(..., partitions=(i, n))` has finished its partitions; the
destination may be one of them. Nothing is published before every partition is there exactly once,
made of the same sources with the same settings and tokenizer, and every shard has its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxgpt.corpus import generations, journal
from jaxgpt.corpus.generations import Finished
from jaxgpt.corpus.journal import INPUTS, JOURNAL, MODEL
from jaxgpt.corpus.prepare import publish
from jaxgpt.corpus.workers import SPLITS
from jaxgpt.durable import storage_errors, sync_directory
from jaxgpt.errors import DataError

NAMED = 20  # at most so many missing partitions are named in a message


def merge(
    destination: str | Path,
    folders: Sequence[str | Path],
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Publish the store `destination` of the shares in `folders`; return the report of `prepare`.

    Shards are linked where the file system can, else copied; the folders stay as they are.
    `progress(partitions done, partitions in all)` is called after each. Killed and started again,
    it goes on to the same store. Raises DataError for shares of different work, partitions that are
    missing or differ, damaged shards, or a folder in which a process still prepares; StorageError
    when a folder cannot be read or written.
    """
    store = Path(destination)
    others = _distinct(store, map(Path, folders))
    for folder in others:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
    with storage_errors(store), contextlib.ExitStack() as held:
        _common_key(store, others)  # before anything is made: a mistyped folder stays as it is
        store.mkdir(parents=True, exist_ok=True)
        for folder in (store, *others):
            held.enter_context(journal.hold(folder))
        key = _common_key(store, others)
        finished = generations.read_finished(store, key)
        if finished.key == key:
            journal.close_journal(store, finished)
            return finished.report | {"already_prepared": True}
        if key["base"] != finished.digests or key["generation"] != finished.generation + 1:
            raise DataError(
                f"{store}: the shares are generation {key['generation']} of a store, and here is "
                f"generation {finished.generation}; merge into the store that they extend"
            )
        results = _take_over(store, others, key, finished, progress)
        return publish(store, key, finished, results)


def _distinct(store: Path, folders: Sequence[Path]) -> list[Path]:
    """Return the folders other than the store, each once."""
    seen, found = {os.path.realpath(store)}, []
    for folder in folders:
        if os.path.realpath(folder) not in seen:
            seen.add(os.path.realpath(folder))
            found.append(folder)
    return found


def _common_key(store: Path, folders: list[Path]) -> dict:
    """Return the key that all shares have; DataError names one that differs and how."""
    keys = {folder: journal.read_key(folder) for folder in (store, *folders)}
    for folder in folders:
        if keys[folder] is None:
            raise DataError(f"{folder}: has no share of a store; `prepare --partitions` makes one")
    if keys[store] is None and not folders:
        keys[store] = generations.finished_key(store)
    known = {folder: key for folder, key in keys.items() if key is not None}
    if not known:
        raise DataError(f"{store}: has no share of a store; `prepare --partitions` makes one")
    first, key = next(iter(known.items()))
    for folder, other in known.items():
        if wrong := generations.changes(key, other):
            raise DataError(f"{first} and {folder} are no shares of one store: {wrong}")
    return key


def _take_over(
    store: Path,
    folders: list[Path],
    key: dict,
    finished: Finished,
    progress: Callable[[int, int], None] | None,
) -> dict[int, dict]:
    """Bring all partitions into the store's journal, with their shards; return the results."""
    found: dict[int, tuple[Path, dict]] = {}
    holders = [folder for folder in (store, *folders) if journal.read_key(folder) is not None]
    for folder in holders:  # without a key, what a journal holds is about to be thrown away
        for index, result in journal.finished_results(folder).items():
            place, same = found.setdefault(index, (folder, result))
            if result != same:
                raise DataError(f"partition {index} differs between {place} and {folder}")
    if lacking := journal.missing(key, found):
        named = ", ".join(map(str, lacking[:NAMED])) + (", ..." if lacking[NAMED:] else "")
        raise DataError(
            f"{len(lacking)} of {key['partitions']} partitions are missing: {named}; prepare them "
            "with `prepare --partitions`, or all that is left with `prepare` in one of the folders"
        )
    inputs = (holders[0] / JOURNAL / INPUTS).read_bytes()
    model = (holders[0] / MODEL).read_bytes()
    journal.open_journal(store, key, inputs, model, finished)
    run = journal.run_folder(store)
    for done, (index, (folder, result)) in enumerate(sorted(found.items()), 1):
        for split in SPLITS:
            for shard in result[split]:
                if folder != store:
                    _link(folder / split / shard["name"], run / split / shard["name"])
                _check((run if folder != store else store) / split / shard["name"], shard)
        if folder != store:
            journal.record(store, index, result, run)
        if progress:
            progress(done, len(found))
    return {index: result for index, (_, result) in found.items()}


def _check(path: Path, shard: dict) -> None:
    with storage_errors(path), open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != shard["sha256"]:
        raise DataError(
            f"{path}: damaged, its SHA-256 is not the recorded one; delete it and prepare it again"
        )


def _link(source: Path, target: Path) -> None:
    with storage_errors(source):
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())
    sync_directory(target.parent)
