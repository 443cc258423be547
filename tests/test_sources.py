"""Entries of data.sources become the same partitions everywhere, or are refused by name."""

from __future__ import annotations

import gzip
import json
import os
import random

import pyarrow
import pyarrow.parquet
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.data import sources
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


def origins(cfg):
    return [
        os.path.basename(document.origin)
        for part in sources.partitions(cfg)
        for document in sources.documents(cfg, part, sources.bad_records(cfg, part))
    ]


def test_a_folder_is_all_files_below_it_in_byte_order(folder):
    assert origins(config(folder)) == [".hidden.txt", "Z.txt", "a.txt", "b.txt", "c.md", "d.py"]


def test_a_glob_is_its_files_in_byte_order(folder):
    assert origins(config(folder / "*.txt")) == [".hidden.txt", "Z.txt", "a.txt", "b.txt"]
    assert origins(config(folder / "**" / "*.py")) == ["d.py"]


def test_entries_keep_their_order(folder):
    assert origins(config(folder / "b.txt", folder / "a.txt")) == ["b.txt", "a.txt"]


def test_a_name_with_glob_characters_is_found_as_a_name(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert origins(config(tmp_path / "a[1].txt")) == ["a[1].txt"]


def test_names_that_are_no_utf8_work(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"a\xff.txt")
    with open(path, "wb") as file:
        file.write(b"x")
    assert origins(config(tmp_path / "*.txt")) == ["a\\xff.txt"]
    assert sources.fingerprint(sources.partitions(config(tmp_path)))


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


def test_a_broken_link_and_a_pipe_are_refused_by_name(tmp_path):
    os.symlink(tmp_path / "gone", tmp_path / "link")
    with pytest.raises(DataError, match="link: cannot read it"):
        sources.partitions(config(tmp_path))
    (tmp_path / "link").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: not a regular file"):
        sources.partitions(config(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "json"), ("a.json.gz", "json"), ("a.jsonl.gz", "json"), ("a.jsonl.zst", "json"),
        ("a.JSONL", "json"), ("a.json", "json"), ("a.ndjson", "json"), ("a.txt", "text"),
        ("a.md.gz", "text"), ("a.parquet", "parquet"), ("README", "text"), ("a.csv", "text"),
    ],
)  # fmt: skip
def test_the_suffix_decides_how_a_file_is_read(name, kind):
    assert sources._kind(name) == kind


def corpus(tmp_path):
    """Write 200 records to JSONL, gzip, parquet and small files, and return the four entries."""
    rng = random.Random(0)
    values = [f"document {i} " + "x" * rng.randrange(60) for i in range(200)]
    data = "".join(json.dumps({"text": value}) + "\n" for value in values).encode()
    (tmp_path / "plain.jsonl").write_bytes(data)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(data))
    table = pyarrow.table({"text": values})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet", row_group_size=7)
    (tmp_path / "small").mkdir()
    for i, value in enumerate(values):
        (tmp_path / "small" / f"{i:03}.txt").write_text(value)
    return values, [
        tmp_path / n for n in ("plain.jsonl", "packed.jsonl.gz", "table.parquet", "small")
    ]


@pytest.mark.parametrize("size", [40, 300, 10**9])
def test_partitions_of_any_size_hold_every_document_once_in_order(tmp_path, size):
    values, entries = corpus(tmp_path)
    cfg = config(*entries, partition_bytes=size)
    for entry in entries:
        found = [
            document.text
            for part in sources.partitions(cfg)
            if part.source == str(entry)
            for document in sources.documents(cfg, part, sources.bad_records(cfg, part))
        ]
        assert found == values
    assert list(sources.texts(cfg)) == values * 4


def test_partitions_are_about_as_large_as_asked(tmp_path):
    _, entries = corpus(tmp_path)
    cfg = config(entries[0], partition_bytes=1000)
    total = os.path.getsize(entries[0])
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


def test_a_file_that_changes_while_it_is_read_is_refused(folder):
    cfg = config(folder / "a.txt")
    (part,) = sources.partitions(cfg)
    (folder / "a.txt").write_text("something else")
    with pytest.raises(DataError, match=r"a\.txt: changed while it was read"):
        list(sources.documents(cfg, part, sources.bad_records(cfg, part)))


def test_a_file_that_vanishes_is_refused(folder):
    cfg = config(folder / "a.txt")
    (part,) = sources.partitions(cfg)
    (folder / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: cannot read it"):
        list(sources.documents(cfg, part, sources.bad_records(cfg, part)))


def test_reading_is_lazy(folder):
    cfg = config(folder / "a.txt", folder / "b.txt")
    (folder / "b.txt").write_bytes(b"\xff")
    first, second = sources.partitions(cfg)
    assert next(sources.texts(cfg)) == "text of a.txt"
