"""What a token store holds, in numbers, and whether every byte of it is what was written.

`survey` reads manifests and the lengths of documents; `verify` reads everything: each shard of each
generation of each split against its checksums and against the manifest, the manifests themselves,
the packing indices and the tokenizer. A damaged file does not hide the ones after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.corpus.generations import FINISHED, JOURNAL
from jaxgpt.corpus.workers import SPLITS
from jaxgpt.data import best_fit, blocks, shard
from jaxgpt.data.store import (
    MANIFEST,
    Store,
    generations,
    open_store,
    read_manifest,
    tokenizer_path,
)
from jaxgpt.durable import storage_errors
from jaxgpt.errors import DataError, StorageError
from jaxgpt.tokenization import tokenizer

Progress = Callable[[int, int], None]
READ_BYTES = 1 << 20


def split_folders(path: Path) -> dict[str, Path]:
    """Return the folders of the splits of a store by name; DataError where there is no store.

    `path` is the folder that `prepare` wrote, or that of one split.
    """
    with storage_errors(path):
        if _is_split(path):
            return {path.name: path}
        if (path / JOURNAL).exists() and not any((path / s / MANIFEST).exists() for s in SPLITS):
            raise DataError(
                f"{path}: not finished: run the same `jaxgpt prepare` again, or where it is a "
                "share of --partitions, `jaxgpt data merge`"
            )
        found = {split: path / split for split in reversed(SPLITS) if _is_split(path / split)}
    if not found:
        raise DataError(f"{path}: not a token store: no manifest is in it; run `jaxgpt prepare`")
    return found


def _is_split(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in ("manifest*.json", "*.shard"))


# In numbers.


def survey(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Return what a store holds: per split, per source of its report, and its settings.

    `lengths` counts documents by content ids: those of 8 to 15 are under "8", and so on by powers
    of two. Reads 8 bytes per document; `progress(shards done, shards in all)` is called on the way.
    Raises DataError or StorageError.
    """
    folders = split_folders(path)
    with contextlib.ExitStack() as stack:
        stores = {
            split: stack.enter_context(contextlib.closing(open_store(folder)))
            for split, folder in folders.items()
        }
        total = sum(store.num_shards for store in stores.values())
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, total)

        splits = {split: _split_facts(store, step) for split, store in stores.items()}
        first = next(iter(stores.values()))
        report = first.manifest["report"]
        return {
            "store": str(path),
            "tokenizer": {
                "digest": first.tokenizer_digest,
                "vocab_size": first.vocab_size,
                "eos_id": first.eos_id,
            },
            "splits": splits,
            "report": {name: report[name] for name in report if name != "sources"},
            "sources": report.get("sources", []),
            "policies": {k: v for k, v in first.manifest["policies"].items() if k != "split"},
        }


def _split_facts(store: Store, step: Callable[[], None]) -> dict[str, Any]:
    return {
        "documents": store.num_docs,
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "shards": store.num_shards,
        "generation": store.manifest["generation"],
        "generations": len(generations(store.directory)),
        "digest": store.digest,
        "bytes_on_disk": sum(entry["size"] for entry in store.manifest["shards"]),
        "lengths": lengths(store, step),
    }


def lengths(store: Store, step: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Return how many documents have 1, 2 to 3, 4 to 7, ... content ids, by the lower bound."""
    counts = np.zeros(64, np.int64)
    for number in range(store.num_shards):
        tokens = np.diff(store.doc_starts(number)) - 1
        power = np.frexp(tokens.astype(np.float64))[1] - 1  # exact below 2^53
        counts += np.bincount(power, minlength=64)
        step()
    return {str(1 << power): int(counts[power]) for power in np.flatnonzero(counts).tolist()}


# Byte by byte.


def verify(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Check every file of a store, all generations included; return the counts and what is wrong.

    "problems" has a line for each damaged, missing or unreadable file. `progress(bytes done, bytes
    in all)` is called about every MiB. Raises DataError where there is no store at all.
    """
    problems: list[str] = []
    counts = {"manifests": 0, "shards": 0, "indices": 0, "tokenizers": 0, "bytes": 0}
    work, tokenizers, newest = [], {}, {}
    for split, folder in split_folders(path).items():
        named = dict(_manifests(folder, problems))
        manifests = list(named.values())
        if MANIFEST in named:
            newest[split] = named[MANIFEST]["digest"]
        counts["manifests"] += len(manifests)
        entries = {}
        for manifest in manifests:
            fixed = {key: manifest[key] for key in ("tokenizer_digest", "vocab_size", "eos_id")}
            for entry in manifest["shards"]:
                entries[entry["name"], entry["sha256"]] = entry | fixed
            tokenizers.setdefault(tokenizer_path(folder), set()).add(manifest["tokenizer_digest"])
        work += [(folder / entry["name"], entry) for entry in entries.values()]
        counts["indices"] += sum(1 for _ in _indices(folder, manifests, problems))
    _check_finished(path / FINISHED, newest, problems)
    total = sum(entry["size"] for _, entry in work)
    for file, entry in work:
        for size in _check_shard(file, entry, problems):
            counts["bytes"] += size
            if progress:
                progress(counts["bytes"], total)
        counts["shards"] += 1
    for file, digests in tokenizers.items():
        _check_tokenizer(file, digests, problems)
        counts["tokenizers"] += 1
    return {"store": str(path)} | counts | {"problems": problems}


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Note what is wrong with a file instead of raising it."""
    try:
        yield
    except (DataError, StorageError) as error:
        problems.append(str(error))


def _manifests(folder: Path, problems: list[str]) -> Iterator[tuple[str, dict]]:
    for name in generations(folder):
        with _collected(problems):
            yield name, read_manifest(folder, name)


def _check_finished(path: Path, newest: dict[str, str], problems: list[str]) -> None:
    """Check that the splits are those that `prepare` finished together."""
    if not path.exists():
        return
    with _collected(problems), storage_errors(path):
        try:
            report = json.loads(path.read_bytes())["report"]
            digests = {split: report[split]["digest"] for split in SPLITS}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: cannot be read; restore the file") from error
        for split, digest in digests.items():
            if newest.get(split, digest) != digest or not _is_split(path.parent / split):
                raise DataError(
                    f"{path.parent / split}: has data {newest.get(split, 'none')[:12]}, and "
                    f"{FINISHED} names {digest[:12]}; restore the folder"
                )


def _check_shard(path: Path, entry: dict, problems: list[str]) -> Iterator[int]:
    """Check a shard and yield the bytes read, piece by piece."""
    before = len(problems)
    with _collected(problems), storage_errors(path), open(path, "rb") as file:
        found = hashlib.sha256()
        while data := file.read(READ_BYTES):
            found.update(data)
            yield len(data)
    with _collected(problems):
        if len(problems) == before:
            shard.verify(shard.open_shard(path, entry))  # names the block, where it is one
            if found.hexdigest() != entry["sha256"]:
                raise DataError(
                    f"{path}: SHA-256 is {found.hexdigest()[:12]}, the manifest says "
                    f"{entry['sha256'][:12]}; restore the file"
                )


def _indices(folder: Path, manifests: list[dict], problems: list[str]) -> Iterator[Path]:
    for path in sorted(folder.glob("packing-*.index")):
        yield path
        with _collected(problems):
            file = blocks.open_file(path, best_fit.MAGIC, {})
            blocks.verify(file)
            _check_index(path, folder, file.header, manifests)


def _check_index(path: Path, folder: Path, header: dict, manifests: list[dict]) -> None:
    """Raise DataError unless an index is what its name and the store it is of promise."""
    if header["store"] not in {manifest["digest"] for manifest in manifests}:
        return  # of data that is no longer here; never looked at
    if header["algorithm"] != best_fit.VERSION:
        return
    with contextlib.ExitStack() as stack:
        try:
            store = open_store(folder, digest=header["store"])
        except (DataError, StorageError):
            return  # a shard of it is damaged, which is said elsewhere
        stack.callback(store.close)
        size, whole = header["seq_len"], header["whole"]
        if best_fit.index_path(store, size, whole=whole) != path:
            raise DataError(f"{path}: has the name of another packing index; delete it")
        best_fit.open_index(store, size, whole=whole)


def _check_tokenizer(path: Path, digests: set[str], problems: list[str]) -> None:
    with _collected(problems):
        digest = tokenizer.load(path).digest
        if wrong := digests - {digest}:
            raise DataError(
                f"{path}: has digest {digest[:12]}, the ids of the store come from "
                f"{', '.join(sorted(other[:12] for other in wrong))}; put that tokenizer back"
            )
