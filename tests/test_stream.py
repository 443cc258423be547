"""What a position holds, and what a resumed run may change about it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from stores import COMMON, random_documents, write_store

from jaxgpt.config import DataConfig
from jaxgpt.data.history import History, recall, record
from jaxgpt.data.pipeline import batches, sample_rows
from jaxgpt.data.store import open_store, write_manifest
from jaxgpt.data.stream import Data, locate, open_data
from jaxgpt.errors import ConfigError, DataError

T = 16


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stream")
    for number, (name, count) in enumerate((("a", 12), ("b", 5), ("c", 8))):
        lengths = np.random.default_rng(number).integers(1, 50, count).tolist()
        write_store(path / name / "train", [random_documents(lengths, number)])
    return path


def opened(root: Path, store: object, history: History | None = None, **options) -> Data:
    names = {str(root / name): weight for name, weight in dict(store).items()}
    stages = {
        start: {str(root / name): weight for name, weight in table.items()}
        for start, table in options.pop("stages", {}).items()
    }
    seed = options.pop("seed", 0)
    cfg = DataConfig(store=names, stages=stages, **options)
    return open_data(cfg, seq_len=T, seed=seed, history=history)


def saved(data: Data, position: int, *, may_change: bool = False) -> History:
    """Return what comes out of a checkpoint made at a position."""
    return recall(json.loads(json.dumps(record(data))), position, may_change=may_change)


def visits(data: Data, start: int, stop: int) -> list[tuple[str, int, int]]:
    """Return (store, epoch, row) of each position."""
    source, epoch, row = locate(data, np.arange(start, stop))
    names = [Path(name).name for name in data.names]
    return [(names[s], int(e), int(r)) for s, e, r in zip(source, epoch, row, strict=True)]


def rows_of(data: Data, name: str) -> int:
    present = zip(data.names, data.sources, strict=True)
    return {Path(each).name: source.num_rows for each, source in present if source}[name]


AB = {"a": 0.5, "b": 0.5}


def test_a_stage_changes_the_shares_from_its_first_row_on(root):
    stages = {"40": {"a": 0.25, "b": 0.25, "c": 0.5}, "1_00": {"c": 1.0}}
    found = visits(opened(root, AB, stages=stages), 0, 120)
    assert Counter(name for name, _, _ in found[:40]) == {"a": 20, "b": 20}
    assert Counter(name for name, _, _ in found[40:100]) == {"a": 15, "b": 15, "c": 30}
    assert Counter(name for name, _, _ in found[100:]) == {"c": 20}


def test_counters_go_on_over_stages_so_that_an_epoch_has_every_row_once(root):
    data = opened(root, AB, stages={"33": {"a": 0.9, "b": 0.1}})
    found = visits(data, 0, 200)
    for name in AB:
        mine = [(epoch, row) for each, epoch, row in found if each == name]
        rows = rows_of(data, name)
        for epoch in range(len(mine) // rows):
            part = mine[epoch * rows : (epoch + 1) * rows]
            assert sorted(part) == [(epoch, row) for row in range(rows)]


def test_resuming_with_the_same_mixture_changes_nothing(root):
    data = opened(root, AB, stages={"90": {"b": 1.0}})
    again = opened(root, {"a": 3, "b": 3}, saved(data, 50), stages={"90": {"b": 7}})
    assert again.digest == data.digest
    assert visits(again, 0, 150) == visits(data, 0, 150)


def test_another_mixture_is_refused_with_both_and_the_way_to_make_the_change(root):
    data = opened(root, AB)
    with pytest.raises(ConfigError) as caught:
        opened(root, {"a": 0.9, "b": 0.1}, saved(data, 50))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "from row 50 on" in message and 'allow_change=["mixture"]' in message
    assert "0.9" in message and "0.5" in message and str(root / "a") in message


@pytest.mark.parametrize(
    "changed", [{"a": 0.9, "b": 0.1}, {"a": 0.5, "b": 0.25, "c": 0.25}, {"b": 1.0}, {"c": 1.0}]
)
def test_an_allowed_change_begins_at_the_position_and_keeps_the_counters(root, changed):
    data = opened(root, AB)
    later = opened(root, changed, saved(data, 50, may_change=True))
    if set(AB) <= set(changed):
        assert visits(later, 0, 50) == visits(data, 0, 50)
    found = visits(data, 0, 50) + visits(later, 50, 250)
    total = sum(changed.values())
    shares = Counter(name for name, _, _ in found[50:])
    assert shares == {name: 200 * weight / total for name, weight in changed.items()}
    for name in {name for name, _, _ in found}:
        mine = [(epoch, row) for each, epoch, row in found if each == name]
        rows = rows_of(later if name in changed else data, name)
        for epoch in range(len(mine) // rows):
            part = mine[epoch * rows : (epoch + 1) * rows]
            assert sorted(part) == [(epoch, row) for row in range(rows)]


def test_a_changed_run_is_resumed_with_its_whole_history(root):
    data = opened(root, AB)
    changed = opened(root, {"a": 0.9, "b": 0.1}, saved(data, 50, may_change=True))
    again = opened(root, {"a": 0.9, "b": 0.1}, saved(changed, 70))
    assert again.digest == changed.digest
    assert visits(again, 0, 200) == visits(changed, 0, 200)
    fresh = opened(root, {"a": 0.9, "b": 0.1})
    assert visits(fresh, 50, 100) != visits(changed, 50, 100)


def test_a_damaged_record_of_the_mixture_is_refused():
    whole = {"plan": [[0, {"a": 1.0}]], "layout": "x", "since": 0}
    assert recall(whole, 4) == History(((0, {"a": 1.0}),), 4, layout="x")
    plans = [[], [[3, {}]], [[0, 1.0]], [[0, {"a": "much"}]]]
    for damaged in (None, [], {}, whole | {"since": "x"}, *(whole | {"plan": p} for p in plans)):
        with pytest.raises(DataError, match="mixture recorded in the checkpoint is damaged"):
            recall(damaged, 0)


@pytest.mark.parametrize("change", [{"packing": "best_fit"}, {"order": "block"}, {"seed": 1}])
def test_it_is_known_since_when_rows_have_been_laid_out_as_they_are(root, change):
    data = opened(root, AB)
    assert (data.since, opened(root, AB, saved(data, 30)).since) == (0, 0)
    later = opened(root, AB, saved(data, 50), **change)
    assert later.since == 50
    assert opened(root, AB, saved(later, 70), **change).since == 50


def test_the_run_stops_where_a_store_has_run_out(root):
    data = opened(root, AB, max_epochs=1.0)
    rows = rows_of(data, "b")
    assert rows < rows_of(data, "a")
    found = visits(data, 0, data.end)
    assert sorted(row for name, _, row in found if name == "b") == list(range(rows))
    assert all(epoch == 0 for _, epoch, _ in found)
    with batches(data, position=0, global_batch=4) as source:
        assert len(list(source)) == data.end // 4


def test_the_others_go_on_where_a_store_has_run_out(root):
    data = opened(root, AB, max_epochs=1.0, run_out="drop")
    found = visits(data, 0, data.end)
    names = ["a", "b"]
    assert sorted((name, row) for name, _, row in found) == [
        (name, row) for name in names for row in range(rows_of(data, name))
    ]


def test_where_a_store_runs_out_is_said(root):
    said: list[str] = []
    table = {str(root / name): weight for name, weight in AB.items()}
    cfg = DataConfig(store=table, max_epochs=1.0, run_out="drop")
    data = open_data(cfg, seq_len=T, seed=0, say=said.append)
    last = max(p for p, (name, _, _) in enumerate(visits(data, 0, data.end)) if name == "b")
    assert said == [f"{root / 'b'}: runs out at row {last + 1}; the others go on (data.run_out)"]


def test_a_run_that_dropped_a_store_is_resumed_as_it_went(root):
    data = opened(root, AB, max_epochs=1.0, run_out="drop")
    at = data.end - 3
    again = opened(root, AB, saved(data, at), max_epochs=1.0, run_out="drop")
    assert visits(again, 0, data.end) == visits(data, 0, data.end)
    with pytest.raises(ConfigError, match="allow_change"):  # would have drawn otherwise before
        opened(root, AB, saved(data, at), max_epochs=2.0, run_out="drop")
    raised = opened(root, AB, saved(data, at, may_change=True), max_epochs=2.0, run_out="drop")
    assert visits(raised, 0, at) == visits(data, 0, at)
    assert raised.end > data.end


def test_more_epochs_may_follow_a_run_that_stopped(root):
    data = opened(root, AB, max_epochs=1.0)
    more = opened(root, AB, saved(data, data.end), max_epochs=2.0)
    assert visits(more, 0, data.end) == visits(data, 0, data.end)
    assert more.end > data.end


def test_with_fewer_epochs_than_were_drawn_the_data_ends_at_once(root):
    data = opened(root, AB, max_epochs=3.0)
    at = data.end - 2
    later = opened(root, AB, saved(data, at, may_change=True), max_epochs=1.0)
    assert visits(later, 0, at) == visits(data, 0, at)
    assert later.end == at + (visits(data, at, at + 1)[0][0] == "a")  # b has run out
    assert rows_of(data, "b") < rows_of(data, "a")


def test_a_run_keeps_the_generation_it_began_with(root, tmp_path):
    shutil.copytree(root / "a", tmp_path / "a")
    data = opened(tmp_path, {"a": 1.0})
    grow(tmp_path / "a/train", tmp_path / "more")
    said = []
    cfg = DataConfig(store={str(tmp_path / "a"): 1.0})
    again = open_data(cfg, seq_len=T, seed=0, history=saved(data, 20), say=said.append)
    assert again.digest == data.digest and "has been added to" in said[0]
    newer = open_data(cfg, seq_len=T, seed=0, history=saved(data, 20, may_change=True))
    stores = dict(zip(newer.names, newer.sources, strict=True))
    assert stores[str(tmp_path / "a")].store.num_docs == data.stores[0].num_docs + 2
    assert open_data(cfg, seq_len=T, seed=0).stores[0].num_docs == data.stores[0].num_docs + 2


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_what_was_drawn_from_an_earlier_generation_can_still_be_looked_up(root, tmp_path, packing):
    shutil.copytree(root / "a", tmp_path / "a")
    data = opened(tmp_path, {"a": 1.0}, packing=packing)
    grow(tmp_path / "a/train", tmp_path / "more")
    history = saved(data, 20, may_change=True)
    newer = opened(tmp_path, {"a": 1.0}, history, packing=packing, max_epochs=50.0)
    assert visits(newer, 0, 20) == [("a@1", epoch, row) for _, epoch, row in visits(data, 0, 20)]
    assert {name for name, _, _ in visits(newer, 20, 40)} == {"a"}
    assert newer.mixture.end == 20 + 50 * rows_of(newer, "a")  # the new one has not been drawn yet


def grow(directory: Path, more: Path) -> None:
    """Add two documents to a store, as its second generation; `more` is a folder to work in."""
    first = open_store(directory).manifest["shards"]
    write_store(more, [random_documents([9, 20], 7)])
    (more / "00000.shard").rename(directory / "00001.shard")
    entries = [*first, open_store_entries(more)[0] | {"name": "00001.shard"}]
    write_manifest(directory, entries, policies={}, report={}, generation=2, **COMMON)


def open_store_entries(directory: Path) -> list[dict]:
    return json.loads((directory / "manifest.json").read_text())["shards"]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "best_fit_whole"])
@pytest.mark.parametrize("order", ["global", "block", "sequential"])
def test_every_order_and_packing_has_every_row_once_per_epoch(root, order, packing):
    data = opened(root, {"a": 1.0}, order=order, packing=packing)
    (rows,) = data.num_rows
    found = visits(data, 0, 3 * rows)
    passes = [[row for _, e, row in found if e == epoch] for epoch in range(3)]
    assert all(sorted(one) == list(range(rows)) for one in passes)
    same = passes[0] == list(range(rows)) and passes[0] == passes[1]
    assert same == (order == "sequential")


@pytest.mark.parametrize("packing", ["best_fit", "best_fit_whole"])
def test_best_fit_rows_hold_whole_documents_and_their_targets(root, packing):
    data = opened(root, {"c": 1.0}, packing=packing, document_mask=True)
    (rows,) = data.num_rows
    batch = sample_rows(data, np.arange(rows))
    store = data.stores[0]
    documents = []
    for doc in range(store.num_docs):
        start, stop = store.document_span(doc)
        documents.append(store.read(start, stop + 1).tolist())
    if packing == "best_fit_whole":
        pieces = [(doc[:-1][:T], doc[1:][:T]) for doc in documents]
    else:
        pieces = [
            (doc[at : min(at + T, len(doc) - 1)], doc[at + 1 : at + 1 + T])
            for doc in documents
            for at in range(0, len(doc) - 1, T)
        ]
    found = []
    for row in range(rows):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            where = batch.segment_ids[row] == segment
            found.append((batch.tokens[row, where].tolist(), batch.targets[row, where].tolist()))
            assert batch.positions[row, where].tolist() == list(range(where.sum()))
            assert (batch.weights[row, where] == 1).all()
    assert sorted(found) == sorted(pieces)
    padding = batch.segment_ids == 0
    for leaf in (batch.tokens, batch.targets, batch.weights, batch.positions):
        assert (leaf[padding] == 0).all()


def test_a_packing_index_is_built_once_and_said(root, tmp_path):
    shutil.copytree(root / "a", tmp_path / "a", ignore=shutil.ignore_patterns("*.index"))
    cfg = DataConfig(store=str(tmp_path / "a"), packing="best_fit")
    said = []
    first = open_data(cfg, seq_len=T, seed=0, say=said.append)
    assert "packing 12 documents into rows of 16" in said[0] and "% padding" in said[1]
    said.clear()
    second = open_data(cfg, seq_len=T, seed=0, say=said.append)
    assert len(said) == 1 and second.digest == first.digest


def test_a_row_longer_than_all_data_is_refused_for_every_packing(root):
    for packing in ("concat", "best_fit", "best_fit_whole"):
        cfg = DataConfig(store=str(root / "b"), packing=packing)
        with pytest.raises(DataError, match="fewer than one row of model.seq_len=4096"):
            open_data(cfg, seq_len=4096, seed=0)
