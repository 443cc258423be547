"""The training pipeline alone: shards on disk, the order of rows, packing, batches on the host.

It is the very stream of `jaxgpt train`, read as fast as it comes; then a few real steps tell what
training waits for it. The first reading checks every block of the store, later ones find the files
in memory, as the loaders of other programs are measured.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt import config
from jaxgpt.bench import timing
from jaxgpt.config import Config
from jaxgpt.data.feeder import BatchStream, import_tensorflow
from jaxgpt.data.pipeline import batches
from jaxgpt.data.shard import DIGEST_BYTES, Encoded, token_dtype, write_shard
from jaxgpt.data.store import write_manifest
from jaxgpt.data.stream import Data, open_data

EOS = 0  # of a made-up store
SHARD_TOKENS = 1 << 25
FIRST_SECONDS = 10.0  # at most, of a first reading, which is one pass over a small store
WARM_STEPS = 2


def measure(
    cfg: Config,
    *,
    store: str | None,
    tokens: int,
    doc_tokens: int,
    seconds: float,
    repeats: int,
    steps: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return rates of the stream of `cfg`, and what `steps` real steps (0: none) wait for it.

    Without a `store`, one of `tokens` random ids in documents of `doc_tokens` on average is made in
    a temporary folder. A rate is that of about `seconds`, `repeats` times. Raises DataError and
    ConfigError for a store that the configuration cannot train on.
    """
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxgpt-bench-"))
            began = time.perf_counter()
            write_store(Path(store), cfg.model.vocab_size, tokens, doc_tokens)
            say(f"made a store of {tokens:,} ids in {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        import_tensorflow()
        imported = time.perf_counter()
        cfg = config.with_values(cfg, "bench loader", data={"store": store})
        data = open_data(cfg.data, seq_len=cfg.model.seq_len, seed=cfg.run.seed, say=say)
        stack.callback(lambda: [opened.close() for opened in data.stores])
        opened = time.perf_counter()
        batch_tokens = cfg.train.global_batch * cfg.model.seq_len
        found = {
            "tokens_per_batch": batch_tokens,
            "rows_per_batch": cfg.train.global_batch,
            "seq_len": cfg.model.seq_len,
            "packing": cfg.data.packing,
            "document_mask": cfg.data.document_mask,
            "prefetch": cfg.data.prefetch,
            "store_tokens": sum(source.num_tokens for source in data.stores),
            "import_tensorflow_seconds": round(imported - began, 3),
            "open_seconds": round(opened - imported, 3),
        }
        began = time.perf_counter()
        with _stream(cfg, data) as stream:
            next(stream)
            found["first_batch_seconds"] = round(time.perf_counter() - began, 4)
            found |= _rates(stream, batch_tokens, sum(data.num_rows) // cfg.train.global_batch,
                            seconds, repeats)  # fmt: skip
        if steps:
            say(f"training {WARM_STEPS + steps} steps on it")
            cfg = config.with_values(cfg, "bench loader", model={"vocab_size": data.vocab_size})
            found |= _waits(cfg, data, steps)
            alone = batch_tokens / found["tokens_per_sec_median"]
            found["data_share_unread_ahead"] = round(alone / found["step_seconds_median"], 6)
        return found


def write_store(folder: Path, vocab_size: int, tokens: int, doc_tokens: int) -> None:
    """Write a store of `tokens` random ids; lengths of documents are exponentially distributed."""
    rng, dtype = np.random.default_rng(0), token_dtype(vocab_size)
    common = {"tokenizer_digest": "0" * 64, "vocab_size": vocab_size, "eos_id": EOS}

    def documents(left: int) -> Iterator[Encoded]:
        number = 0
        while left:
            length = min(left, 1 + int(rng.exponential(doc_tokens - 1)))
            ids = rng.integers(1, vocab_size, length, dtype)
            yield Encoded(ids, 4 * length, "made up", number.to_bytes(DIGEST_BYTES, "big"))
            left, number = left - length, number + 1

    parts = [min(SHARD_TOKENS, tokens - at) for at in range(0, tokens, SHARD_TOKENS)]
    infos = [
        write_shard(folder / f"{number:06}.shard", documents(part), **common)
        for number, part in enumerate(parts)
    ]
    write_manifest(folder, infos, policies={}, report={}, **common)


def _stream(cfg: Config, data: Data) -> BatchStream:
    return batches(
        data,
        position=0,
        global_batch=cfg.train.global_batch,
        accum_steps=cfg.train.accum_steps,
        prefetch=cfg.data.prefetch,
    )


def _take(stream: BatchStream, count: int) -> float:
    """Return the seconds in which so many batches came."""
    began = time.perf_counter()
    for _ in range(count):
        next(stream)
    return time.perf_counter() - began


def _rates(
    stream: BatchStream, batch_tokens: int, epoch: int, seconds: float, repeats: int
) -> dict[str, Any]:
    """Return the rates of a first reading and of later ones; `epoch` is in batches.

    One batch has been taken before.
    """
    done, spent = 0, 0.0
    while done < max(1, epoch - 1) and spent < FIRST_SECONDS:
        count = min(32, max(1, epoch - 1) - done)
        spent, done = spent + _take(stream, count), done + count
    per_window = max(1, round(done * seconds / spent))
    per_window = max(1, round(per_window * seconds / _take(stream, per_window)))
    cpu = time.process_time()
    windows = [_take(stream, per_window) for _ in range(repeats)]
    cpu = time.process_time() - cpu
    total = batch_tokens * per_window
    return {
        "tokens_per_sec_first_reading": round(done * batch_tokens / spent, 1),
        **timing.rates(total, windows),
        "cpu_seconds_per_billion_tokens": round(cpu / (total * repeats) * 1e9, 3),
    }


def _waits(cfg: Config, data: Data, steps: int) -> dict[str, Any]:
    """Return the seconds of real training steps, and how much of them was waiting for data."""
    import jax

    from jaxgpt.model import params as parameters
    from jaxgpt.parallel import mesh as meshes
    from jaxgpt.parallel import sharding
    from jaxgpt.parallel.xla_options import compile_with
    from jaxgpt.training import optimizer, step
    from jaxgpt.training import state as states

    mesh = meshes.make_mesh(cfg.mesh)
    meshes.check_run(mesh, cfg)
    shapes = parameters.abstract(parameters.specs(cfg.model), cfg.train.param_dtype)
    tx = optimizer.build(cfg, cfg.train.num_steps, shapes)
    placed = states.state_shardings(mesh, cfg, tx)
    state = states.create(cfg, tx, mesh, placed)
    waits, ends, pending, update = [], [], None, None
    with _stream(cfg, data) as stream:
        for _ in range(WARM_STEPS + steps + 1):
            began = time.perf_counter()
            local = next(stream)
            waits.append(time.perf_counter() - began)
            batch = sharding.to_global(mesh, local)
            if update is None:
                lowered = step.make_train_step(cfg, tx, mesh, placed).lower(state, batch)
                update = compile_with(lowered, cfg.train.xla_options)
            state, metrics = update(state, batch)
            if pending is not None:
                pending.block_until_ready()
                ends.append(time.perf_counter())
            pending = metrics["loss_sum"]
    jax.block_until_ready(state)
    seconds = np.diff(ends[WARM_STEPS - 1 :]).tolist()
    waited = waits[WARM_STEPS + 1 : WARM_STEPS + 1 + len(seconds)]
    return {
        "step_seconds_median": statistics.median(seconds),
        "data_wait_seconds_median": statistics.median(waited),
        "data_wait_share": round(sum(waited) / sum(seconds), 6),
    }
