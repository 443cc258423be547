"""Words join to the text, respect pieces, and are bounded."""

from __future__ import annotations

import base64
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxgpt.tokenization import words

ANY_TEXT = st.text(
    st.one_of(st.sampled_from(" \n\ta(1\u00e9\u4e2d\u2581"), st.characters()), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT, st.sampled_from([words.FINE, words.COARSE]))
def test_words_join_to_the_text(text, pattern):
    found = [word for block in words.split(pattern, text) for word in block]
    assert "".join(found) == text
    assert all(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if x1 == 20:", ["if", " x", "1", " ==", " 2", "0", ":"]),
        ("  a  ", ["  a", "  "]),
        ("foo.bar\n\tbaz", ["foo", ".", "bar", "\n\t", "baz"]),
        ("caf\u00e9s, no", ["caf\u00e9s,", " no"]),
        ("(\u201cx\u201d)", ["(\u201cx\u201d)"]),
        ("a \u2581b", ["a", " ", "\u2581", "b"]),
    ],
)
def test_words_end_where_no_piece_can_go_on(text, expected):
    assert words.FINE.findall(text) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(" \n\ta(1\u00e9\u4e2d\u2581"), min_size=30, max_size=90))
def test_the_block_size_does_not_change_the_words(text):
    whole = words.FINE.findall(text)
    assume(max(map(len, whole)) < 20)  # as real blocks are longer than any word
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "BLOCK_CHARS", 20)
        assert [word for block in words.split(words.FINE, text) for word in block] == whole


def test_a_run_without_a_place_to_cut_is_cut_and_counted():
    text = "x" * 10_000 + " y"
    found = [word for block in words.split(words.FINE, text) for word in block]
    assert list(map(len, found)) == [4096, 4096, 1808, 2]
    assert words.forced_cuts(words.FINE, text) == 2


def test_ordinary_long_texts_have_no_forced_cuts():
    encoded = base64.b64encode(random.Random(0).randbytes(30_000)).decode()
    assert words.forced_cuts(words.FINE, encoded) == 0  # digits are places to cut
    assert words.forced_cuts(words.FINE, "word " * 10_000) == 0


def test_the_pattern_is_the_finest_that_splits_no_piece():
    assert words.choose([" the", "\n\t", "9", "\u00e9(", "  "]) is words.FINE
    assert words.choose([" the", "it's"]) is words.COARSE
    assert words.choose(["of the"]) is None


@pytest.fixture
def short(monkeypatch):
    """Sections of 8 to 40 characters."""
    monkeypatch.setattr(words, "SHORTEST_SECTION", 8)
    monkeypatch.setattr(words, "LONGEST_SECTION", 40)
    return words.sections((words.AT_SPACE, words.AT_LINE))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the king went", ["the king", " went"]),
        ("0123456789 a b", ["0123456789", " a b"]),
        ("a 345678\nb c", ["a 345678\n", "b c"]),
        ("the king  went", ["the king  went"]),  # a run of spaces belongs to what is after it
        ("the king\n\nwent on", ["the king\n\nwent", " on"]),
        ("the king\r\nwent on", ["the king\r\nwent", " on"]),
        (
            "\u2581\u2581\u2581\u2581\u2581\u2581\u2581\u2581 b",
            ["\u2581\u2581\u2581\u2581\u2581\u2581\u2581\u2581 b"],
        ),
        ("x" * 90, ["x" * 40, "x" * 40, "x" * 10]),
        ("", []),
    ],
)
def test_sections_end_before_a_single_space_or_after_a_single_newline(short, text, expected):
    assert [unit for block in words.split(short, text) for unit in block] == expected


def test_forced_cuts_of_sections_are_counted(short):
    assert words.forced_cuts(short, "x" * 90) == 2
    assert words.forced_cuts(short, "the king went " * 9) == 0


@settings(max_examples=200, deadline=None)
@given(ANY_TEXT, st.integers(0, 60))
def test_a_unit_is_certain_when_the_next_has_begun(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "SHORTEST_SECTION", 4)
        patch.setattr(words, "LONGEST_SECTION", 12)
        pattern = words.sections((words.AT_SPACE, words.AT_LINE))
    for cut in (pattern, words.FINE, words.COARSE):
        whole, part = cut.findall(text), cut.findall(text[:size])
        assert part[:-1] == whole[: max(len(part) - 1, 0)]


def by_letter(texts):
    return [list(map(ord, text)) for text in texts]


def with_space(texts):
    return by_letter([f" {text}" for text in texts])


def in_sevens(texts):
    """Return ids that depend on the length of the text."""
    return [[len(text) % 7, *map(ord, text)] for text in texts]


@pytest.mark.parametrize(
    ("pieces", "encode", "places", "skip_space"),
    [
        ([b" the", b"\n\n"], by_letter, (words.AT_SPACE, words.AT_LINE), False),
        ([b"of the"], by_letter, (words.AT_LINE,), False),
        ([b";\nint"], by_letter, (words.AT_SPACE,), False),
        ([b"of the", b";\nint"], by_letter, (), False),
        ([b" the"], with_space, (words.AT_SPACE,), True),
        ([b" the"], in_sevens, (), False),
    ],
)
def test_places_to_cut_are_those_that_neither_pieces_nor_examples_refute(
    pieces, encode, places, skip_space
):
    assert words.choose_sections(pieces, encode) == (words.sections(places), skip_space)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("  ab\n"), max_size=40))
def test_a_long_run_is_found_wherever_it_is(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "LONGEST_WORD", 5)
        right = any(len(run) >= 5 for run in text.split(" ")) or " " * 5 in text
        assert words._has_long_run(text) == right
