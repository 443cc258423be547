"""The entries of data.sources: what each one holds, and how the work is divided.

An entry is a file, a folder, a glob pattern, `stdlib` or `tfds:NAME/SPLIT`. All entries together
become a list of partitions, the units of work and of restart, which depends on the sources and the
configuration alone and never on who does the work. Order is that of the entries; within one, of
paths as bytes, so that it is the same on every file system and in every locale.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from jaxgpt.config import DataConfig
from jaxgpt.data import formats, stdlib, tfds_source
from jaxgpt.data.formats import BadRecords, Document, show_path
from jaxgpt.errors import ConfigError, DataError

MIN_PARTITION_BYTES = 1 << 20
MANY_PARTITIONS = 32  # a small corpus is cut into about this many, so that all cores have work
STDLIB = "stdlib"


@dataclass(frozen=True)
class Slice:
    """A stretch of one file or dataset; `start` and `stop` count in the unit of its kind.

    text: unused (a whole file) · json: bytes · parquet: row groups · module: unused (the
    documentation of one C module) · tfds: examples. `size` is its raw bytes, `stamp` what must not
    change while it is read.
    """

    kind: Literal["text", "json", "parquet", "module", "tfds"]
    path: str
    size: int = 0
    start: int = 0
    stop: int | None = None
    stamp: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """Slices of one entry of data.sources that are prepared together."""

    source: str
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)


def partitions(cfg: DataConfig) -> list[Partition]:
    """Return the partitions of all sources, of about `partition_bytes` raw bytes each.

    Reads names, sizes and footers only. Raises ConfigError when there are no sources, DataError for
    an entry that matches nothing, a file that is listed twice or cannot be read.
    """
    if not cfg.sources:
        raise ConfigError("data.sources is empty: name files, folders, globs, stdlib or tfds:...")
    seen: dict[tuple[int, int], str] = {}
    entries = {}
    for source in cfg.sources:
        if source in entries:
            raise DataError(f"data.sources lists {source!r} twice")
        if _holds(source, cfg.store):
            raise DataError(f"data.store = {cfg.store!r} lies inside data.sources {source!r}")
        entries[source] = list(_slices(source, cfg, seen))
    total = sum(part.size for slices in entries.values() for part in slices)
    target = min(cfg.partition_bytes, max(MIN_PARTITION_BYTES, total // MANY_PARTITIONS))
    return [
        Partition(source, group)
        for source, slices in entries.items()
        for group in _group((piece for part in slices for piece in _cut(part, target)), target)
    ]


def bad_records(cfg: DataConfig, partition: Partition) -> BadRecords:
    """Return an empty record of bad input; in `stdlib`, files invalid on purpose are left out."""
    return BadRecords("skip" if partition.source == STDLIB else cfg.bad_text)


def documents(cfg: DataConfig, partition: Partition, bad: BadRecords) -> Iterator[Document]:
    """Yield the documents of a partition, empty ones included.

    Raises DataError as `bad` decides, and for a file that is damaged or changed since `partitions`.
    """
    for part in partition.slices:
        yield from _read(cfg, part, bad)
        if part.kind in ("text", "json", "parquet") and _stamp(_stat(part.path)) != part.stamp:
            raise DataError(f"{show_path(part.path)}: changed while it was read; prepare again")


def texts(cfg: DataConfig) -> Iterator[str]:
    """Yield the text of every document of all sources."""
    for partition in partitions(cfg):
        for document in documents(cfg, partition, bad_records(cfg, partition)):
            yield document.text


def fingerprint(parts: Iterable[Partition]) -> str:
    """Return a hash of all names, sizes, times and cuts: equal when the work to do is the same."""
    text = json.dumps([asdict(partition) for partition in parts])
    return hashlib.sha256(text.encode()).hexdigest()


def _read(cfg: DataConfig, part: Slice, bad: BadRecords) -> Iterator[Document]:
    match part.kind:
        case "text":
            yield from formats.text_document(part.path, stdlib.short_name(part.path), bad)
        case "json":
            yield from formats.json_documents(part.path, part.start, part.stop, cfg.text_field, bad)
        case "parquet":
            groups = part.start, part.stop
            yield from formats.parquet_documents(part.path, *groups, cfg.text_field, bad)
        case "tfds":
            place = part.path, cfg.data_dir, cfg.text_field, part.start, part.stop
            yield from tfds_source.documents(*place, bad)
        case "module":
            try:
                yield Document(stdlib.documentation(part.path), f"{STDLIB}:module {part.path}")
            except ImportError as error:
                bad.skip(f"{STDLIB}: module {part.path} cannot be imported: {error}")


def _slices(source: str, cfg: DataConfig, seen: dict[tuple[int, int], str]) -> Iterator[Slice]:
    """Yield the files or datasets of an entry whole, and remember the identity of each file."""
    if source.startswith("tfds:"):
        count, size, name = tfds_source.examples(source, cfg.data_dir, cfg.text_field)
        yield Slice("tfds", source, size, 0, count, (name, count, size))
        return
    for path in stdlib.python_files() if source == STDLIB else _files(source):
        status = _stat(path)
        identity = status.st_dev, status.st_ino
        if identity in seen:
            both = f"{show_path(path)} and {show_path(seen[identity])}"
            raise DataError(f"data.sources: {both} are the same file; list it once")
        seen[identity] = path
        yield Slice(_kind(path), path, status.st_size, 0, status.st_size, _stamp(status))
    if source == STDLIB:
        yield from (Slice("module", name) for name in stdlib.extension_modules())


def _files(source: str) -> list[str]:
    """Return the files an entry stands for: itself, all below a folder, or what a glob matches."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        below = (os.path.join(top, name) for top, _, names in os.walk(path) for name in names)
        found = sorted(below, key=os.fsencode)
    elif os.path.exists(path):
        found = [path]
    else:
        matches = glob.glob(path, recursive=True, include_hidden=True)
        found = sorted((m for m in matches if not os.path.isdir(m)), key=os.fsencode)
    if not found:
        raise DataError(f"data.sources: {source!r} matches no file")
    return found


def _holds(source: str, store: str | dict[str, float]) -> bool:
    """Return whether the store to be written lies in a folder that is to be read."""
    folder = os.path.expanduser(source)
    inside = os.path.realpath(store) if isinstance(store, str) and store else ""
    return os.path.isdir(folder) and Path(inside).is_relative_to(os.path.realpath(folder))


def _kind(path: str) -> Literal["text", "json", "parquet"]:
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    if path.lower().endswith(".parquet"):
        return "parquet"
    return "json" if name.endswith((".jsonl", ".ndjson", ".json")) else "text"


def _stat(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{show_path(path)}: cannot read it: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{show_path(path)}: not a regular file")
    return status


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _cut(part: Slice, target: int) -> Iterator[Slice]:
    """Cut a slice where that is cheap: JSON at lines, parquet at row groups, datasets anywhere."""
    if part.kind == "parquet":
        for group, size in enumerate(formats.parquet_groups(part.path)):
            yield replace(part, start=group, stop=group + 1, size=size)
    elif part.kind == "tfds" and tfds_source.can_cut(part.path):
        step = max(1, part.stop * target // max(1, part.size))
        for start in range(0, part.stop, step):
            count = min(step, part.stop - start)
            yield replace(
                part, start=start, stop=start + count, size=part.size * count // part.stop
            )
    elif part.kind == "json" and not formats.is_compressed(part.path):
        for start in range(0, part.size, target):
            stop = min(start + target, part.size)
            yield replace(part, start=start, stop=stop, size=stop - start)
    else:
        yield replace(part, stop=None)


def _group(pieces: Iterable[Slice], target: int) -> Iterator[tuple[Slice, ...]]:
    """Yield runs of slices of about `target` bytes; slices that adjoin in a file become one."""
    group: list[Slice] = []
    size = 0
    for piece in pieces:
        size += piece.size
        last = group[-1] if group else None
        if last and (last.path, last.stop) == (piece.path, piece.start):
            group[-1] = replace(last, stop=piece.stop, size=last.size + piece.size)
        else:
            group.append(piece)
        if size >= target:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)
