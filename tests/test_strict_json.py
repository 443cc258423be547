"""JSON from untrusted places."""

from __future__ import annotations

import pytest

from jaxgpt import strict_json


def test_what_is_json_is_read_as_it_is():
    assert strict_json.loads(b'{"a": [1, 2.5, null, {"a": "b"}]}') == {
        "a": [1, 2.5, None, {"a": "b"}]
    }


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "'b' appears twice"),
        (b"[NaN]", "NaN is not a number of JSON"),
        (b"[-Infinity]", "-Infinity is not a number of JSON"),
        (b"{", "Expecting property name"),
    ],
)
def test_what_json_does_not_mean_is_refused(raw, words):
    with pytest.raises(ValueError, match=words):
        strict_json.loads(raw)
