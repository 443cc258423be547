"""The entries of data.sources: what each one holds, and how the work is divided.

An entry is a file, a folder, a glob pattern (local or on gs://, s3:// and the like), the folder of
a saved Hugging Face dataset, `stdlib` or `tfds:NAME/SPLIT`. All entries together become a list of
partitions, the units of work and of restart, which depends on the sources and the configuration
alone and never on who does the work. Order is that of the entries; within one, of paths as bytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jaxgpt.config import DataConfig
from jaxgpt.corpus import columnar, files, formats, stdlib, tfds_source
from jaxgpt.corpus.files import FileStatus, UnreadableFile
from jaxgpt.corpus.formats import BadRecords, Piece
from jaxgpt.errors import ConfigError, DataError, show_path

MIN_PARTITION_BYTES = 1 << 20
MANY_PARTITIONS = 32  # a small corpus is cut into about this many, so that all cores have work
OPEN_COST = 4096  # bytes that could be read in the time it takes to open a file
SHOWN = 1000  # unreadable files that an error lists
STDLIB = "stdlib"


class Slice(NamedTuple):
    """A stretch of one file or dataset; `start` and `stop` count in the unit of its kind.

    text: unused (a whole file) · json: bytes · parquet: row groups · arrow: record batches · tfds:
    examples · module: unused (the documentation of one C module) · unreadable: unused (`stamp` says
    why). A `stop` of None is the end. `size` is its raw bytes; `stamp` changes with the content of
    the whole file or dataset. All are plain JSON values: Slice(*json.loads(json.dumps(part))).
    """

    kind: Literal["text", "json", "parquet", "arrow", "tfds", "module", "unreadable"]
    path: str
    size: int = 0
    start: int = 0
    stop: int | None = None
    stamp: str = ""


@dataclass(frozen=True)
class Partition:
    """Slices of one entry of data.sources that are prepared together."""

    source: str
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)


def partitions(cfg: DataConfig, *, without: Collection[tuple[str, str]] = ()) -> list[Partition]:
    """Return the partitions of all sources, of about `partition_bytes` raw bytes each.

    Reads names, sizes and footers only. `without` holds the `file_keys` of partitions prepared
    before: their files are left out and the rest is divided by itself, so that old partitions stay
    as they were when files are added. A file that cannot be read becomes a slice of kind
    "unreadable" when data.bad_text is "skip".

    Raises ConfigError when there are no sources; DataError for an entry that matches nothing, a
    file that is listed twice or has changed since it was prepared, and, with a line for each, for
    files that cannot be read.
    """
    if not cfg.sources:
        raise ConfigError("data.sources is empty: name files, folders, globs, stdlib or tfds:...")
    known, seen = dict(without), {}
    entries: dict[str, list[Slice]] = {}
    for source in cfg.sources:
        if source in entries:
            raise DataError(f"data.sources lists {source!r} twice")
        if _holds(source, cfg.store):
            raise DataError(f"data.store = {cfg.store!r} lies inside data.sources {source!r}")
        entries[source] = [part for part in _slices(source, cfg, seen) if _is_new(part, known)]
    total = sum(_cost(part) for slices in entries.values() for part in slices)
    target = min(cfg.partition_bytes, max(MIN_PARTITION_BYTES, total // MANY_PARTITIONS))
    parts = [
        Partition(source, group)
        for source, slices in entries.items()
        for group in _group((piece for part in slices for piece in _cut(part, cfg, target)), target)
    ]
    if cfg.bad_text != "skip":
        _refuse_unreadable(parts)
    return parts


def file_keys(parts: Iterable[Partition]) -> set[tuple[str, str]]:
    """Return (path, stamp) of every file and dataset that partitions read, for `without`."""
    return {
        (part.path, part.stamp)
        for partition in parts
        for part in partition.slices
        if part.kind != "unreadable"
    }


def fingerprint(parts: Iterable[Partition]) -> str:
    """Return a hash of all names, sizes, times and cuts: equal when the work to do is the same."""
    hasher = hashlib.sha256()
    for partition in parts:
        hasher.update(os.fsencode(f"{partition.source}\0\0"))
        for part in partition.slices:
            hasher.update(os.fsencode("\0".join(map(str, part)) + "\0\n"))
    return hasher.hexdigest()


def bad_records(cfg: DataConfig, partition: Partition) -> BadRecords:
    """Return an empty record of bad input; in `stdlib`, files invalid on purpose are left out."""
    return BadRecords("skip" if partition.source == STDLIB else cfg.bad_text)


def documents(cfg: DataConfig, partition: Partition, bad: BadRecords) -> Iterator[Piece]:
    """Yield the documents of a partition as pieces, empty documents included.

    A file that cannot be read raises UnreadableFile; if `bad` skips, it is recorded there, a
    document that it breaks off is abandoned, and the next file is read.

    Raises DataError as `bad` decides, and for a file that is damaged, or of which a part is used
    and that has changed or gone since `partitions`.
    """
    for part in partition.slices:
        piece, before = None, bad.skipped + len(bad.skipped_files)
        try:
            for piece in _read(cfg, part, bad):
                yield piece
        except UnreadableFile as error:
            if piece or part.start or part.stop is not None:  # some of it is used
                _refuse_changed(part, cfg)
            if piece is not None and not piece.last:
                yield Piece(None, piece.origin)
            bad.skip_file(part.path, error)
        else:
            _refuse_changed(part, cfg)
            if part.kind in ("json", "parquet", "arrow") and part.stop is None and piece is None:
                bad.empty_files += bad.skipped + len(bad.skipped_files) == before


def texts(cfg: DataConfig) -> Iterator[str]:
    """Yield the text of every document of all sources, whole."""
    parts: list[str] = []
    for piece in _all_pieces(cfg):
        if piece.text is not None:
            parts.append(piece.text)
        if piece.last:
            if piece.text is not None:
                yield "".join(parts)
            parts = []


def text_pieces(cfg: DataConfig, bad: list[BadRecords] | None = None) -> Iterator[str]:
    """Yield the text of all sources in order, huge documents in pieces of about 1 MiB.

    Memory does not grow with the size of a document. Of a document that turns out bad and is left
    out, the pieces before that place have been yielded. What is bad is recorded at the end of
    `bad`, for each partition in which there is something.
    """
    return (piece.text for piece in _all_pieces(cfg, bad) if piece.text is not None)


def _all_pieces(cfg: DataConfig, bad: list[BadRecords] | None = None) -> Iterator[Piece]:
    for partition in partitions(cfg):
        found = bad_records(cfg, partition)
        yield from documents(cfg, partition, found)
        if bad is not None and (found.skipped or found.replaced or found.skipped_files):
            bad.append(found)


def _read(cfg: DataConfig, part: Slice, bad: BadRecords) -> Iterator[Piece]:
    place = part.path, part.start, part.stop, cfg.text_field
    match part.kind:
        case "text":
            yield from formats.text_document(part.path, stdlib.short_name(part.path), bad)
        case "json":
            yield from formats.json_documents(*place, bad)
        case "parquet":
            yield from columnar.parquet_documents(*place, bad)
        case "arrow":
            yield from columnar.arrow_documents(*place, bad)
        case "tfds":
            where = part.path, cfg.data_dir, cfg.text_field
            yield from tfds_source.documents(*where, part.start, part.stop or 0, bad)
        case "module":
            try:
                yield Piece(stdlib.documentation(part.path), f"{STDLIB}:module {part.path}")
            except ImportError as error:
                bad.skip(f"{STDLIB}: module {part.path} cannot be imported: {error}")
        case "unreadable":
            raise UnreadableFile(part.stamp)


def _slices(source: str, cfg: DataConfig, seen: dict[int | str, str]) -> Iterator[Slice]:
    """Yield the files or datasets of an entry whole, and remember the identity of each file."""
    if source.startswith("tfds:"):
        count, size, stamp = tfds_source.examples(source, cfg.data_dir, cfg.text_field)
        yield Slice("tfds", source, size, 0, count, stamp)
        return
    saved = None if source == STDLIB else columnar.saved_dataset(source)
    if saved is not None:
        found = ((path, _status(path)) for path in saved)
    elif source == STDLIB:
        found = ((path, _status(path)) for path in stdlib.python_files())
    else:
        found = _without_saved(files.listing(source))
    for path, status in found:
        if isinstance(status, UnreadableFile):
            yield Slice("unreadable", path, stamp=str(status))
            continue
        if status.identity in seen:
            both = f"{show_path(path)} and {show_path(seen[status.identity])}"
            raise DataError(f"data.sources: {both} are the same file; list it once")
        seen[status.identity] = path
        yield Slice(files.base_name_kind(path), path, status.size, 0, None, status.stamp)
    if source == STDLIB:
        version = platform.python_version()
        yield from (Slice("module", name, stamp=version) for name in stdlib.extension_modules())


def _refuse_changed(part: Slice, cfg: DataConfig) -> None:
    """Raise DataError when a file is not what it was: a half of it must not pass for the whole."""
    try:
        same = _stamp(part, cfg) == part.stamp
    except UnreadableFile as error:
        raise DataError(f"{error}, though it could be read before; prepare again") from error
    if not same:
        raise DataError(f"{show_path(part.path)}: changed while it was read; prepare again")


def _stamp(part: Slice, cfg: DataConfig) -> str:
    """Return the stamp of a slice as it is now."""
    if part.kind == "tfds":
        return tfds_source.examples(part.path, cfg.data_dir, cfg.text_field).stamp
    return part.stamp if part.kind == "module" else files.status(part.path).stamp


def _status(path: str) -> FileStatus | UnreadableFile:
    try:
        return files.status(path)
    except UnreadableFile as error:
        return error


def _without_saved(
    found: Iterable[tuple[str, FileStatus | UnreadableFile]],
) -> Iterator[tuple[str, FileStatus | UnreadableFile]]:
    """Pass a listing through; DataError when it holds a saved dataset, which is no set of files."""
    info = ""
    for path, status in found:
        folder, _, name = path.rpartition("/")
        if name == "dataset_info.json":
            info = folder
        if name == "state.json" and folder == info:
            raise DataError(
                f"{show_path(folder)}: a saved dataset inside an entry of data.sources; list the "
                "folder itself there"
            )
        yield path, status


def _is_new(part: Slice, known: dict[str, str]) -> bool:
    """Return whether a file has not been prepared; DataError when it has, with other content."""
    if known.get(part.path, part.stamp) != part.stamp:
        raise DataError(
            f"{show_path(part.path)}: changed since it was prepared (it was {known[part.path]}, is "
            f"{part.stamp}); put its old content back, or prepare a new store"
        )
    return part.path not in known


def _refuse_unreadable(parts: list[Partition]) -> None:
    lines = [part.stamp for p in parts for part in p.slices if part.kind == "unreadable"]
    if lines:
        shown = "\n".join(lines[:SHOWN])
        more = f"\nand {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        hint = 'data.bad_text = "skip" leaves such files out'
        raise UnreadableFile(f"{shown}{more} ({hint})")


def _holds(source: str, store: str | dict[str, float]) -> bool:
    """Return whether the store to be written lies in a folder that is to be read."""
    folder = os.path.expanduser(source)
    inside = os.path.realpath(store) if isinstance(store, str) and store else ""
    return os.path.isdir(folder) and Path(inside).is_relative_to(os.path.realpath(folder))


def _cost(part: Slice) -> int:
    return part.size + (OPEN_COST if part.start == 0 else 0)


def _cut(part: Slice, cfg: DataConfig, target: int) -> Iterator[Slice]:
    """Yield the parts of a slice that can be read one by one, or the slice if it has none.

    JSON is cut at lines, tables at row groups or record batches, datasets anywhere.
    """
    cuts: list[tuple[int, int, int]] = []  # start, stop, bytes
    if part.kind in ("parquet", "arrow"):
        try:
            sizes = columnar.group_sizes(part.path, cfg.text_field)
        except UnreadableFile as error:
            yield Slice("unreadable", part.path, stamp=str(error))
            return
        cuts = [(group, group + 1, size) for group, size in enumerate(sizes)]
    elif part.kind == "tfds" and tfds_source.can_cut(part.path):
        count = part.stop or 0
        step = max(1, count * target // max(1, part.size))
        cuts = [(a, b, part.size * (b - a) // count) for a, b in _ranges(count, step)]
    elif part.kind == "json" and not files.is_compressed(part.path):
        cuts = [(a, b, b - a) for a, b in _ranges(part.size, target)]
    for start, stop, size in cuts:
        yield part._replace(start=start, stop=stop, size=size)
    if not cuts:
        yield part


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, count)) for start in range(0, count, step))


def _group(pieces: Iterable[Slice], target: int) -> Iterator[tuple[Slice, ...]]:
    """Yield runs of slices of about `target` bytes; slices that adjoin in a file become one."""
    group: list[Slice] = []
    cost = 0
    for piece in pieces:
        cost += _cost(piece)
        last = group[-1] if group else None
        if last and (last.path, last.stop) == (piece.path, piece.start):
            group[-1] = last._replace(stop=piece.stop, size=last.size + piece.size)
        else:
            group.append(piece)
        if cost >= target:
            yield tuple(group)
            group, cost = [], 0
    if group:
        yield tuple(group)
