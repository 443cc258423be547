"""The parts of a serialized SentencePiece model that decide how it encodes, read from its bytes.

SentencePiece has no call for piece types and its protobuf module cannot be loaded beside that of
transformers (both register sentencepiece_model.proto), so the few fields needed are read by hand.
Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # piece types
UNIGRAM, BPE = 1, 2  # model types; 3 and 4 are whole words and single characters


class Piece(NamedTuple):
    """One id: its text lies at raw[start:stop]; `kind_at` is where the type does, -1 if unsaid."""

    start: int
    stop: int
    score: float
    kind: int
    kind_at: int


class Rules(NamedTuple):
    """How a model treats texts before and after cutting them; the defaults are the format's own."""

    model_type: int = UNIGRAM
    space_as_suffix: bool = False
    char_map: bytes = b""  # compiled normaliser; empty: none
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True
    denormalizes: bool = False


def pieces(raw: bytes) -> Iterator[Piece]:
    """Yield each piece of a model in the order of the ids.

    Raises IndexError, ValueError or struct.error for bytes that are no protobuf message.
    """
    for number, start, stop in _fields(raw, 0, len(raw)):
        if number == 1:
            parts = {key: (low, high) for key, low, high in _fields(raw, start, stop)}
            low, high = parts.get(1, (start, start))
            score = struct.unpack_from("<f", raw, parts[2][0])[0] if 2 in parts else 0.0
            kind, kind_stop = parts.get(3, (NORMAL, 0))
            yield Piece(low, high, score, kind, kind_stop - 1)


def rules(raw: bytes) -> Rules:
    """Return the rules of a model; errors as for `pieces`."""
    parts = [field for field in _fields(raw, 0, len(raw)) if field[0] != 1]
    spec: dict[int, dict[int, tuple[int, int]]] = {2: {}, 3: {}, 5: {}}
    for number, start, stop in parts:
        if number in spec:
            spec[number] |= {key: (low, high) for key, low, high in _fields(raw, start, stop)}
    trainer, normalizer, denormalizer = spec[2], spec[3], spec[5]
    char_map = normalizer.get(2, (0, 0))
    denormal = denormalizer.get(2, (0, 0))
    return Rules(
        model_type=trainer.get(3, (UNIGRAM, 0))[0],
        space_as_suffix=bool(trainer.get(24, (0, 0))[0]),
        char_map=raw[slice(*char_map)],
        dummy_prefix=bool(normalizer.get(3, (1, 0))[0]),
        remove_extra_spaces=bool(normalizer.get(4, (1, 0))[0]),
        escape_spaces=bool(normalizer.get(5, (1, 0))[0]),
        denormalizes=denormal[1] > denormal[0],
    )


def _fields(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, stop) of each field of a message.

    An integer is yielded as (number, value, where it ends).
    """
    while at < end:
        tag, at = _varint(raw, at)
        if tag & 7 == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value, at
            continue
        if tag & 7 == 2:
            size, at = _varint(raw, at)
        elif tag & 7 in (1, 5):
            size = 8 if tag & 7 == 1 else 4
        else:
            raise ValueError(f"wire type {tag & 7} at byte {at}")
        if at + size > end:
            raise ValueError(f"a field of {size} bytes at byte {at}, past the end")
        yield tag >> 3, at, at + size
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at
