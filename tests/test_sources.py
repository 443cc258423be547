"""Entries of data.sources become the same partitions everywhere, or are refused by name."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os
import random
import tracemalloc

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.corpus import files, formats, sources
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.corpus.formats import Piece
from jaxgpt.corpus.sources import Slice
from jaxgpt.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.md", "sub/deep/d.py", "Z.txt", ".hidden.txt"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    return tmp_path / "corpus"


def config(*entries, **options):
    return DataConfig(sources=tuple(map(str, entries)), **options)


def pieces(cfg, parts=None, bad=None):
    parts = sources.partitions(cfg) if parts is None else parts
    return [
        piece
        for part in parts
        for piece in sources.documents(cfg, part, bad or sources.bad_records(cfg, part))
    ]


def origins(cfg):
    return [os.path.basename(piece.origin) for piece in pieces(cfg)]


def test_entries_keep_their_order(folder):
    assert origins(config(folder / "b.txt", folder / "a.txt")) == ["b.txt", "a.txt"]


def test_a_name_that_is_no_utf8_is_read_and_fingerprinted(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"a\xff\n.txt")
    with open(path, "wb") as file:
        file.write(b"x")
    cfg = config(tmp_path / "*.txt")
    assert pieces(cfg) == [Piece("x", f"{tmp_path}/a\\xff\\x0a.txt")]
    assert sources.fingerprint(sources.partitions(cfg))


@pytest.mark.parametrize("entry", ["nothing-*.txt", "missing.txt", "empty"])
def test_an_entry_that_matches_nothing_is_refused_by_name(tmp_path, entry):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"matches no file") as refused:
        sources.partitions(config(tmp_path / entry))
    assert str(tmp_path / entry) in str(refused.value)


def test_no_sources_is_a_configuration_error():
    with pytest.raises(ConfigError, match="data.sources is empty"):
        sources.partitions(config())


def test_the_same_file_twice_is_refused_also_through_a_link(folder):
    os.symlink(folder / "a.txt", folder / "link.txt")
    with pytest.raises(DataError, match=r"link\.txt and .*a\.txt are the same file"):
        sources.partitions(config(folder))
    with pytest.raises(DataError, match="are the same file"):
        sources.partitions(config(folder / "a.txt", folder / "[a].txt"))
    with pytest.raises(DataError, match="twice"):
        sources.partitions(config("stdlib", "stdlib"))


def test_a_store_inside_a_source_is_refused(folder):
    with pytest.raises(DataError, match="data.store = .* lies inside data.sources"):
        sources.partitions(config(folder, store=str(folder / "tokens")))
    assert sources.partitions(config(folder, store=str(folder) + "-tokens"))


KINDS = ("plain.jsonl", "packed.jsonl.gz", "table.parquet", "file.arrow", "stream.arrow", "small")


def corpus(folder, count=200):
    """Write records in every format below `folder`; return them and the names of the entries."""
    rng = random.Random(0)
    values = [f"document {i} " + "x" * rng.randrange(60) for i in range(count)]
    data = "".join(json.dumps({"text": value}) + "\n" for value in values).encode()
    (folder / "plain.jsonl").write_bytes(data)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(data))
    table = pyarrow.table({"text": values})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=7)
    for name, new in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        with new(str(folder / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, 7)
    (folder / "small").mkdir()
    for i, value in enumerate(values):
        (folder / "small" / f"{i:03}.txt").write_text(value)
    return values


@pytest.mark.parametrize("size", [40, 300, 10**9])
def test_partitions_of_any_size_hold_every_document_once_in_order(tmp_path, size):
    values = corpus(tmp_path)
    cfg = config(*(tmp_path / kind for kind in KINDS), partition_bytes=size)
    for kind in KINDS:
        parts = [p for p in sources.partitions(cfg) if p.source == str(tmp_path / kind)]
        assert [piece.text for piece in pieces(cfg, parts)] == values
    assert list(sources.texts(cfg)) == values * len(KINDS)
    assert len({piece.origin for piece in pieces(cfg)}) == len(values) * len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_the_same_on_another_file_system(tmp_path, kind):
    values = corpus(tmp_path, 20)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / kind), f"{tmp_path}/{kind}", recursive=True)
    cfg = config(f"memory://{tmp_path}/{kind}", partition_bytes=300)
    assert list(sources.texts(cfg)) == values
    assert pieces(cfg)[0].origin.startswith(f"memory://{tmp_path}/{kind}")


def test_partitions_are_about_as_large_as_asked(tmp_path):
    corpus(tmp_path)
    cfg = config(tmp_path / "plain.jsonl", partition_bytes=1000)
    total = os.path.getsize(tmp_path / "plain.jsonl")
    sizes = [part.size for part in sources.partitions(cfg)]
    assert sum(sizes) == total and sizes[:-1] == [1000] * (total // 1000)


def test_a_small_corpus_is_still_cut_for_all_cores(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 300_000)  # 4.2 MB
    assert len(sources.partitions(config(tmp_path / "a.jsonl"))) == 5


def test_the_fingerprint_follows_names_sizes_and_times(folder):
    def now():
        return sources.fingerprint(sources.partitions(config(folder)))

    before = now()
    assert now() == before
    os.utime(folder / "a.txt", ns=(1, 1))
    touched = now()
    (folder / "a.txt").write_text("other text")
    os.utime(folder / "a.txt", ns=(1, 1))
    grown = now()
    (folder / "a.txt").rename(folder / "aa.txt")
    assert len({before, touched, grown, now()}) == 4


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "small"])
def test_a_file_that_changes_before_it_has_been_read_is_refused(tmp_path, name):
    corpus(tmp_path)
    cfg = config(tmp_path / name)
    reading = sources.documents(cfg, sources.partitions(cfg)[0], formats.BadRecords("skip"))
    next(reading)
    os.utime(tmp_path / name, ns=(1, 1))
    with pytest.raises(DataError, match=rf"{name}: changed while it was read; prepare again"):
        list(reading)


@pytest.mark.parametrize("name", [*(kind for kind in KINDS if kind != "small"), "small/000.txt"])
def test_a_file_that_goes_when_some_of_it_is_used_is_refused_also_where_bad_ones_are_skipped(
    tmp_path, name
):
    corpus(tmp_path, 20)
    cfg = config(tmp_path / name)
    reading = sources.documents(cfg, sources.partitions(cfg)[0], bad := formats.BadRecords("skip"))
    next(reading)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: .* could be read before; prepare again"):
        list(reading)
    assert bad.skipped_files == []


def test_a_file_that_goes_between_two_of_its_partitions_is_refused(tmp_path):
    corpus(tmp_path)
    cfg = config(tmp_path / "plain.jsonl", partition_bytes=1000, bad_text="skip")
    first, second, *_ = sources.partitions(cfg)
    assert pieces(cfg, [first])
    (tmp_path / "plain.jsonl").unlink()
    with pytest.raises(DataError, match=r"plain\.jsonl: .* prepare again"):
        pieces(cfg, [second])


def test_a_file_that_fails_midway_because_it_was_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"y" * (9 << 20))
    cfg = config(tmp_path / "a.txt", bad_text="skip")
    parts = sources.partitions(cfg)
    read = files.RawFile.read

    def stale(self, size=-1):
        if self.tell() > 6 << 20:
            os.utime(tmp_path / "a.txt", ns=(1, 1))
            raise files._unreadable("a.txt", OSError(errno.ESTALE, "Stale file handle"))
        return read(self, size)

    monkeypatch.setattr(files.RawFile, "read", stale)
    with pytest.raises(DataError, match=r"a\.txt: changed while it was read; prepare again"):
        pieces(cfg, parts)


def test_a_file_that_vanishes_is_refused(folder):
    cfg = config(folder / "a.txt")
    parts = sources.partitions(cfg)
    (folder / "a.txt").unlink()
    with pytest.raises(UnreadableFile, match=r"a\.txt: cannot read it"):
        pieces(cfg, parts)


def test_all_unreadable_files_are_listed_at_once(tmp_path):
    for i in range(23):
        os.symlink(tmp_path / "gone", tmp_path / f"{i:02}.txt")
    (tmp_path / "fine.txt").write_text("x")
    (tmp_path / "none.parquet").symlink_to(tmp_path / "gone")
    with pytest.raises(UnreadableFile) as refused:
        sources.partitions(config(tmp_path))
    lines = str(refused.value).split("\n")
    reason = "cannot read it: No such file or directory"
    names = [*(f"{i:02}.txt" for i in range(23)), "none.parquet"]
    hint = ' (data.bad_text = "skip" leaves such files out)'
    assert "\n".join(lines) == "\n".join(f"{tmp_path}/{n}: {reason}" for n in names) + hint


def test_every_way_of_being_unreadable_is_listed_or_recorded_with_its_reason(tmp_path, monkeypatch):
    reasons = {
        "a.txt": (errno.EACCES, "Permission denied"),
        "b.jsonl": (errno.EIO, "Input/output error"),
        "c.parquet": (errno.ESTALE, "Stale file handle"),
    }
    for name in (*reasons, "d.txt"):
        (tmp_path / name).write_text(name)
    real = os.stat

    def failing(path, **options):
        if (name := os.path.basename(path)) in reasons:
            raise OSError(*reasons[name])
        return real(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    lines = [f"{tmp_path}/{n}: cannot read it: {reason}" for n, (_, reason) in reasons.items()]
    with pytest.raises(UnreadableFile) as refused:
        sources.partitions(config(tmp_path))
    assert str(refused.value).removesuffix(' (data.bad_text = "skip" leaves such files out)') == (
        "\n".join(lines)
    )
    cfg = config(tmp_path, bad_text="skip")
    (part,) = sources.partitions(cfg)
    bad = sources.bad_records(cfg, part)
    assert [piece.text for piece in pieces(cfg, [part], bad)] == ["d.txt"]
    assert [entry["reason"] for entry in bad.skipped_files] == lines


def test_unreadable_files_are_recorded_and_the_others_read_when_they_may_be_skipped(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (tmp_path / name).write_text(name)
    cfg = config(tmp_path, bad_text="skip")
    (tmp_path / "b.txt").unlink()
    os.symlink(tmp_path / "gone", tmp_path / "b.txt")  # found out when the files are listed
    parts = sources.partitions(cfg)
    (tmp_path / "c.txt").unlink()  # and when they are read
    bad = sources.bad_records(cfg, parts[0])
    assert [piece.text for piece in pieces(cfg, parts, bad)] == ["a.txt", "d.txt"]
    assert [entry["path"] for entry in bad.skipped_files] == [f"{tmp_path}/{n}.txt" for n in "bc"]
    assert all("No such file" in entry["reason"] for entry in bad.skipped_files)


def test_a_file_that_fails_while_it_is_read_takes_back_only_the_document_at_hand(
    tmp_path, monkeypatch
):
    first, huge = json.dumps({"text": "first"}), json.dumps({"text": "y" * (9 << 20)})
    (tmp_path / "a.jsonl").write_text(f"{first}\n{huge}\n")
    (tmp_path / "b.txt").write_text("b")
    read = files.RawFile.read

    def failing(self, size=-1):
        if self.tell() > 6 << 20:
            raise files._unreadable("a.jsonl", OSError(errno.EIO, "Input/output error"))
        return read(self, size)

    monkeypatch.setattr(files.RawFile, "read", failing)
    cfg = config(tmp_path, bad_text="skip", partition_bytes=10**9)
    parts = sources.partitions(cfg)
    found = pieces(cfg, parts, bad := sources.bad_records(cfg, parts[0]))
    origin = f"{tmp_path}/a.jsonl:{len(first) + 1}"
    assert found[0].text == "first" and found[-2:] == [
        Piece(None, origin),
        Piece("b", f"{tmp_path}/b.txt"),
    ]
    assert len(found) > 3 and not any(piece.last for piece in found[1:-2])
    assert {entry["path"] for entry in bad.skipped_files} == {f"{tmp_path}/a.jsonl"}
    assert list(sources.texts(cfg)) == ["first", "b"]


def test_empty_files_are_empty_documents_and_no_records(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.md"):
        (tmp_path / name).write_bytes(b"")
    assert pieces(config(tmp_path)) == [Piece("", f"{tmp_path}/{n}") for n in ("a.txt", "c.md")]


# Huge documents


def test_texts_are_whole_and_pieces_are_small(tmp_path):
    huge = " \u20ac\n" * 2_000_000  # 10 MB
    (tmp_path / "a.txt").write_text(huge)
    (tmp_path / "b.txt.bz2").write_bytes(bz2.compress(huge[:900].encode()))
    cfg = config(tmp_path)
    assert list(sources.texts(cfg)) == [huge, huge[:900]]
    *parts, last = sources.text_pieces(cfg)
    assert "".join(parts) == huge and last == huge[:900]
    assert max(map(len, parts)) <= formats.PIECE_BYTES


# Many files


def test_tiny_files_cost_little_memory_and_few_partitions(tmp_path):
    for i in range(2000):
        (tmp_path / f"document-{i:05}.txt").touch()
    tracemalloc.start()
    parts = sources.partitions(config(tmp_path))
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 500 * 2000 and peak < 1000 * 2000  # bytes: 10 million files take under 10 GB
    # 2000 files cost as much as 8 MB to read, though they are empty: 1 MiB of it per partition.
    assert [len(part.slices) for part in parts] == [256] * 7 + [208]


# Later additions


def test_files_that_are_added_get_partitions_of_their_own(folder):
    cfg = config(folder)
    old = sources.partitions(cfg)
    known = sources.file_keys(old)
    assert sources.partitions(cfg, without=known) == []
    (folder / "aa.txt").write_text("new")
    (added,) = sources.partitions(cfg, without=known)
    assert [part.path for part in added.slices] == [f"{folder}/aa.txt"]
    everything = {part.path for p in sources.partitions(cfg) for part in p.slices}
    assert everything == {path for path, _ in known | sources.file_keys([added])}


def test_a_file_that_changed_since_it_was_prepared_is_refused(folder):
    cfg = config(folder)
    known = sources.file_keys(sources.partitions(cfg))
    (folder / "a.txt").write_text("longer than it was")
    with pytest.raises(DataError, match=r"a\.txt: changed since it was prepared"):
        sources.partitions(cfg, without=known)


def test_slices_survive_json(folder):
    for partition in sources.partitions(config(folder, "stdlib")):
        for part in partition.slices:
            assert Slice(*json.loads(json.dumps(part))) == part


# Saved datasets


def save_dataset(folder, values):
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": values})
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_rows(tmp_path):
    save_dataset(tmp_path / "set" / "train", ["a", "b"])
    save_dataset(tmp_path / "set" / "test", ["c"])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(sources.texts(config(tmp_path / "set" / "train"))) == ["a", "b"]
    with pytest.raises(DataError, match=r"several splits \(train, test\)"):
        sources.partitions(config(tmp_path / "set"))
    with pytest.raises(DataError, match="set/test: a saved dataset inside an entry"):
        sources.partitions(config(tmp_path))


def test_a_saved_dataset_without_one_of_its_files_is_refused(tmp_path):
    save_dataset(tmp_path / "set", ["a", "b"])
    (tmp_path / "set" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UnreadableFile, match=r"data-00000-of-00001\.arrow: cannot read it"):
        sources.partitions(config(tmp_path / "set"))


def test_reading_is_lazy(folder):
    cfg = config(folder / "a.txt", folder / "b.txt")
    (folder / "b.txt").write_bytes(b"\xff")
    first, second = sources.partitions(cfg)
    assert next(sources.texts(cfg)) == "text of a.txt"
