"""Training a SentencePiece model: a fair sample of the texts, the trainer, and a report.

The sample is bounded in bytes and by memory; texts are cut to what the trainer can take, so that no
text is too long for it and none is left out without being counted.
"""

from __future__ import annotations

import heapq
import io
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import sentencepiece

from jaxgpt.errors import DataError, one_line
from jaxgpt.tokenization import model_file, tokenizer_check
from jaxgpt.tokenization.words import SPACE

if TYPE_CHECKING:
    from jaxgpt.tokenization.tokenizer import Tokenizer

RESERVED = ("<pad>", "<unk>", "</s>")  # ids 0, 1, 2

# The trainer uses a tab as a boundary mark, so tabs are trained as this character and put back.
TAB_STAND_IN = "\x01"
_UNTRAINABLE = re.compile(f"[\0\x1f{TAB_STAND_IN}{SPACE}\u2585\ud800-\udfff]+")  # its other marks
_TRAINING_CHARS = 4096  # a text is cut to this length for training, so that none is too long

# Peak memory per byte of sample, measured with 40 MB of code: 18 and 24.
_MEMORY_PER_BYTE = {"bpe": 22, "unigram": 30}
_MEASURED_BYTES = 2_000_000  # of the sample are encoded for the report
MIN_BYTES_PER_ID = 100  # with less text than this per id, pieces are learnt from too few examples
MAX_BYTE_SHARE = 0.05


class Sample(NamedTuple):
    """What training learns from, and what was counted on the way; sizes in UTF-8 bytes."""

    pieces: list[str]
    texts: int
    bytes_read: int
    bytes_used: int
    skipped: dict[str, int]
    memory_limit: int | None  # the bytes there was memory for, if that was the limit


@dataclass(frozen=True)
class TrainReport:
    """What a tokenizer was trained on and how well it fits, for people and for logs."""

    texts: int
    bytes_read: int
    bytes_used: int
    skipped: dict[str, int]  # reason: bytes
    bytes_per_token: float  # on the sample
    byte_share: float  # of the tokens of the sample: bytes of characters without a piece
    round_trips: int  # awkward texts and pieces of the sample that came back byte for byte
    seconds: float
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report as lines of text, warnings last."""
        left_out = ", ".join(f"{size:,} {reason}" for reason, size in self.skipped.items())
        return [
            f"trained on {self.bytes_used:,} of {self.bytes_read:,} bytes in {self.texts:,} texts "
            f"in {self.seconds:.1f} s",
            f"left out, bytes: {left_out or 'none'}",
            f"{self.bytes_per_token:.2f} bytes per token, {self.byte_share:.2%} of tokens are "
            f"single bytes, {self.round_trips:,} texts came back byte for byte",
            *(f"warning: {warning}" for warning in self.warnings),
        ]


def check_symbols(symbols: Sequence[str]) -> None:
    """Raise DataError unless every user symbol can be one, under exactly its name."""
    for symbol in symbols:
        if not symbol.isprintable() or not symbol or re.search(f"[ {SPACE}]", symbol):
            raise DataError(f"user symbol {symbol!r}: needs visible characters and no spaces")
        if symbol in RESERVED or re.fullmatch("<0x[0-9A-F]{2}>", symbol):
            raise DataError(f"user symbol {symbol!r} is already the name of another id")
    if len(set(symbols)) < len(symbols):
        raise DataError(f"user symbols {list(symbols)}: each may be given once")


def take_sample(
    texts: Iterable[str],
    max_bytes: int,
    seed: int,
    kind: Literal["bpe", "unigram"] = "bpe",
    progress: Callable[[int, int], None] | None = None,
) -> Sample:
    """Return pieces of texts of at most `max_bytes` in all: those with the smallest random keys.

    The sample is smaller where memory has no room for training on `max_bytes`.
    """
    room = available_memory() // _MEMORY_PER_BYTE[kind]
    limit = min(max_bytes, room)
    rng = random.Random(seed)
    kept: list[tuple[float, int, int, str]] = []  # heap: -key, order, bytes, piece
    counts: Counter = Counter()
    pieces = (piece for text in texts for piece in _counted_pieces(text, counts))
    size = 0
    for order, piece in enumerate(pieces):
        num_bytes = len(piece.encode())
        heapq.heappush(kept, (-rng.random(), order, num_bytes, piece))
        counts["pieces"] += num_bytes
        size += num_bytes
        while size > limit:
            size -= heapq.heappop(kept)[2]
        if progress and order % 1000 == 0:
            progress(counts["pieces"], size)
    skipped = {
        "not in the sample": counts["pieces"] - size,
        "in U+0000, U+0001, U+001F, U+2581, U+2585, marks of the trainer": counts["untrainable"],
    }
    return Sample(
        pieces=[piece for _, _, _, piece in sorted(kept, key=lambda entry: entry[1])],
        texts=counts["texts"],
        bytes_read=counts["pieces"] + counts["untrainable"],
        bytes_used=size,
        skipped={reason: number for reason, number in skipped.items() if number},
        memory_limit=room if room < min(max_bytes, counts["pieces"]) else None,
    )


def _counted_pieces(text: str, counts: Counter) -> Iterator[str]:
    counts["texts"] += 1
    for mark in _UNTRAINABLE.findall(text):
        counts["untrainable"] += len(mark.encode("utf-8", "surrogatepass"))
    return _training_pieces(text)


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


def available_memory() -> int:
    """Return the bytes of memory that this process may still take; no limit known: all there is."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free += [int(found[1]) << 10] if found else []
        group = Path("/sys/fs/cgroup")  # of a container, seen from inside
        used = int((group / "memory.current").read_text())
        free.append(int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError):  # another system, or "max"
        pass
    return max(min(free), 0)


def make_model(
    pieces: Iterable[str],
    kind: Literal["bpe", "unigram"],
    vocab_size: int,
    user_symbols: Sequence[str],
) -> bytes:
    """Return the model file learnt from pieces of text; DataError names the setting to change."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(pieces),
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
    for piece in list(model_file.pieces(bytes(raw))):
        text = raw[piece.start : piece.stop]
        raw[piece.start : piece.stop] = text.replace(TAB_STAND_IN.encode(), b"\t")
    return bytes(raw)


def make_report(tok: Tokenizer, sample: Sample, seconds: float) -> TrainReport:
    """Measure a fresh tokenizer on part of its sample and say what looks wrong.

    Raises DataError if a piece of the sample does not come back.
    """
    stride = max(1, sample.bytes_used // _MEASURED_BYTES)
    texts = [piece.replace(TAB_STAND_IN, "\t") for piece in sample.pieces[::stride]]
    bytes_per_token, byte_share, returns = tokenizer_check.measure(tok, texts)
    if not returns:
        raise DataError(f"{tok.path}: a text of its own sample does not come back; report this")
    warnings = []
    if sample.memory_limit is not None:
        warnings.append(
            f"there is memory for a sample of {sample.memory_limit:,} bytes only, so another "
            "machine may learn other pieces; lower tokenizer.train_bytes to this or less"
        )
    if sample.bytes_used < MIN_BYTES_PER_ID * tok.vocab_size:
        warnings.append(
            f"{sample.bytes_used:,} bytes are little text for {tok.vocab_size} ids; give "
            f"{MIN_BYTES_PER_ID * tok.vocab_size:,} or more, or lower tokenizer.vocab_size"
        )
    if byte_share > MAX_BYTE_SHARE:
        warnings.append(
            f"{byte_share:.0%} of tokens are single bytes of characters that have no piece; raise "
            "tokenizer.vocab_size, or is this text at all?"
        )
    return TrainReport(
        texts=sample.texts,
        bytes_read=sample.bytes_read,
        bytes_used=sample.bytes_used,
        skipped=sample.skipped,
        bytes_per_token=bytes_per_token,
        byte_share=byte_share,
        round_trips=len(texts) + len(tokenizer_check.NASTY),
        seconds=seconds,
        warnings=tuple(warnings),
    )


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
    return f"the tokenizer cannot be trained: {one_line(message)}"
