"""Cutting a text into words at places that no piece of a vocabulary spans.

SentencePiece merges only inside such words, so a word can be encoded alone, once, and remembered.
Words are at most 2 * LONGEST_WORD characters, which bounds memory whatever the text. The cut is a
function of the text and the vocabulary alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

SPACE = "\u2581"  # stands for a space inside pieces; as a character of a text it is a word alone
LONGEST_WORD = 4096  # characters; a longer run without a place to cut is cut here: a forced cut
BLOCK_CHARS = 1 << 20  # a text is split in blocks of this size

_SPACES = f" {{0,{LONGEST_WORD}}}+"
_RUN = f"{{1,{LONGEST_WORD}}}+"
_NOT_BEFORE_WIDE = "(?![^\0-\x7f])"

# A word is spaces followed by ASCII letters, one digit, or other ASCII characters; but from a run
# that has a non-ASCII character beside it, everything up to the next space is one word.
FINE = re.compile(
    f"{SPACE}|{_SPACES}(?:[A-Za-z]{_RUN}{_NOT_BEFORE_WIDE}|[0-9]"
    f"|[^ 0-9A-Za-z\x80-\U0010ffff]{_RUN}{_NOT_BEFORE_WIDE}|[^ {SPACE}]{_RUN})| {_RUN}"
)
# A word is spaces followed by everything up to the next space.
COARSE = re.compile(f"{SPACE}|{_SPACES}[^ {SPACE}]{_RUN}| {_RUN}")


def choose(pieces: Iterable[str]) -> re.Pattern | None:
    """Return the finest pattern that splits none of `pieces` (spaces as " "); None if all do."""
    pieces = list(pieces)
    for pattern in (FINE, COARSE):
        if all(pattern.match(piece).end() == len(piece) for piece in pieces):
            return pattern
    return None


def split(pattern: re.Pattern, text: str) -> Iterator[list[str]]:
    """Yield the words of a text, which joined are the text, in lists of about BLOCK_CHARS chars."""
    start = 0
    while len(text) - start > BLOCK_CHARS:
        words = pattern.findall(text, start, start + BLOCK_CHARS)
        start += BLOCK_CHARS - len(words.pop())  # the last word may go on beyond the block
        yield words
    yield pattern.findall(text, start)


def forced_cuts(pattern: re.Pattern, text: str) -> int:
    """Return the number of words cut for their length: there ids may differ from whole encoding."""
    if not _has_long_run(text):
        return 0
    return sum(len(w) >= LONGEST_WORD for words in split(pattern, text) for w in words)


def _has_long_run(text: str) -> bool:
    """Return whether LONGEST_WORD spaces, or as many other characters, follow one another."""
    if " " * LONGEST_WORD in text:
        return True
    for start in range(0, len(text), BLOCK_CHARS):  # blocks overlap, so that no run is missed
        runs = text[start : start + BLOCK_CHARS + LONGEST_WORD].split(" ")
        if max(map(len, runs)) >= LONGEST_WORD:
            return True
    return False
