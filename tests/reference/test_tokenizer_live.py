"""Tokenizers against those that transformers makes of the same files; needs transformers."""

from __future__ import annotations

import random

import pytest
import transformers
from corpora import LINES
from foreign_models import E, byte_level, llama_style, metaspace

from jaxgpt.tokenization import tokenizer

MAKERS = {"byte_level": byte_level, "metaspace": metaspace, "llama_style": llama_style}
PARTS = ["the", " king", "\n", "\t", "  ", "caf\u00e9", "\u4e2d", "\U0001f680", "</s>", E,
         "<|user|>", "0x1", "\r\n", ";", "<0x41>", "'s"]  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS)
def pair(request, tmp_path_factory):
    """A folder as `save_pretrained` writes it, opened here and there."""
    folder = tmp_path_factory.mktemp("hf")
    MAKERS[request.param](folder / "made.json")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "made.json"),
        eos_token=E if request.param == "byte_level" else "</s>",
        clean_up_tokenization_spaces=False,
    )
    theirs.save_pretrained(folder / "saved")
    return tokenizer.load(folder / "saved" / "tokenizer.json"), theirs


def texts():
    rng = random.Random(0)
    return [*LINES[:100], *("".join(rng.choices(PARTS, k=12)) for _ in range(200))]


def test_ids_are_those_of_transformers_when_specials_are_text(pair):
    ours, theirs = pair
    for text, ids in zip(texts(), ours.encode_batch(texts()), strict=True):
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids.tolist() == expected


def test_decoding_is_that_of_transformers(pair):
    ours, theirs = pair
    for text in texts():
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_the_end_of_texts_and_the_specials_are_those_of_transformers(pair):
    ours, theirs = pair
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    assert set(ours.specials.values()) <= set(theirs.added_tokens_decoder)
