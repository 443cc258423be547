"""Documents out of text and JSON lines files, in pieces, so that none needs to fit in memory.

Text is kept byte for byte. What cannot be read as text is refused, mended or skipped by policy,
always counted, with its place. A document of up to HELD_BYTES is one piece; of a longer one only a
few MiB are in memory at a time. Knows nothing of sources, partitions or tokens.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxgpt.corpus import files
from jaxgpt.corpus.json_stream import string_field
from jaxgpt.errors import DataError, one_line, show_path

HELD_BYTES = 4 << 20  # a text file or a line up to this size is decoded in one go
PIECE_BYTES = 1 << 20
SHOWN = 10  # places of bad records that are kept

_WIDE_MARKS = {
    b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe\x00\x00": "UTF-32", b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}  # fmt: skip
_BINARY_MARKS = {  # none of them can begin a text
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"PK\3\4": "zip",
    b"\x89PNG\r\n": "PNG",
}  # fmt: skip
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\r\v\f\b\x1b")  # never common in text
_SURROGATE = re.compile("[\ud800-\udfff]")

# Objects become tuples of (key, value), so that a key that occurs twice is seen; it costs nothing.
_parse = json.JSONDecoder(object_pairs_hook=tuple, parse_int=float).decode


class Piece(NamedTuple):
    """A stretch of a document, and where that came from: file, file:offset, file:row or the like.

    A document is a run of pieces, the last of which says so. `text` None, in a last piece only,
    takes back the pieces before it: the document is bad and left out, and already counted.
    """

    text: str | None
    origin: str
    last: bool = True


@dataclass
class BadRecords:
    """What could not be read as text; `policy` is data.bad_text."""

    policy: str
    replaced: int = 0
    skipped: int = 0
    empty_files: int = 0  # of records or rows
    places: list[str] = field(default_factory=list)
    skipped_files: list[dict[str, str]] = field(default_factory=list)  # path, reason

    def skip(self, message: str) -> None:
        """Count a record that is left out; DataError unless the policy is "skip"."""
        if self.policy != "skip":
            raise DataError(f'{message} (data.bad_text = "skip" leaves such records out)')
        self.skipped += 1
        self._note(message)

    def skip_file(self, path: str, error: DataError) -> None:
        """Record a file, or what is left of it, as unreadable; raise `error` by policy."""
        if self.policy != "skip":
            raise error
        self.skipped_files.append({"path": show_path(path), "reason": str(error)})

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


class _LeftOut(Exception):
    """The document at hand is bad and left out; it is already counted."""


def text_document(path: str, name: str, bad: BadRecords) -> Iterator[Piece]:
    """Yield the one document of a plain text file; none when it is bad and skipped."""
    blocks, parts, size = files.blocks(path), [], 0
    for block in blocks:
        parts.append(block)
        size += len(block)
        if size > HELD_BYTES:
            break
    head = b"".join(parts)
    if problem := _no_text(head[:PIECE_BYTES]) or _other_encoding(head[:PIECE_BYTES]):
        bad.skip(f"{name}: {problem}")
    elif size > HELD_BYTES:
        texts = _decoded(itertools.chain(_cut(head), blocks), lambda: name, bad)
        yield from _pieces(texts, name, lambda: name, bad)
    elif (text := decode(head, name, bad)) is not None:
        yield Piece(text, name)


def json_documents(
    path: str, start: int, stop: int | None, text_field: str, bad: BadRecords
) -> Iterator[Piece]:
    """Yield `text_field` of the JSON object on each line whose first byte is in [start, stop).

    Offsets count bytes of the text inside a compressed file. Lines end at LF only (CR LF included):
    not at U+2028, U+2029 or U+0085. Blank lines and a leading byte order mark are no content.
    """
    name = show_path(path)

    @functools.cache
    def lines_before() -> int:  # counted only when a place must be named
        return sum(1 for _ in itertools.takewhile(lambda line: line[0] < start, _lines(path, 0)))

    for number, (offset, line, rest) in enumerate(_lines(path, start, stop), 1):
        if offset == 0:
            if problem := _no_text(line[:PIECE_BYTES]):
                return bad.skip_file(path, DataError(f"{name}: {problem}"))
            line = line.removeprefix(codecs.BOM_UTF8)

        def where(number: int = number) -> str:
            return f"{name}:{lines_before() + number}"

        if rest is not None:
            text = _decoded(itertools.chain(_cut(line), rest), where, bad)
            yield from _pieces(string_field(text, text_field), f"{name}:{offset}", where, bad)
        elif line.strip():
            text = _json_text(line, text_field, where, bad)
            if text is not None:
                yield Piece(text, f"{name}:{offset}")


def _json_text(
    line: bytes, text_field: str, where: Callable[[], str], bad: BadRecords
) -> str | None:
    """Return the string in a field of the object on a line; None when the line is left out."""
    try:
        raw = line.decode()
    except UnicodeDecodeError:
        problem = _other_encoding(line[:PIECE_BYTES])
        raw = bad.skip(f"{where()}: {problem}") if problem else decode(line, where(), bad)
        if raw is None:
            return None
    try:
        record = _parse(raw)
    except (ValueError, RecursionError) as error:
        return bad.skip(f"{where()}: not JSON: {one_line(error)}")
    if not isinstance(record, tuple):
        return bad.skip(f"{where()}: {_kind(record)}, not an object with {text_field!r}")
    values = [value for key, value in record if key == text_field]
    if not values:
        names = ", ".join(map(repr, sorted({key for key, _ in record})))[:200] or "an empty object"
        return bad.skip(f"{where()}: no field {text_field!r}, only {names}")
    if len(values) > 1:
        return bad.skip(f"{where()}: field {text_field!r} occurs {len(values)} times")
    (text,) = values
    if not isinstance(text, str):
        return bad.skip(f"{where()}: field {text_field!r} holds {_kind(text)}, not a string")
    return without_surrogates(text, where, bad)


def _kind(value: object) -> str:
    """Return what JSON calls a value that `_parse` made."""
    names = {type(None): "null", bool: "a boolean", float: "a number", str: "a string"}
    return (names | {list: "an array", tuple: "an object"})[type(value)]


def decode(data: bytes, where: str, bad: BadRecords) -> str | None:
    """Return UTF-8 data as text; None when it is not UTF-8 and is left out."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data.decode("utf-8", "replace") if bad.mend(_place(where, error)) else None


def without_surrogates(text: str, where: Callable[[], str], bad: BadRecords) -> str | None:
    """Return a text that UTF-8 can hold; lone surrogates are refused, mended or skipped."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    try:
        return "".join(_without_surrogates([text], where, bad))
    except _LeftOut:
        return None


def _without_surrogates(
    texts: Iterable[str], where: Callable[[], str], bad: BadRecords
) -> Iterator[str]:
    """Yield the stretches of one document with U+FFFD for surrogates, or raise _LeftOut."""
    mended, before = False, 0
    for text in texts:
        if found := None if text.isascii() else _SURROGATE.search(text):
            at = before + found.start()
            message = f"{where()}: lone surrogate U+{ord(found[0]):04X} at character {at}"
            if not mended and not bad.mend(message):
                raise _LeftOut
            mended = True
        yield _SURROGATE.sub("\ufffd", text) if found else text
        before += len(text)


def _decoded(blocks: Iterable[bytes], where: Callable[[], str], bad: BadRecords) -> Iterator[str]:
    """Yield blocks of UTF-8 as text, which joined is that of the joined blocks, or raise _LeftOut.

    A character that goes on in the next block waits for it.
    """
    rest, offset, errors = b"", 0, "strict"
    for block in itertools.chain(blocks, (None,)):
        data, final = rest + (block or b""), block is None
        try:
            text, used = codecs.utf_8_decode(data, errors, final)
        except UnicodeDecodeError as error:
            if not bad.mend(_place(where(), error, offset)):
                raise _LeftOut from None
            errors = "replace"  # and what follows is counted no more: it is the same document
            text, used = codecs.utf_8_decode(data, errors, final)
        rest, offset = data[used:], offset + used
        yield text


def _pieces(
    texts: Iterable[str], origin: str, where: Callable[[], str], bad: BadRecords
) -> Iterator[Piece]:
    """Yield one document of which the text comes in stretches; a ValueError among them is bad."""
    try:
        for text in _without_surrogates(texts, where, bad):
            if text:
                yield Piece(text, origin, last=False)
    except ValueError as error:
        bad.skip(f"{where()}: {error}")
        yield Piece(None, origin)
    except _LeftOut:
        yield Piece(None, origin)
    else:
        yield Piece("", origin)


def _place(where: str, error: UnicodeDecodeError, offset: int = 0) -> str:
    """Return where the first byte that is not UTF-8 stands, `offset` bytes after what was read."""
    data, at = error.object, error.start
    like_latin1 = (
        data[at] >= 0xA0 and data[at - 1 : at].isalpha() and data[at + 1 : at + 2].isascii()
    )
    hint = " (Latin-1? iconv -f LATIN1 -t UTF-8 converts it)" if like_latin1 else ""
    return f"{where}: byte {offset + at}: 0x{data[at]:02X} is not UTF-8{hint}"


def _no_text(head: bytes) -> str | None:
    """Return why the beginning of a file cannot be text in UTF-8, or None."""
    for mark, encoding in _WIDE_MARKS.items():
        if head.startswith(mark):
            return f"{encoding} text; convert it: iconv -f {encoding} -t UTF-8"
    for mark, kind in _BINARY_MARKS.items():
        if head.startswith(mark):
            return f"binary, not text: it begins like {kind} data"
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls >= 16 and controls > len(head) // 20:
        few, many = sorted((head[::2].count(0), head[1::2].count(0)))
        found = f"binary, not text: {controls} control characters in the first {len(head)} bytes"
        return found + " (UTF-16 without its mark?)" * (few * 8 < len(head) < many * 4)
    return None


def _other_encoding(head: bytes) -> str | None:
    """Return that the beginning of a file is text in another encoding, or None.

    More than a tenth of it is not UTF-8: mended, there would be little left to learn from.
    """
    try:
        codecs.utf_8_decode(head, "strict", False)
    except UnicodeDecodeError:
        lost = head.decode("utf-8", "replace").count("\ufffd") - head.count("\ufffd".encode())
        if lost >= 16 and lost > len(head) // 10:
            places = f"{lost} places in the first {len(head)} bytes are not UTF-8"
            return f"text in another encoding: {places}; convert it with iconv"
    return None


def _lines(
    path: str, start: int, stop: int | None = None
) -> Iterator[tuple[int, bytes, Iterator[bytes] | None]]:
    """Yield (offset, line with its LF, None) of each line whose first byte is in [start, stop).

    Of a line longer than HELD_BYTES it is the beginning, and the rest as blocks, which last until
    the next line is asked for.
    """
    chunks = _chunks(path, max(0, start - 1))  # the byte before: after an LF a line begins at start
    if start:
        for offset, chunk in chunks:
            if chunk.endswith(b"\n") or stop is not None and offset >= stop:
                break
    for offset, chunk in chunks:
        if stop is not None and offset >= stop:
            return
        if chunk.endswith(b"\n"):
            yield offset, chunk, None
            continue
        parts, size = [chunk], len(chunk)
        for _, chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if chunk.endswith(b"\n") or size > HELD_BYTES:
                break
        line = b"".join(parts)
        if size <= HELD_BYTES or line.endswith(b"\n"):
            yield offset, line, None
        else:
            rest = _until_line_end(chunks)
            yield offset, line, rest
            for _ in rest:
                pass


def _until_line_end(chunks: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    for _, chunk in chunks:
        yield chunk
        if chunk.endswith(b"\n"):
            return


def _chunks(path: str, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of a file from `offset` on, cut after every LF and at most a block."""
    for block in files.blocks(path, offset):
        at = 0
        while (end := block.find(b"\n", at) + 1) > 0:
            yield offset + at, block[at:end]
            at = end
        if at < len(block):
            yield offset + at, block[at:]
        offset += len(block)


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
