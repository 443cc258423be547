"""Subword tokenizer: a lossless view of a SentencePiece model, and the training of one.

decode(encode(text)) == text for every text. Special ids (pad 0, unk 1, end-of-text 2, then the user
symbols) are control symbols: no text ever produces them. Texts are encoded word by word with a
memory of words seen, for BPE exactly as if encoded whole and about three times as fast.
The identity of a tokenizer is the SHA-256 of its model file.
"""

from __future__ import annotations

import codecs
import hashlib
import heapq
import io
import random
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import sentencepiece

from jaxgpt.data import model_file, words
from jaxgpt.data.model_file import BYTE, CONTROL, NORMAL, USER_DEFINED
from jaxgpt.data.store import storage_errors, write_atomic
from jaxgpt.data.words import SPACE
from jaxgpt.errors import DataError

RESERVED = ("<pad>", "<unk>", "</s>")  # ids 0, 1, 2
MAX_MODEL_BYTES = 64 << 20
CACHE_CHARS = 1 << 20  # words are remembered up to this total: about 40 MB with their ids

# The trainer uses a tab as a boundary mark, so tabs are trained as this character and put back.
TAB_STAND_IN = "\x01"
_UNTRAINABLE = re.compile(f"[\0\x1f{TAB_STAND_IN}{SPACE}\u2585\ud800-\udfff]+")  # its other marks
_TRAINING_CHARS = 4096  # a text is cut to this length for training, so that none is too long

# What a model must bring back unchanged before it is written or used.
_NASTY = (
    " a", "a ", "a  b", "   ", "a\tb", "a\nb", "a\r\nb\r\n", "\n\n\n", "\0", "a\0b", "\x0b\x0c\x1f",
    "def f(x):\n    if x:\n\t\treturn 'a,b'\n", "0123 45.6e-7", "</s><s><pad><unk>",
    "<|endoftext|>", "<0x41>", f"a{SPACE}b", f" {SPACE}{SPACE} ", "\u2585\u2047 \u2047",
    "caf\u00e9 cafe\u0301(", "\ufb01\uff11\u00bd\u2122", "\u00a0\u00ad\u200b\u2028\u2029\x85\ufeff",
    "\ufffd\ufffe\ufdd0", "\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u4e2d\u6587 \u3042", "\U0010ffff",
)  # fmt: skip


@dataclass
class _WordCache:
    """Words seen and their ids as int32 bytes."""

    ids: dict[str, bytes]
    chars: int = 0


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A loaded model. `pieces[i]` is what id i stands for in UTF-8; special ids stand for b""."""

    path: str
    digest: str
    eos_id: int
    pad_id: int
    specials: dict[str, int]
    pieces: tuple[bytes, ...] = field(repr=False)
    is_byte: np.ndarray = field(repr=False)  # [V] bool: the 256 ids that stand for a single byte
    word_pattern: re.Pattern = field(repr=False)
    _processor: sentencepiece.SentencePieceProcessor = field(repr=False)
    _caches: list[_WordCache] = field(repr=False)  # one; in a list so that it can be replaced

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def special_id(self, name: str) -> int:
        """Return the id of a special symbol such as `</s>` or a user symbol; DataError if none."""
        if name not in self.specials:
            known = ", ".join(self.specials)
            raise DataError(f"{self.path}: no special symbol {name!r}; there are {known}")
        return self.specials[name]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the empty text has none. DataError for a lone surrogate."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Return the int32 ids of each text; words not seen before use `threads` native threads.

        Memory beyond the texts and their ids is bounded. DataError as for `encode`.
        """
        encoded: list[list[bytes]] = [[] for _ in texts]
        block: list[tuple[int, list[str]]] = []
        size = 0
        for number, text in enumerate(texts):
            for found in words.split(self.word_pattern, text):
                block.append((number, found))
                size += min(len(text), words.BLOCK_CHARS)
                if size >= words.BLOCK_CHARS:
                    self._encode_block(block, encoded, threads)
                    block, size = [], 0
        self._encode_block(block, encoded, threads)
        return [np.frombuffer(b"".join(parts), np.int32) for parts in encoded]

    def _encode_block(
        self, block: list[tuple[int, list[str]]], encoded: list[list[bytes]], threads: int
    ) -> None:
        cache = self._caches[0]
        new = list(set().union(*(found for _, found in block)).difference(cache.ids))
        if new:
            for word in new:
                _refuse_surrogates(word)
            batch = self._processor.encode(new, num_threads=threads)
            for word, ids in zip(new, batch, strict=True):
                cache.ids[word] = struct.pack(f"{len(ids)}i", *ids)
            cache.chars += sum(map(len, new))
        for number, found in block:
            encoded[number].append(b"".join(map(cache.ids.__getitem__, found)))
        if cache.chars > CACHE_CHARS:  # replaced, not cleared: another thread may be reading it
            self._caches[0] = _new_cache(self._processor)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Return the exact bytes that ids stand for; DataError for one outside the vocabulary."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise DataError(f"ids {ids.min()}..{ids.max()}: the vocabulary has {self.vocab_size}")
        return b"".join(map(self.pieces.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one id at a time."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns ids into text as they come; all it returned and `flush` equal `decode` of all ids."""

    def __init__(self, tok: Tokenizer):
        self._tok = tok
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that is certain after one more id; a part of a character waits."""
        return self._decoder.decode(self._tok.decode_bytes([token]))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def load(path: str | Path) -> Tokenizer:
    """Load a SentencePiece model file and check that it is lossless.

    Raises DataError when the file is missing, too large, no model, or changes texts.
    """
    version = sentencepiece.__version__
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < (0, 2, 1):
        raise DataError(f"sentencepiece {version} is unsafe with crafted models; install >= 0.2.1")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_MODEL_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error.strerror}") from error
    if len(raw) > MAX_MODEL_BYTES:
        raise DataError(f"{path}: over {MAX_MODEL_BYTES >> 20} MiB, so no tokenizer model")
    return _open(raw, str(path))


def _open(raw: bytes, path: str) -> Tokenizer:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(raw)
        found = [(raw[start:stop].decode(), kind) for start, stop, kind in model_file.pieces(raw)]
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(
            f"{path}: not a SentencePiece model, or a damaged one; put it back, or delete it and "
            "make one with `jaxgpt tokenizer train`"
        ) from error

    normal = {piece: piece.replace(SPACE, " ") for piece, kind in found if kind == NORMAL}
    is_byte = np.array([kind == BYTE for _, kind in found], bool)
    word_pattern = words.choose(normal.values())
    if is_byte.sum() != 256 or processor.eos_id() < 0 or word_pattern is None:
        raise DataError(
            f"{path}: a tokenizer here needs byte fallback, an end-of-text symbol and pieces with "
            "spaces only at their start; train one with `jaxgpt tokenizer train`"
        )
    tok = Tokenizer(
        path=path,
        digest=hashlib.sha256(raw).hexdigest(),
        eos_id=processor.eos_id(),
        pad_id=processor.pad_id() if processor.pad_id() >= 0 else processor.eos_id(),
        specials={p: i for i, (p, kind) in enumerate(found) if kind in (CONTROL, USER_DEFINED)},
        pieces=tuple(
            bytes([int(p[3:5], 16)]) if kind == BYTE else normal.get(p, "").encode()
            for p, kind in found
        ),
        is_byte=is_byte,
        word_pattern=word_pattern,
        _processor=processor,
        _caches=[_new_cache(processor)],
    )
    _self_test(tok)
    return tok


def _new_cache(processor: sentencepiece.SentencePieceProcessor) -> _WordCache:
    """Return a memory that knows how a space mark in a text is spelled: in bytes."""
    spelled = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
    return _WordCache({SPACE: struct.pack("3i", *spelled)})


def _refuse_surrogates(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError as error:
        code = ord(word[error.start])
        shown = ascii(word[max(0, error.start - 20) : error.start + 20])
        raise DataError(f"lone surrogate U+{code:04X} in {shown}: UTF-8 cannot hold it") from None


def _self_test(tok: Tokenizer) -> None:
    texts = [*_NASTY, *tok.specials]
    for text, ids in zip(texts, tok.encode_batch(texts), strict=True):
        if not all(tok.pieces[number] for number in ids):
            raise DataError(f"{tok.path}: refused: the text {text!r} produces a special id")
        if tok.decode(ids) != text:
            raise DataError(
                f"{tok.path}: refused: it changes texts, {text!r} becomes {tok.decode(ids)!r}; "
                "train a lossless one with `jaxgpt tokenizer train`"
            )


def train(
    texts: Iterable[str],
    path: str | Path,
    *,
    kind: Literal["bpe", "unigram"] = "bpe",
    vocab_size: int = 8192,
    user_symbols: Sequence[str] = (),
    max_bytes: int = 200_000_000,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """Train a tokenizer on a sample of `texts` and write its model file, whole or not at all.

    Every byte of the texts has the same chance to be among the at most `max_bytes` used; the same
    texts and seed give the same file on any machine. `progress(bytes read, bytes kept)` is called
    as texts are read. Raises DataError for unusable symbols or a vocabulary size that the text
    cannot support, StorageError when the file cannot be written.
    """
    _check_symbols(user_symbols)
    sample = _sample(texts, max_bytes, seed, progress)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            pad_id=0,
            unk_id=1,
            eos_id=2,
            bos_id=-1,
            control_symbols=list(user_symbols),
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 20,
            num_threads=4,  # a constant: it is part of the file, and of the result of unigram
            minloglevel=3,
        )
    except RuntimeError as error:
        raise DataError(_explain(str(error), vocab_size)) from error
    raw = bytearray(model.getvalue())
    for start, stop, _ in list(model_file.pieces(bytes(raw))):
        raw[start:stop] = raw[start:stop].replace(TAB_STAND_IN.encode(), b"\t")
    tok = _open(bytes(raw), str(path))
    expected = [name for name in RESERVED if name != "<unk>"] + list(user_symbols)
    if list(tok.specials) != expected:
        raise DataError(f"special symbols became {list(tok.specials)}, asked for {expected}")
    with storage_errors(Path(path).parent):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), bytes(raw))
    return tok


def _check_symbols(symbols: Sequence[str]) -> None:
    for symbol in symbols:
        if not symbol.isprintable() or not symbol or re.search(f"[ {SPACE}]", symbol):
            raise DataError(f"user symbol {symbol!r}: needs visible characters and no spaces")
        if symbol in RESERVED or re.fullmatch("<0x[0-9A-F]{2}>", symbol):
            raise DataError(f"user symbol {symbol!r} is already the name of another id")
    if len(set(symbols)) < len(symbols):
        raise DataError(f"user symbols {list(symbols)}: each may be given once")


def _sample(
    texts: Iterable[str], max_bytes: int, seed: int, progress: Callable[[int, int], None] | None
) -> list[str]:
    """Return pieces of texts of at most `max_bytes` in all: those with the smallest random keys."""
    rng = random.Random(seed)
    kept: list[tuple[float, int, int, str]] = []  # heap: -key, order, bytes, piece
    read = size = 0
    pieces = (piece for text in texts for piece in _training_pieces(text))
    for order, piece in enumerate(pieces):
        num_bytes = len(piece.encode())
        heapq.heappush(kept, (-rng.random(), order, num_bytes, piece))
        read, size = read + num_bytes, size + num_bytes
        while size > max_bytes:
            size -= heapq.heappop(kept)[2]
        if progress and order % 1000 == 0:
            progress(read, size)
    return [piece for _, _, _, piece in sorted(kept, key=lambda entry: entry[1])]


def _training_pieces(text: str) -> Iterator[str]:
    """Cut a text where the trainer needs it, else after newlines or before runs of spaces."""
    for part in _UNTRAINABLE.split(text):
        start = 0
        while start < len(part):
            stop = start + _TRAINING_CHARS
            if stop < len(part):
                line = part.rfind("\n", start, stop) + 1
                space = start + len(part[start:stop].rstrip(" ").rpartition(" ")[0].rstrip(" "))
                stop = max(line, space) if max(line, space) > start else stop
            yield part[start:stop].replace("\t", TAB_STAND_IN)
            start = stop


def _explain(message: str, vocab_size: int) -> str:
    """Return the trainer's complaint as one line that names the setting to change."""
    if limit := re.search(r"too high .*<= (\d+)", message):
        return (
            f"tokenizer.vocab_size = {vocab_size} is too large for this text: at most {limit[1]} "
            "ids can be learnt from it; lower it or add text"
        )
    if limit := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"tokenizer.vocab_size = {vocab_size} is too small: specials, 256 bytes and the "
            f"characters of this text need {limit[1]}"
        )
    if "sentences_.empty()" in message:
        return "data.sources: there is no text to train a tokenizer on"
    return f"the tokenizer cannot be trained: {' '.join(message.split())}"
