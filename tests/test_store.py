"""The token store: reads what was written, notices any damage, and is the same wherever it lies."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from stores import COMMON, SHARDS, E, random_documents, refusal, stream_of, write_store

from jaxgpt.data import blocks
from jaxgpt.data.store import open_store, write_manifest
from jaxgpt.durable import write_atomic
from jaxgpt.errors import DataError, StorageError


def test_every_range_of_the_stream_reads_as_written(tmp_path):
    write_store(tmp_path, SHARDS)
    store, stream = open_store(tmp_path), stream_of(SHARDS)
    assert store.stream_len == len(stream) - 1
    for start in range(len(stream) + 1):
        for stop in range(start, len(stream) + 1):
            ids = store.read(start, stop)
            assert ids.dtype == np.int32 and ids.tolist() == stream[start:stop]


def test_documents_open_where_their_end_of_text_id_stands(tmp_path):
    write_store(tmp_path, SHARDS)
    store, stream = open_store(tmp_path), stream_of(SHARDS)
    for start in range(len(stream)):
        for stop in range(start, len(stream) + 1):
            right = [p - start for p in range(start, min(stop, len(stream) - 1)) if stream[p] == E]
            assert store.opens(start, stop).tolist() == right


def test_ids_are_read_in_place_and_in_the_dtype_of_the_store(tmp_path):
    write_store(tmp_path, SHARDS)
    store, stream = open_store(tmp_path), stream_of(SHARDS)
    out = np.zeros((3, 7), store.dtype)
    store.read_into(4, out[1])
    assert out.tolist() == [[0] * 7, stream[4:11], [0] * 7]


@pytest.mark.parametrize("max_open", [1, 3])
def test_rows_inside_shards_are_read_together_and_the_others_are_left(tmp_path, max_open):
    write_store(tmp_path, SHARDS)
    store, stream = open_store(tmp_path, max_open=max_open), stream_of(SHARDS)
    starts, rows = np.arange(len(stream) - 5), list(range(len(stream) - 5))[::-1]
    ends = store.shard_positions[1:]
    right = [
        any(a <= s and s + 5 <= b for a, b in zip([0, *ends], ends, strict=False)) for s in starts
    ]
    for _ in range(2):  # blocks that are checked now, and that have been
        out = np.full((len(stream), 5), 63, store.dtype)
        inside = store.read_rows(starts, out, rows)
        assert inside.tolist() == right and 0 < inside.sum() < len(inside)
        for start, row, read in zip(starts.tolist(), rows, right, strict=True):
            assert out[row].tolist() == (stream[start : start + 5] if read else [63] * 5)
        assert (out[len(rows) :] == 63).all()


def test_rows_that_touch_several_blocks_are_checked_and_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    documents = [random_documents([500, 40])]
    write_store(tmp_path, documents)
    store, stream = open_store(tmp_path), np.array(stream_of(documents))
    starts = np.array([0, 7, 300, 120])
    for width in (3, 32, 200):  # in one block of 32 ids or two, in two, in seven or eight
        out = np.zeros((4, width), store.dtype)
        assert store.read_rows(starts, out, [2, 0, 1, 3]).all()
        for start, row in zip(starts, (2, 0, 1, 3), strict=True):
            np.testing.assert_array_equal(out[row], stream[start : start + width])


def test_damage_is_noticed_in_rows_read_together(tmp_path):
    write_store(tmp_path, SHARDS)
    store = open_store(tmp_path)
    with open(min(tmp_path.glob("*.shard")), "r+b") as file:
        file.seek(4096)
        file.write(b"\x3e\x3e\x3e\x3e")
    with pytest.raises(DataError, match="block 0"):
        store.read_rows(np.array([0]), np.zeros((1, 2), store.dtype), [0])


@pytest.mark.parametrize("fails", ["raises", "reads less"])
def test_a_row_whose_read_fails_once_is_read_again(tmp_path, monkeypatch, fails):
    write_store(tmp_path, SHARDS)
    store, stream, preadv = open_store(tmp_path), stream_of(SHARDS), os.preadv
    out = np.zeros((2, 4), store.dtype)
    store.read_rows(np.array([0, 1]), out, [0, 1])
    calls = []

    def once(fd, buffers, at):
        calls.append(at)
        if len(calls) > 1:
            return preadv(fd, buffers, at)
        if fails == "raises":
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, [buffers[0][:3]], at)

    monkeypatch.setattr(os, "preadv", once)
    assert store.read_rows(np.array([2, 1]), out, [0, 1]).all()
    assert out.tolist() == [stream[2:6], stream[1:5]] and len(calls) == 3


def test_documents_of_one_and_of_a_million_tokens_read_as_written(tmp_path):
    rng = np.random.default_rng(0)
    shards = [[rng.integers(3, 64, 1_000_000)], rng.integers(3, 64, (5000, 1))]
    write_store(tmp_path, shards)
    store, stream = open_store(tmp_path), np.array(stream_of(shards))
    for start in (0, 1, 524_287, 999_990, 1_000_000, 1_000_001, 1_005_000, store.stream_len - 50):
        np.testing.assert_array_equal(store.read(start, start + 51), stream[start : start + 51])
    np.testing.assert_array_equal(store.read(0, len(stream)), stream)


def test_a_range_outside_the_stream_is_refused(tmp_path):
    write_store(tmp_path, SHARDS)
    store = open_store(tmp_path)
    for start, stop in ((-1, 3), (0, store.stream_len + 2)):
        with pytest.raises(IndexError):
            store.read(start, stop)


@pytest.mark.parametrize("shards", [[], [[]], [[], []]])
def test_a_store_without_documents_is_one_end_of_text_id(tmp_path, shards):
    write_store(tmp_path, shards)
    store = open_store(tmp_path)
    assert (store.num_docs, store.num_tokens, store.num_bytes, store.stream_len) == (0, 0, 0, 0)
    assert store.read(0, 1).tolist() == [E]


def test_counts_bytes_origins_and_offsets_of_documents(tmp_path):
    write_store(tmp_path, SHARDS)
    store = open_store(tmp_path)
    lengths = [5, 1, 1, 9, 1, 3, 12]
    sizes = [10, 3, 4, 18, 2, 6, 25]  # 2 * length + index in shard mod 3, as written
    assert (store.num_docs, store.num_tokens, store.num_bytes) == (7, sum(lengths), sum(sizes))
    assert store.doc_bytes(0, 7).tolist() == sizes
    assert store.doc_bytes(3, 6).tolist() == sizes[3:6]
    assert store.provenance(0) == "corpus/file.txt:0:0"
    assert store.provenance(6) == "corpus/file.txt:3:1"
    places = [(doc, offset) for doc, n in enumerate(lengths) for offset in range(n + 1)]
    assert [store.document_at(p) for p in range(store.stream_len)] == places


def test_an_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def edited(path: Path, **changes) -> None:
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(manifest))


def resealed(path: Path, **changes) -> None:
    """Edit a manifest as one who also knows how its checksum is made."""
    from jaxgpt.data.store import _checksum

    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}))


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda path: path.write_text(path.read_text()[:-40]), "refused"),
        (lambda path: path.write_text(""), "refused"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "refused"),
        (lambda path: path.write_text("[1]"), "refused"),
        (lambda path: path.write_text("[" * 100_000), "refused"),
        (lambda path: path.write_text("{}"), "field 'format' is missing"),
        (lambda path: edited(path, eos_id=3), "edited or damaged"),
        (lambda path: edited(path, shards=[]), "edited or damaged"),
        (lambda path: edited(path, report={"docs": 9}), "edited or damaged"),
        (lambda path: edited(path, version=1), "version is 1, this program reads 2"),
        (lambda path: edited(path, format="other"), "format is 'other'"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_refused_with_the_reason(tmp_path, damage, reason):
    write_store(tmp_path, SHARDS)
    damage(tmp_path / "manifest.json")
    assert reason in refusal(tmp_path)


def test_a_shard_outside_the_store_is_refused(tmp_path):
    write_store(tmp_path / "a", SHARDS)
    path = tmp_path / "a/manifest.json"
    shards = json.loads(path.read_text())["shards"]
    shards[0]["name"] = "../b/00000.shard"
    resealed(path, shards=shards)
    assert "not a plain file name" in refusal(tmp_path / "a")


def test_a_folder_without_a_store_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(DataError, match="not a token store: neither.*jaxgpt prepare"):
        open_store(tmp_path)


def test_a_store_opens_by_itself_or_as_a_part_of_what_prepare_wrote(tmp_path):
    train = write_store(tmp_path / "train", SHARDS[:1])
    valid = write_store(tmp_path / "valid", SHARDS[2:])
    assert open_store(tmp_path).digest == open_store(tmp_path / "train").digest == train
    assert open_store(tmp_path, "valid").digest == open_store(tmp_path / "valid").digest == valid


def test_the_tokenizer_lies_beside_the_manifest_or_one_folder_above(tmp_path):
    write_store(tmp_path / "train", SHARDS)
    store = open_store(tmp_path)
    assert store.tokenizer_path == tmp_path / "tokenizer.model"
    (tmp_path / "train/tokenizer.model").write_bytes(b"")
    assert store.tokenizer_path == tmp_path / "train/tokenizer.model"


def test_the_identity_is_made_of_contents_only(tmp_path):
    digest = write_store(tmp_path / "a", SHARDS)
    assert len(digest) == 64
    same = write_store(tmp_path / "b" / "c", SHARDS, policies={"x": 1}, origin="/other/place")
    assert same == digest
    without_empty = [documents for documents in SHARDS if documents]
    assert write_store(tmp_path / "d", without_empty) == digest


@pytest.mark.parametrize(
    "shards, options",
    [
        (SHARDS[::-1], {}),
        ([[[3, 4, 5]]], {}),
        (SHARDS, {"tokenizer": "tokenizer-b"}),
        (SHARDS, {"vocab_size": 65}),
        ([[[*SHARDS[0][0], *SHARDS[0][1]], *SHARDS[0][2:]], *SHARDS[1:]], {}),
    ],
)
def test_another_order_token_tokenizer_or_boundary_is_another_identity(tmp_path, shards, options):
    assert write_store(tmp_path / "a", SHARDS) != write_store(tmp_path / "b", shards, **options)


def test_the_identity_is_the_same_after_writing_again_and_after_moving(tmp_path):
    digest = write_store(tmp_path / "a", SHARDS)
    assert write_store(tmp_path / "a", SHARDS) == digest
    (tmp_path / "a").rename(tmp_path / "moved")
    store = open_store(tmp_path / "moved")
    assert store.digest == digest
    assert store.read(0, store.stream_len + 1).tolist() == stream_of(SHARDS)


def test_the_order_is_that_of_the_manifest_whatever_the_files_are_called(tmp_path):
    digest = write_store(tmp_path / "a", SHARDS)
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    for number, entry in enumerate(manifest["shards"]):
        name = f"{9 - number}-renamed"  # listed in the opposite order
        (tmp_path / "a" / entry["name"]).rename(tmp_path / "a" / name)
        entry["name"] = name
    resealed(tmp_path / "a/manifest.json", shards=manifest["shards"])
    (tmp_path / "mount").symlink_to(tmp_path / "a")
    store = open_store(tmp_path / "mount")
    assert store.digest == digest
    assert store.read(0, store.stream_len + 1).tolist() == stream_of(SHARDS)


def test_a_report_with_numbers_as_keys_survives_the_checksum(tmp_path):
    write_manifest(tmp_path, [], policies={}, report={10: (1, 2), 9: 0.1}, **COMMON)
    assert open_store(tmp_path).manifest["report"] == {"10": [1, 2], "9": 0.1}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_file_descriptors_are_bounded_by_max_open(tmp_path):
    shards = [random_documents([20], seed) for seed in range(30)]
    write_store(tmp_path, shards)
    before, stream = open_files(), stream_of(shards)
    store = open_store(tmp_path, max_open=4)
    for start in [*range(0, len(stream) - 30, 17)] * 2:
        assert store.read(start, start + 30).tolist() == stream[start : start + 30]
        assert open_files() <= before + 4
    store.close()
    store.close()
    assert open_files() == before


def test_several_threads_read_the_same_as_one(tmp_path):
    shards = [random_documents([7, 1, 30], seed) for seed in range(12)]
    write_store(tmp_path, shards)
    store, stream = open_store(tmp_path, max_open=2), stream_of(shards)
    starts = np.random.default_rng(0).integers(0, len(stream) - 50, 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda start: store.read(start, start + 50).tolist(), starts))
    assert parts == [stream[start : start + 50] for start in starts]


def test_an_earlier_generation_stays_readable_by_its_identity(tmp_path):
    first = write_store(tmp_path, SHARDS)
    names = ("00000.shard", "00003.shard")
    more = [entry for entry in open_store(tmp_path).manifest["shards"] if entry["name"] in names]
    second = write_manifest(tmp_path, more, policies={}, report={}, generation=2, **COMMON)
    assert first != second
    assert open_store(tmp_path).digest == second
    older = open_store(tmp_path, digest=first)
    assert older.read(0, older.stream_len + 1).tolist() == stream_of(SHARDS)
    with pytest.raises(DataError, match=f"has no data abc, only {second[:12]}, {first[:12]}"):
        open_store(tmp_path, digest="abc")


def test_publishing_a_generation_again_changes_nothing(tmp_path):
    first = write_store(tmp_path, SHARDS)
    entries = open_store(tmp_path).manifest["shards"]
    for _ in range(2):
        write_manifest(tmp_path, entries[:1], policies={}, report={}, generation=2, **COMMON)
    assert sorted(p.name for p in tmp_path.glob("manifest*")) == [
        "manifest-000001.json",
        "manifest.json",
    ]
    assert open_store(tmp_path, digest=first).digest == first


def many_shards(directory: Path, count: int, size: int) -> None:
    """Write a store of `count` shards of which all but the first are names and sizes only."""
    write_store(directory, [SHARDS[0]])
    manifest = json.loads((directory / "manifest.json").read_text())
    (entry,) = manifest["shards"]
    entries = [entry]
    for number in range(1, count):
        name = f"{number:06}.shard"
        os.close(os.open(directory / name, os.O_CREAT | os.O_WRONLY))
        os.truncate(directory / name, size)  # sparse: takes no room
        tokens = {"num_docs": 10**5, "num_tokens": 25 * 10**7, "num_bytes": 10**9}
        entries.append(entry | tokens | {"name": name, "size": size})
    write_manifest(directory, entries, policies={}, report={}, **COMMON)


def test_sixty_thousand_shards_open_in_two_seconds(tmp_path):
    many_shards(tmp_path, 60_000, 10**9)
    began = time.monotonic()
    store = open_store(tmp_path)
    assert time.monotonic() - began < 2
    assert store.stream_len > 15 * 10**12 and store.num_shards == 60_000
    assert store.read(0, 16).tolist() == stream_of([SHARDS[0]])[:16]


@pytest.mark.parametrize("damage", ["resize", "remove", "header"])
def test_among_many_shards_a_missing_or_damaged_one_is_named(tmp_path, damage):
    many_shards(tmp_path, 1100, 5000)
    path = tmp_path / "001099.shard"
    if damage == "remove":
        path.unlink()
    elif damage == "resize":
        os.truncate(path, 4999)
    with pytest.raises((DataError, StorageError), match="001099.shard"):
        store = open_store(tmp_path)
        store.read(store.stream_len - 5, store.stream_len)  # headers are read on first touch


def test_the_input_that_opens_documents_is_part_of_the_identity_where_it_is_not_the_end(tmp_path):
    documents = [random_documents([4, 5])]
    plain, same, other = (
        write_store(tmp_path / str(start), documents, start_id=start) for start in (None, E, 1)
    )
    assert plain == same != other
    assert open_store(tmp_path / "None").start_id == open_store(tmp_path / "2").start_id == E
    assert open_store(tmp_path / "1").start_id == 1
