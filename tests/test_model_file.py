"""The parts of a SentencePiece model read by hand are those the library itself reads."""

from __future__ import annotations

import pytest
import sentencepiece
from foreign_models import sentencepiece_file

from jaxgpt.tokenization import model_file


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_pieces_scores_and_types_are_those_of_the_library(tmp_path, kind):
    path = sentencepiece_file(tmp_path / "m", model_type=kind, vocab_size=400)
    raw, processor = path.read_bytes(), sentencepiece.SentencePieceProcessor(str(path))
    found = list(model_file.pieces(raw))
    assert len(found) == processor.piece_size()
    for number, piece in enumerate(found):
        assert raw[piece.start : piece.stop].decode() == processor.id_to_piece(number)
        assert piece.score == processor.get_score(number)
        assert (piece.kind == model_file.CONTROL) == processor.is_control(number)
        assert (piece.kind == model_file.BYTE) == processor.is_byte(number)
        assert (piece.kind == model_file.UNKNOWN) == processor.is_unknown(number)


def test_the_type_of_a_piece_lies_where_it_is_said_to(tmp_path):
    raw = sentencepiece_file(tmp_path / "m", user_defined_symbols=["<a>"]).read_bytes()
    told = [piece for piece in model_file.pieces(raw) if piece.kind_at >= 0]
    assert {piece.kind for piece in told} >= {model_file.USER_DEFINED, model_file.CONTROL}
    assert all(raw[piece.kind_at] == piece.kind for piece in told)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"model_type": model_file.BPE, "dummy_prefix": False, "remove_extra_spaces": False}),
        ({"add_dummy_prefix": True}, {"dummy_prefix": True}),
        ({"remove_extra_whitespaces": True}, {"remove_extra_spaces": True}),
        ({"treat_whitespace_as_suffix": True}, {"space_as_suffix": True}),
        ({"model_type": "unigram", "vocab_size": 400}, {"model_type": model_file.UNIGRAM}),
    ],
)
def test_rules_are_those_asked_of_the_trainer(tmp_path, options, expected):
    rules = model_file.rules(sentencepiece_file(tmp_path / "m", **options).read_bytes())
    assert rules.char_map == b"" and rules.escape_spaces and not rules.denormalizes
    assert {key: getattr(rules, key) for key in expected} == expected


def test_a_normaliser_is_seen(tmp_path):
    path = sentencepiece_file(tmp_path / "m", normalization_rule_name="nfkc")
    assert len(model_file.rules(path.read_bytes()).char_map) > 10_000


def test_a_model_that_says_nothing_has_the_defaults_of_the_format():
    assert model_file.rules(b"") == model_file.Rules(1, False, b"", True, True, True, False)


@pytest.mark.parametrize(
    "raw", [b"\x0a\x05\x0a", b"\x0a", b"\x0f", b"\x0a\x04\x0a\x7fab", b"\x80", b"\x12\x01\x18"]
)
def test_bytes_that_are_no_message_are_an_error(raw):
    with pytest.raises((IndexError, ValueError)):
        list(model_file.pieces(raw))
        model_file.rules(raw)
