"""Tokenizers: from text to ids and back, with one interface for every engine.

`load` opens SentencePiece models, Hugging Face tokenizer.json files and tiktoken rank files, and
`train` makes a SentencePiece model for which decode(encode(text)) == text for every text. No text
produces a special id. The identity of a tokenizer is a SHA-256 over all that its ids depend on:
pieces, scores, rules and the end-of-text symbol, but not over notes in its file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import multiprocessing
import re
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import DataError
from jaxgpt.tokenization import (
    hf_engine,
    sentencepiece_engine,
    tiktoken_engine,
    tokenizer_check,
    tokenizer_training,
    words,
)
from jaxgpt.tokenization.engine import FORMAT, Engine
from jaxgpt.tokenization.frame import is_json, with_frame
from jaxgpt.tokenization.token_streams import StreamDecoder, StreamEncoder, strip_start
from jaxgpt.tokenization.tokenizer_training import RESERVED, TrainReport

log = logging.getLogger(__name__)

MAX_MODEL_BYTES = 64 << 20
MODEL_NAMES = ("tokenizer.model", "tokenizer.json")  # as in stores, runs and folders of models
CACHE_CHARS = 1 << 20  # words are remembered up to this total: about 40 MB with their ids
IDENTITY = b"jaxgpt-tokenizer 1"  # goes into every digest; changes when ids change their meaning


@dataclass
class _WordCache:
    """Words seen and their ids as int32 bytes."""

    ids: dict[str, bytes]
    chars: int = 0


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A loaded model. `pieces[i]` is what id i stands for in UTF-8; special ids stand for b"".

    `raw` is a file that `load` opens as this very tokenizer without any other file. If not
    `lossless`, `losses` say what happens to texts. `report` is there right after training.
    """

    path: str
    digest: str
    engine: Literal["sentencepiece", "hf", "tiktoken"]
    eos_id: int
    pad_id: int
    start_id: int  # stands before the first token of what a model continues; mostly E
    stop_ids: tuple[int, ...]  # end what a model writes: E, and what some models know besides
    specials: dict[str, int]
    pieces: tuple[bytes, ...] = field(repr=False)
    is_byte: np.ndarray = field(repr=False)  # [V] bool: ids for a byte of a character without piece
    raw: bytes = field(repr=False)
    strip: Literal["", "space", "pieces"]  # the leading space that `decode` takes away
    word_pattern: re.Pattern = field(repr=False)  # what is encoded alone, see `words`
    _engine: Engine = field(repr=False)
    _caches: list[_WordCache] = field(repr=False)  # one; in a list so that it can be replaced
    losses: tuple[str, ...] = ()
    report: TrainReport | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def eos_name(self) -> str:
        return next(name for name, number in self.specials.items() if number == self.eos_id)

    @property
    def lossless(self) -> bool:
        return not self.losses

    def special_id(self, name: str) -> int:
        """Return the id of a special symbol such as `</s>` or a user symbol; DataError if none."""
        if name not in self.specials:
            known = ", ".join(list(self.specials)[:20])
            raise DataError(f"{self.path}: no special symbol {name!r}; there are {known}")
        return self.specials[name]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the empty text has none. DataError for a lone surrogate."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Return the int32 ids of each text; units not seen before use `threads` native threads.

        Memory beyond the texts and their ids is bounded. DataError as for `encode`.
        """
        encoded: list[list[bytes]] = [[] for _ in texts]
        block: list[tuple[int, list[str]]] = []
        size = 0
        for number, text in enumerate(texts):
            at_start = True
            for found in words.split(self.word_pattern, text):
                block.append((number, self._prepared(found, at_start)))
                at_start = False
                size += min(len(text), words.BLOCK_CHARS)
                if size >= words.BLOCK_CHARS:
                    self._encode_block(block, encoded, threads)
                    block, size = [], 0
        self._encode_block(block, encoded, threads)
        return [np.frombuffer(b"".join(parts), np.int32) for parts in encoded]

    def encode_whole(self, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """Return what the library itself makes of whole texts, to compare with: unbounded memory.

        The ids are those of `encode_batch` but at a forced cut, and where a text spells a symbol.
        """
        return self._engine.encode(texts, 1)

    def encode_units(self, units: list[str], at_start: bool) -> np.ndarray:
        """Return the int32 ids of some units of a text that follow one another."""
        encoded: list[list[bytes]] = [[]]
        self._encode_block([(0, self._prepared(units, at_start))], encoded, threads=1)
        return np.frombuffer(b"".join(encoded[0]), np.int32)

    def _prepared(self, found: list[str], at_start: bool) -> list[str]:
        """Return units without the space that the engine puts before each of its own accord."""
        if not self._engine.skip_space:
            return found
        return found[:at_start] + [unit.removeprefix(" ") for unit in found[at_start:]]

    def _encode_block(
        self, block: list[tuple[int, list[str]]], encoded: list[list[bytes]], threads: int
    ) -> None:
        if self._engine.words is None:
            self._encode_sections(block, encoded, threads)
            return
        cache = self._caches[0]
        new = list(set().union(*(found for _, found in block)).difference(cache.ids))
        if new:
            for word, ids in zip(new, self._encode_units(new, threads), strict=True):
                cache.ids[word] = struct.pack(f"{len(ids)}i", *ids)
            cache.chars += sum(map(len, new))
        for number, found in block:
            encoded[number].append(b"".join(map(cache.ids.__getitem__, found)))
        if cache.chars > CACHE_CHARS:  # replaced, not cleared: another thread may be reading it
            self._caches[0] = _WordCache(dict(self._engine.words))

    def _encode_sections(
        self, block: list[tuple[int, list[str]]], encoded: list[list[bytes]], threads: int
    ) -> None:
        numbers = [number for number, found in block for _ in found]
        sections = [section for _, found in block for section in found]
        for number, ids in zip(numbers, self._encode_units(sections, threads), strict=True):
            encoded[number].append(np.asarray(ids).astype(np.int32).tobytes())

    def _encode_units(self, units: list[str], threads: int) -> Sequence[Any]:
        for unit in units:
            _refuse_surrogates(unit)
        return self._engine.encode(units, threads)

    def forced_cuts(self, text: str) -> int:
        """Return the number of units cut for their length, whose ids may be others than whole."""
        return words.forced_cuts(self.word_pattern, text)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Return the exact bytes that ids stand for; DataError for one outside the vocabulary."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise DataError(f"ids {ids.min()}..{ids.max()}: the vocabulary has {self.vocab_size}")
        return b"".join(map(self.pieces.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray, *, continues: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

        A space that the engine puts before texts is taken away, as the engine does; but not where
        the ids continue a text, whose words have spaces of their own.
        """
        data, rule = self.decode_bytes(ids), "" if continues else self.strip
        if rule:
            start, parts = 0, []
            while rule and start < len(ids):
                part, rule = strip_start(self, int(ids[start]), rule)
                parts.append(part)
                start += 1
            data = b"".join(parts) + self.decode_bytes(ids[start:])
        return data.decode("utf-8", "replace")

    def stream_encoder(self) -> StreamEncoder:
        """Return an encoder that takes one text piece by piece, in bounded memory."""
        return StreamEncoder(self)

    def stream_decoder(self, *, continues: bool = False) -> StreamDecoder:
        """Return a decoder that takes one id at a time; `continues` as for `decode`."""
        return StreamDecoder(self, continues)


def load(path: str | Path, eos: str | None = None, pattern: str | None = None) -> Tokenizer:
    """Load a tokenizer file of any kind, told by its content, and try it on awkward texts.

    `eos` names the end-of-text symbol where file and neighbours do not say it; `pattern` is the
    regular expression that cuts texts for a tiktoken rank file that is none of the published.
    Raises DataError when the file is missing, too large, damaged, or cannot be used safely.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_MODEL_BYTES + 1)
    except OSError as error:
        names = [name for name in MODEL_NAMES if Path(path, name).is_file()]
        hint = f"; name the file in it: {Path(path, names[0])}" if names else ""
        raise DataError(f"{path}: cannot read the tokenizer: {error.strerror}{hint}") from error
    if len(raw) > MAX_MODEL_BYTES:
        raise DataError(f"{path}: over {MAX_MODEL_BYTES >> 20} MiB, so no tokenizer model")
    tok = _open(raw, str(path), eos, pattern)
    if tok.losses and multiprocessing.parent_process() is None:  # workers need not say it again
        log.warning("%s: not lossless: %s", path, "; ".join(tok.losses))
    return tok


def import_model(
    path: str | Path, out: str | Path, eos: str | None = None, pattern: str | None = None
) -> Tokenizer:
    """Write a tokenizer of any kind as one file that `load` opens without arguments or neighbours.

    Errors as for `load`; StorageError when the file cannot be written.
    """
    tok = load(path, eos, pattern)
    _write(Path(out), tok.raw)
    return replace(tok, path=str(out))


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
    texts and seed give the same file on any machine whose memory has room for the sample.
    `progress(bytes read, bytes kept)` is called as texts are read. The result has a `report`.
    Raises DataError for unusable symbols or a vocabulary size that the text cannot support,
    StorageError when the file cannot be written.
    """
    start = time.monotonic()
    tokenizer_training.check_symbols(user_symbols)
    sample = tokenizer_training.take_sample(texts, max_bytes, seed, kind, progress)
    raw = tokenizer_training.make_model(sample.pieces, kind, vocab_size, user_symbols)
    tok = _open(raw, str(path), None, None)
    expected = [name for name in RESERVED if name != "<unk>"] + list(user_symbols)
    if list(tok.specials) != expected or tok.losses:
        raise DataError(f"special symbols became {list(tok.specials)}, asked for {expected}")
    _write(Path(path), raw)
    seconds = time.monotonic() - start
    return replace(tok, report=tokenizer_training.make_report(tok, sample, seconds))


def _write(path: Path, raw: bytes) -> None:
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, raw)


def _open(raw: bytes, path: str, eos: str | None, pattern: str | None) -> Tokenizer:
    frame = None
    if is_json(raw):
        model, frame = _open_json(raw, path, eos)
    elif tiktoken_engine.looks_like_ranks(raw):
        model = tiktoken_engine.open_ranks(raw, path, eos, pattern)
    else:
        model = sentencepiece_engine.open_model(raw, path, eos)
    if pattern is not None and model.name != "tiktoken":
        raise DataError(f"{path}: a pattern is given, but this is no tiktoken rank file")
    digest = hashlib.sha256()
    for part in (IDENTITY, model.name.encode(), *model.identity):
        digest.update(len(part).to_bytes(8, "little") + part)
    tok = Tokenizer(
        path=path,
        digest=digest.hexdigest(),
        engine=model.name,
        eos_id=model.eos_id,
        pad_id=model.pad_id,
        start_id=model.eos_id,
        stop_ids=(model.eos_id,),
        specials=model.specials,
        pieces=model.pieces,
        is_byte=model.is_byte,
        raw=model.raw,
        strip=model.strip,
        word_pattern=model.units,
        _engine=model,
        _caches=[_WordCache(dict(model.words or {}))],
    )
    tok = replace(tok, losses=tokenizer_check.check(tok, model.examples, model.exact))
    return with_frame(tok, *frame) if frame else tok


def _open_json(raw: bytes, path: str, eos: str | None) -> tuple[Engine, tuple | None]:
    """Open a tokenizer.json, or a self-contained file of any engine and its start and stop ids."""
    try:
        spec = json.loads(raw)
        if spec.get("format") != FORMAT:
            eos = eos or hf_engine.neighbours_eos(Path(path), spec)
            return hf_engine.open_spec(spec, path, eos), None
        if spec["version"] != 1:
            raise DataError(f"{path}: version {spec['version']}, made by a newer jaxgpt")
        frame = (spec["start_id"], tuple(spec["stop_ids"])) if "start_id" in spec else None
        if spec["engine"] == "tiktoken":
            return tiktoken_engine.open_wrapper(spec, path, eos), frame
        if spec["engine"] == "hf":
            return hf_engine.open_spec(spec["model"], path, eos or spec["eos"]), frame
        model = base64.b64decode(spec["model"], validate=True)
        return sentencepiece_engine.open_model(model, path, eos or spec["eos"]), frame
    except _DAMAGE as error:
        raise DataError(
            f"{path}: JSON, but no tokenizer.json or a damaged one ({type(error).__name__})"
        ) from error


_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)


def _refuse_surrogates(unit: str) -> None:
    try:
        unit.encode()
    except UnicodeEncodeError as error:
        code = ord(unit[error.start])
        raise DataError(f"lone surrogate U+{code:04X} in a text: UTF-8 cannot hold it") from None
