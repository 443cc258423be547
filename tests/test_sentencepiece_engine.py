"""SentencePiece models made elsewhere keep their semantics, say what they lose, or are refused."""

from __future__ import annotations

import json
import logging

import pytest
import sentencepiece
from corpora import LINES
from foreign_models import sentencepiece_file
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import DataError
from jaxgpt.tokenization import tokenizer, words

ODD = ["a", " a", "  a  b ", "", "\n", "caf\u00e9\tx", "\U0001f680 \u4e2d", "\ufb01", *LINES[:8]]
PREFIX = "a space is put before each text"
FORMS = "characters take their normal forms"
SPACES = "tabs, newlines or runs of spaces change"
LOST = "characters that it has no piece for are lost"
MARK = "the character U+2581 becomes a space"
STYLES = {
    "llama": ({"add_dummy_prefix": True}, {PREFIX, MARK}),
    "t5": (
        {"normalization_rule_name": "nmt_nfkc", "model_type": "unigram", "vocab_size": 75,
         "byte_fallback": False, "add_dummy_prefix": True, "remove_extra_whitespaces": True},
        {PREFIX, FORMS, SPACES, LOST},
    ),
    "nfkc": ({"normalization_rule_name": "nfkc"}, {FORMS, MARK}),
    "no_fallback": ({"byte_fallback": False}, {LOST}),
    "squeezed": ({"remove_extra_whitespaces": True}, {SPACES, MARK}),
    "across_words": ({"split_by_whitespace": False}, {MARK}),
}  # fmt: skip


@pytest.fixture(scope="module", params=STYLES)
def foreign(request, tmp_path_factory):
    options, losses = STYLES[request.param]
    path = sentencepiece_file(tmp_path_factory.mktemp("sp") / "m", **options)
    return tokenizer.load(path), sentencepiece.SentencePieceProcessor(str(path)), losses


def test_ids_are_those_of_the_library(foreign):
    tok, library, _ = foreign
    assert [ids.tolist() for ids in tok.encode_batch(ODD)] == library.encode(ODD)


def test_decoding_is_that_of_the_library(foreign):
    tok, library, _ = foreign
    for ids in [*library.encode(ODD), [3, 3, 4], [2, *library.encode(" a")], [1, 1]]:
        expected = library.decode(ids)
        assert tok.decode(ids) == (expected if tok.pieces[0] else expected.replace(" \u2047 ", ""))


def test_what_a_model_does_to_texts_is_said(foreign):
    tok, _, losses = foreign
    assert set(tok.losses) == losses and not tok.lossless


def test_a_lossy_model_is_warned_of_once_in_one_line(tmp_path, caplog):
    path = sentencepiece_file(tmp_path / "m", add_dummy_prefix=True)
    with caplog.at_level(logging.WARNING):
        tokenizer.load(path)
    assert caplog.messages == [f"{path}: not lossless: {PREFIX}; {MARK}"]


def test_a_lossless_model_made_elsewhere_is_encoded_by_words(tmp_path):
    tok = tokenizer.load(sentencepiece_file(tmp_path / "m"))
    assert tok.lossless and tok.word_pattern in (words.FINE, words.COARSE)
    assert tok.decode(tok.encode(LINES[0])) == LINES[0]


GEMMA = ["<start_of_turn>", "[@SYSTEM@]", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "0"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma") / "m"
    options = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    return tokenizer.load(sentencepiece_file(path, user_defined_symbols=GEMMA, **options))


def test_markers_among_user_defined_symbols_are_specials_and_others_are_text(gemma):
    assert list(gemma.specials) == ["<pad>", "</s>", "<s>", "<start_of_turn>", "[@SYSTEM@]"]
    assert (gemma.pad_id, gemma.eos_id) == (0, 1)
    assert {b"\n\n", b"  ", b"    ", b"0"} < set(gemma.pieces)


@pytest.mark.parametrize("name", ["<start_of_turn>", "[@SYSTEM@]", "<s>", "</s>", "<pad>"])
def test_a_marker_in_a_text_is_text(gemma, name):
    ids = gemma.encode(f"a{name}b {name}")
    assert gemma.special_id(name) not in ids and gemma.lossless
    assert gemma.decode(ids) == f"a{name}b {name}"


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from(" \n0a<>[@_\u4e2d"), max_size=30))
def test_with_other_user_defined_symbols_ids_are_still_those_of_the_library(gemma, text):
    library = sentencepiece.SentencePieceProcessor(gemma.path)
    assert gemma.encode(text) == library.encode(text)


def test_runs_of_spaces_and_newlines_that_are_symbols_are_used(gemma):
    assert [gemma.pieces[i] for i in gemma.encode("a\n\nb")] == [b"a", b"\n\n", b"b"]
    assert gemma.pieces[gemma.encode("     a")[0]] == b"    "


@pytest.mark.parametrize("name", ["<|im_end|>", "end_of_text"])
def test_the_symbol_that_ends_texts_can_be_named(tmp_path, name):
    path = sentencepiece_file(
        tmp_path / "m",
        eos_id=-1,
        control_symbols=["<|im_end|>"],
        user_defined_symbols=["end_of_text"],
    )
    tok = tokenizer.import_model(path, tmp_path / "out", eos=name)
    assert tok.specials[name] == tok.eos_id
    assert tok.eos_id not in tok.encode(f"a {name} b")
    again = tokenizer.load(tmp_path / "out")
    assert (again.eos_id, again.digest) == (tok.eos_id, tok.digest)
    assert json.loads(again.raw)["engine"] == "sentencepiece"


def test_another_symbol_that_ends_texts_is_another_tokenizer(tmp_path):
    path = sentencepiece_file(tmp_path / "m", control_symbols=["<|im_end|>"])
    assert tokenizer.load(path).digest == tokenizer.load(path, eos="</s>").digest
    assert tokenizer.load(path).digest != tokenizer.load(path, eos="<|im_end|>").digest


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"eos_id": -1, "bos_id": 1}, "which symbol ends a text is not known; name it with"),
        ({"treat_whitespace_as_suffix": True}, "spaces as suffixes; not usable"),
        (
            {"model_type": "char", "byte_fallback": False, "vocab_size": 40},
            "whole words or characters; not usable",
        ),
        ({"denormalization_rule_tsv": "rules"}, "not usable"),
    ],
)
def test_a_model_that_cannot_be_used_safely_is_refused(tmp_path, options, reason):
    if "denormalization_rule_tsv" in options:
        (tmp_path / "rules").write_text("61\t62\n")
        options = {"denormalization_rule_tsv": str(tmp_path / "rules")}
    with pytest.raises(DataError, match=reason):
        tokenizer.load(sentencepiece_file(tmp_path / "m", **options))


def test_an_unknown_name_for_the_end_of_texts_is_refused_with_those_there_are(tmp_path):
    path = sentencepiece_file(tmp_path / "m")
    with pytest.raises(DataError, match=r"no special symbol '<eot>' .* there are: <s>, </s>"):
        tokenizer.load(path, eos="<eot>")


def test_a_pattern_for_a_model_is_refused(tmp_path):
    with pytest.raises(DataError, match="no tiktoken rank file"):
        tokenizer.load(sentencepiece_file(tmp_path / "m"), pattern=r"\w+|\W+")
