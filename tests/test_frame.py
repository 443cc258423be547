"""What stands before and after texts: kept in the file of every engine, never in a digest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxgpt.errors import DataError
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.frame import with_frame

GOLDEN = Path(__file__).parent / "golden" / "tokenizers"
FILES = sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_file_starts_and_ends_texts_with_e(name):
    tok = tokenizer.load(GOLDEN / name)
    assert (tok.start_id, tok.stop_ids) == (tok.eos_id, (tok.eos_id,))
    assert with_frame(tok, tok.eos_id, []) is tok


@pytest.mark.parametrize("name", FILES)
def test_start_and_stops_come_back_from_the_file_and_change_nothing_else(tmp_path, name):
    tok = tokenizer.load(GOLDEN / name)
    start = next((n for n in tok.specials.values() if n != tok.eos_id), tok.eos_id)
    framed = with_frame(tok, start, [7, tok.eos_id, 7])
    (tmp_path / "t.model").write_bytes(framed.raw)
    again = tokenizer.load(tmp_path / "t.model")
    assert (again.start_id, again.stop_ids) == (start, (tok.eos_id, 7))
    assert (again.digest, again.raw, again.pieces) == (tok.digest, framed.raw, tok.pieces)
    assert again.encode("the king </s> \t") == tok.encode("the king </s> \t")


@pytest.mark.parametrize(
    ("start", "stops", "match"),
    [
        (330, [], r"id 330: not in \[0, 330\)"),
        (2, [-1], "id -1: not in"),
        (2, [True], "id True: not in"),
        (300, [], "id 300 stands for text, so it cannot open texts"),
    ],
)
def test_ids_that_cannot_stand_there_are_refused(tmp_path, start, stops, match):
    tok = tokenizer.load(GOLDEN / "own.model")
    with pytest.raises(DataError, match=match):
        with_frame(tok, start, stops)
    wrapped = json.loads(with_frame(tok, 2, [5]).raw) | {"start_id": start, "stop_ids": stops}
    (tmp_path / "t.model").write_text(json.dumps(wrapped))
    with pytest.raises(DataError, match=match):
        tokenizer.load(tmp_path / "t.model")


def test_a_damaged_list_of_stops_is_one_line(tmp_path):
    tok = tokenizer.load(GOLDEN / "own.model")
    wrapped = json.loads(with_frame(tok, 2, [5]).raw)
    for stops in (5, None, [[1]], "x"):
        (tmp_path / "t.model").write_text(json.dumps(wrapped | {"stop_ids": stops}))
        with pytest.raises(DataError) as refused:
            tokenizer.load(tmp_path / "t.model")
        assert "\n" not in str(refused.value)


def test_replacing_the_path_keeps_start_and_stops():
    tok = with_frame(tokenizer.load(GOLDEN / "own.model"), 2, [5])
    assert dataclasses.replace(tok, path="elsewhere").stop_ids == (2, 5)
