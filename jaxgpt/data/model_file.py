"""The pieces of a serialized SentencePiece model, read from its bytes.

SentencePiece has no call for piece types and its protobuf module cannot be loaded beside that of
transformers (both register sentencepiece_model.proto), so the few fields needed are read by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # piece types


def pieces(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, type) of each piece's UTF-8 text in a model, in the order of the ids.

    Raises IndexError or ValueError for bytes that are no protobuf message.
    """
    for number, start, stop in _fields(raw, 0, len(raw)):
        if number == 1:
            parts = {key: (low, high) for key, low, high in _fields(raw, start, stop)}
            yield *parts.get(1, (start, start)), parts.get(3, (NORMAL, 0))[0]


def _fields(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, stop) of each field of a message; for an integer (number, value, 0)."""
    while at < end:
        tag, at = _varint(raw, at)
        if tag & 7 == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value, 0
            continue
        if tag & 7 == 2:
            size, at = _varint(raw, at)
        elif tag & 7 in (1, 5):
            size = 8 if tag & 7 == 1 else 4
        else:
            raise ValueError(f"wire type {tag & 7} at byte {at}")
        yield tag >> 3, at, at + size
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at
