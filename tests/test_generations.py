"""A finished store grows by generations when its sources have grown, and else stays as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from corpora import TEXTS, change, configure, make_models, stored_documents, write_jsonl

from jaxgpt.corpus import files
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.corpus.prepare import prepare
from jaxgpt.data.store import open_store
from jaxgpt.errors import DataError


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cfg(tmp_path, models):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "b.jsonl", TEXTS[:40])
    return configure(tmp_path, models, [tmp_path / "in"], partition_bytes=4000)


def more(cfg, name="a.jsonl", texts=TEXTS[40:60]):
    """Add a file to the folder of a configuration; `a.jsonl` comes before the one that is there."""
    write_jsonl(Path(cfg.data.sources[0], name), texts)


def shard_files(cfg):
    """Return (bytes, modification time) of all shards by path."""
    paths = Path(cfg.data.store).rglob("*.shard")
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_new_files_of_an_entry_come_after_all_that_was_there(cfg):
    prepare(cfg)
    old = stored_documents(cfg, "train"), stored_documents(cfg, "valid")
    more(cfg)
    report = prepare(cfg)
    new = stored_documents(cfg, "train"), stored_documents(cfg, "valid")
    assert new[0][: len(old[0])] == old[0] and new[1][: len(old[1])] == old[1]
    assert sorted(new[0] + new[1]) == sorted(TEXTS[:60])
    assert report["generation"] == 2 and report["documents"] == 60


def test_nothing_of_the_earlier_generation_is_written_again(cfg):
    prepare(cfg)
    before = shard_files(cfg)
    more(cfg)
    prepare(cfg)
    after = shard_files(cfg)
    assert len(after) > len(before) and {path: after[path] for path in before} == before


def test_the_earlier_generation_stays_readable_by_its_digest(cfg):
    first = prepare(cfg)
    texts = {split: stored_documents(cfg, split) for split in ("train", "valid")}
    manifests = {s: Path(cfg.data.store, s, "manifest.json").read_bytes() for s in texts}
    more(cfg)
    second = prepare(cfg)
    for split in texts:
        store = open_store(cfg.data.store, split, digest=first[split]["digest"])
        assert store.num_docs == len(texts[split])
        kept = Path(cfg.data.store, split, "manifest-000001.json").read_bytes()
        assert kept == manifests[split]
    assert open_store(cfg.data.store).digest == second["train"]["digest"]
    assert second["train"]["digest"] != first["train"]["digest"]


def test_entries_at_the_end_make_a_generation_too(cfg, tmp_path):
    prepare(cfg)
    write_jsonl(tmp_path / "late.jsonl", TEXTS[60:70])
    grown = change(cfg, sources=(*cfg.data.sources, str(tmp_path / "late.jsonl")))
    report = prepare(grown)
    assert [entry["documents"] for entry in report["sources"]] == [40, 10]
    assert prepare(grown) == report | {"already_prepared": True}


def test_a_third_generation_knows_the_files_of_both_before(cfg):
    prepare(cfg)
    more(cfg)
    prepare(cfg)
    more(cfg, "c.jsonl", TEXTS[60:70])
    report = prepare(cfg)
    assert report["generation"] == 3 and report["documents"] == 70
    assert prepare(cfg) == report | {"already_prepared": True}
    names = sorted(path.name for path in Path(cfg.data.store, "train").glob("manifest*"))
    assert names == ["manifest-000001.json", "manifest-000002.json", "manifest.json"]
    assert sorted(stored_documents(cfg, "train") + stored_documents(cfg, "valid")) == sorted(
        TEXTS[:70]
    )


def test_partitions_and_files_of_each_generation_are_on_record(cfg):
    prepare(cfg)
    more(cfg)
    prepare(cfg)
    lines = [
        [json.loads(line) for line in Path(cfg.data.store, name).read_text().splitlines()]
        for name in ("inputs-000001.jsonl", "inputs-000002.jsonl")
    ]
    numbers = [line["partition"] for line in lines[0] + lines[1]]
    assert numbers == list(range(len(numbers)))
    for found, name in zip(lines, ("b.jsonl", "a.jsonl"), strict=True):
        path = os.path.join(cfg.data.sources[0], name)
        slices = [part for line in found for part in line["slices"]]
        assert {part[1] for part in slices} == {path}
        assert sum(part[2] for part in slices) == os.path.getsize(path)
        assert {part[5] for part in slices} == {files.status(path).stamp}


def test_the_workers_do_not_change_a_new_generation(cfg, tmp_path):
    copy = change(cfg, store=str(tmp_path / "copy"))
    prepare(cfg)
    prepare(copy)
    more(cfg)
    assert prepare(cfg, workers=1) == prepare(copy, workers=2)


def test_a_store_that_was_moved_is_extended_where_it_is(cfg, tmp_path):
    prepare(cfg)
    Path(cfg.data.store).rename(tmp_path / "moved")
    moved = change(cfg, store=str(tmp_path / "moved"))
    assert prepare(moved)["already_prepared"]
    more(cfg)
    assert prepare(moved)["generation"] == 2
    assert not any(
        cfg.data.store in path.read_text() for path in (tmp_path / "moved").rglob("*.json*")
    )


def test_a_new_generation_without_text_counts_its_files_once(cfg):
    first = prepare(cfg)
    more(cfg, texts=["", ""])
    report = prepare(cfg)
    assert report["empty"] == 2 and report["train"] == first["train"]
    assert prepare(cfg)["already_prepared"]


# Refusals


def test_a_file_that_is_gone_is_named(cfg):
    more(cfg)
    prepare(cfg)
    Path(cfg.data.sources[0], "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"something else: \S+in/a\.jsonl is gone; delete the"):
        prepare(cfg)


def test_a_file_that_has_changed_is_named_also_when_others_are_new(cfg):
    prepare(cfg)
    more(cfg)
    more(cfg, "b.jsonl", TEXTS[:41])
    problem = r"something else: \S+in/b\.jsonl has changed \(size or time\); delete"
    with pytest.raises(DataError, match=problem):
        prepare(cfg)


def test_of_many_changed_files_three_are_named(cfg):
    for i in range(6):
        more(cfg, f"{i}.jsonl", [f"a {i}"])
    prepare(cfg)
    for i in range(5):
        Path(cfg.data.sources[0], f"{i}.jsonl").unlink()
    with pytest.raises(DataError, match=r"0\.jsonl is gone, .*2\.jsonl is gone and 2 more;"):
        prepare(cfg)


def test_entries_in_another_order_are_refused(cfg, tmp_path):
    write_jsonl(tmp_path / "late.jsonl", TEXTS[60:70])
    both = (*cfg.data.sources, str(tmp_path / "late.jsonl"))
    prepare(change(cfg, sources=both))
    for sources in (both[::-1], both[:1]):
        with pytest.raises(DataError, match="something else: data.sources was"):
            prepare(change(cfg, sources=sources))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_bytes": 5}, "data.min_bytes was 0, now 5"),
        ({"max_bytes": 5}, "data.max_bytes was 0, now 5"),
        ({"dedup": True}, "data.dedup was False, now True"),
        ({"partition_bytes": 5000}, "data.partition_bytes was 4000, now 5000"),
    ],
)
def test_new_files_do_not_excuse_other_settings(cfg, options, named):
    prepare(cfg)
    more(cfg)
    with pytest.raises(DataError, match=named):
        prepare(change(cfg, **options))


def test_a_damaged_older_shard_stops_an_extension(cfg):
    prepare(cfg)
    more(cfg)
    shard = next(Path(cfg.data.store, "train").glob("*.shard"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"is damaged: .*\.shard.* restore the file, or delete"):
        prepare(cfg)


def test_a_lost_record_of_files_stops_an_extension(cfg):
    prepare(cfg)
    more(cfg)
    Path(cfg.data.store, "inputs-000001.jsonl").unlink()
    with pytest.raises(DataError, match=r"is damaged: inputs-000001\.jsonl cannot be read"):
        prepare(cfg)


# Files that cannot be read


@pytest.fixture
def unreadable(cfg, monkeypatch):
    """Let a.jsonl be there but refuse to be read, until the returned set is cleared."""
    more(cfg)
    refused = {os.path.join(cfg.data.sources[0], "a.jsonl")}
    blocks = files.blocks

    def refuse(path, start=0):
        if path in refused:
            raise UnreadableFile(f"{path}: cannot read it: Permission denied")
        return blocks(path, start)

    monkeypatch.setattr(files, "blocks", refuse)
    return refused


def test_an_unreadable_file_is_refused_after_all_others_are_done(cfg, unreadable):
    with pytest.raises(DataError, match=r"in/a\.jsonl: cannot read it: Permission denied"):
        prepare(cfg, workers=1)
    done = len(list(Path(cfg.data.store, ".prepare").glob("[0-9]*.json")))
    assert done >= 2
    unreadable.clear()
    seen = []
    prepare(cfg, lambda *state: seen.append(state), workers=1)
    size = os.path.getsize(os.path.join(cfg.data.sources[0], "a.jsonl"))
    assert seen[-1][1] - seen[0][0] < size  # only what had failed was done again
    assert sorted(stored_documents(cfg, "train") + stored_documents(cfg, "valid")) == sorted(
        TEXTS[:60]
    )


def test_a_file_that_becomes_readable_is_added_and_no_longer_listed_as_skipped(cfg):
    late = Path(cfg.data.sources[0], "late.txt")
    for path in (late, late.with_name("never.txt")):
        os.symlink(path.with_name("gone"), path)
    cfg = change(cfg, bad_text="skip")
    assert len(prepare(cfg)["skipped_files"]) == 2
    late.unlink()
    late.write_text("late")
    report = prepare(cfg)
    assert (report["generation"], report["documents"]) == (2, 41)
    assert [entry["path"] for entry in report["skipped_files"]] == [f"{late.parent}/never.txt"]


def test_a_file_that_is_skipped_in_several_partitions_is_listed_once(cfg, unreadable):
    report = prepare(change(cfg, bad_text="skip", partition_bytes=500), workers=1)
    (path,) = unreadable
    lines = Path(cfg.data.store, "inputs-000001.jsonl").read_text().splitlines()
    assert sum(path in line for line in lines) > 1
    assert [entry["path"] for entry in report["skipped_files"]] == [path]


def test_an_unreadable_file_that_is_skipped_is_in_report_and_manifest(cfg, unreadable):
    report = prepare(change(cfg, bad_text="skip"), workers=1)
    assert report["documents"] == 40
    (path,) = unreadable
    assert {entry["path"] for entry in report["skipped_files"]} == {path}
    assert "Permission denied" in report["skipped_files"][0]["reason"]
    manifest = open_store(cfg.data.store).manifest
    assert manifest["report"]["skipped_files"] == report["skipped_files"]
    assert report["sources"][0]["skipped_files"] == report["skipped_files"]
