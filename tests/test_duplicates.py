"""Equal documents are found exactly, counted, and left out when that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, change, configure, make_models, stored_documents, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.corpus.duplicates import mark
from jaxgpt.corpus.prepare import prepare
from jaxgpt.data.store import open_store

# 60 documents, 25 of them equal to an earlier one: 20 in the other file, 5 in the same.
FIRST = TEXTS[:30]
SECOND = TEXTS[10:30] + TEXTS[30:35] + TEXTS[30:35]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cfg(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", FIRST)
    write_jsonl(tmp_path / "b.jsonl", SECOND)
    names = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    return configure(tmp_path, models, names, valid_share=0.3)


halves = st.integers(0, 3).map(lambda i: i * 2**62)  # so few that half-equal digests are common


@given(st.lists(st.lists(st.tuples(halves, halves), max_size=8), max_size=6))
def test_marks_are_those_of_a_set_of_all_earlier_digests(shards):
    expected, seen = [], set()
    for shard in shards:
        marks = []
        for digest in shard:
            marks.append(digest in seen)
            seen.add(digest)
        expected.append(marks)
    arrays = [np.array(shard, np.uint64).reshape(-1, 2) for shard in shards]
    found = mark(lambda: iter(arrays), sum(map(len, arrays)))
    assert [marks.tolist() for marks in found] == expected


def test_duplicates_are_counted_by_source_and_kept_by_default(cfg):
    report = prepare(cfg)
    assert report["documents"] == 60 and report["duplicates"] == 25
    assert [entry["duplicates"] for entry in report["sources"]] == [0, 25]
    assert report["train"]["documents"] + report["valid"]["documents"] == 60


def test_dedup_keeps_the_first_of_equal_documents_in_order(cfg):
    report = prepare(change(cfg, dedup=True))
    train, valid = stored_documents(cfg, "train"), stored_documents(cfg, "valid")
    unique = list(dict.fromkeys(FIRST + SECOND))
    assert sorted(train + valid) == sorted(unique) and len(unique) == 35
    assert train == [text for text in unique if text in set(train)]
    assert valid == [text for text in unique if text in set(valid)]
    assert (report["duplicates"], report["documents"]) == (25, 60)
    assert report["train"]["documents"] + report["valid"]["documents"] == 35
    open_store(cfg.data.store).verify()


def test_dedup_keeps_provenance_and_bytes_of_what_remains(cfg):
    prepare(change(cfg, dedup=True))
    store, texts = open_store(cfg.data.store), stored_documents(cfg, "train")
    for doc in (0, len(texts) // 2, len(texts) - 1):
        path, _, offset = store.provenance(doc).rpartition(":")
        line = Path(path).read_bytes()[int(offset) :].split(b"\n")[0]
        assert json.loads(line)["text"] == texts[doc]
    assert store.doc_bytes(0, len(texts)).tolist() == [len(text.encode()) for text in texts]


def test_dedup_leaves_no_file_of_what_was_there_before(cfg):
    prepare(change(cfg, dedup=True))
    for split in ("train", "valid"):
        store = open_store(cfg.data.store, split)
        listed = {shard["name"] for shard in store.manifest["shards"]}
        assert {path.name for path in store.directory.glob("*.shard*")} == listed
        assert all(shard["num_docs"] for shard in store.manifest["shards"])


def test_dedup_does_not_depend_on_who_works(cfg, tmp_path):
    one = prepare(change(cfg, dedup=True), workers=1)
    two = prepare(change(cfg, dedup=True, store=str(tmp_path / "two")), workers=2)
    assert one == two


def test_dedup_without_duplicates_is_the_same_data(cfg, tmp_path):
    cfg = change(cfg, sources=cfg.data.sources[:1])
    plain = prepare(cfg)
    unique = prepare(change(cfg, dedup=True, store=str(tmp_path / "unique")))
    assert plain["train"] == unique["train"] and plain["valid"] == unique["valid"]


def test_a_new_generation_drops_its_duplicates_of_older_documents(cfg, tmp_path):
    first = prepare(change(cfg, sources=cfg.data.sources[:1], dedup=True))
    old = open_store(cfg.data.store).manifest["shards"]
    report = prepare(change(cfg, dedup=True))
    assert (first["duplicates"], report["duplicates"]) == (0, 25)
    assert open_store(cfg.data.store).manifest["shards"][: len(old)] == old
    texts = stored_documents(cfg, "train") + stored_documents(cfg, "valid")
    assert sorted(texts) == sorted(set(FIRST + SECOND))


def test_the_same_text_with_other_white_space_is_no_duplicate(tmp_path, models):
    write_jsonl(tmp_path / "a.jsonl", ["a b", "a  b", "a b ", "a b\n", "a b"])
    cfg = configure(tmp_path, models, [tmp_path / "a.jsonl"], valid_share=0.0, dedup=True)
    assert prepare(cfg)["duplicates"] == 1
    assert stored_documents(cfg, "train") == ["a b", "a  b", "a b ", "a b\n"]
