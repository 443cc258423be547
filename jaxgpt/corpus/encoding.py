"""Documents to token ids, in memory that grows neither with their number nor with their size.

Small documents are encoded in batches; the ids of a huge one go piece by piece to a file, the
spool, where held-out documents wait, too. What becomes of each document is counted.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.corpus.formats import Piece
from jaxgpt.data.shard import DIGEST_BYTES, Encoded, document_digest
from jaxgpt.tokenization.tokenizer import Tokenizer

# Of the texts found, `documents` have tokens and a length within the limits; the others are empty
# (nothing, or a byte order mark alone), too short or too long. Bytes and tokens are of documents.
# `empty_files` are those of records or rows that hold none.
COUNTED = (
    "documents", "empty", "too_short", "too_long", "bytes", "tokens", "byte_tokens", "forced_cuts",
    "bad_replaced", "bad_skipped", "empty_files",
)  # fmt: skip
EMPTY = ("", "\ufeff")
BATCH_CHARS = 1 << 20  # documents are encoded in batches of about this size
READ_IDS = 1 << 18  # ids are read back from the spool this many at a time

Counts = dict[str, Any]  # plain JSON


def no_counts() -> Counts:
    """Return zero for each of COUNTED, and "lengths": documents by length in tokens, as yet none.

    Those of 8 to 15 tokens are under "8", and so on by powers of two.
    """
    return dict.fromkeys(COUNTED, 0) | {"lengths": {}}


class Spool:
    """Token ids that wait to be written: of held-out documents, and after them of a huge one.

    They are in a file without a name, which goes when it is closed or its process ends. A place in
    it is a range of ids.
    """

    def __init__(self, folder: str):
        self._file = tempfile.TemporaryFile(dir=folder)
        self.end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, ids: np.ndarray) -> range:
        self._file.seek(4 * self.end)
        self._file.write(np.asarray(ids, np.int32).data)
        place = range(self.end, self.end + len(ids))
        self.end = place.stop
        return place

    def read(self, place: range) -> Iterator[np.ndarray]:
        for start in place[::READ_IDS]:
            self._file.seek(4 * start)
            data = self._file.read(4 * min(READ_IDS, place.stop - start))
            yield np.frombuffer(data, np.int32)

    def cut(self, end: int) -> None:
        """Forget the ids from `end` on."""
        self.end = end
        self._file.truncate(4 * end)


def encode(
    tok: Tokenizer, pieces: Iterator[Piece], cfg: DataConfig, counts: Counts, spool: Spool
) -> Iterator[Encoded]:
    """Yield the documents that have text and the length asked for; a huge one's `ids` is a range.

    That is its place at the end of `spool`, and is gone when the next document is asked for.
    """
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if piece.last:
            if piece.text is not None:
                batch.append(piece)
                size += len(piece.text) + 1
            if size < BATCH_CHARS:
                continue
        yield from _encode_batch(tok, batch, cfg, counts)
        batch, size = [], 0
        if not piece.last:
            document = itertools.chain((piece,), _until_last(pieces))
            yield from _encode_huge(tok, document, cfg, counts, spool)
    yield from _encode_batch(tok, batch, cfg, counts)


def _until_last(pieces: Iterator[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        if piece.last:
            return


def _encode_batch(
    tok: Tokenizer, batch: list[Piece], cfg: DataConfig, counts: Counts
) -> Iterator[Encoded]:
    kept, texts = [], []
    for text, origin, _ in batch:
        data = text.encode()
        if _has_length(text, len(data), cfg, counts):
            texts.append(text)
            kept.append((data, origin))
    if not kept:
        return
    encoded = tok.encode_batch(texts)
    byte_tokens = np.count_nonzero(tok.is_byte[np.concatenate(encoded)])
    forced_cuts = sum(map(tok.forced_cuts, texts))
    sizes = [len(data) for data, _ in kept]
    _count(counts, sizes, [len(ids) for ids in encoded], int(byte_tokens), forced_cuts)
    for (data, origin), ids in zip(kept, encoded, strict=True):
        if len(ids):
            yield Encoded(ids, len(data), origin, document_digest(data))


def _encode_huge(
    tok: Tokenizer, pieces: Iterable[Piece], cfg: DataConfig, counts: Counts, spool: Spool
) -> Iterator[Encoded]:
    """Yield the one document of `pieces` with its place in the spool; none when it is left out."""
    start, encoder, digest = spool.end, tok.stream_encoder(), hashlib.sha256()
    opening, num_bytes, byte_tokens = "", 0, 0
    for piece in pieces:
        if piece.text is None:  # it is bad, and counted already
            return spool.cut(start)
        data = piece.text.encode()
        digest.update(data)
        num_bytes += len(data)
        opening = (opening + piece.text[:2])[:2]
        if not 0 < cfg.max_bytes < num_bytes:  # else it will be left out: it is bad or too long
            ids = encoder.feed(piece.text)
            spool.append(ids)
            byte_tokens += int(np.count_nonzero(tok.is_byte[ids]))
    if not _has_length(opening, num_bytes, cfg, counts):
        return spool.cut(start)
    ids = encoder.flush()
    spool.append(ids)
    byte_tokens += int(np.count_nonzero(tok.is_byte[ids]))
    place = range(start, spool.end)
    _count(counts, [num_bytes], [len(place)], byte_tokens, encoder.forced_cuts)
    if place:
        yield Encoded(place, num_bytes, piece.origin, digest.digest()[:DIGEST_BYTES])


def _has_length(text: str, num_bytes: int, cfg: DataConfig, counts: Counts) -> bool:
    """Return whether a text, or the beginning of one, is to be encoded; count it if it is not."""
    if text in EMPTY:
        counts["empty"] += 1
    elif num_bytes < cfg.min_bytes:
        counts["too_short"] += 1
    elif 0 < cfg.max_bytes < num_bytes:
        counts["too_long"] += 1
    else:
        return True
    return False


def _count(
    counts: Counts, sizes: list[int], lengths: list[int], byte_tokens: int, forced_cuts: int
) -> None:
    """Count documents that were encoded: their sizes in bytes, and lengths in tokens."""
    counts["empty"] += lengths.count(0)
    counts["documents"] += len(lengths) - lengths.count(0)
    counts["bytes"] += sum(size for size, length in zip(sizes, lengths, strict=True) if length)
    counts["tokens"] += sum(lengths)
    counts["byte_tokens"] += byte_tokens
    counts["forced_cuts"] += forced_cuts
    for bits, number in Counter(length.bit_length() for length in lengths if length).items():
        power = str(1 << (bits - 1))  # text, as JSON makes of keys anyway
        counts["lengths"][power] = counts["lengths"].get(power, 0) + number
