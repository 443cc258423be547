"""One shard file: refuses what cannot be content, and notices any damage at the right moment."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from stores import COMMON, SHARDS, E, random_documents, refusal, stream_of, write_store

from jaxgpt.data import shard as shard_file
from jaxgpt.data.shard import HEADER_BYTES, write_shard
from jaxgpt.data.store import open_store
from jaxgpt.errors import DataError, StorageError


def test_an_origin_with_newlines_and_undecodable_bytes_comes_back(tmp_path):
    origin = os.fsdecode(b"a\nb \xff \xe2\x80\xa8")
    write_store(tmp_path, [[[3], [4]]], origin=origin)
    assert open_store(tmp_path).provenance(1) == f"{origin}:0:1"


@pytest.mark.parametrize("vocab_size, size", [(65_536, 2), (65_537, 4)])
def test_ids_take_two_bytes_only_if_the_largest_fits(tmp_path, vocab_size, size):
    top = vocab_size - 1
    write_store(tmp_path, [[[3, top, 4]]], vocab_size=vocab_size)
    store = open_store(tmp_path)
    assert store.read(0, 5).tolist() == [E, 3, top, 4, E]
    assert store._shard(0).dtype.itemsize == size


@pytest.mark.parametrize("ids", [[3, 64], [-1, 3], [3, 70_000], [3, E, 4]])
def test_ids_that_cannot_be_content_are_refused_and_nothing_is_left(tmp_path, ids):
    with pytest.raises(DataError, match=r"x\.shard: document 1 (has ids|contains end-of-text)"):
        write_shard(tmp_path / "x.shard", [([3], 1, "a"), (np.array(ids), 2, "b")], **COMMON)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_source_keeps_its_type_and_leaves_nothing(tmp_path):
    def documents():
        yield np.array([3]), 1, "a"
        raise FileNotFoundError("input gone")

    with pytest.raises(FileNotFoundError, match="input gone"):
        write_shard(tmp_path / "x.shard", documents(), **COMMON)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="x.shard: No space left"):
        write_shard(tmp_path / "x.shard", [(np.array([3]), 1, "a")], **COMMON)
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_in_any_byte_of_a_shard_is_detected(tmp_path):
    write_store(tmp_path, [SHARDS[0]])
    path = tmp_path / "00000.shard"
    good = path.read_bytes()
    positions = [*range(0, HEADER_BYTES, 16), *range(HEADER_BYTES - 8, len(good))]
    assert len(good) - HEADER_BYTES > 100
    for position in positions:
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        assert "00000.shard" in refusal(tmp_path)
    path.write_bytes(good)
    open_store(tmp_path).verify()


def three_blocks(directory: Path) -> np.ndarray:
    """Write a store with tokens in blocks 0, 1 and (with all that follows) 2; return them."""
    tokens = np.random.default_rng(0).integers(3, 64, 1_100_000)
    write_store(directory, [[tokens]])
    return tokens


def test_a_damaged_block_is_named_when_it_is_touched_and_not_before(tmp_path):
    tokens = three_blocks(tmp_path)
    path = tmp_path / "00000.shard"
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + (1 << 20) + 77)
        file.write(b"\xff")
    store = open_store(tmp_path)
    np.testing.assert_array_equal(store.read(1, 500_001), tokens[:500_000])
    with pytest.raises(DataError, match=r"00000\.shard: block 1 .* fails its checksum"):
        store.read(524_280, 524_300)


def test_each_block_is_checked_once_even_when_shards_are_closed_between(tmp_path, monkeypatch):
    three_blocks(tmp_path)
    reads = []
    pread = os.pread

    def note(fd: int, size: int, start: int) -> bytes:
        if size > 100_000:
            reads.append(start)
        return pread(fd, size, start)

    monkeypatch.setattr(os, "pread", note)
    store = open_store(tmp_path)
    for _ in range(3):
        for start in (0, 300_000, 524_000, 1_000_000, 1_099_000):
            store.read(start, start + 1000)
        store.close()
    assert sorted(reads) == [HEADER_BYTES + block * 2**20 for block in range(3)]


def test_ids_beyond_the_vocabulary_are_refused_on_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "_check_ids", lambda *_: None)  # a writer that forgot to check
    write_store(tmp_path, [[[3, 4], [64]]])
    assert "00000.shard: block 0 (bytes 4096..4" in (message := refusal(tmp_path))
    assert "has id 64, the vocabulary 64" in message


@pytest.mark.parametrize("change", [-1, -200, 1])
def test_a_shard_of_another_size_is_refused_at_open(tmp_path, change):
    write_store(tmp_path, SHARDS)
    path = tmp_path / "00003.shard"
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(DataError, match=f"00003.shard: shard has {size + change} bytes.*{size}"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "field, options", [("tokenizer_digest", {"tokenizer": "tokenizer-b"}), ("vocab_size", {})]
)
def test_a_shard_of_another_tokenizer_is_refused_at_open(tmp_path, field, options):
    write_store(tmp_path / "a", SHARDS, vocab_size=64)
    write_store(tmp_path / "b", SHARDS, vocab_size=64 if options else 65, **options)
    shutil.copy(tmp_path / "b/00003.shard", tmp_path / "a/00003.shard")
    with pytest.raises(DataError, match=f"00003.shard: shard has {field}"):
        open_store(tmp_path / "a")


def test_a_shard_with_wider_ids_than_its_vocabulary_needs_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shard_file, "token_dtype", lambda _: np.dtype("<u4"))
        write_store(tmp_path, SHARDS)
    with pytest.raises(DataError, match="dtype uint32, expected uint16"):
        open_store(tmp_path)


def test_two_shards_of_one_size_that_changed_places_are_refused(tmp_path):
    write_store(tmp_path, [random_documents([8, 8], seed) for seed in (1, 2)])
    first, second = tmp_path / "00000.shard", tmp_path / "00001.shard"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(DataError, match="00000.shard"):
        open_store(tmp_path)


def test_a_missing_shard_is_refused_at_open(tmp_path):
    write_store(tmp_path, SHARDS)
    (tmp_path / "00002.shard").unlink()
    with pytest.raises(StorageError, match="00002.shard: No such file"):
        open_store(tmp_path)


def test_a_shard_truncated_while_open_is_an_error_and_not_a_crash(tmp_path):
    three_blocks(tmp_path)
    store = open_store(tmp_path)
    store.read(0, 10)
    os.truncate(tmp_path / "00000.shard", HEADER_BYTES + (1 << 20) + 5)
    with pytest.raises(DataError, match="00000.shard: bytes .* has become shorter"):
        store.read(600_000, 600_100)


def test_a_read_error_is_retried_and_then_named(tmp_path, monkeypatch):
    write_store(tmp_path, SHARDS)
    monkeypatch.setattr(shard_file, "RETRY_AFTER", (0, 0, 0))
    failures = [3]
    pread = os.pread

    def flaky(*args):
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return pread(*args)

    monkeypatch.setattr(os, "pread", flaky)
    assert open_store(tmp_path).read(0, 3).tolist() == stream_of(SHARDS)[:3]
    failures[0] = 4
    with pytest.raises(StorageError, match="00000.shard: bytes .*Input/output error"):
        open_store(tmp_path).read(0, 3)


def test_the_checksums_are_standard_crc_32(tmp_path):
    """So that a store can be checked without this package."""
    three_blocks(tmp_path)
    data = (tmp_path / "00000.shard").read_bytes()
    table = np.frombuffer(data[-24:-12], "<u4")
    assert zlib.crc32(data[HEADER_BYTES : HEADER_BYTES + 2**20]) == table[0]
    assert zlib.crc32(data[HEADER_BYTES + 2**21 : -24]) == table[2]
