"""The string of one field is what `json.loads` finds there, however the object is cut."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxgpt.corpus.json_stream import string_field

TEXT = st.text(
    st.one_of(
        st.sampled_from('\\"/ubn\n\t\x7fd8\ud83d\ude80\ud800\udfff\U0001f680\u2028'),
        st.characters(exclude_categories=()),
    ),
    max_size=20,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def cut(text, size):
    return (text[at : at + size] for at in range(0, len(text), size))


def value_of(text, size, name="text"):
    return "".join(string_field(cut(text, size), name))


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(TEXT.filter(lambda key: key != "text"), VALUES, max_size=3),
    st.dictionaries(TEXT.filter(lambda key: key != "text"), VALUES, max_size=3),
    TEXT,
    st.booleans(),
    st.sampled_from([None, 1, "\r\t"]),
    st.integers(1, 30),
)
def test_the_value_is_that_of_json_loads_wherever_the_object_is_cut(
    before, after, text, ascii_only, indent, size
):
    record = before | {"text": text} | {k: v for k, v in after.items() if k not in before}
    line = json.dumps(record, ensure_ascii=ascii_only, indent=indent)
    assert value_of(line, size) == json.loads(line)["text"]


@pytest.mark.parametrize("size", range(1, 40))
def test_escapes_are_decoded_whole_across_every_border(size):
    text = 'a\\b"c\U0001f680\ud83dd\ud83d\ud83d\ude80\ude80/\x01\\ud83d\ud83d\\\ud83d\x08'
    line = '{"x": "' + "\\" * 6 + '", "text": ' + json.dumps(text) + ', "y": "\\""}'
    assert value_of(line, size) == json.loads(line)["text"]


OBJECT = (
    '{"a": [1, -2.5e+3, 0, 0.5, -1, 22, 7,8 , 9,{"text": "no"}, [], {}], '
    '"te\\u0078t": "\\ud83d\\ude80 x", "b": null}'
)


def decides(line):
    """Return the text of a line, or None when `json.loads` or the rules refuse it."""
    try:
        record = json.loads(line, object_pairs_hook=tuple)
    except ValueError:
        return None
    values = [v for k, v in record if k == "text"] if isinstance(record, tuple) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, len(OBJECT)),
    st.integers(0, 6),
    st.text(st.sampled_from(' {}[]:,"\\utexn0-.+eE1NaIfl\x00\n\u00a0'), max_size=5),
    st.integers(1, 80),
)
@example(0, 0, "", 7)
def test_a_changed_object_is_refused_exactly_when_json_loads_refuses_it(at, removed, added, size):
    line = OBJECT[:at] + added + OBJECT[at + removed :]
    try:
        found = value_of(line, size)
    except ValueError:
        found = None
    assert found == decides(line)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a",}', r"not JSON: unexpected '}' \(char 13\)"),
        ('{"text": "a"} {"text": "b"}', r"not JSON: unexpected '{' \(char 14\)"),
        ('{"text": "a"', r"not JSON: it ends too early \(char 12\)"),
        ('{"text": "a', r"not JSON: a string does not end \(char 11\)"),
        ("", "not JSON: it ends too early"),
        ('{"text": "a\tb"}', r"not JSON: Invalid control character at \(char 11\)"),
        ('{"text": "a\\xb"}', r"not JSON: Invalid \\escape.* \(char 11\)"),
        ('{"text": "\\u12"}', "not JSON"),
        ('{"text": "a", "n": 01}', r"not JSON: not a value \(char 19\)"),
        ('{"text": "a", \'n\': 1}', r"not JSON: unexpected character \(char 14\)"),
        ("[" * 2000, r"an array, not an object with 'text'"),
        ('{"x": ' + "[" * 2000, r"not JSON: nested more than 1000 deep \(char 1005\)"),
        ('{"x": ' + "1" * 9999, r"not JSON: not a value \(char 6\)"),
        ('{"x": [' + "1, " * 9 + "01, 2]", r"not JSON: not a value \(char 34\)"),
        ('{"x": [' + "1, " * 9 + "]", r"not JSON: unexpected ']' \(char 34\)"),
        ('{"x": ' + "1, " * 9 + "}", r"not JSON: unexpected"),
        ('{"x": 1 987', r"not JSON: unexpected value \(char 8\)"),
        ('["text"]', "an array, not an object with 'text'"),
        ('"text"', "a string, not an object"),
        ("7", "a number, not an object"),
        ('{"body": "x", "y": {"text": "z"}}', "no field 'text'"),
        ('{"texts": "x"}', "no field 'text'"),
        ("{}", "no field 'text'"),
        ('{"text": null}', "field 'text' holds null, not a string"),
        ('{"text": true}', "field 'text' holds a boolean, not a string"),
        ('{"text": 7}', "field 'text' holds a number, not a string"),
        ('{"text": ["a"]}', "field 'text' holds an array, not a string"),
        ('{"text": {"text": "a"}}', "field 'text' holds an object, not a string"),
        ('{"text": "a", "b": 1, "text": "a"}', "field 'text' occurs twice"),
        ('{"te\\u0078t": "a", "text": 1}', "field 'text' occurs twice"),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_what_is_wrong_is_said_with_its_place(line, problem, size):
    with pytest.raises(ValueError, match=problem):
        value_of(line, size)


def test_pieces_are_no_longer_than_chunks_and_memory_stays_small():
    chunks = itertools.chain(
        ['{"x": [0', *[", 0.25"] * 30_000, "]" + " " * 9999, ', "text": "'],
        itertools.repeat("some words\\n" * 1000, 500),
        ['", "z": "'], itertools.repeat("\\ud83d" * 1000, 100), ['"}'],
    )  # fmt: skip
    tracemalloc.start()
    sizes = [len(piece) for piece in string_field(chunks, "text")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == 500 * 11_000 and max(sizes) <= 12_000
    assert peak < 1 << 20


def test_a_run_of_lone_halves_is_not_kept_back():
    assert value_of('{"text": "' + "\\ud83d" * 100 + '"}', 3) == "\ud83d" * 100
