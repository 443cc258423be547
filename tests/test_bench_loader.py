"""What `bench loader` reports: counts by arithmetic, and that batches were really read."""

from __future__ import annotations

import numpy as np
import pytest
from stores import random_documents, write_store

from jaxgpt.bench import loader, shapes
from jaxgpt.data.store import open_store
from jaxgpt.errors import DataError

SIZES = (
    "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "model.vocab_size=64",
    "model.seq_len=16", "train.global_batch=8",
)  # fmt: skip


def measured(*overrides: str, store: str | None = None, steps: int = 0) -> dict:
    cfg = shapes.load("small", "f32", [*SIZES, *overrides])
    options = {"tokens": 4000, "doc_tokens": 50, "seconds": 0.02, "repeats": 2}
    return loader.measure(cfg, store=store, steps=steps, say=lambda line: None, **options)


def test_a_store_that_is_made_up_has_the_ids_and_documents_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SHARD_TOKENS", 8192)
    loader.write_store(tmp_path, 64, 20_000, 50)
    store = open_store(tmp_path)
    store.verify()
    assert (store.num_tokens, store.num_shards, store.vocab_size) == (20_000, 3, 64)
    assert 40 < store.num_tokens / store.num_docs < 60
    counts = np.bincount(store.read(0, store.stream_len), minlength=64)
    assert counts[0] == store.num_docs and counts[1:].min() > 200  # of 317 on average


def test_the_counts_are_those_of_the_configuration():
    found = measured()
    assert (found["rows_per_batch"], found["seq_len"], found["tokens_per_batch"]) == (8, 16, 128)
    assert (found["store_tokens"], found["repeats"]) == (4000, 2)
    batches = found["tokens_per_sec_median"] * found["seconds_median"] / 128
    assert batches >= 1 and batches == pytest.approx(round(batches), rel=1e-3)
    for name in ("first_reading", "best"):
        assert found[f"tokens_per_sec_{name}"] > 0
    assert found["cpu_seconds_per_billion_tokens"] > 0 and found["first_batch_seconds"] > 0


def test_a_time_is_that_of_as_many_batches_as_are_taken():
    stream = iter(range(7))
    assert loader._take(stream, 5) > 0
    assert list(stream) == [5, 6]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_given_store_is_read_with_the_packing_of_the_configuration(tmp_path, packing):
    write_store(tmp_path, [random_documents([30, 45, 120, 60])])
    overrides = (f"data.packing={packing}", "data.document_mask=true")
    found = measured(*overrides, store=str(tmp_path))
    assert (found["store_tokens"], found["packing"], found["document_mask"]) == (255, packing, True)


def test_a_store_shorter_than_a_row_is_refused(tmp_path):
    write_store(tmp_path, [random_documents([5])])
    with pytest.raises(DataError, match="fewer than one row"):
        measured(store=str(tmp_path))


def test_real_steps_tell_how_much_of_them_was_waiting():
    found = measured(steps=3)
    wait, step = found["data_wait_seconds_median"], found["step_seconds_median"]
    assert 0 < wait < step and 0 < found["data_wait_share"] < 1
    alone = 128 / found["tokens_per_sec_median"] / step
    assert found["data_share_unread_ahead"] == pytest.approx(alone, abs=1e-6)
