"""A tokenizer keeps every text and keeps specials apart from text, or is refused."""

from __future__ import annotations

import random
import struct
import threading

import numpy as np
import pytest
import sentencepiece
from corpora import LINES, SYMBOLS
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.errors import DataError
from jaxgpt.tokenization import model_file, tokenizer, words

AWKWARD = [
    "a  b", "a\tb", "a\nb", " a", "a ", "", "   ", "\r\n", "a\r\n\r\nb", "\0", "</s>", "<0x41>",
    "\u2581", "a\u2581 \u2581b", "\u2585", " \u2047 ", "\ufeffa", "\u2028\x85", "e\u0301\u00e9",
    "\U0001f680", "\ufdd0", "\x01\x1f\x1e\x01", "x\u00e9(y", "1\u00bd2", "    x = 1\n",
    "the king \U0001f468\u200d\U0001f469 went",
]  # fmt: skip


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tok(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / f"{request.param}.model"
    return tokenizer.train(LINES, path, kind=request.param, vocab_size=330, user_symbols=SYMBOLS)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / "bpe.model"
    return tokenizer.train(LINES, path, vocab_size=330, user_symbols=SYMBOLS)


@pytest.mark.parametrize("text", AWKWARD)
def test_decode_of_encode_is_the_text_byte_for_byte(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.decode_bytes(ids) == text.encode()


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_the_empty_text_has_no_ids(tok):
    assert tok.encode("") == []
    assert tok.decode([]) == ""


def test_specials_have_fixed_ids_and_exact_names(tok):
    names = ["<pad>", "</s>", *SYMBOLS]
    assert [tok.special_id(name) for name in names] == [0, 2, 3, 4, 5, 6]
    assert (tok.pad_id, tok.eos_id, tok.vocab_size) == (0, 2, 330)
    with pytest.raises(DataError, match=r"no special symbol '<x'; there are <pad>"):
        tok.special_id("<x")


@pytest.mark.parametrize(
    "text", ["</s>", "a</s>b", "<s>", "<pad>", "<unk>", "<|endoftext|>", *SYMBOLS]
)
def test_no_text_produces_a_special_id(tok, text):
    ids = tok.encode(f"{text} x {text}")
    assert min(ids) > 2 + len(SYMBOLS)
    assert tok.decode(ids) == f"{text} x {text}"


def test_specials_stand_for_no_text(tok):
    assert tok.decode([2, *tok.encode("king"), 3, 0, 1]) == "king"


def test_the_space_mark_as_a_character_is_spelled_in_its_three_bytes(tok):
    ids = tok.encode("\u2581")
    assert [tok.pieces[i] for i in ids] == [b"\xe2", b"\x96", b"\x81"]
    assert all(tok.is_byte[ids])


def test_each_byte_has_its_own_id(tok):
    assert {tok.decode_bytes([i]) for i in np.flatnonzero(tok.is_byte)} == {
        bytes([b]) for b in range(256)
    }


def test_pieces_are_those_of_sentencepiece(tok):
    processor = sentencepiece.SentencePieceProcessor(tok.path)
    found = list(model_file.pieces(tok.raw))
    names = [tok.raw[piece.start : piece.stop].decode() for piece in found]
    assert names == [processor.id_to_piece(i) for i in range(processor.piece_size())]
    kinds = [piece.kind for piece in found]
    assert [k == model_file.BYTE for k in kinds] == [
        processor.is_byte(i) for i in range(len(kinds))
    ]
    assert [k == model_file.CONTROL for k in kinds] == [
        processor.is_control(i) for i in range(len(kinds))
    ]


def test_no_piece_joins_digits(tok):
    assert not any(
        len(piece) > 1 and any(48 <= byte < 58 for byte in piece) for piece in tok.pieces
    )


def test_bpe_ids_are_those_of_sentencepiece_on_the_whole_text(bpe):
    rng = random.Random(0)
    alphabet = "abking kingfind  019 \n\t().'\u4e2d\u6587\u00e9\u201c\u00bd"
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(90))) for _ in range(400)] + LINES
    processor = sentencepiece.SentencePieceProcessor(bpe.path)
    for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
        assert ids.tolist() == processor.encode(text)


def test_ids_do_not_depend_on_batch_threads_blocks_or_memory(tok, monkeypatch):
    texts = ["".join(LINES), *LINES, "", *AWKWARD]
    expected = [tok.encode(text) for text in texts]
    monkeypatch.setattr(words, "BLOCK_CHARS", 100)
    monkeypatch.setattr(tokenizer, "CACHE_CHARS", 50)
    small = tokenizer.load(tok.path)
    assert [ids.tolist() for ids in small.encode_batch(texts, threads=2)] == expected


def test_python_threads_may_share_a_tokenizer(bpe, monkeypatch):
    monkeypatch.setattr(tokenizer, "CACHE_CHARS", 50)
    expected = [bpe.encode(text) for text in LINES]
    results: list[list] = []

    def work():
        results.append([bpe.encode(text) for text in LINES])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_streamed_text_equals_decode_and_is_never_corrected(tok):
    ids = tok.encode("the king \U0001f680 went to caf\u00e9 \u4e2d")
    decoder = tok.stream_decoder()
    parts = [decoder.feed(i) for i in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + decoder.flush() == "the king \U0001f680 went to caf\u00e9 \u4e2d"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 329), max_size=30))
def test_streaming_any_ids_equals_decoding_them(bpe, ids):
    decoder = bpe.stream_decoder()
    assert "".join(decoder.feed(i) for i in ids) + decoder.flush() == bpe.decode(ids)


def test_an_unfinished_character_is_shown_only_at_the_end(bpe):
    decoder = bpe.stream_decoder()
    first_byte = bpe.encode("\U0001f680")[0]
    assert decoder.feed(first_byte) == ""
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("ids", [[-1], [330], [5, 1 << 40]])
def test_ids_outside_the_vocabulary_are_refused(bpe, ids):
    with pytest.raises(DataError, match="the vocabulary has 330"):
        bpe.decode(ids)


def test_a_lone_surrogate_is_refused_by_name_without_the_text(bpe):
    with pytest.raises(DataError) as refused:
        bpe.encode("secret\ud800c")
    assert str(refused.value) == "lone surrogate U+D800 in a text: UTF-8 cannot hold it"


def test_load_gives_back_the_trained_tokenizer(bpe):
    loaded = tokenizer.load(bpe.path)
    assert loaded.pieces == bpe.pieces and loaded.specials == bpe.specials
    assert loaded.digest == bpe.digest and len(bpe.digest) == 64
    assert loaded.raw == open(bpe.path, "rb").read()
    assert (loaded.engine, loaded.lossless, loaded.report) == ("sentencepiece", True, None)


def test_notes_in_the_file_do_not_change_the_identity(bpe, tmp_path):
    path = tmp_path / "noted.model"
    note = b"\x0a\x04a.gz"  # trainer_spec.input, field 1 of field 2
    path.write_bytes(bpe.raw + b"\x12" + bytes([len(note)]) + note)
    assert tokenizer.load(path).digest == bpe.digest


def changed_model(tok, path, change):
    raw = bytearray(tok.raw)
    change(raw, [p for p in model_file.pieces(tok.raw) if p.kind == model_file.NORMAL])
    path.write_bytes(raw)
    return tokenizer.load(path)


def test_another_score_is_another_tokenizer(tmp_path):
    tok = tokenizer.train(LINES, tmp_path / "u.model", kind="unigram", vocab_size=330)

    def change(raw, pieces):
        old = struct.pack("<f", pieces[-1].score)
        at = raw.index(old, pieces[-1].stop)
        raw[at : at + 4] = struct.pack("<f", pieces[-1].score - 1)

    other = changed_model(tok, tmp_path / "o.model", change)
    assert other.pieces == tok.pieces and other.digest != tok.digest


def test_another_piece_is_another_tokenizer(bpe, tmp_path):
    def change(raw, pieces):
        last = [p for p in pieces if p.stop == p.start + 1][-1]
        raw[last.start : last.stop] = b"\x7f"

    assert changed_model(bpe, tmp_path / "o.model", change).digest != bpe.digest


CUTS = [lambda raw: b"", lambda raw: b"no model" * 99, lambda raw: raw[:-7], lambda raw: raw[:3000]]


@pytest.mark.parametrize("damage", CUTS)
def test_a_file_that_is_no_model_is_refused_in_one_line(bpe, tmp_path, damage):
    path = tmp_path / "bad.model"
    path.write_bytes(damage(open(bpe.path, "rb").read()))
    with pytest.raises(DataError) as refused:
        tokenizer.load(path)
    assert str(refused.value).startswith(f"{path}: not a SentencePiece model, or a damaged one; ")


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the tokenizer: No such file"):
        tokenizer.load(tmp_path / "none.model")


def test_a_file_over_64_mib_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "huge.model"
    with open(path, "wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(DataError, match="over 64 MiB"):
        tokenizer.load(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the tokenizer: Is a directory"):
        tokenizer.load(tmp_path)


def test_the_file_that_is_meant_by_a_folder_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="Is a directory; name the file in it: .*/tokenizer.json$"):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_is_refused_in_one_line_or_loads_as_another_tokenizer(bpe, tmp_path, seed):
    rng, path = random.Random(seed), tmp_path / "bad.model"
    for _ in range(25):
        raw = bytearray(bpe.raw)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        try:
            tok = tokenizer.load(path)
        except DataError as refused:
            assert str(refused).startswith(str(path)) and "\n" not in str(refused)
        else:  # a score, a note, or the text of a piece
            assert tok.digest != bpe.digest or tok.pieces == bpe.pieces


def test_an_unsafe_sentencepiece_is_refused(bpe, monkeypatch):
    monkeypatch.setattr(sentencepiece, "__version__", "0.2.0")
    with pytest.raises(DataError, match=r"sentencepiece 0\.2\.0 is unsafe"):
        tokenizer.load(bpe.path)
