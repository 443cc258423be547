"""Cutting a text into units that are encoded alone, at places that no piece of a vocabulary spans.

SentencePiece merges only inside words, so a word can be encoded alone, once, and remembered.
For other engines a unit is a section of at least SHORTEST_SECTION characters, which most texts are
one of. Units are bounded, which bounds memory whatever the text. The cut is a function of the text
and the vocabulary alone: a unit is certain as soon as the next one has begun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

SPACE = "\u2581"  # stands for a space inside pieces; as a character of a text it is a word alone
LONGEST_WORD = 4096  # characters; a longer run without a place to cut is cut here: a forced cut
SHORTEST_SECTION, LONGEST_SECTION = 1 << 14, 1 << 17  # characters; the last may be shorter
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

# Places inside a text where no pre-tokenizer in use joins what is before and what is after, and
# where no Unicode normal form does either: before a single space, and after a single newline.
# Characters that some normalisers turn into spaces or into nothing do not count as visible.
_VISIBLE = f"[^\\s\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff{SPACE}]"
AT_SPACE, AT_LINE = f"{_VISIBLE}(?= {_VISIBLE})", f"{_VISIBLE}\n(?={_VISIBLE})"
_AROUND_SPACE = (
    ("the king", " went"), ("a\n  b", " c"), ("x1", " 2 y"), ("end.", " (now"), ("}", " {"),
    ("\u00e9", " \u00e9"), ("\u4e2d", " \u4e2d\u6587"), ("it's", " 's"), ("a, b", " </s>"),
)  # fmt: skip
_AROUND_LINE = (
    ("the king\n", "went"), ("end.\n", "(now"), ("{\n", "} a"), ("1\n", "2"),
    ("\u00e9\n", "\u00e9"),
)  # fmt: skip


def choose(pieces: Iterable[str]) -> re.Pattern | None:
    """Return the finest pattern that splits none of `pieces` (spaces as " "); None if all do."""
    pieces = list(pieces)
    for pattern in (FINE, COARSE):
        if all((found := pattern.match(p)) and found.end() == len(p) for p in pieces):
            return pattern
    return None


def sections(places: Sequence[str]) -> re.Pattern:
    """Return the pattern of sections that end at the first of `places` once they are long enough.

    A section without such a place is cut at LONGEST_SECTION: a forced cut, where an engine that
    puts a space before each text puts one too.
    """
    at = "|".join(places) or "(?!)"
    return re.compile(
        f"(?s:.{{{SHORTEST_SECTION - 1},{LONGEST_SECTION - 2}}}?(?:{at})|.{{1,{LONGEST_SECTION}}})"
    )


def choose_sections(
    pieces: Iterable[bytes], encode: Callable[[list[str]], list[list[int]]]
) -> tuple[re.Pattern, bool]:
    """Return the pattern of sections for a vocabulary, and whether a section loses its first space.

    A kind of place is used if no piece spans it and examples encode the same cut and whole. An
    engine that puts a space before every text is given sections without their own.
    """
    text = [piece.decode("utf-8", "replace") for piece in pieces]
    for skip_space in (False, True):
        if _may_cut(AT_SPACE, _AROUND_SPACE, text, encode, skip_space):
            lines = _may_cut(AT_LINE, _AROUND_LINE, text, encode, False)
            return sections((AT_SPACE, AT_LINE) if lines else (AT_SPACE,)), skip_space
    lines = _may_cut(AT_LINE, _AROUND_LINE, text, encode, False)
    return sections((AT_LINE,) if lines else ()), False


def _may_cut(
    place: str,
    around: Sequence[tuple[str, str]],
    pieces: Iterable[str],
    encode: Callable[[list[str]], list[list[int]]],
    skip_space: bool,
) -> bool:
    if any(map(re.compile(place).search, pieces)):
        return False
    return all(
        list(whole) == [*left, *right]
        for whole, left, right in (
            encode([left + right, left, right[skip_space:]]) for left, right in around
        )
    )


def split(pattern: re.Pattern, text: str) -> Iterator[list[str]]:
    """Yield the units of a text, which joined are the text, in lists of about BLOCK_CHARS chars."""
    start = 0
    while len(text) - start > BLOCK_CHARS:
        units = pattern.findall(text, start, start + BLOCK_CHARS)
        start += BLOCK_CHARS - len(units.pop())  # the last may go on beyond the block
        yield units
    yield pattern.findall(text, start)


def longest(pattern: re.Pattern) -> int:
    """Return the length at which units of this pattern are cut by force."""
    return LONGEST_WORD if pattern in (FINE, COARSE) else LONGEST_SECTION


def forced_cuts(pattern: re.Pattern, text: str) -> int:
    """Return the number of units cut for their length: there ids may differ from whole encoding."""
    limit = longest(pattern)
    if len(text) < limit or (limit == LONGEST_WORD and not _has_long_run(text)):
        return 0
    return sum(len(unit) >= limit for units in split(pattern, text) for unit in units)


def _has_long_run(text: str) -> bool:
    """Return whether LONGEST_WORD spaces, or as many other characters, follow one another."""
    if " " * LONGEST_WORD in text:
        return True
    start = 0  # no run begins before it; a space ends all that begin up to it, so most is skipped
    while len(text) - start >= LONGEST_WORD:
        space = text.rfind(" ", start, start + LONGEST_WORD)
        if space < 0:
            return True
        start = space + 1
    return False
