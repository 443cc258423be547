"""A text that comes in pieces has the ids of the whole text, for every engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
from corpora import LINES
from foreign_models import every_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import DataError
from jaxgpt.tokenization import words

NAMES = "own sp_llama sp_nfkc byte_level metaspace llama_style gpt2 cl100k o200k".split()
CHARS = st.sampled_from(" \n\t\r,.(a1\u00e9\u0301\u4e2d\u2581\U0001f680")
WORDS = st.sampled_from(
    ["the", " king", " the", "find", "\n", "  ", "12", "'s", "; ", "\r\n", "</s>"]
)
TEXT = st.lists(st.one_of(CHARS, WORDS), max_size=60).map("".join)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Tokenizers with sections of 8 to 64 characters, so that short texts have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "SHORTEST_SECTION", 8)
        patch.setattr(words, "LONGEST_SECTION", 64)
        yield every_engine(tmp_path_factory.mktemp("engines"))


def stream(tok, text, sizes):
    """Return the ids of a text fed in pieces of the given sizes, and then of the last size."""
    encoder, parts, start = tok.stream_encoder(), [], 0
    for size in sizes:
        parts.append(encoder.feed(text[start : start + size]))
        start += size
    while start < len(text):
        parts.append(encoder.feed(text[start : start + sizes[-1]]))
        start += sizes[-1]
    parts.append(encoder.flush())
    return np.concatenate(parts).tolist(), encoder.forced_cuts


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(text=TEXT, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_the_ids_of_the_pieces_joined_are_those_of_the_text(engines, name, text, sizes):
    tok = engines[name][0]
    ids, forced_cuts = stream(tok, text, sizes)
    assert ids == tok.encode(text)
    assert forced_cuts == tok.forced_cuts(text)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(text=TEXT)
def test_cutting_a_text_into_units_does_not_change_its_ids(engines, name, text):
    tok, library = engines[name]
    if not tok.forced_cuts(text) and not (name == "own" and "\u2581" in text):
        assert tok.encode(text) == list(library(text))


@pytest.mark.parametrize("name", NAMES)
def test_long_texts_are_cut_often_and_never_by_force(engines, name):
    tok, library = engines[name]
    text = "".join(LINES).replace("\t", "").replace("\n", " ").replace("  ", "")
    units = [unit for block in words.split(tok.word_pattern, text) for unit in block]
    assert len(units) > len(text) / 20 and tok.forced_cuts(text) == 0
    assert tok.encode(text) == list(library(text))


@pytest.mark.parametrize("name", ["own", "byte_level", "gpt2"])
def test_a_text_without_a_place_to_cut_comes_back_and_its_cuts_are_counted(engines, name):
    tok = engines[name][0]
    text = "ab" * 5000
    ids, forced_cuts = stream(tok, text, [1000])
    assert tok.decode(ids) == text
    assert forced_cuts == 10_000 // (4096 if name == "own" else 64)


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_can_be_used_for_one_text_after_another(engines, name):
    encoder = engines[name][0].stream_encoder()
    for text in ("the king", "  the list of paper, and so on for long", ""):
        ids = [*encoder.feed(text), *encoder.flush()]
        assert ids == engines[name][0].encode(text)


def test_memory_is_bounded_by_the_unit_and_not_by_the_text(engines):
    for name in ("own", "byte_level"):
        encoder = engines[name][0].stream_encoder()
        for _ in range(300):
            encoder.feed("the king went to the hall. " * 10)
            assert sum(map(len, encoder._waiting)) < 400


def test_the_place_of_a_cut_in_a_run_of_spaces_does_not_matter(engines):
    for tok, _ in engines.values():
        text = "a" + " " * 40 + "b" + " " * 40
        assert all(stream(tok, text, [k, 100])[0] == tok.encode(text) for k in range(1, 80, 7))


def test_a_surrogate_that_comes_in_a_piece_is_refused(engines):
    for tok, _ in engines.values():
        encoder = tok.stream_encoder()
        encoder.feed("the king ")
        with pytest.raises(DataError, match=r"lone surrogate U\+D800 in a text"):
            encoder.feed("a\ud800b " * 20)
            encoder.flush()


@pytest.mark.parametrize("name", NAMES)
def test_streamed_decoding_equals_decoding_any_ids(engines, name):
    tok, rng = engines[name][0], random.Random(0)
    for _ in range(60):
        ids = rng.choices(range(tok.vocab_size), k=rng.randrange(12))
        decoder = tok.stream_decoder()
        assert "".join(map(decoder.feed, ids)) + decoder.flush() == tok.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_cut_between_ids_is_whole_again_when_its_end_is_decoded_as_such(engines, name):
    tok = engines[name][0]
    ids = tok.encode("the king: no 5, found the hall")
    for cut in range(1, len(ids)):
        decoder = tok.stream_decoder(continues=True)
        end = "".join(map(decoder.feed, ids[cut:])) + decoder.flush()
        assert end == tok.decode(ids[cut:], continues=True)
        assert tok.decode(ids[:cut]) + end == "the king: no 5, found the hall"
