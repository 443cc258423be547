"""Encoding a text that comes in pieces, and decoding ids that come one at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import numpy as np

from jaxgpt.tokenization import words
from jaxgpt.tokenization.engine import LOST

if TYPE_CHECKING:
    from jaxgpt.tokenization.tokenizer import Tokenizer


class StreamEncoder:
    """Turns one text into ids piece by piece; the ids joined equal `encode` of the whole text.

    Pieces may end anywhere. `forced_cuts` counts the units cut for their length so far. Memory is
    bounded by the longest unit, 128 Ki characters, and the ids of one piece.
    """

    def __init__(self, tok: Tokenizer):
        self.forced_cuts = 0
        self._tok = tok
        self._longest = words.longest(tok.word_pattern)
        self._step = 1 if self._longest == words.LONGEST_WORD else words.SHORTEST_SECTION
        self._ready_at = self._step  # with fewer characters no unit can be certain
        self._waiting: list[str] = []  # the start of the last unit, which may go on
        self._length = 0
        self._at_start = True

    def feed(self, text: str) -> np.ndarray:
        """Return the int32 ids that are certain after one more piece of the text."""
        self._waiting.append(text)
        self._length += len(text)
        if self._length < self._ready_at:
            return np.empty(0, np.int32)
        parts, ready = [], []
        for units in words.split(self._tok.word_pattern, "".join(self._waiting)):
            parts.append(self._encode(ready))
            ready = units
        last = ready.pop() if ready else ""
        self._waiting, self._length = [last], len(last)
        self._ready_at = len(last) + self._step  # so that tiny pieces do not cut it ever again
        parts.append(self._encode(ready))
        return np.concatenate(parts)

    def flush(self) -> np.ndarray:
        """Return the ids of what is left; the encoder is then ready for another text."""
        left = "".join(self._waiting)
        units = [unit for block in words.split(self._tok.word_pattern, left) for unit in block]
        ids = self._encode(units)
        self._waiting, self._length, self._ready_at, self._at_start = [], 0, self._step, True
        return ids

    def _encode(self, units: list[str]) -> np.ndarray:
        if not units:
            return np.empty(0, np.int32)
        self.forced_cuts += sum(len(unit) >= self._longest for unit in units)
        ids = self._tok.encode_units(units, self._at_start)
        self._at_start = False
        return ids


class StreamDecoder:
    """Turns ids into text as they come; all it returned and `flush` equal `decode` of all ids."""

    def __init__(self, tok: Tokenizer, continues: bool = False):
        self._tok = tok
        self._strip = "" if continues else tok.strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that is certain after one more id; a part of a character waits."""
        piece = self._tok.decode_bytes([token])
        if self._strip:
            piece, self._strip = strip_start(self._tok, token, self._strip)
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def strip_start(tok: Tokenizer, token: int, rule: str) -> tuple[bytes, str]:
    """Return the bytes of an id at the start of a text without the engine's space, and the rule
    for the next id: "" when the text has begun.

    "space" takes away one space, "pieces" one of each piece until something is left of one. Bytes
    spelled one by one and unknown ids are left as they are, as SentencePiece does.
    """
    piece = tok.pieces[token]
    if not piece:
        return piece, rule
    as_it_is = tok.is_byte[token] or piece == LOST
    left = piece if as_it_is else piece.removeprefix(b" ")
    return left, rule if rule == "pieces" and not left else ""
