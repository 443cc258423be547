"""A token store: a folder with one manifest and its shards, read as a single stream of ids.

The stream is E d1 E d2 ... E dn E over all shards in manifest order: the end-of-text id E opens
every document and one more E closes the last. Stream position p < `stream_len` is an input whose
target is position p + 1. The manifest is written last and atomically; its digest, made of contents
only, is the identity of the data. Names are relative, so a store can be moved or copied.
Knows nothing of rows, batches or order.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from itertools import accumulate
from operator import add
from pathlib import Path

import numpy as np

from jaxgpt.data.shard import (
    Shard,
    open_shard,
    read_doc_bytes,
    read_header,
    read_provenance,
    read_tokens,
    storage_errors,
    sync_directory,
    token_dtype,
    verify,
    write_shard,
)
from jaxgpt.errors import DataError

__all__ = [
    "Store",
    "open_store",
    "read_manifest",
    "storage_errors",
    "write_atomic",
    "write_manifest",
    "write_shard",
]

VERSION = 1
MANIFEST = "manifest.json"
_NOWHERE = np.empty(0, np.int64)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that after any crash `path` holds the old bytes or all of the new."""
    temporary = path.with_name(path.name + ".partial")
    with storage_errors(path):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)


def write_manifest(
    directory: Path,
    shard_infos: list[dict],
    *,
    tokenizer_digest: str,
    vocab_size: int,
    eos_id: int,
    policies: dict,
    report: dict,
) -> str:
    """Publish a store by writing its manifest, and return the identity of the data (SHA-256, hex).

    The identity covers what the stream is made of: contents and order of the non-empty shards, and
    the tokenizer. Names, paths, times, `policies` and `report` are covered only by the manifest's
    own checksum.
    """
    body = {
        "format": "jaxgpt-store",
        "version": VERSION,
        "digest": _identity(shard_infos, tokenizer_digest, vocab_size, eos_id),
        "tokenizer_digest": tokenizer_digest,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "shards": shard_infos,
        "policies": policies,
        "report": report,
    }
    body = json.loads(json.dumps(body))  # keys become strings, tuples lists: what a reader will see
    text = json.dumps(body | {"checksum": _checksum(body)}, indent=1)
    write_atomic(Path(directory, MANIFEST), text.encode())
    return body["digest"]


def _identity(shards: list[dict], tokenizer_digest: str, vocab_size: int, eos_id: int) -> str:
    contents = [shard["content"] for shard in shards if shard["num_docs"]]
    text = json.dumps([VERSION, tokenizer_digest, vocab_size, eos_id, contents])
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(manifest: dict) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> dict:
    """Read and check `manifest.json`; DataError if it is damaged, edited or of another version."""
    path = Path(directory, MANIFEST)
    with storage_errors(path):
        data = path.read_bytes()
    try:
        manifest = json.loads(data)
        if manifest["format"] != "jaxgpt-store":
            raise ValueError(f"format is {manifest['format']!r}, not 'jaxgpt-store'")
        if manifest["version"] != VERSION:
            raise ValueError(f"version is {manifest['version']}, this program reads {VERSION}")
        if manifest["checksum"] != _checksum(manifest):
            raise ValueError("its checksum does not match, so it was edited or damaged")
        if any(Path(shard["name"]).name != shard["name"] for shard in manifest["shards"]):
            raise ValueError("a shard name is not a plain file name")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{path}: refused: {reason}; restore it or prepare again") from error
    return manifest


def open_store(path: str | Path, split: str = "train", *, max_open: int = 64) -> Store:
    """Open the store at `path`, or at `path/split` when `path` is the folder `prepare` wrote.

    Size and header of every shard are checked here, its contents on first touch. At most `max_open`
    shards, one file descriptor each, are open at once. DataError when there is no store or anything
    in it does not match; StorageError when it cannot be read.
    """
    path = Path(path)
    for directory in (path, path / split):
        with storage_errors(directory):
            found = (directory / MANIFEST).is_file()
        if found:
            return Store(directory, read_manifest(directory), max_open)
    places = f"neither {MANIFEST} nor {split}/{MANIFEST} is in it"
    raise DataError(f"{path}: not a token store: {places}; run `jaxgpt prepare`")


class Store:
    """An open token store, safe to read from several threads; `open_store` makes one.

    Attributes: `digest` (identity of the data), `tokenizer_digest`, `vocab_size`, `eos_id`,
    `num_docs`, `num_tokens` (content ids), `num_bytes` (UTF-8 bytes of the documents), `stream_len`
    (inputs in the stream: num_tokens + num_docs), `manifest`, `directory`.
    """

    def __init__(self, directory: Path, manifest: dict, max_open: int):
        self.directory, self.manifest = directory, manifest
        self.digest: str = manifest["digest"]
        self.tokenizer_digest: str = manifest["tokenizer_digest"]
        self.vocab_size: int = manifest["vocab_size"]
        self.eos_id: int = manifest["eos_id"]
        common = {key: manifest[key] for key in ("tokenizer_digest", "vocab_size", "eos_id")}
        common["dtype"] = token_dtype(self.vocab_size).name
        self._entries = [entry | common for entry in manifest["shards"]]
        for entry in self._entries:
            read_header(directory / entry["name"], entry)
        docs = [entry["num_docs"] for entry in self._entries]
        tokens = [entry["num_tokens"] for entry in self._entries]
        self._first_doc = list(accumulate(docs, initial=0))  # [shards + 1]
        self._first_position = list(accumulate(map(add, docs, tokens), initial=0))  # [shards + 1]
        self.num_docs, self.num_tokens = sum(docs), sum(tokens)
        self.num_bytes: int = sum(entry["num_bytes"] for entry in self._entries)
        self.stream_len = self.num_docs + self.num_tokens
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._verified: dict[int, bytearray] = {}  # kept when a shard closes: a block is read once
        self._max_open, self._lock = max_open, threading.Lock()

    @property
    def tokenizer_path(self) -> Path:
        """The SentencePiece model of the ids: beside the manifest, else one folder above."""
        beside = self.directory / "tokenizer.model"
        return beside if beside.is_file() else self.directory.parent / "tokenizer.model"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return stream ids [start, stop), int32; 0 <= start <= stop <= stream_len + 1."""
        ids = np.empty(max(0, stop - start), np.int32)
        self.read_into(start, ids)
        return ids

    def read_into(self, start: int, out: np.ndarray) -> np.ndarray:
        """Fill `out`, int32 [M], with the stream from `start`; return where documents open in it.

        The indices (int64, ascending) are those of each document's E; the E that closes the stream
        opens nothing. Costs O(M + log documents). Raises DataError for damage, StorageError for a
        block that cannot be read.
        """
        stop = start + len(out)
        if not 0 <= start <= stop <= self.stream_len + 1:
            raise IndexError(f"stream range {start}..{stop} of a store of {self.stream_len + 1}")
        if stop > self.stream_len and len(out):
            out[-1] = self.eos_id
        opens, at, end = [_NOWHERE], start, min(stop, self.stream_len)
        number = bisect_right(self._first_position, start) - 1
        while at < end:
            base, until = self._first_position[number], min(self._first_position[number + 1], end)
            if at < until:  # a shard of no documents has no positions
                part = out[at - start : until - start]
                opens.append(self._fill(number, at - base, until - base, part) + (at - start))
            at, number = until, number + 1
        return np.concatenate(opens)

    def _fill(self, number: int, low: int, high: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with a shard's stream [low, high); return where documents open in it."""
        shard = self._shard(number)
        first, last = bisect_left(shard.starts, low), bisect_left(shard.starts, high)
        tokens = read_tokens(shard, low - first, high - last)  # an E lies before for each start
        if first == last:
            out[:] = tokens
            return _NOWHERE
        opens = np.array(shard.starts[first:last], np.int64) - low
        content = np.ones(out.size, bool)
        content[opens] = False
        out[content] = tokens
        out[opens] = self.eos_id
        return opens

    def _shard(self, number: int) -> Shard:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
            verified = self._verified.get(number)
        entry = self._entries[number]
        shard = open_shard(self.directory / entry["name"], entry, verified)
        with self._lock:
            self._verified.setdefault(number, shard.verified)
            self._open[number] = shard
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)  # a reader that still uses it keeps it open
        return shard

    def document_at(self, position: int) -> tuple[int, int]:
        """Return the document of a stream position < stream_len, and the offset in it (E is 0)."""
        if not 0 <= position < self.stream_len:
            raise IndexError(f"stream position {position} of a store of {self.stream_len}")
        number = bisect_right(self._first_position, position) - 1
        starts, local = self._shard(number).starts, position - self._first_position[number]
        doc = bisect_right(starts, local) - 1
        return self._first_doc[number] + doc, local - starts[doc]

    def doc_bytes(self, start: int, stop: int) -> np.ndarray:
        """Return the UTF-8 bytes of documents [start, stop) as int64."""
        parts = [np.empty(0, np.int64)]
        for number in range(len(self._entries)):
            base, until = self._first_doc[number], self._first_doc[number + 1]
            low, high = max(start, base) - base, min(stop, until) - base
            if low < high:
                parts.append(read_doc_bytes(self._shard(number), low, high))
        return np.concatenate(parts)

    def provenance(self, doc: int) -> str:
        """Return where a document came from, as `prepare` recorded it."""
        if not 0 <= doc < self.num_docs:
            raise IndexError(f"document {doc} of a store of {self.num_docs}")
        number = bisect_right(self._first_doc, doc) - 1
        return read_provenance(self._shard(number))[doc - self._first_doc[number]]

    def verify(self) -> None:
        """Check every block of every shard; DataError names the first damaged one."""
        for number in range(len(self._entries)):
            verify(self._shard(number))

    def close(self) -> None:
        """Close all files. Safe to call twice; a later read opens them again."""
        with self._lock:
            self._open.clear()
