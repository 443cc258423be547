"""What a tokenizer does to texts is found, named and measured."""

from __future__ import annotations

import pytest
from corpora import LINES
from foreign_models import byte_level

from jaxgpt.tokenization import tokenizer, tokenizer_check


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / "t.model"
    return tokenizer.train(LINES, path, vocab_size=330)


def test_the_share_of_single_bytes_is_that_of_characters_without_a_piece(tok):
    # Each rocket is four bytes without a piece; "0" is one piece that is no byte.
    assert tokenizer_check.measure(tok, ["\U0001f680", "0000"]) == (1.0, 0.5, True)


def test_bytes_per_token_counts_utf8_bytes(tok):
    text = " the" * 10
    size, share, returns = tokenizer_check.measure(tok, [text])
    assert size == 40 / len(tok.encode(text)) and (share, returns) == (0.0, True)


def test_texts_that_do_not_come_back_are_seen(tmp_path):
    byte_level(tmp_path / "t.json", add_prefix_space=True)
    lossy = tokenizer.load(tmp_path / "t.json")
    assert lossy.losses == ("a space is put before each text",)
    assert tokenizer_check.measure(lossy, ["a"])[2] is False


def test_no_text_has_no_measures(tok):
    assert tokenizer_check.measure(tok, []) == (0.0, 0.0, True)


def test_a_description_counts_the_single_bytes_of_a_vocabulary(tok):
    found = tokenizer_check.describe(tok)
    assert (found["engine"], found["vocab_size"], found["single_bytes"]) == (
        "sentencepiece", 330, 256,
    )  # fmt: skip
    assert found["losses"] == [] and found["lossless"]


def test_a_text_of_bytes_alone_has_a_byte_share_of_1(tok):
    assert tokenizer_check.measure(tok, ["\U0001f680"])[1] == 1.0
