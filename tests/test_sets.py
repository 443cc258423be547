"""What a run is evaluated on by default: the held-out part of its stores, as it trains on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from stores import COMMON, random_documents, write_store

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.data.history import recall, record
from jaxgpt.data.store import open_store, write_manifest
from jaxgpt.data.stream import open_data
from jaxgpt.evaluation.sets import eval_stores


def configured(*stores: Path) -> Config:
    table = ", ".join(f'"{store}" = 1' for store in stores)
    return config.load(None, [f"data.store={{{table}}}", "model.seq_len=8", "model.num_heads=2"])


def make(folder: Path, seed: int, held_out: int = 2) -> Path:
    """Make a store with 9 documents to train on and `held_out` others."""
    write_store(folder / "train", [random_documents([20] * 9, seed)])
    write_store(folder / "valid", [random_documents([10] * held_out, seed + 100)])
    return folder


def grow(folder: Path, seed: int) -> None:
    """Add a document to both splits, as the second generation."""
    for split in ("train", "valid"):
        held = open_store(folder / split).manifest["shards"]
        more = folder.with_name("more")
        write_store(more, [random_documents([12], seed)])
        entry = open_store(more).manifest["shards"][0] | {"name": "00001.shard"}
        (more / "00000.shard").rename(folder / split / "00001.shard")
        write_manifest(
            folder / split, [*held, entry], policies={}, report={}, generation=2, **COMMON
        )


@pytest.mark.parametrize(("may_change", "documents"), [(False, 2), (True, 3)])
def test_a_run_is_evaluated_on_the_generation_that_it_goes_on_with(tmp_path, may_change, documents):
    cfg = configured(make(tmp_path / "a", 1))
    recorded = record(open_data(cfg.data, seq_len=8, seed=0))
    grow(tmp_path / "a", 7)
    history = recall(recorded, 4, may_change=may_change)
    assert [source.num_docs for source in eval_stores(cfg, history).values()] == [documents]
    assert [source.num_docs for source in eval_stores(cfg).values()] == [3]


def test_a_store_without_held_out_documents_is_left_out_and_said(tmp_path):
    said: list[str] = []
    both = configured(make(tmp_path / "a", 1), make(tmp_path / "b", 2, held_out=0))
    assert list(eval_stores(both, say=said.append)) == ["a"]
    assert len(said) == 1 and said[0].startswith(str(tmp_path / "b"))


def test_stores_in_folders_of_one_name_are_all_evaluated(tmp_path):
    first, second = make(tmp_path / "en/data", 1), make(tmp_path / "fr/data", 2, held_out=3)
    sets = eval_stores(configured(first, second, make(tmp_path / "code", 3, held_out=4)))
    assert {name: source.num_docs for name, source in sets.items()} == {
        str(first): 2,
        str(second): 3,
        "code": 4,
    }


def test_the_store_of_a_run_that_was_moved_is_found_in_its_folder(tmp_path):
    cfg = configured(make(tmp_path / "old/data", 1))
    (tmp_path / "old").rename(tmp_path / "new")
    (found,) = eval_stores(cfg, search=tmp_path / "new").values()
    assert found.directory == tmp_path / "new/data/valid"


def test_a_store_of_a_later_stage_is_evaluated_too(tmp_path):
    cfg = configured(make(tmp_path / "a", 1))
    later = make(tmp_path / "b", 2)
    data = dataclasses.replace(cfg.data, stages={"9": {str(later): 1.0}})
    assert list(eval_stores(dataclasses.replace(cfg, data=data))) == ["a", "b"]
