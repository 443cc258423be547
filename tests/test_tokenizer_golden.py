"""Ids and identities of stored tokenizers stay what they are: prepared data depends on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpora import LINES

from jaxgpt.tokenization import tokenizer

GOLDEN = Path(__file__).parent / "golden"
CONTENT = json.loads((GOLDEN / "tokenizers.json").read_text())
NAMES = sorted(CONTENT["expected"])


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_that_the_library_gave(name):
    tok = tokenizer.load(GOLDEN / "tokenizers" / name)
    ids = [ids.tolist() for ids in tok.encode_batch(CONTENT["texts"])]
    assert ids == CONTENT["expected"][name]["ids"]


@pytest.mark.parametrize("name", NAMES)
def test_the_identity_of_a_stored_tokenizer_never_changes(name):
    tok = tokenizer.load(GOLDEN / "tokenizers" / name)
    assert tok.digest == CONTENT["expected"][name]["digest"]


@pytest.mark.parametrize("name", NAMES)
def test_the_copy_in_one_file_has_the_same_identity(tmp_path, name):
    made = tokenizer.import_model(GOLDEN / "tokenizers" / name, tmp_path / "tokenizer.model")
    again = tokenizer.load(tmp_path / "tokenizer.model")
    assert again.digest == made.digest == CONTENT["expected"][name]["digest"]
    assert again.raw == made.raw


def test_training_gives_the_stored_tokenizer_on_any_machine(tmp_path):
    tok = tokenizer.train(LINES, tmp_path / "t.model", vocab_size=330)
    assert tok.digest == CONTENT["expected"]["own.model"]["digest"]
