"""Converters of words of the command to values, for `add_argument`."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Return a converter of words to whole numbers within the bounds."""

    def convert(word: str) -> int:
        number = int(word)
        if number < lowest or highest is not None and number > highest:
            rule = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"{number}: must be {rule}")
        return number

    convert.__name__ = "whole number"  # argparse names it where int() refuses a word
    return convert


def share(word: str) -> tuple[int, int]:
    """Return (i, n) of `I/N`."""
    number, slash, count = word.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{word}: must be I/N with I from 1 to N, as in 2/8")
    return int(number), int(count)
