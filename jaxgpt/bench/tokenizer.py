"""Encoding alone: MB/s of text to ids by the library, by the tokenizer, and as `prepare` does it.

Each pass starts with a tokenizer that has seen no text, as it would a new corpus. On one core the
three take turns. All cores are worker processes, as in `prepare`; their start is not timed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from jaxgpt.bench import timing
from jaxgpt.config import DataConfig
from jaxgpt.corpus import stdlib
from jaxgpt.corpus.encoding import Spool, encode, no_counts
from jaxgpt.corpus.formats import Piece
from jaxgpt.errors import DataError
from jaxgpt.runtime.processor import num_cores
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import Tokenizer

MB = 1e6
PATIENCE = 600.0  # seconds for all workers to be ready


def measure(
    files: Sequence[str],
    *,
    model: str | None,
    kind: str,
    vocab_size: int,
    workers: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the rates of encoding `files`, a document each; none: the Python library's sources.

    `model` is a file that `tokenizer.load` opens; without it one of `vocab_size` ids is trained on
    the text in a temporary folder. `workers` of 0: a process for each core. Raises DataError for
    files that cannot be read or are not UTF-8.
    """
    names = list(files) or stdlib.python_files()
    texts = [_text(name) for name in names]
    size = sum(len(text.encode()) for text in texts)
    if not size:
        raise DataError(f"{', '.join(names[:3])}: no text to encode")
    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {"text_bytes": size, "documents": len(texts)}
        if model is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxgpt-bench-"))
            model = str(Path(folder, "tokenizer.model"))
            report = tokenizer.train(texts, model, kind=kind, vocab_size=vocab_size).report
            found["train_seconds"] = round(report.seconds, 2)
            say(f"trained {vocab_size:,} ids on {size / MB:,.1f} MB in {report.seconds:.1f} s")
        tok = tokenizer.load(model)
        tokens = sum(map(len, tok.encode_batch(texts)))
        found |= {
            "engine": tok.engine,
            "vocab_size": tok.vocab_size,
            "tokens": tokens,
            "bytes_per_token": round(size / tokens, 4),
        }
        passes = {"library": _by_library, "tokenizer": _by_tokenizer, "prepare": _as_prepare}
        seconds: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(repeats):
            for name, encode_all in passes.items():
                seconds[name].append(_timed(encode_all, tokenizer.load(model), texts))
        found |= timing.rates(tokens, seconds["prepare"])
        for name, passed in seconds.items():
            found |= _rates(name, size, passed)
        workers = workers or num_cores()
        say(f"one core done; now {workers} processes")
        passed = _in_processes(model, texts, workers, repeats)
        found |= {"workers": workers, **_rates("all_cores", size, passed)}
        found["all_cores_tokens_per_sec_median"] = round(tokens / sorted(passed)[repeats // 2], 1)
        return found


def _text(name: str) -> str:
    try:
        return Path(name).read_bytes().decode()
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: byte {error.start} is not UTF-8; convert the file") from None


def _rates(name: str, size: int, seconds: list[float]) -> dict[str, float]:
    rates = timing.rates(size, seconds, "bytes")
    return {
        f"{name}_mb_per_sec_{which}": round(rates[f"bytes_per_sec_{which}"] / MB, 3)
        for which in ("median", "best")
    }


def _timed(encode_all: Callable, tok: Tokenizer, texts: list[str]) -> float:
    began = time.perf_counter()
    encode_all(tok, texts)
    return time.perf_counter() - began


def _by_library(tok: Tokenizer, texts: list[str]) -> None:
    tok.encode_whole(texts)


def _by_tokenizer(tok: Tokenizer, texts: list[str]) -> None:
    tok.encode_batch(texts)


def _as_prepare(tok: Tokenizer, texts: list[str]) -> None:
    """Encode as a worker of `prepare`: in batches, counted, each document with its digest."""
    pieces = (Piece(text, "bench", True) for text in texts)
    with tempfile.TemporaryDirectory() as folder, Spool(folder) as spool:
        for _ in encode(tok, pieces, DataConfig(), no_counts(), spool):
            pass


def _in_processes(model: str, texts: list[str], workers: int, repeats: int) -> list[float]:
    """Return the seconds of the slowest of all workers, each with its share, in each pass."""
    context = multiprocessing.get_context("spawn")
    shares = [texts[number::workers] for number in range(workers)]
    begin = context.Barrier(workers)
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start, (begin,)) as pool:
        return [max(pool.map(_work, [model] * workers, shares)) for _ in range(repeats)]


_begin: Barrier | None = None  # in a worker: where all begin together


def _start(begin: Barrier) -> None:
    global _begin
    _begin = begin


def _work(model: str, texts: list[str]) -> float:
    tok = tokenizer.load(model)
    _begin.wait(PATIENCE)
    return _timed(_as_prepare, tok, texts)
