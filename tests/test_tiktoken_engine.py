"""Rank files give the ids of tiktoken, with pattern and symbols of the published vocabularies."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiktoken_ext.openai_public as published
from corpora import LINES
from foreign_models import PATTERNS, E, encoding, rank_file, rank_lines, ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import DataError
from jaxgpt.tokenization import tiktoken_engine, tokenizer

ODD = [
    "",
    " a",
    "a\r\n  b\t\t\n\n",
    "\U0001f680 caf\u00e9 \u4e2d",
    "it's IT'S \u01c5x 12345",
    *LINES,
]


@pytest.fixture(scope="module", params=PATTERNS)
def pair(request, tmp_path_factory):
    """A tokenizer, and the encoding that tiktoken makes itself."""
    pattern = PATTERNS[request.param]
    path = rank_file(tmp_path_factory.mktemp("ranks") / "r")
    return tokenizer.load(path, eos=E, pattern=pattern), encoding(pattern)


def test_ids_in_batches_are_those_of_tiktoken(pair):
    tok, library = pair
    for threads in (1, 3):
        batch = tok.encode_batch(ODD, threads=threads)
        assert [ids.tolist() for ids in batch] == library.encode_ordinary_batch(ODD)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_with_the_ids_of_tiktoken(pair, text):
    tok, library = pair
    ids = tok.encode(text)
    assert ids == library.encode_ordinary(text)
    assert tok.lossless and tok.decode_bytes(ids) == text.encode() and tok.decode(ids) == text


def test_pieces_are_the_tokens_by_rank(pair):
    tok, library = pair
    for number in range(len(ranks())):
        assert tok.decode_bytes([number]) == library.decode_single_token_bytes(number)
    assert tok.vocab_size == len(ranks()) + 1 and tok.decode([tok.eos_id]) == ""
    assert [int(i) for i in np.flatnonzero(tok.is_byte)] == list(range(128, 256))


def test_the_end_of_texts_comes_after_all_ranks_and_never_from_text(pair):
    tok, _ = pair
    assert tok.specials == {E: len(ranks())} and tok.pad_id == tok.eos_id == len(ranks())
    assert tok.eos_id not in tok.encode(f"a {E}{E} b")


def numbered(count):
    """Return ranks of `count` tokens: the bytes, then pairs and triples of bytes."""
    found = {bytes([byte]): byte for byte in range(256)}
    pairs = (bytes([a, b]) for a in range(256) for b in range(256))
    triples = (bytes([7, a, b]) for a in range(256) for b in range(256))
    fourths = (bytes([7, 7, a, b]) for a in range(256) for b in range(256))
    for rank, token in zip(range(256, count), (t for s in (pairs, triples, fourths) for t in s),
                           strict=False):  # fmt: skip
        found[token] = rank
    return found


@pytest.mark.parametrize(
    ("count", "name", "last_id"),
    [(50256, E, 50256), (128000, "<|end_of_text|>", 128255)],
)
def test_published_vocabularies_are_told_by_their_number_of_ranks(
    tmp_path, caplog, count, name, last_id
):
    tok = tokenizer.load(rank_file(tmp_path / "r", numbered(count)))
    assert tok.special_id(name) == tok.eos_id and tok.vocab_size == last_id + 1
    assert f"by its {count} ranks" in caplog.messages[0] and len(caplog.messages) == 1
    again = tokenizer.import_model(tmp_path / "r", tmp_path / "out")
    assert tokenizer.load(tmp_path / "out").digest == again.digest == tok.digest


def test_symbols_of_published_vocabularies_are_those_of_tiktoken(monkeypatch):
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *args, **kwargs: {})
    for count, made in (
        (50256, published.r50k_base()),
        (50280, published.p50k_base()),
        (100256, published.cl100k_base()),
        (199998, published.o200k_base()),
    ):
        assert tiktoken_engine.PUBLISHED[count][2] == made["special_tokens"]


@pytest.mark.parametrize(
    ("count", "make"),
    [(50256, "r50k_base"), (100256, "cl100k_base"), (199998, "o200k_base")],
)
def test_patterns_of_published_vocabularies_cut_as_those_of_tiktoken(monkeypatch, count, make):
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *args, **kwargs: {})
    theirs = encoding(getattr(published, make)()["pat_str"])
    ours = encoding(tiktoken_engine.PUBLISHED[count][1])
    rng = np.random.default_rng(0)
    parts = [" ", "  ", "\n", "\r\n", "\t", "a", "A", "\u01c5", "the", "'s", "'LL", "12", "3"]
    parts += ["\u00b2", "/", "!?", "\u4e2d", "\u0301", "\U0001f680", "\u2028"]
    for _ in range(500):
        text = "".join(rng.choice(parts, rng.integers(1, 20)))
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)


def test_llama_3_symbols_have_their_published_ids():
    # llama3/tokenizer.py of Meta: 128009 ends a turn, 128006 and 128007 enclose a header.
    symbols = tiktoken_engine.PUBLISHED[128000][2]
    assert [symbols[n] for n in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")] == [
        128000, 128001, 128009,
    ]  # fmt: skip
    assert (symbols["<|start_header_id|>"], symbols["<|end_header_id|>"]) == (128006, 128007)
    assert symbols["<|reserved_special_token_250|>"] == 128255 and len(symbols) == 256


def test_another_number_of_ranks_needs_pattern_and_end_of_texts(tmp_path):
    path = rank_file(tmp_path / "r")
    with pytest.raises(DataError, match=r"267 ranks, no published .* --eos NAME --pattern REGEX"):
        tokenizer.load(path)
    with pytest.raises(DataError, match="without the name of the end-of-text symbol"):
        tokenizer.load(path, pattern=PATTERNS["gpt2"])


def test_the_copy_in_one_file_needs_no_arguments_and_is_the_same_tokenizer(pair, tmp_path):
    tok, _ = pair
    made = tokenizer.import_model(tok.path, tmp_path / "m", eos=E, pattern=pattern_of(tok))
    again = tokenizer.load(tmp_path / "m")
    assert (again.digest, again.raw, again.specials) == (tok.digest, made.raw, tok.specials)
    assert again.encode(LINES[0]) == tok.encode(LINES[0])


def pattern_of(tok):
    return json.loads(tok.raw)["pattern"]


def test_the_order_of_lines_does_not_change_the_identity_and_pattern_and_rank_do(tmp_path):
    def digest(found, pattern=PATTERNS["gpt2"], eos=E):
        return tokenizer.load(rank_file(tmp_path / "r", found), eos=eos, pattern=pattern).digest

    base = digest(ranks())
    swapped = ranks() | {b" t": 257, b"he": 256}
    assert digest(dict(reversed(ranks().items()))) == base
    others = [digest(swapped), digest(ranks(), PATTERNS["o200k"]), digest(ranks(), eos="<e>")]
    assert len({base, *others}) == 4


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"IQ== 0\nIQ== 1\n", "line 2: needs a token in base64, once, and a rank"),
        (b"IQ== 0\n!!! 1\n", "line 2: needs a token"),
        (b"IQ== 0\nIg== x\n", "line 2: needs a token"),
        (b"IQ== 0\nIg 1\n", "line 2: needs a token"),
        (b"IQ== 0\nIg== 99999999\n", "line 2: needs a token"),
        (b"IQ== 0\nIg== 0\n", "two tokens have the same rank"),
        (b"IQ== 0\n", "byte 0x00 has no rank"),
    ],
)
def test_a_damaged_rank_file_is_refused_by_line(tmp_path, raw, reason):
    (tmp_path / "r").write_bytes(raw)
    with pytest.raises(DataError, match=f"r: {reason}"):
        tokenizer.load(tmp_path / "r", eos=E, pattern=PATTERNS["gpt2"])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a usable pattern"),
        ("[a-z]+", "refused: it changes texts"),
        ("", "the pattern fails on a text"),
    ],
)
def test_a_pattern_that_is_none_or_leaves_text_out_is_refused(tmp_path, pattern, reason):
    with pytest.raises(DataError, match=reason) as refused:
        tokenizer.load(rank_file(tmp_path / "r"), eos=E, pattern=pattern)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"specials": {}},
        {"specials": {E: 3}},
        {"specials": {E: -5}},
        {"specials": {E: 1 << 40}},
        {"specials": 7},
        {"model": "x"},
        {"model": None},
        {"pattern": "("},
        {"version": 2},
        {"eos": "<e>"},
        {"engine": "hf"},
        {"engine": "sentencepiece"},
    ],
)
def test_a_damaged_copy_is_refused_in_one_line(pair, tmp_path, change):
    (tmp_path / "m").write_text(json.dumps(json.loads(pair[0].raw) | change))
    with pytest.raises(DataError) as refused:
        tokenizer.load(tmp_path / "m")
    assert str(refused.value).startswith(str(tmp_path / "m")) and "\n" not in str(refused.value)


def test_a_rank_file_over_64_mib_is_refused_before_it_is_parsed(tmp_path):
    line = rank_lines({b"a": 0})
    (tmp_path / "r").write_bytes(line * ((64 << 20) // len(line) + 1))
    with pytest.raises(DataError, match="over 64 MiB"):
        tokenizer.load(tmp_path / "r")
