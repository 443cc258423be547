"""Documents become ids and counts, the same whether they come whole or in pieces."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import make_models

from jaxgpt.config import DataConfig
from jaxgpt.corpus.encoding import Spool, encode, no_counts
from jaxgpt.corpus.formats import Piece
from jaxgpt.tokenization import tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return tokenizer.load(make_models(tmp_path_factory.mktemp("models")) / "a.model")


def whole(texts):
    return [Piece(text, str(number)) for number, text in enumerate(texts)]


def in_pieces(texts):
    return [
        piece
        for number, text in enumerate(texts)
        for piece in (
            *(Piece(text[at : at + 3], str(number), False) for at in range(0, len(text), 3)),
            Piece("", str(number), True),
        )
    ]


def run(folder, tok, pieces, **options):
    """Return the ids and origin of each document, and the counts."""
    counts, found = no_counts(), []
    with Spool(str(folder)) as spool:
        for ids, num_bytes, origin, digest in encode(
            tok, iter(pieces), DataConfig(**options), counts, spool
        ):
            if isinstance(ids, range):
                place, ids = ids, np.concatenate(list(spool.read(ids)))
                spool.cut(place.start)
            text = tok.decode(ids)
            assert num_bytes == len(text.encode())
            assert digest == hashlib.sha256(text.encode()).digest()[:16]
            found.append((ids.tolist(), origin))
        assert spool.end == 0  # nothing is left of documents that were left out
    return found, counts


@pytest.fixture(params=[whole, in_pieces])
def cut(request):
    return request.param


def test_documents_have_their_ids_and_order(tmp_path, tok, cut):
    texts = ["the king", "a" * 9, " \n", "tent \u00e9 \U0001f680"]
    found, counts = run(tmp_path, tok, cut(texts))
    assert found == [(tok.encode(text), str(i)) for i, text in enumerate(texts)]
    assert counts["documents"] == 4 and counts["byte_tokens"] == 2 + 4  # \u00e9, \U0001f680
    assert counts["tokens"] == sum(len(tok.encode(text)) for text in texts)
    assert counts["bytes"] == sum(len(text.encode()) for text in texts)


def test_small_documents_before_and_after_a_huge_one_keep_their_place(tmp_path, tok):
    texts = ["one", "two", "three is huge", "four"]
    huge = [piece for piece in in_pieces(texts) if piece.origin == "2"]
    pieces = whole(texts)[:2] + huge + whole(texts)[3:]
    found, _ = run(tmp_path, tok, pieces)
    assert [origin for _, origin in found] == ["0", "1", "2", "3"]


def test_a_text_of_nothing_or_a_byte_order_mark_is_empty_and_white_space_is_not(tmp_path, tok, cut):
    found, counts = run(tmp_path, tok, cut(["", "\ufeff", " \n", "\ufeffx", "\ufeff\ufeff"]))
    assert [origin for _, origin in found] == ["2", "3", "4"]
    assert (counts["empty"], counts["documents"]) == (2, 3)


def test_a_text_without_tokens_is_empty(tmp_path, tok, cut):
    class Deaf:
        def encode_batch(self, texts):
            return [np.array([] if text.isspace() else [7], np.int32) for text in texts]

        def stream_encoder(self):
            return SimpleNamespace(
                feed=lambda text: self.encode_batch([text or " "])[0],
                flush=lambda: np.array([], np.int32),
                forced_cuts=0,
            )

        def forced_cuts(self, text):
            return 0

        is_byte, decode = np.zeros(9, bool), staticmethod(lambda ids: "a" * len(ids))

    found, counts = run(tmp_path, Deaf(), cut([" ", "a", "\n"]))
    assert found == [([7], "1")]
    assert (counts["empty"], counts["documents"], counts["bytes"]) == (2, 1, 1)


def test_documents_outside_the_length_limits_are_counted_and_left_out(tmp_path, tok, cut):
    texts = ["a" * 4, "\u00e9" * 2, "a" * 5, "\u00e9" * 15, "c" * 31, "", "d" * 99]
    found, counts = run(tmp_path, tok, cut(texts), min_bytes=5, max_bytes=30)
    assert [origin for _, origin in found] == ["2", "3"]
    assert (counts["too_short"], counts["too_long"], counts["empty"]) == (2, 2, 1)
    assert (counts["documents"], counts["bytes"]) == (2, 35)


def test_a_document_that_is_taken_back_is_not_counted(tmp_path, tok):
    pieces = [
        Piece("a", "0"), Piece("bb", "1", False), Piece(None, "1"), Piece(None, "2"),
        Piece("too long" * 9, "3", False), Piece(None, "3"), Piece("c", "4"),
    ]  # fmt: skip
    found, counts = run(tmp_path, tok, pieces, max_bytes=50)
    assert [origin for _, origin in found] == ["0", "4"]
    assert counts == no_counts() | {
        "documents": 2, "bytes": 2, "tokens": 2, "lengths": {"1": 2}
    }  # fmt: skip


def test_lengths_are_counted_by_powers_of_two(tmp_path, tok, cut):
    texts = ["z" * n for n in (1, 2, 3, 4, 7, 8, 15, 16, 2000)]  # z has no piece: a token each
    counts = run(tmp_path, tok, cut(texts))[1]
    assert counts["lengths"] == {"1": 1, "2": 2, "4": 2, "8": 2, "16": 1, "1024": 1}


def test_forced_cuts_are_counted(tmp_path, tok, cut):
    counts = run(tmp_path, tok, cut(["z" * 9000, "z z", " " * 5000]))[1]
    assert counts["forced_cuts"] == 3  # 9000 = 2 * 4096 + 808


def test_a_spool_gives_back_ids_and_forgets_what_is_cut(tmp_path):
    ids = np.arange(700_000, dtype=np.int32)
    with Spool(str(tmp_path)) as spool:
        first, second = spool.append(ids[:5]), spool.append(ids)
        spool.cut(second.start)
        third = spool.append(ids[::-1].copy())
        assert list(tmp_path.iterdir()) == []
        assert np.concatenate(list(spool.read(first))).tolist() == [0, 1, 2, 3, 4]
        assert (np.concatenate(list(spool.read(third))) == ids[::-1]).all()
        assert third == range(5, 700_005)
