"""The stream of batches: the same at every position whatever is asked of it, and in O(1)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from stores import random_documents, stream_of, write_store

from jaxgpt.config import DataConfig
from jaxgpt.data import blocks, order
from jaxgpt.data.packing import Batch
from jaxgpt.data.pipeline import batches, batches_of_spans, eval_batches, sample_rows
from jaxgpt.data.store import Store, open_store
from jaxgpt.data.stream import Data, epochs, locate, open_data
from jaxgpt.errors import ConfigError, DataError, StorageError
from jaxgpt.ramp import Span

T = 16
SHARDS = [random_documents([7, 30, 1, 55, 12, 40], seed) for seed in range(3)]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    write_store(path / "store/train", SHARDS)
    write_store(path / "other/train", [random_documents([25, 60], 9)])
    return path


def opened(root: Path, **changes) -> Data:
    options = {"store": str(root / "store")} | changes
    seed = options.pop("seed", 0)
    return open_data(DataConfig(**options), seq_len=T, seed=seed)


def stacked(parts: list[Batch], axis: int = 0) -> Batch:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis), *parts)


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


def assert_equal(a: Batch, b: Batch) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def stream(data: Data, position: int, count: int, **options) -> Batch:
    """Return samples position.. of `batches` as one Batch [count, T]."""
    size = options["global_batch"]
    with batches(data, position=position, num_batches=count // size, **options) as source:
        parts = [jax.tree.map(lambda leaf: leaf.reshape(-1, T), batch) for batch in source]
    return stacked(parts)


@pytest.mark.parametrize("accum_steps, processes", [*itertools.product((1, 2), (1, 2, 4))])
@pytest.mark.parametrize("global_batch", [8, 16])
def test_the_stream_is_the_same_for_any_batch_accumulation_and_process_count(
    root, global_batch, accum_steps, processes
):
    data = opened(root, document_mask=True)
    right = sample_rows(data, np.arange(48))
    micro = global_batch // accum_steps
    share = micro // processes
    parts = []
    for process in range(processes):
        rows = slice(process * share, (process + 1) * share) if processes > 1 else None
        with batches(
            data,
            position=0,
            global_batch=global_batch,
            accum_steps=accum_steps,
            rows=rows,
            num_batches=48 // global_batch,
            prefetch=1 + process,
        ) as source:
            got = list(source)
        assert got[0].tokens.shape == (accum_steps, share, T)
        parts.append(stacked(got))  # [steps * A, B / A / processes, T]
    assert_equal(jax.tree.map(lambda leaf: leaf.reshape(-1, T), stacked(parts, axis=1)), right)


@pytest.mark.parametrize("position, prefetch", [(0, 0), (1, 4), (4, 1), (13, 4), (40, 16)])
def test_starting_at_any_position_goes_on_with_the_same_stream(root, position, prefetch):
    data = opened(root)
    got = stream(data, position, 12, global_batch=4, prefetch=prefetch)
    assert_equal(got, sample_rows(data, np.arange(position, position + 12)))


def test_every_position_of_two_epochs_starts_the_same_stream(root):
    data = opened(root, document_mask=True)
    (rows,) = data.num_rows
    whole = sample_rows(data, np.arange(2 * rows + 7))
    for position in range(2 * rows + 1):  # inside, at and across the ends of epochs
        with batches(data, position=position, global_batch=6, num_batches=1) as source:
            got = jax.tree.map(lambda leaf: leaf[0], next(source))
        assert_equal(got, rows_of(whole, position, position + 6))


def test_hosts_with_unequal_shares_read_the_same_batch(root):
    data = opened(root, document_mask=True)
    parts = [
        stream(data, 5, 8, global_batch=8, rows=rows)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 8))
    ]
    assert_equal(stacked(parts), sample_rows(data, np.arange(5, 13)))


@pytest.mark.parametrize("packing", ["concat", "best_fit", "best_fit_whole"])
def test_processes_whose_documents_differ_in_length_have_batches_of_one_shape(tmp_path, packing):
    # Whole in rows of 16, the first 5 ids leave padding that parts of the 30 leave elsewhere.
    write_store(tmp_path / "store/train", [random_documents([5, 30] * 5), random_documents([5])])
    data = opened(tmp_path, packing=packing, document_mask=True)
    parts = [stream(data, 0, 6, global_batch=2, rows=slice(i, i + 1)) for i in range(2)]
    assert {leaf.shape for part in parts for leaf in jax.tree.leaves(part)} == {(3, T)}
    assert packing == "concat" or (parts[0].weights.sum(1) != parts[1].weights.sum(1)).any()
    joined = jax.tree.map(lambda *leaves: np.stack(leaves, 1).reshape(-1, T), *parts)
    assert_equal(joined, sample_rows(data, np.arange(6)))


def test_the_batch_after_a_resume_is_the_next_unseen_one(root):
    data = opened(root)
    unbroken = stream(data, 0, 40, global_batch=4).tokens[:, :3].tolist()
    before = stream(data, 0, 20, global_batch=4).tokens[:, :3].tolist()
    after = stream(opened(root), 20, 20, global_batch=4).tokens[:, :3].tolist()
    assert before + after == unbroken


def test_a_batch_size_changed_on_resume_neither_skips_nor_repeats(root):
    data = opened(root)
    parts = [
        stream(data, 0, 12, global_batch=4),
        stream(data, 12, 10, global_batch=5),
        stream(data, 22, 14, global_batch=7),
    ]
    assert_equal(stacked(parts), sample_rows(data, np.arange(36)))


SPANS = (Span(2, 0, 5, 2), Span(6, 2, 9, 3), Span(4, 5, 27, 2))


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_batches_that_grow_neither_skip_nor_repeat_a_row(root, micro_batch):
    data = opened(root, document_mask=True)
    with contextlib.closing(batches_of_spans(data, SPANS, micro_batch=micro_batch)) as source:
        got = list(source)
    sizes = [2, 2, 6, 6, 6, 4, 4]
    assert [batch.tokens.shape for batch in got] == [
        (size // (micro_batch or size), micro_batch or size, T) for size in sizes
    ]
    rows = stacked([jax.tree.map(lambda leaf: leaf.reshape(-1, T), batch) for batch in got])
    assert_equal(rows, sample_rows(data, np.arange(5, 35)))


def test_processes_share_the_rows_of_batches_that_grow(root):
    data = opened(root)
    halves = [lambda rows: slice(0, rows // 2), lambda rows: slice(rows // 2, rows)]
    parts = [
        [batch.tokens[0] for batch in batches_of_spans(data, SPANS, rows=half)] for half in halves
    ]
    whole = [batch.tokens[0] for batch in batches_of_spans(data, SPANS)]
    for left, right, both in zip(*parts, whole, strict=True):
        np.testing.assert_array_equal(np.concatenate([left, right]), both)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_batches_that_grow_are_given_up_at_any_point(root, taken):
    before = {thread for thread in threading.enumerate()}
    source = batches_of_spans(opened(root), SPANS)
    for _ in range(taken):
        next(source)
    source.close()
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in left if thread.name.startswith("batch-")]


def test_every_epoch_holds_every_row_once_and_batches_straddle_its_end(root):
    data = opened(root)
    (rows,) = data.num_rows
    in_order = stacked(
        [
            jax.tree.map(lambda leaf: leaf[0], batch)
            for batch in eval_batches(data.stores[0], seq_len=T, batch=1, document_mask=False)
        ]
    )
    right = sorted(in_order.targets.tolist())
    assert rows % 4  # the last batch of an epoch takes rows of the next
    got = stream(data, 0, 4 * rows, global_batch=4).targets.tolist()
    for e in range(4):
        assert sorted(got[e * rows : (e + 1) * rows]) == right


def test_thirteen_rows_in_batches_of_four_lose_none(tmp_path):
    write_store(tmp_path, [random_documents([13 * T - 1])])
    data = open_data(DataConfig(store=str(tmp_path)), seq_len=T, seed=0)
    assert data.num_rows == (13,)
    _, epoch, row = locate(data, np.arange(52))
    assert np.bincount(row, minlength=13).tolist() == [4] * 13  # 13 batches of 4 are 4 epochs
    assert epoch.tolist() == [p // 13 for p in range(52)]
    assert sorted(row[:13]) == list(range(13))  # 3 batches and 1 row; the 3 others are epoch 1


def test_three_shards_of_two_documents_last_for_fifty_steps_of_changing_order(tmp_path):
    write_store(tmp_path, [random_documents([25, 40], seed) for seed in range(3)])
    data = open_data(DataConfig(store=str(tmp_path)), seq_len=T, seed=0)
    (rows,) = data.num_rows
    with batches(data, position=0, global_batch=4, num_batches=50) as source:
        got = np.concatenate([batch.targets[0] for batch in source])
    starts = range(0, 200 - rows, rows)
    passes = [tuple(map(tuple, got[p : p + rows].tolist())) for p in starts]
    assert len(passes) >= 5
    assert len(set(passes)) == len(passes)
    assert len({tuple(sorted(one)) for one in passes}) == 1
    assert epochs(data, 200) == {str(tmp_path): 200 / rows}
    again = open_data(DataConfig(store=str(tmp_path)), seq_len=T, seed=0)
    np.testing.assert_array_equal(stream(again, 0, 200, global_batch=4).targets, got)
    other = open_data(DataConfig(store=str(tmp_path)), seq_len=T, seed=1)
    assert (stream(other, 0, 200, global_batch=4).targets != got).any()


@pytest.mark.parametrize("position", [2**33 + 7, 2**40 + 3])
def test_a_far_position_is_exact_and_fast(root, position):
    data = opened(root)
    stream(data, 0, 4, global_batch=4)  # TensorFlow is loaded
    times = []
    for _ in range(3):  # the best of three: other programs may run beside this one
        start = time.monotonic()
        with batches(data, position=position, global_batch=4) as source:
            first = next(source)
            times.append(time.monotonic() - start)
    assert min(times) < 1
    n = data.num_rows[0]
    index = np.arange(position, position + 4)
    keys = [order.epoch_keys(0, data.stores[0].digest, p // n) for p in index.tolist()]
    rows = order.permute(np.stack(keys), n, index % n)
    flat = stream_of(SHARDS)
    right = [flat[r * T : (r + 1) * T] for r in rows.tolist()]
    got = [row[: len(want)].tolist() for row, want in zip(first.tokens[0], right, strict=True)]
    assert got == right


@pytest.mark.parametrize("weights, counts", [((0.999, 0.001), (999, 1)), ((0.7, 0.3), (700, 300))])
def test_a_mixture_draws_exact_shares_and_the_small_source_repeats(tmp_path, weights, counts):
    write_store(tmp_path / "a/train", [random_documents([20] * 1000, 1)])
    write_store(tmp_path / "b/train", [random_documents([20] * 5, 2)])
    names = (str(tmp_path / "a"), str(tmp_path / "b"))
    data = open_data(DataConfig(store=dict(zip(names, weights, strict=True))), seq_len=T, seed=0)
    rows = {n: r for n, r in zip(data.names, data.num_rows, strict=True)}
    assert rows == {names[0]: -(-21000 // T), names[1]: -(-105 // T)}
    source, epoch, row = locate(data, np.arange(1000))
    drawn = dict(zip(data.names, np.bincount(source).tolist(), strict=True))
    assert drawn == dict(zip(names, counts, strict=True))
    passes = epochs(data, 1000)
    assert passes == {name: drawn[name] / rows[name] for name in names}
    small = source == data.names.index(names[1])
    assert epoch[small].tolist() == [visit // 7 for visit in range(counts[1])]
    half = locate(data, np.arange(500, 1000))
    np.testing.assert_array_equal(np.stack(half), np.stack((source, epoch, row))[:, 500:])
    whole = stream(data, 0, 1000, global_batch=100)
    resumed = stream(data, 500, 500, global_batch=50)
    assert_equal(resumed, jax.tree.map(lambda leaf: leaf[500:], whole))


def test_the_stream_depends_on_contents_and_not_on_names_places_or_table_order(root, tmp_path):
    weights = {str(root / "store"): 3.0, str(root / "other"): 1.0}
    data = opened(root, store=weights)
    shutil.copytree(root / "store", tmp_path / "zzz")
    shutil.copytree(root / "other", tmp_path / "aaa")
    moved = opened(root, store={str(tmp_path / "aaa"): 0.25, str(tmp_path / "zzz"): 0.75})
    assert moved.digest == data.digest
    assert_equal(sample_rows(moved, np.arange(60)), sample_rows(data, np.arange(60)))


def test_the_digest_changes_with_all_that_the_stream_depends_on(root):
    both = {str(root / "store"): 1.0, str(root / "other"): 1.0}
    data = [
        opened(root),
        opened(root, seed=1),
        opened(root, document_mask=True),
        opened(root, store=str(root / "other")),
        opened(root, store=both),
        opened(root, store=both | {str(root / "other"): 2.0}),
        open_data(DataConfig(store=str(root / "store")), seq_len=8, seed=0),
    ]
    assert len({each.digest for each in data}) == len(data)
    assert opened(root, prefetch=9).digest == data[0].digest


def test_more_rows_than_an_epoch_in_a_batch_wrap_with_a_warning(tmp_path, caplog):
    write_store(tmp_path, [random_documents([3 * T - 1])])
    data = open_data(DataConfig(store=str(tmp_path)), seq_len=T, seed=0)
    with caplog.at_level(logging.WARNING):
        got = stream(data, 0, 8, global_batch=8)
    assert "global_batch=8 is more than the 3 rows of one epoch" in caplog.text
    assert_equal(got, sample_rows(data, np.arange(8)))


def refused(error: type[Exception], cfg: DataConfig, seq_len: int = T) -> str:
    with pytest.raises(error) as caught:
        open_data(cfg, seq_len=seq_len, seed=0)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("seq_len", [0, -1, 2**31])
def test_a_row_length_out_of_range_is_refused(root, seq_len):
    cfg = DataConfig(store=str(root / "store"))
    assert f"model.seq_len: {seq_len}" in refused(ConfigError, cfg, seq_len)


def test_a_row_longer_than_all_data_is_refused_with_the_numbers(tmp_path):
    write_store(tmp_path, [random_documents([5, 4])])
    message = refused(DataError, DataConfig(store=str(tmp_path)), 12)
    assert "has 11 tokens (2 documents)" in message and "seq_len=12" in message
    assert open_data(DataConfig(store=str(tmp_path)), seq_len=11, seed=0).num_rows == (1,)


def test_stores_of_two_tokenizers_or_vocabularies_are_refused(root, tmp_path):
    write_store(tmp_path / "b", SHARDS, tokenizer="tokenizer-b")
    write_store(tmp_path / "c", SHARDS, vocab_size=70_000)
    for name, field in (("b", "tokenizer_digest"), ("c", "vocab_size")):
        both = {str(root / "store"): 1.0, str(tmp_path / name): 1.0}
        message = refused(DataError, DataConfig(store=both))
        assert field in message and str(tmp_path / name) in message


def test_a_store_without_documents_is_refused(tmp_path):
    write_store(tmp_path, [[]])
    assert "holds no documents" in refused(DataError, DataConfig(store=str(tmp_path)))


def test_the_same_data_twice_is_refused(root, tmp_path):
    shutil.copytree(root / "store", tmp_path / "copy")
    both = {str(root / "store"): 1.0, str(tmp_path / "copy"): 1.0}
    assert "hold the same data" in refused(ConfigError, DataConfig(store=both))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 1e-9])
def test_a_weight_that_can_never_be_drawn_is_refused(root, weight):
    both = {str(root / "store"): 1.0, str(root / "other"): weight}
    assert "other" in refused(ConfigError, DataConfig(store=both))


@pytest.mark.parametrize("store", ["", {}])
def test_no_store_is_refused(store):
    assert refused(ConfigError, DataConfig(store=store)).startswith("data.store")


def test_damage_found_while_reading_is_raised_with_type_shard_block_and_position(root, tmp_path):
    shutil.copytree(root / "store", tmp_path / "store")
    data = opened(tmp_path)
    path = tmp_path / "store/train/00001.shard"
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\x3e\x3e\x3e\x3e")
    good = 0
    with batches(data, position=8, global_batch=2) as source:
        with pytest.raises(DataError) as caught:
            for _ in source:
                good += 1
        with pytest.raises(DataError):
            next(source)
    message = str(caught.value)
    assert f"{path}: block 0" in message
    assert f"(batch at position {8 + 2 * good})" in message


@pytest.mark.parametrize("packing, opened_before", [("concat", 1), ("concat", 0), ("best_fit", 0)])
def test_a_file_that_cannot_be_read_for_now_is_named_while_it_is_waited_for(
    root, monkeypatch, packing, opened_before
):
    data = opened(root, packing=packing)
    reached, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def stuck(*args):
        reached.set()
        go_on.wait()
        return preadv(*args)

    sample_rows(data, np.arange(4 * opened_before))  # all shards are open
    monkeypatch.setattr(os, "preadv", stuck)
    with batches(data, position=0, global_batch=1, num_batches=1) as source:
        reached.wait()
        words = blocks.reading()
        go_on.set()
        next(source)
    name = "0000" if packing == "concat" else "packing-"
    assert words.startswith(f"reading {root}/store/train/{name}")
    assert blocks.reading() == "reading no file"


def test_a_read_that_never_ends_is_given_up_in_time_with_the_shard_named(root):
    code = f"""
import os, time
from jaxgpt.runtime.watchdog import Watchdog
from jaxgpt.config import DataConfig
from jaxgpt.data import blocks
from jaxgpt.data.pipeline import batches
from jaxgpt.data.stream import open_data
data = open_data(DataConfig(store={str(root / "store")!r}), seq_len={T}, seed=0)
os.preadv = lambda *_: time.sleep(600)
with Watchdog(tick=0.05) as dog, batches(data, position=0, global_batch=2) as source:
    with dog.phase("data", 0.5, blocks.reading):
        next(source)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 76, done.stderr
    assert f"phase data (reading {root}/store/train/0000" in last and "limit 0.5 s" in last


def test_a_disk_that_fails_in_the_middle_ends_the_stream_with_shard_and_position(root, monkeypatch):
    monkeypatch.setattr(blocks, "RETRY_AFTER", (0, 0, 0))
    data = opened(root)
    right = sample_rows(data, np.arange(60))  # all blocks are checked: what follows are rows
    preadv, reads = os.preadv, itertools.count()

    def failing(*args):
        if next(reads) >= 21:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", failing)
    got = []
    with batches(data, position=4, global_batch=2) as source:
        with pytest.raises(StorageError) as caught:
            got.extend(source)
        with pytest.raises(StorageError):  # no batch of zeros, and none after a gap
            next(source)
    assert 0 < len(got) <= 10
    stop = 4 + 2 * len(got)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, T), stacked(got))
    assert_equal(rows, rows_of(right, 4, stop))
    assert f"{root}/store/train/0000" in str(caught.value)
    assert f"(batch at position {stop})" in str(caught.value)


def test_two_thousand_shards_are_read_with_256_file_descriptors(tmp_path):
    shards = random_documents([1 + n % 9 for n in range(2000)], 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # 4,000 of them take seconds
        write_store(tmp_path / "train", [[document] for document in shards])
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from jaxgpt.config import DataConfig
from jaxgpt.data.pipeline import batches
from jaxgpt.data.stream import open_data
data = open_data(DataConfig(store={str(tmp_path)!r}), seq_len={T}, seed=0)
with batches(data, position=0, global_batch=data.num_rows[0], num_batches=1) as source:
    print(int(next(source).targets.astype("int64").sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(stream_of([shards])[1:])


def test_without_the_document_mask_no_boundary_is_looked_up(root, monkeypatch):
    def never(*_):
        raise AssertionError("looked for documents")

    monkeypatch.setattr(Store, "opens", never)
    batch = stream(opened(root), 0, 8, global_batch=4)
    assert batch.segment_ids is None and batch.positions is None
    with pytest.raises(AssertionError, match="looked for documents"):
        stream(opened(root, document_mask=True), 0, 8, global_batch=4)


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
@pytest.mark.parametrize("document_mask", [False, True])
def test_evaluation_sees_each_row_once_in_order_for_any_batch(root, batch, document_mask):
    store = open_store(root / "store")
    options = {"seq_len": T, "document_mask": document_mask}
    got = list(eval_batches(store, batch=batch, **options))
    assert all(each.tokens.shape == (1, batch, T) for each in got)
    whole = jax.tree.map(lambda leaf: leaf[0], stacked(got, axis=1))
    assert whole.targets[whole.weights == 1].tolist() == stream_of(SHARDS)[1:]
    rows = -(-store.stream_len // T)
    assert (whole.weights[rows:] == 0).all()
    single = stacked(list(eval_batches(store, batch=1, **options)))
    assert_equal(jax.tree.map(lambda leaf: leaf[:rows], whole), single_rows(single))


def single_rows(batch: Batch) -> Batch:
    return jax.tree.map(lambda leaf: leaf[:, 0], batch)


def test_evaluation_of_the_first_rows_is_the_beginning_of_the_whole(root):
    store = open_store(root / "store")
    options = {"seq_len": T, "document_mask": True}
    whole = stacked(list(eval_batches(store, batch=1, **options)))
    first = list(eval_batches(store, batch=3, max_rows=4, **options))
    assert [batch.weights[0].any(axis=1).tolist() for batch in first] == [
        [True] * 3,
        [True, False, False],
    ]
    rows = jax.tree.map(lambda leaf: leaf[0, :4], stacked(first, axis=1))
    assert_equal(rows, single_rows(jax.tree.map(lambda leaf: leaf[:4], whole)))


def test_processes_share_the_rows_of_an_evaluation_batch(root):
    store = open_store(root / "store")
    options = {"seq_len": T, "document_mask": False, "batch": 4}
    whole = stacked(list(eval_batches(store, **options)))
    halves = [
        stacked(list(eval_batches(store, rows=slice(first, first + 2), **options)))
        for first in (0, 2)
    ]
    assert_equal(stacked(halves, axis=1), whole)
