"""Reading documents from files: plain text and JSON lines, also in gzip or zstd, and parquet.

Text is kept byte for byte. What cannot be read as text is refused, mended or skipped by policy,
always counted, with its place. Files are streamed, but a document is held whole: preparing one
takes about seven times its size in memory. Knows nothing of sources, partitions or tokens.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxgpt.errors import DataError

MAX_DOCUMENT_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
SHOWN = 10  # places of bad records that are kept

_WIDE_MARKS = {
    b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe\x00\x00": "UTF-32", b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}  # fmt: skip
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r\v\f\b\x1b")  # never common in text
_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """A text, and where it came from: file, or file:offset, file:row, source:index."""

    text: str
    origin: str


@dataclass
class BadRecords:
    """What could not be read as text; `policy` is data.bad_text."""

    policy: str
    replaced: int = 0
    skipped: int = 0
    places: list[str] = field(default_factory=list)

    def skip(self, message: str) -> None:
        """Count a record that is left out; DataError unless the policy is "skip"."""
        if self.policy != "skip":
            raise DataError(f'{message} (data.bad_text = "skip" leaves such records out)')
        self.skipped += 1
        self._note(message)

    def mend(self, message: str) -> bool:
        """Return whether undecodable text is to be mended; False: left out. DataError by policy."""
        if self.policy == "replace":
            self.replaced += 1
            self._note(message)
        elif self.policy == "skip":
            self.skip(message)
        else:
            hint = '"replace" puts U+FFFD there, "skip" leaves the record out'
            raise DataError(f"{message} (data.bad_text: {hint})")
        return self.policy == "replace"

    def _note(self, message: str) -> None:
        if len(self.places) < SHOWN:
            self.places.append(message)


def show_path(path: str) -> str:
    """Return a path as text that any file can hold; undecodable bytes are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_compressed(path: str) -> bool:
    """Return whether the name of a file says that it must be decompressed."""
    return path.lower().endswith((".gz", ".zst"))


def text_document(path: str, name: str, bad: BadRecords) -> Iterator[Document]:
    """Yield the one document of a plain text file; none when it is bad and skipped."""
    parts, size = [], 0
    for block in _blocks(path):
        if not parts and (problem := _not_utf8(block)):
            return bad.skip(f"{name}: {problem}")
        parts.append(block)
        size += len(block)
        if size > MAX_DOCUMENT_BYTES:
            raise DataError(f"{name}: over 1 GiB in one document; split the file")
    text = decode(b"".join(parts), name, bad)
    if text is not None:
        yield Document(text, name)


def json_documents(
    path: str, start: int, stop: int | None, text_field: str, bad: BadRecords
) -> Iterator[Document]:
    """Yield `text_field` of the JSON object on each line whose first byte is in [start, stop).

    Offsets count bytes of the text inside gzip or zstd. Lines end at LF only (CR LF included): not
    at U+2028, U+2029 or U+0085. Blank lines and a leading byte order mark are no content.
    """
    name = show_path(path)

    @functools.cache
    def lines_before() -> int:  # counted only when a place must be named
        return sum(1 for _ in itertools.takewhile(lambda line: line[0] < start, _lines(path, 0)))

    for number, (offset, line) in enumerate(_lines(path, start), 1):
        if stop is not None and offset >= stop:
            return
        if offset == 0:
            if problem := _not_utf8(line):
                return bad.skip(f"{name}: {problem}")
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue

        def where(number: int = number) -> str:
            return f"{name}:{lines_before() + number}"

        text = _json_text(line, text_field, where, bad)
        if text is not None:
            yield Document(text, f"{name}:{offset}")


def _json_text(line: bytes, text_field: str, where: Callable[[], str], bad: BadRecords) -> Any:
    try:
        raw = line.decode()
    except UnicodeDecodeError:
        raw = decode(line, where(), bad)
        if raw is None:
            return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return bad.skip(f"{where()}: not JSON: {' '.join(str(error).split())}")
    if not isinstance(record, dict):
        return bad.skip(f"{where()}: a {type(record).__name__}, not an object with {text_field!r}")
    text = record.get(text_field)
    if not isinstance(text, str):
        problem = f"field {text_field!r} holds {type(text).__name__}, not a string"
        if text_field not in record:
            problem = f"no field {text_field!r}, only {', '.join(sorted(record))[:200]}"
        return bad.skip(f"{where()}: {problem}")
    return without_surrogates(text, where, bad)


def without_surrogates(text: str, where: Callable[[], str], bad: BadRecords) -> str | None:
    """Return a text that UTF-8 can hold; lone surrogates are refused, mended or skipped."""
    if text.isascii() or not (found := _SURROGATE.search(text)):
        return text
    message = f"{where()}: lone surrogate U+{ord(found[0]):04X} at character {found.start()}"
    return _SURROGATE.sub("\ufffd", text) if bad.mend(message) else None


def parquet_groups(path: str) -> list[int]:
    """Return the bytes of each row group; DataError when the file is no parquet file."""
    metadata = _open_parquet(path).metadata
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_documents(
    path: str, start: int, stop: int, text_field: str, bad: BadRecords
) -> Iterator[Document]:
    """Yield column `text_field` of row groups [start, stop)."""
    import pyarrow

    name, file = show_path(path), _open_parquet(path)
    schema = file.schema_arrow
    if text_field not in schema.names:
        columns = ", ".join(schema.names)
        raise DataError(f"{name}: no column {text_field!r}, only {columns}; set data.text_field")
    kind = schema.field(text_field).type
    row = sum(file.metadata.row_group(i).num_rows for i in range(start))
    try:
        for batch in file.iter_batches(256, range(start, stop), [text_field], use_threads=False):
            try:
                values = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
                raise DataError(f"{name}: column {text_field!r} holds {kind}, not text") from None
            for value in values:
                if value is None:
                    bad.skip(f"{name}: row {row}: column {text_field!r} is null")
                elif (text := decode(value, f"{name}: row {row}", bad)) is not None:
                    yield Document(text, f"{name}:{row}")
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{name}: damaged near row {row}: {reason}") from error


def _open_parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{show_path(path)}: not a readable parquet file: {reason}") from error


def decode(data: bytes, where: str, bad: BadRecords) -> str | None:
    """Return UTF-8 data as text; None when it is not UTF-8 and is left out."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = f"{where}: byte {error.start}: 0x{data[error.start]:02X} is not UTF-8"
        return data.decode("utf-8", "replace") if bad.mend(place) else None


def _not_utf8(head: bytes) -> str | None:
    """Return why the beginning of a file cannot be UTF-8 text, or None."""
    for mark, encoding in _WIDE_MARKS.items():
        if head.startswith(mark):
            return f"{encoding} text; convert it: iconv -f {encoding} -t UTF-8"
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls >= 16 and controls > len(head) // 20:
        return f"binary, not text: {controls} control characters in the first {len(head)} bytes"
    return None


def _lines(path: str, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line with its LF) of each line that begins at or after byte `start`."""
    offset = max(0, start - 1)  # the byte before: if it is LF, a line begins at `start` exactly
    parts: list[bytes] = []
    size, skipping = 0, start > 0
    for block in _blocks(path, offset):
        at = 0
        while (end := block.find(b"\n", at) + 1) > 0:
            parts.append(block[at:end])
            line, at = b"".join(parts), end
            if not skipping:
                yield offset, line
            offset, parts, size, skipping = offset + len(line), [], 0, False
        parts.append(block[at:])
        size += len(parts[-1])
        if size > MAX_DOCUMENT_BYTES:
            raise DataError(f"{show_path(path)}: over 1 GiB in the line at byte {offset}")
    if (line := b"".join(parts)) and not skipping:
        yield offset, line


def _blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """Yield a file from byte `start` in blocks, decompressed by its suffix (then from 0 only)."""
    name = show_path(path)
    try:
        raw = open(path, "rb")
    except OSError as error:
        raise DataError(f"{name}: cannot read it: {error.strerror}") from error
    with raw:
        stream: Any = raw
        if path.lower().endswith(".gz"):
            stream = gzip.GzipFile(fileobj=raw)
        elif path.lower().endswith(".zst"):
            import pyarrow  # zstandard's own reader takes a truncated file for a whole one

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
        else:
            raw.seek(start)
        while True:
            try:
                block = stream.read(BLOCK_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                where = f"near byte {raw.tell()} of the file"
                raise DataError(f"{name}: damaged or truncated {where}: {error}") from error
            if not block:
                return
            yield block
