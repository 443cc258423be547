"""Best fit decreasing: each piece, from long to short, goes to the fullest row it still fits.

Whole runs of equal pieces and equal rows are placed in one step, and the least room that fits is
found by bit search, so 200,000 pieces take 0.1 s at T = 2048. Knows nothing of documents.
"""

from __future__ import annotations

from collections import deque

import numpy as np


def assign(length: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the row, int64 [M] numbered as opened, of each piece of 1..seq_len inputs.

    Pieces of one length are placed together: the row with the least room that fits takes as many
    as it can hold before the next one is touched, so a run of equal pieces and equal rows is one
    step, and a million 1-token documents are a single one.
    """
    order = np.argsort(-length, kind="stable")
    row = np.empty_like(length)
    rooms = _Rooms(seq_len)
    num_rows = at = 0
    negative, counts = np.unique(-length, return_counts=True)
    for size, count in zip((-negative).tolist(), counts.tolist(), strict=True):
        while count:
            room = rooms.least(size) or seq_len
            each = min(room // size, count)
            wanted = -(-count // each)  # rows
            taken = rooms.take(room, wanted)
            if not taken:  # none is open with that room
                taken = range(num_rows, num_rows + wanted)
                num_rows += wanted
            placed = min(count, each * len(taken))
            row[order[at : at + placed]] = np.repeat(taken, each)[:placed]
            in_last = placed - each * (len(taken) - 1)
            rooms.add(room - each * size, taken[:-1])
            rooms.add(room - in_last * size, taken[-1:])
            at, count = at + placed, count - placed
    return row


class _Rooms:
    """Rows by the inputs they have room for, with the least room that fits found by bit search.

    A set bit says that rows with this room are waiting; words of about sqrt(T) bits and one more
    word over them keep a step near 1 us up to T = 2^31, where one long integer would be copied.
    """

    def __init__(self, seq_len: int):
        self._shift = (seq_len.bit_length() + 1) // 2
        self._words: dict[int, int] = {}
        self._nonzero = 0  # bit w: word w is not 0
        self._waiting: dict[int, deque[int]] = {}

    def least(self, size: int) -> int:
        """Return the least room of at least `size`, or 0."""
        word = size >> self._shift
        bits = self._words.get(word, 0) >> (size - (word << self._shift))
        if bits:
            return size + _lowest_bit(bits)
        words = self._nonzero >> (word + 1)
        if not words:
            return 0
        word += 1 + _lowest_bit(words)
        return (word << self._shift) + _lowest_bit(self._words[word])

    def add(self, room: int, rows: list[int] | range) -> None:
        """Let rows wait with this room; full ones are forgotten."""
        if room and rows:
            if room not in self._waiting:
                self._waiting[room] = deque()
                self._flip(room)
            self._waiting[room].extend(rows)

    def take(self, room: int, most: int) -> list[int]:
        """Remove and return up to `most` rows with this room, the longest waiting first."""
        waiting = self._waiting.get(room, ())
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        if taken and not waiting:
            del self._waiting[room]
            self._flip(room)
        return taken

    def _flip(self, room: int) -> None:
        word = room >> self._shift
        bits = self._words.get(word, 0) ^ 1 << (room - (word << self._shift))
        self._words[word] = bits
        self._nonzero = self._nonzero & ~(1 << word) | (bool(bits) << word)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
