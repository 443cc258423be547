"""A token store: a folder with one manifest and its shards, read as a single stream of ids.

The stream is E d1 E d2 ... E dn E over all shards in manifest order: the end-of-text id E opens
every document and one more E closes the last. Stream position p < `stream_len` is an input whose
target is position p + 1. The manifest is written last and atomically; its digest, made of contents
only, is the identity of the data. A store that is added to keeps the manifests of its earlier
generations. Names are relative, so a store can be moved. Knows nothing of rows, batches or order.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path

import numpy as np

from jaxgpt.data import shard as shards
from jaxgpt.data.shard import Shard, open_shard, token_dtype
from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import DataError, StorageError

VERSION = 2
MANIFEST = "manifest.json"
HEADERS_READ = 1024  # with more shards, headers are checked on first touch, so that opening is fast


def earlier_manifest(generation: int) -> str:
    """Return the name under which the manifest of an earlier generation is kept."""
    return f"manifest-{generation:06}.json"


def write_manifest(
    directory: Path,
    shard_infos: list[dict],
    *,
    tokenizer_digest: str,
    vocab_size: int,
    eos_id: int,
    start_id: int | None = None,
    policies: dict,
    report: dict,
    generation: int = 1,
) -> str:
    """Publish a store by writing its manifest, and return the identity of the data (SHA-256, hex).

    `start_id` is the input that opens a document, if that is not E. The identity covers what the
    stream is made of: contents and order of the non-empty shards, and the tokenizer. Names, paths,
    times, `policies`, `report` and `generation` are covered only by the manifest's own checksum.
    The manifest of an earlier generation stays, under another name.
    """
    directory = Path(directory)
    start = {} if start_id in (None, eos_id) else {"start_id": start_id}
    body = {
        "format": "jaxgpt-store",
        "version": VERSION,
        "generation": generation,
        "digest": _identity(shard_infos, tokenizer_digest, vocab_size, eos_id, *start.values()),
        "tokenizer_digest": tokenizer_digest,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        **start,
        "shards": shard_infos,
        "policies": policies,
        "report": report,
    }
    body = json.loads(json.dumps(body))  # keys become strings, tuples lists: what a reader will see
    text = json.dumps(body | {"checksum": _checksum(body)}, indent=1)
    if generation > 1 and (directory / MANIFEST).exists():
        earlier = read_manifest(directory)
        if earlier["generation"] < generation:
            name = earlier_manifest(earlier["generation"])
            write_atomic(directory / name, (directory / MANIFEST).read_bytes())
    write_atomic(directory / MANIFEST, text.encode())
    return body["digest"]


def _identity(shards: list[dict], tokenizer_digest: str, *ids: int) -> str:
    contents = [shard["content"] for shard in shards if shard["num_docs"]]
    text = json.dumps([VERSION, tokenizer_digest, *ids, contents])
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(manifest: dict) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path, name: str = MANIFEST) -> dict:
    """Read and check a manifest; DataError if it is damaged, edited or of another version."""
    path = Path(directory, name)
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
        if any("/" in shard["name"] or shard["name"] in ("", "..") for shard in manifest["shards"]):
            raise ValueError("a shard name is not a plain file name")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{path}: refused: {reason}; restore it or prepare again") from error
    return manifest


def open_store(
    path: str | Path, split: str = "train", *, digest: str | None = None, max_open: int = 64
) -> Store:
    """Open the store at `path`, or at `path/split` when `path` is the folder `prepare` wrote.

    `digest` asks for the generation with this identity instead of the newest. Sizes of all shards
    are checked here, of at most HEADERS_READ their headers too; contents on first touch. At most
    `max_open` shards, one file descriptor each, are open at once. DataError when there is no store
    or anything in it does not match; StorageError when it cannot be read.
    """
    path = Path(path)
    for directory in (path, path / split):
        with storage_errors(directory):
            found = (directory / MANIFEST).is_file()
        if found:
            return Store(directory, _generation(directory, digest), max_open)
    places = f"neither {MANIFEST} nor {split}/{MANIFEST} is in it"
    raise DataError(f"{path}: not a token store: {places}; run `jaxgpt prepare`")


def tokenizer_path(directory: Path) -> Path:
    """Return the tokenizer of the store in a folder: beside its manifest, else one folder above."""
    beside = directory / "tokenizer.model"
    return beside if beside.is_file() else directory.parent / "tokenizer.model"


def generations(directory: Path) -> list[str]:
    """Return the names of all manifests in the folder of a store, the newest first."""
    with storage_errors(directory):
        earlier = sorted((p.name for p in directory.glob("manifest-*.json")), reverse=True)
    return [MANIFEST, *earlier]


def _generation(directory: Path, digest: str | None) -> dict:
    manifest = read_manifest(directory)
    if digest in (None, manifest["digest"]):
        return manifest
    held = [manifest["digest"][:12]]
    for name in generations(directory)[1:]:
        manifest = read_manifest(directory, name)
        if manifest["digest"] == digest:
            return manifest
        held.append(manifest["digest"][:12])
    raise DataError(f"{directory}: has no data {digest[:12]}, only {', '.join(held)}")


class Store:
    """An open token store, safe to read from several threads; `open_store` makes one.

    `digest` is the identity of the data, `num_bytes` counts the UTF-8 bytes of all documents,
    `stream_len` = num_docs + num_tokens the stream positions that are inputs. `dtype` is that of
    the stored ids, in which E opens each document; a model reads `start_id` there, mostly the same.
    `shard_docs` and `shard_positions`, int64 [shards + 1], tell the first document and stream
    position of each shard.
    """

    def __init__(self, directory: Path, manifest: dict, max_open: int):
        self.directory, self.manifest = directory, manifest
        self.digest: str = manifest["digest"]
        self.tokenizer_digest: str = manifest["tokenizer_digest"]
        self.vocab_size: int = manifest["vocab_size"]
        self.eos_id: int = manifest["eos_id"]
        self.start_id: int = manifest.get("start_id", self.eos_id)
        self.dtype = token_dtype(self.vocab_size)
        self._entries: list[dict] = manifest["shards"]
        self._common = {key: manifest[key] for key in ("tokenizer_digest", "vocab_size", "eos_id")}
        self._common["dtype"] = self.dtype.name
        self._check_files()
        docs = np.array([entry["num_docs"] for entry in self._entries], np.int64)
        tokens = np.array([entry["num_tokens"] for entry in self._entries], np.int64)
        self.num_shards = len(self._entries)
        self.shard_docs = np.concatenate([[0], np.cumsum(docs)])
        self.shard_positions = np.concatenate([[0], np.cumsum(docs + tokens)])
        self._first_doc, self._first = self.shard_docs.tolist(), self.shard_positions.tolist()
        self.num_docs, self.num_tokens = int(docs.sum()), int(tokens.sum())
        self.num_bytes: int = sum(entry["num_bytes"] for entry in self._entries)
        self.stream_len = self.num_docs + self.num_tokens
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._verified: dict[int, bytearray] = {}  # kept when a shard closes: a block is read once
        self._max_open, self._lock = max_open, threading.Lock()

    def _check_files(self) -> None:
        """Refuse a missing, unreadable or resized shard before anything is computed from it."""
        for number, entry in enumerate(self._entries):
            path = f"{self.directory}/{entry['name']}"  # pathlib takes 4 us, of 60,000 shards
            if len(self._entries) <= HEADERS_READ:
                shards.read_header(Path(path), self._expected(number))
                continue
            with storage_errors(Path(path)):
                size = os.stat(path).st_size
            if size != entry["size"]:
                raise DataError(f"{path}: file has {size} bytes, the manifest says {entry['size']}")
            if not os.access(path, os.R_OK):
                raise StorageError(f"{path}: Permission denied")

    def _expected(self, number: int) -> dict:
        return self._entries[number] | self._common

    @property
    def tokenizer_path(self) -> Path:
        """The model of the ids: beside the manifest, else one folder above."""
        return tokenizer_path(self.directory)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return stream ids [start, stop), int32; 0 <= start <= stop <= stream_len + 1."""
        ids = np.empty(max(0, stop - start), self.dtype)
        self.read_into(start, ids)
        return ids.astype(np.int32)

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out`, contiguous, [M] of the store's dtype, with the stream from `start` on.

        Raises DataError for damage, StorageError for a block that cannot be read.
        """
        stop = start + len(out)
        if not 0 <= start <= stop <= self.stream_len + 1:
            raise IndexError(f"stream range {start}..{stop} of a store of {self.stream_len + 1}")
        if stop > self.stream_len and len(out):
            out[-1] = self.eos_id
            stop = self.stream_len
        at, number = start, bisect_right(self._first, start) - 1
        while at < stop:
            until = min(self._first[number + 1], stop)
            if at < until:  # a shard of no documents has no positions
                part = out[at - start : until - start]
                shards.read_stream(self.shard(number), at - self._first[number], part)
            at, number = until, number + 1

    def read_rows(self, starts: np.ndarray, out: np.ndarray, numbers: list[int]) -> np.ndarray:
        """Fill rows `numbers` of `out` with the stream from each of `starts`, int64 [n], on.

        `out` is C-contiguous, [M, W] of the store's dtype. Returns which rows were filled, bool
        [n]: those that lie in one shard; the others are left to `read_into`. Errors are its own.
        """
        holders = np.searchsorted(self.shard_positions, starts, side="right") - 1
        inside = starts + out.shape[1] <= self.shard_positions[holders + 1]
        local = starts - self.shard_positions[holders]
        rows = list(zip(holders.tolist(), local.tolist(), numbers, inside.tolist(), strict=True))
        for at in range(0, len(rows), self._max_open):
            part = [row for row in rows[at : at + self._max_open] if row[3]]
            opened = {holder: self.shard(holder) for holder, *_ in part}
            shards.read_each([(opened[holder], at, row) for holder, at, row, _ in part], out)
        return inside

    def expect(self, start: int, stop: int) -> None:
        """Have the system fetch stream positions [start, stop) for a later read; a hint."""
        number = bisect_right(self._first, start) - 1
        until = min(stop, self._first[number + 1])  # the next shard is left to the read itself
        if start < until:
            shards.expect_stream(self.shard(number), start - self._first[number], until - start)

    def opens(self, start: int, stop: int) -> np.ndarray:
        """Return where documents open in stream positions [start, stop), relative to start, int64.

        The E that closes the stream opens nothing. Costs O(log documents) and what it returns.
        """
        found, at, end = [np.empty(0, np.int64)], start, min(stop, self.stream_len)
        number = bisect_right(self._first, start) - 1
        while at < end:
            base, until = self._first[number], min(self._first[number + 1], end)
            if at < until:
                inside = shards.starts_between(self.shard(number), at - base, until - base)
                found.append(inside + (base - start))
            at, number = until, number + 1
        return np.concatenate(found)

    def shard(self, number: int) -> Shard:
        """Return an open shard; it may be closed by later calls, but not while it is referenced."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
            verified = self._verified.get(number)
        path = self.directory / self._entries[number]["name"]
        shard = open_shard(path, self._expected(number), verified)
        with self._lock:
            self._verified.setdefault(number, shard.file.verified)
            self._open[number] = shard
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)  # a reader that still uses it keeps it open
        return shard

    def doc_starts(self, number: int) -> np.ndarray:
        """Return where the documents of a shard open in its own stream, and its end: [docs + 1]."""
        shard = self.shard(number)
        return shards.read_starts(shard, 0, shard.num_docs + 1)

    def document_at(self, position: int) -> tuple[int, int]:
        """Return the document of a stream position < stream_len, and the offset in it (E is 0)."""
        if not 0 <= position < self.stream_len:
            raise IndexError(f"stream position {position} of a store of {self.stream_len}")
        number = bisect_right(self._first, position) - 1
        starts, local = self.shard(number).starts, position - self._first[number]
        doc = bisect_right(starts, local) - 1
        return self._first_doc[number] + doc, local - starts[doc]

    def document_span(self, doc: int) -> tuple[int, int]:
        """Return the stream positions [start, stop) of a document, its E first."""
        number = self._shard_of(doc)
        starts, local = self.shard(number).starts, doc - self._first_doc[number]
        return self._first[number] + starts[local], self._first[number] + starts[local + 1]

    def doc_bytes(self, start: int, stop: int) -> np.ndarray:
        """Return the UTF-8 bytes of documents [start, stop) as int64."""
        parts = [np.empty(0, np.int64)]
        first = bisect_right(self._first_doc, start) - 1
        for number in range(first, self.num_shards):
            base, until = self._first_doc[number], self._first_doc[number + 1]
            low, high = max(start, base) - base, min(stop, until) - base
            if base >= stop:
                break
            if low < high:
                parts.append(shards.read_doc_bytes(self.shard(number), low, high))
        return np.concatenate(parts)

    def provenance(self, doc: int) -> str:
        """Return where a document came from, as `prepare` recorded it."""
        number = self._shard_of(doc)
        return shards.read_provenance(self.shard(number))[doc - self._first_doc[number]]

    def _shard_of(self, doc: int) -> int:
        if not 0 <= doc < self.num_docs:
            raise IndexError(f"document {doc} of a store of {self.num_docs}")
        return bisect_right(self._first_doc, doc) - 1

    def verify(self) -> None:
        """Check every block of every shard; DataError names the first damaged one."""
        for number in range(self.num_shards):
            shards.verify(self.shard(number))

    def close(self) -> None:
        """Close all files. Safe to call twice; a later read opens them again."""
        with self._lock:
            self._open.clear()
