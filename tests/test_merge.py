"""Shares of a store, prepared apart and merged, are byte for byte the store of one run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import TEXTS, change, configure, make_models, tree, write_jsonl

from jaxgpt.config import TokenizerConfig
from jaxgpt.corpus import journal
from jaxgpt.corpus.journal import Share
from jaxgpt.corpus.merge import merge
from jaxgpt.corpus.prepare import prepare
from jaxgpt.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cfg(tmp_path, models):
    """A configuration of several partitions, in which some documents come twice."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:60] + TEXTS[50:70])
    options = {"partition_bytes": 3000, "dedup": True}
    return configure(tmp_path, models, [tmp_path / "a.jsonl"], **options)


def at(cfg, tmp_path, name):
    return change(cfg, store=str(tmp_path / name))


def shares_of(cfg, tmp_path, count=3):
    """Prepare all shares in folders of their own and return these."""
    for number in range(1, count + 1):
        prepare(at(cfg, tmp_path, f"s{number}"), partitions=(number, count), workers=1)
    return [tmp_path / f"s{number}" for number in range(1, count + 1)]


def test_shares_in_folders_of_their_own_make_the_store_of_one_run(cfg, tmp_path):
    whole = prepare(cfg, workers=1)
    assert merge(tmp_path / "merged", shares_of(cfg, tmp_path)) == whole
    assert whole["duplicates"] == 10
    assert tree(tmp_path / "merged") == tree(cfg.data.store)


def test_shares_in_one_folder_make_the_store_of_one_run(cfg, tmp_path):
    whole = prepare(cfg, workers=1)
    together = at(cfg, tmp_path, "together")
    for number in (3, 1, 2):
        prepare(together, partitions=(number, 3), workers=1)
    assert not Path(together.data.store, "prepared.json").exists()
    assert merge(together.data.store, []) == whole
    assert tree(together.data.store) == tree(cfg.data.store)


def test_prepare_finishes_what_shares_in_its_folder_have_begun(cfg, tmp_path):
    prepare(cfg, partitions=(2, 3), workers=1)
    seen = []
    report = prepare(cfg, lambda *state: seen.append(state), workers=1)
    assert seen[0][0] > seen[0][1] // 3
    assert report == prepare(at(cfg, tmp_path, "whole"), workers=1)


def test_the_destination_may_hold_a_share(cfg, tmp_path):
    first, *others = shares_of(cfg, tmp_path)
    assert merge(first, [first, *others]) == prepare(cfg, workers=1)
    assert tree(first) == tree(cfg.data.store)


def test_shares_hold_each_partition_once():
    for count in (1, 2, 5):
        held = [
            [i for i in range(13) if Share(number, count).holds(i)]
            for number in range(1, count + 1)
        ]
        assert sorted(sum(held, [])) == list(range(13))
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_a_share_reports_what_it_did_and_what_is_missing(cfg):
    report = prepare(cfg, partitions=(1, 2), workers=1)
    total = report["partitions_in_all"]
    assert report["share"] == "1/2" and report["partitions"] == (total + 1) // 2
    assert report["missing"] == list(range(1, total, 2))
    assert 0 < report["documents"] < 80


def test_the_merged_folders_stay_as_they_were(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    before = [tree(folder) for folder in folders]
    merge(tmp_path / "merged", folders)
    assert [tree(folder) for folder in folders] == before


def test_a_merge_is_recognised_when_it_is_done(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    report = merge(tmp_path / "merged", folders)
    assert merge(tmp_path / "merged", folders) == report | {"already_prepared": True}
    assert merge(tmp_path / "merged", []) == report | {"already_prepared": True}
    assert prepare(at(cfg, tmp_path, "merged")) == report | {"already_prepared": True}


def test_shards_are_copied_where_they_cannot_be_linked(cfg, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_links)
    assert merge(tmp_path / "merged", shares_of(cfg, tmp_path)) == prepare(cfg, workers=1)


def test_a_store_grows_by_shares_as_by_one_run(cfg, tmp_path):
    prepare(cfg, workers=1)
    shutil.copytree(cfg.data.store, tmp_path / "whole")
    write_jsonl(tmp_path / "b.jsonl", TEXTS[65:90])
    grown = change(cfg, sources=(*cfg.data.sources, str(tmp_path / "b.jsonl")))
    whole = prepare(at(grown, tmp_path, "whole"), workers=1)
    for number in (1, 2):
        prepare(grown, partitions=(number, 2), workers=1)
    assert merge(cfg.data.store, []) == whole and whole["generation"] == 2
    assert tree(cfg.data.store) == tree(tmp_path / "whole")


# Refusals


def test_missing_partitions_are_named(cfg, tmp_path):
    prepare(cfg, partitions=(1, 3), workers=1)
    total = prepare(cfg, partitions=(2, 3), workers=1)["partitions_in_all"]
    lacking = ", ".join(map(str, range(2, total, 3)))
    count = len(range(2, total, 3))
    with pytest.raises(DataError, match=f"{count} of {total} partitions are missing: {lacking};"):
        merge(cfg.data.store, [])
    assert not Path(cfg.data.store, "prepared.json").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"valid_share": 0.4}, "data.valid_share was 0.1, now 0.4"),
        ({"dedup": False}, "data.dedup was True, now False"),
    ],
)
def test_shares_of_other_settings_are_refused_by_name(cfg, tmp_path, options, named):
    prepare(at(cfg, tmp_path, "s1"), partitions=(1, 2), workers=1)
    prepare(at(change(cfg, **options), tmp_path, "s2"), partitions=(2, 2), workers=1)
    with pytest.raises(DataError, match=f"s1 and .*s2 are no shares of one store: {named}"):
        merge(tmp_path / "merged", [tmp_path / "s1", tmp_path / "s2"])


def test_shares_of_another_tokenizer_are_refused(cfg, tmp_path, models):
    other = replace(cfg, tokenizer=TokenizerConfig(path=str(models / "b.model")))
    prepare(at(cfg, tmp_path, "s1"), partitions=(1, 2), workers=1)
    prepare(at(other, tmp_path, "s2"), partitions=(2, 2), workers=1)
    with pytest.raises(DataError, match="no shares of one store: tokenizer was"):
        merge(tmp_path / "merged", [tmp_path / "s1", tmp_path / "s2"])


def test_a_share_that_was_prepared_twice_counts_once(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    prepare(at(cfg, tmp_path, "again"), partitions=(1, 2), workers=1)
    report = merge(tmp_path / "merged", [*folders, tmp_path / "again"])
    assert report == prepare(cfg, workers=1)


def test_a_partition_with_two_results_is_refused(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    path = folders[0] / ".prepare" / "000000.json"
    copy = tmp_path / "copy"
    shutil.copytree(folders[0], copy)
    result = json.loads(path.read_bytes())
    path.write_text(json.dumps(result | {"source": "elsewhere"}))
    with pytest.raises(DataError, match="partition 0 differs between .*s1 and .*copy"):
        merge(tmp_path / "merged", [*folders, copy])


def test_a_damaged_shard_is_found_before_anything_is_published(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    shard = next((folders[1] / "train").glob("*.shard"))
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=rf"{shard.name}: damaged, its SHA-256"):
        merge(tmp_path / "merged", folders)
    assert not (tmp_path / "merged" / "prepared.json").exists()


def test_a_shard_that_is_gone_makes_its_partition_missing(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    next((folders[0] / "train").glob("000003*.shard")).unlink()
    with pytest.raises(DataError, match="1 of .* partitions are missing: 3;"):
        merge(tmp_path / "merged", folders)


def test_a_folder_without_a_share_is_refused(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: has no share of a store"):
        merge(tmp_path / "merged", [*folders, tmp_path / "empty"])
    with pytest.raises(DataError, match="nowhere: no such folder"):
        merge(tmp_path / "merged", [*folders, tmp_path / "nowhere"])


@pytest.mark.parametrize("folders", [(), ("texts",), ("nowhere",)])
def test_a_refused_merge_leaves_a_mistyped_folder_as_it_was(tmp_path, folders):
    (tmp_path / "texts").mkdir()
    for destination in ("texts", "new"):
        with pytest.raises(DataError, match="no share of a store|no such folder"):
            merge(tmp_path / destination, [tmp_path / name for name in folders])
    assert list(tmp_path.rglob("*")) == [tmp_path / "texts"]  # a lock would be read as a text


def test_what_a_killed_clearing_left_in_the_destination_is_not_used(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    other = change(at(cfg, tmp_path, "merged"), valid_share=0.5)
    prepare(other, partitions=(1, 1), workers=1)
    (tmp_path / "merged" / ".prepare" / "key.json").unlink()
    merge(tmp_path / "merged", folders)
    prepare(cfg, workers=1)
    assert tree(tmp_path / "merged") == tree(cfg.data.store)


def test_a_finished_store_of_something_else_is_left_alone(cfg, tmp_path):
    prepare(change(cfg, valid_share=0.5), workers=1)
    before = tree(cfg.data.store)
    with pytest.raises(DataError, match="prepared from something else: data.valid_share"):
        merge(cfg.data.store, shares_of(cfg, tmp_path))
    assert tree(cfg.data.store) == before


@pytest.mark.parametrize("partitions", [(0, 2), (3, 2), (1, 0), (-1, 2)])
def test_shares_that_do_not_exist_are_refused(cfg, partitions):
    with pytest.raises(ConfigError, match="give I/N with I from 1 to N"):
        prepare(cfg, partitions=partitions)


# Who may write


def test_one_share_is_prepared_by_one_process_at_a_time(cfg):
    store = Path(cfg.data.store)
    store.mkdir()
    with journal.hold(store, Share(1, 2)):
        with pytest.raises(DataError, match="another process prepares share 1/2 already: pid"):
            prepare(cfg, partitions=(1, 2))
        assert prepare(cfg, partitions=(2, 2), workers=1)["partitions"] >= 2


def test_neither_prepare_nor_merge_cuts_into_shares_at_work(cfg, tmp_path):
    folders = shares_of(cfg, tmp_path)
    with journal.hold(folders[1], Share(2, 3)):
        for act in (
            lambda: merge(tmp_path / "m", folders),
            lambda: prepare(at(cfg, tmp_path, "s2")),
        ):
            with pytest.raises(DataError, match="another process .* pid .* share 2-of-3"):
                act()


def test_a_share_does_not_start_while_one_process_has_the_whole(cfg):
    store = Path(cfg.data.store)
    store.mkdir()
    with journal.hold(store):
        with pytest.raises(DataError, match="another process prepares here already: pid"):
            prepare(cfg, partitions=(1, 2))


def test_a_share_does_not_throw_away_the_work_of_others(cfg):
    prepare(cfg, partitions=(1, 2), workers=1)
    before = tree(cfg.data.store)
    with pytest.raises(DataError, match="unfinished work for something else: data.valid_share"):
        prepare(change(cfg, valid_share=0.5), partitions=(2, 2))
    after = tree(cfg.data.store)
    assert {name: after[name] for name in before} == before
