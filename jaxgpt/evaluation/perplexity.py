"""How well a model predicts held-out text: loss, perplexity, bits per byte, beside gzip and xz.

Every token of the text is predicted exactly once, in rows of `model.seq_len`, and so is the
end-of-text id that closes each document. Its loss is part of every sum, but it stands for 0 bytes.
The device gives sums per row; they are added in float64 on the host, so that neither the number of
rows at once nor the number of devices changes the result. Padding is never counted.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.pipeline import eval_batches
from jaxgpt.data.shard import encoded_document, write_shard
from jaxgpt.data.store import Store, open_store, write_manifest
from jaxgpt.errors import DataError, NumericsError
from jaxgpt.evaluation import row_sums
from jaxgpt.model.params import Params
from jaxgpt.parallel.mesh import batch_shards
from jaxgpt.parallel.sharding import rows_of_process, to_global
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import Tokenizer

MAX_EXPONENT = 709.0  # exp of more is not a float64
READ_TOKENS = 1 << 20  # ids decoded at once
BASELINE_BYTES = 100_000_000  # xz -9 compresses about 2 MB/s


@dataclass(frozen=True)
class EvalResult:
    """One set of text. All numbers are finite.

    `loss` is in nats per token and `perplexity` its exponential; the tokens include one end-of-text
    id per document. `bits_per_byte` is the whole loss in bits over the UTF-8 bytes of the text, and
    compares across tokenizers. `loss_stderr` is the standard error of `loss` with rows as the
    independent samples (ratio estimator); None for a single row.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    rows: int
    loss_stderr: float | None

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


def evaluate(
    cfg: Config,
    params: Params,
    store: Store,
    *,
    batch: int = 0,
    max_rows: int = 0,
    name: str = "",
) -> EvalResult:
    """Evaluate on rows 0, 1, ... of a store, in `train.compute_dtype` and `train.logits_dtype`.

    `batch` rows are computed at once (default: eval.batch, else train.micro_batch, or all of
    train.global_batch where stages compute parts of it at the same time); with params on a mesh it
    is rounded up to a multiple of the devices that split the rows, and every process of
    the mesh must call this. `max_rows` > 0 ends after that many rows. `name` is what errors call
    the store. Raises DataError for a store without text or with ids that the model does not have,
    NumericsError for a loss that is not finite.
    """
    name, T = name or str(store.directory), cfg.model.seq_len
    if store.vocab_size > cfg.model.vocab_size:
        raise DataError(
            f"{name}: ids up to {store.vocab_size - 1}, but the model has {cfg.model.vocab_size}; "
            "evaluate on text prepared with the tokenizer of the run"
        )
    if store.num_docs == 0:
        raise DataError(f"{name}: no text to evaluate on; it holds no document that is not empty")
    mesh = getattr(params.embed.sharding, "mesh", None)
    shards = batch_shards(mesh)
    # The stages of a pipeline compute several micro-batches at the same time.
    staged = mesh is not None and mesh.shape["stage"] > 1
    default = cfg.train.global_batch if staged else cfg.train.micro_rows
    batch = -(-(batch or cfg.eval.batch or default) // shards) * shards
    batches = eval_batches(
        store,
        seq_len=T,
        batch=batch,
        document_mask=cfg.data.document_mask,
        max_rows=max_rows,
        rows=None if mesh is None else rows_of_process(mesh, batch),
    )
    step = row_sums.compiled(cfg, params, mesh, batch)
    sums = _one_late(step(rows if mesh is None else to_global(mesh, rows)) for rows in batches)
    losses, weights = np.concatenate([np.asarray(pair, np.float64) for pair in sums], axis=1)  # [R]
    if not np.isfinite(losses).all():
        raise NumericsError(
            f"{name}: the loss of row {int(np.argmin(np.isfinite(losses)))} is not finite in "
            f"{cfg.train.compute_dtype}; look for NaN or Inf in the checkpoint, or use float32"
        )
    real = weights > 0
    end = min(max_rows * T, store.stream_len) if max_rows else store.stream_len
    return summarize(losses[real], weights[real], target_bytes(store, end))


def evaluate_sets(
    cfg: Config,
    params: Params,
    stores: Mapping[str, Store],
    *,
    batch: int = 0,
    max_rows: int = 0,
) -> dict[str, EvalResult]:
    """Evaluate on each named store; arguments and errors as `evaluate`."""
    return {
        name: evaluate(cfg, params, store, batch=batch, max_rows=max_rows, name=name)
        for name, store in stores.items()
    }


def evaluate_text(
    cfg: Config,
    params: Params,
    tok: Tokenizer,
    texts: str | Sequence[str],
    *,
    batch: int = 0,
    name: str = "text",
) -> EvalResult:
    """Evaluate on documents given as text (one string is one document), by way of a passing store.

    Empty documents are left out. Errors as `evaluate`.
    """
    common = {"tokenizer_digest": tok.digest, "vocab_size": tok.vocab_size, "eos_id": tok.eos_id}
    documents = [text for text in ([texts] if isinstance(texts, str) else texts) if text]
    encoded = (
        encoded_document(np.array(tok.encode(text), np.int32), text, f"{name} {number}")
        for number, text in enumerate(documents)
    )
    with tempfile.TemporaryDirectory(prefix="jaxgpt-eval-") as folder:
        shard = write_shard(Path(folder, "text.bin"), encoded, **common)
        write_manifest(
            Path(folder), [shard], start_id=tok.start_id, policies={}, report={}, **common
        )
        with closing(open_store(folder)) as store:
            return evaluate(cfg, params, store, batch=batch, name=name)


def summarize(losses: np.ndarray, weights: np.ndarray, num_bytes: int) -> EvalResult:
    """Return the result of rows with loss sums [R] in nats and token counts [R], R > 0, float64."""
    total, tokens, rows = float(losses.sum()), int(weights.sum()), len(losses)
    loss = total / tokens
    stderr = None
    if rows > 1:  # variance of a ratio of two sums over independent rows, to first order
        spread = np.square(losses - loss * weights).sum() * rows / (rows - 1)
        stderr = math.sqrt(spread) / tokens
    return EvalResult(
        loss=loss,
        perplexity=math.exp(min(loss, MAX_EXPONENT)),
        bits_per_byte=total / math.log(2) / num_bytes,
        tokens=tokens,
        bytes=num_bytes,
        rows=rows,
        loss_stderr=stderr,
    )


def _one_late(results: Iterable[Any]) -> Iterator[Any]:
    """Yield device results one step late: the host prepares the next while the device works."""
    held = None
    for result in results:
        if held is not None:
            yield jax.device_get(held)
        held = result
    if held is not None:
        yield jax.device_get(held)


def target_bytes(store: Store, end: int) -> int:
    """Return the UTF-8 bytes of stream positions 1..end, the targets of the inputs before `end`.

    Exact also where `end` lies inside a document, for which the store's tokenizer is loaded.
    """
    if end == store.stream_len:
        return store.num_bytes
    doc, offset = store.document_at(end)
    part = store.read(end - offset + 1, end + 1)  # without its E
    whole = int(store.doc_bytes(0, doc).sum())
    return whole + (len(store_tokenizer(store).decode_bytes(part)) if offset else 0)


def store_tokenizer(store: Store) -> Tokenizer:
    """Load the tokenizer that lies with a store; DataError when it is not the one of its ids."""
    tok = tokenizer.load(store.tokenizer_path)
    if tok.digest != store.tokenizer_digest:
        raise DataError(
            f"{store.tokenizer_path}: has digest {tok.digest[:12]}, but the ids beside it come "
            f"from {store.tokenizer_digest[:12]}; put that tokenizer back"
        )
    return tok


def store_bytes(store: Store, tok: Tokenizer, limit: int = BASELINE_BYTES) -> bytes:
    """Return the documents of a store one after the other, their first `limit` bytes (0: all)."""
    parts, size = [], 0
    for start in range(0, store.stream_len, READ_TOKENS):
        stop = min(start + READ_TOKENS, store.stream_len)
        parts.append(tok.decode_bytes(store.read(start, stop)))  # an end-of-text id is b""
        size += len(parts[-1])
        if limit and size >= limit:
            break
    return b"".join(parts)[: limit or None]


def compressor_baselines(raw: bytes) -> dict[str, float]:
    """Return bits per byte of general-purpose compressors on these bytes; none for no bytes."""
    if not raw:
        return {}
    sizes = {
        "gzip -9": len(gzip.compress(raw, compresslevel=9, mtime=0)),
        "xz -9": len(lzma.compress(raw, preset=9)),
    }
    return {name: 8 * size / len(raw) for name, size in sizes.items()}


def report_table(
    results: Mapping[str, EvalResult],
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    *,
    terminal: bool | None = None,
) -> str:
    """Return the results as a table, a line per set, with bits per byte of its compressors.

    `terminal`: colours and rules, or plain text; None: as stdout is.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty() if terminal is None else terminal
    baselines = baselines or {}
    names = list(dict.fromkeys(name for row in baselines.values() for name in row))
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    table.add_column("set", no_wrap=True)
    headers = ["loss", "±", "perplexity", "bits/byte", *names, "tokens", "bytes"]
    for header in headers:
        style = "bold" if header == "bits/byte" else None
        table.add_column(header, justify="right", no_wrap=True, style=style)
    for name, result in results.items():
        beside = baselines.get(name, {})
        table.add_row(
            name,
            f"{result.loss:.4f}",
            "" if result.loss_stderr is None else f"{result.loss_stderr:.4f}",
            f"{result.perplexity:.4g}",
            f"{result.bits_per_byte:.4f}",
            *(f"{beside[key]:.4f}" if key in beside else "" for key in names),
            f"{result.tokens:,}",
            f"{result.bytes:,}",
        )
    # Wide enough that nothing is cut, whatever the terminal says.
    width = 40 + 16 * len(headers)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines() if line.strip())
