"""What stands behind a row, and where a document is seen: both directions, in closed form.

`samples` goes from positions to rows, the documents in them, and the files these came from;
`sightings` from a document to every position at which the run sees it. Neither depends on how far
the position is. Positions, epochs, rows of a store and documents count from 0; `offset` counts in a
document's inputs, of which the end-of-text id that opens it is number 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxgpt.data import order, shard
from jaxgpt.data.mixture import position_of, visits_before
from jaxgpt.data.packing import Rows
from jaxgpt.data.store import Store
from jaxgpt.data.stream import Data, locate, stretch
from jaxgpt.errors import DataError, show_path
from jaxgpt.tokenization.tokenizer import Tokenizer

AT_ONCE = 1 << 16  # sightings computed together
SHOWN = 10  # candidates that a message names
HELD_SHARDS = 16  # lists of origins kept while samples are looked up; one takes about 5 MB


class Part(NamedTuple):
    """What a row holds of one document: its inputs [offset, offset + row_stop - row_start)."""

    document: int
    origin: str  # where the document came from: file, file:offset or the like
    row_start: int
    row_stop: int
    offset: int
    length: int  # inputs of the whole document: its ids and the E before them
    at: int  # stream position of the first input

    @property
    def continues_before(self) -> bool:
        return self.offset > 0

    @property
    def continues_after(self) -> bool:
        return self.offset + self.row_stop - self.row_start < self.length


@dataclass(frozen=True)
class Sample:
    """The sample at a position: row `row` of a store, in a pass over it."""

    position: int
    name: str  # of the store, as configured
    store: Store
    epoch: int
    row: int
    seq_len: int
    parts: tuple[Part, ...]

    @property
    def padding(self) -> int:
        """Inputs that are no token."""
        return self.seq_len - self.parts[-1].row_stop


def samples(data: Data, positions: np.ndarray) -> Iterator[Sample]:
    """Yield the sample at each position int64 [M], all of them below `data.end`.

    Reads the layout and the origins of what is in the rows, not their ids. Raises DataError for
    positions before a change of the layout of rows, and DataError or StorageError of the stores.
    """
    if positions.size and positions.min() < data.since:
        raise DataError(
            f"position {positions.min()}: rows before {data.since} were laid out otherwise; there "
            "the run changed data.packing, order or document_mask, model.seq_len or the seed"
        )
    origins = functools.lru_cache(HELD_SHARDS)(_origins)
    found = zip(*(array.tolist() for array in locate(data, positions)), strict=True)
    for position, (source, epoch, row) in zip(positions.tolist(), found, strict=True):
        rows = data.sources[source]
        parts = tuple(
            part._replace(origin=_origin(origins, rows.store, part.document))
            for part in row_parts(rows, row)
        )
        yield Sample(position, data.names[source], rows.store, epoch, row, data.seq_len, parts)


def row_parts(rows: Rows, row: int) -> Iterator[Part]:
    """Yield the parts of a row, without their origins."""
    store, row_start = rows.store, 0
    for at, length in rows.pieces(row):
        document, offset = store.document_at(at)
        stop = at + length
        while at < stop:
            begin, end = store.document_span(document)
            row_stop = row_start + min(end, stop) - at
            yield Part(document, "", row_start, row_stop, offset, end - begin, at)
            row_start, at, offset, document = row_stop, min(end, stop), 0, document + 1


def part_ids(store: Store, part: Part) -> np.ndarray:
    """Return the content ids of a part, int32: its inputs without the E that opens a document."""
    opening = 0 if part.continues_before else 1
    return store.read(part.at + opening, part.at + part.row_stop - part.row_start)


def part_text(tok: Tokenizer, store: Store, part: Part) -> str:
    """Return the text of a part; a character that another row completes shows as U+FFFD."""
    return tok.decode(part_ids(store, part), continues=part.offset > 1)  # 1: only E is before


def _origins(store: Store, number: int) -> list[str]:
    return shard.read_provenance(store.shard(number))


def _origin(origins: Callable[[Store, int], list[str]], store: Store, document: int) -> str:
    number = int(np.searchsorted(store.shard_docs, document, side="right")) - 1
    return origins(store, number)[document - int(store.shard_docs[number])]


# From a document to the rows that hold it.


class Place(NamedTuple):
    """Inputs [row_start, row_stop) of a row of the store, from `offset` in the document on."""

    row: int
    row_start: int
    row_stop: int
    offset: int


class Sighting(NamedTuple):
    """One time that a run sees a part of a document."""

    position: int
    epoch: int
    place: Place


def places(rows: Rows, document: int) -> list[Place]:
    """Return where the rows of one epoch hold a document, in its order.

    What packing leaves out of a long document is in no place. A store laid end to end costs
    O(places), a packing index O(places * pieces of the shard).
    """
    begin, end = rows.store.document_span(document)
    size, found = rows.seq_len, []
    if rows.index is None:
        for row in range(begin // size, (end - 1) // size + 1):
            start, stop = max(begin, row * size), min(end, (row + 1) * size)
            found.append(Place(row, start - row * size, stop - row * size, start - begin))
        return found
    for start in range(begin, end, size):  # a longer document is cut into pieces of a row
        where = rows.index.row_of(start)
        if where is None:
            break
        row, row_start = where
        row_stop = row_start + min(size, end - start)
        found.append(Place(row, row_start, row_stop, start - begin))
    return found


def sightings(data: Data, source: int, document: int, start: int, stop: int) -> Iterator[Sighting]:
    """Yield every sighting of a document of a source at positions [start, stop), in order.

    None is known before `data.since`.
    """
    rows, start = data.sources[source], max(start, min(data.since, stop))
    held = places(rows, document)
    numbers = np.array([place.row for place in held], np.int64)
    first, last = (int(visits_before(data.mixture, at)[source]) for at in (start, stop))
    together = max(1, AT_ONCE // len(held))
    for epoch in range(first // rows.num_rows, -(-last // rows.num_rows), together):
        epochs = np.arange(epoch, min(epoch + together, -(-last // rows.num_rows)))
        visits = epochs[:, None] * rows.num_rows + _ordinals(data, rows, epochs, numbers)
        visits = visits.ravel()  # [epochs * places]
        wanted = np.flatnonzero((visits >= first) & (visits < last))
        wanted = wanted[np.argsort(visits[wanted])]
        positions = position_of(data.mixture, source, visits[wanted])
        for index, position in zip(wanted.tolist(), positions.tolist(), strict=True):
            turn, place = divmod(index, len(held))
            yield Sighting(position, epoch + turn, held[place])


def count_sightings(data: Data, source: int, document: int, start: int, stop: int) -> int:
    """Return how many sightings there are at positions [start, stop), in O(places)."""
    rows, start = data.sources[source], max(start, min(data.since, stop))
    numbers = np.array([place.row for place in places(rows, document)], np.int64)

    def before(position: int) -> int:
        epoch, turn = divmod(int(visits_before(data.mixture, position)[source]), rows.num_rows)
        ordinals = _ordinals(data, rows, np.array([epoch]), numbers)
        return epoch * len(numbers) + int((ordinals < turn).sum())

    return before(stop) - before(start)


def _ordinals(data: Data, rows: Rows, epochs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return when in each epoch each row comes, int64 [epochs, rows]."""
    ordinals = order.ordinal(
        data.seed,
        rows.store.digest,
        rows.num_rows,
        np.repeat(epochs, len(numbers)),
        np.tile(numbers, len(epochs)),
        order=data.order,
        stretch=stretch(data.seq_len),
    )
    return ordinals.reshape(len(epochs), len(numbers))


# From the words of a user to a document.


def find_document(data: Data, wanted: str, name: str = "") -> tuple[int, int]:
    """Return (source, document) that `wanted` means: a document's number or its origin.

    An origin is compared whole, else as the start or the end of one or as the end of its file.
    `name` is the store as configured, or the end of that; without it origins are looked for in all.
    Numbers are found at once, an origin by reading those of all documents. Raises DataError for
    what is not there, or is there more than once, with candidates.
    """
    chosen = _sources(data, name)
    if wanted.isascii() and wanted.isdigit():
        if len(chosen) > 1:
            names = ", ".join(data.names[source] for source in chosen)
            raise DataError(f"document {wanted}: name its store, one of {names}")
        store, document = data.sources[chosen[0]].store, int(wanted)
        if document >= store.num_docs:
            raise DataError(
                f"document {wanted}: {data.names[chosen[0]]} has documents 0..{store.num_docs - 1}"
            )
        return chosen[0], document
    exact: list[tuple[int, int]] = []
    similar: list[tuple[int, int, str]] = []
    count = 0
    for source in chosen:
        for document, origin in _containing(data.sources[source].store, wanted):
            if origin == wanted:
                exact.append((source, document))
            elif _alike(origin, wanted):
                count += 1
                if len(similar) < SHOWN:
                    similar.append((source, document, origin))
    if len(exact) == 1:
        return exact[0]
    if not exact and count == 1:
        return similar[0][:2]
    if not exact and not count:
        where = ", ".join(data.names[source] for source in chosen)
        raise DataError(f"document {show_path(wanted)}: no document of {where} came from there")
    shown = [f"{document} of {data.names[source]}" for source, document in exact[:SHOWN]]
    shown = shown or [f"{number} from {show_path(origin)}" for _, number, origin in similar]
    total = len(exact) or count
    more = f" and {total - len(shown)} more" if total > len(shown) else ""
    raise DataError(
        f"document {show_path(wanted)}: {total} documents fit: {', '.join(shown)}{more}; say which"
    )


def _sources(data: Data, name: str) -> list[int]:
    there = [number for number, rows in enumerate(data.sources) if rows]
    if not name:
        return there
    found = [number for number in there if data.names[number] == name]
    found = found or [number for number in there if data.names[number].endswith(name)]
    if len(found) != 1:
        names = ", ".join(data.names[number] for number in there)
        raise DataError(f"store {name}: {len(found)} of the stores fit; they are {names}")
    return found


def _containing(store: Store, text: str) -> Iterator[tuple[int, str]]:
    for number in np.flatnonzero(np.diff(store.shard_docs)).tolist():
        for document, origin in enumerate(_origins(store, number), int(store.shard_docs[number])):
            if text in origin:
                yield document, origin


def _alike(origin: str, wanted: str) -> bool:
    file = origin.rpartition(":")[0]
    return origin.startswith(wanted) or origin.endswith(wanted) or file.endswith(wanted)
