"""One shard file: refuses what cannot be content, and notices any damage at the right moment."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from stores import COMMON, SHARDS, E, encoded, random_documents, refusal, stream_of, write_store

from jaxgpt.data import blocks
from jaxgpt.data import shard as shard_file
from jaxgpt.data.blocks import BLOCK_BYTES, HEADER_BYTES
from jaxgpt.data.shard import Encoded, copy_shard, document_digest, read_digests, write_shard
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
    assert store.shard(0).dtype.itemsize == size


@pytest.mark.parametrize("ids", [[3, 64], [-1, 3], [3, 70_000], [3, E, 4]])
def test_ids_that_cannot_be_content_are_refused_and_nothing_is_left(tmp_path, ids):
    with pytest.raises(DataError, match=r"x\.shard: document 1 (has ids|contains end-of-text)"):
        write_shard(tmp_path / "x.shard", [encoded([3]), encoded(ids)], **COMMON)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_source_keeps_its_type_and_leaves_nothing(tmp_path):
    def documents():
        yield encoded([3])
        raise FileNotFoundError("input gone")

    with pytest.raises(FileNotFoundError, match="input gone"):
        write_shard(tmp_path / "x.shard", documents(), **COMMON)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="x.shard: No space left"):
        write_shard(tmp_path / "x.shard", [encoded([3])], **COMMON)
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
    """Write a store with its stream in blocks 0, 1 and (with all that follows) 2; return ids."""
    tokens = np.random.default_rng(0).integers(3, 64, BLOCK_BYTES + 20_000)
    write_store(directory, [[tokens]])
    return tokens


def test_a_damaged_block_is_named_when_it_is_touched_and_not_before(tmp_path):
    tokens = three_blocks(tmp_path)
    path = tmp_path / "00000.shard"
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + BLOCK_BYTES + 77)
        file.write(b"\xff")
    store = open_store(tmp_path)
    half = BLOCK_BYTES // 2  # ids in a block
    np.testing.assert_array_equal(store.read(1, half), tokens[: half - 1])
    with pytest.raises(DataError, match=r"00000\.shard: block 1 .* fails its checksum"):
        store.read(half - 10, half + 10)


def test_each_block_is_checked_once_even_when_shards_are_closed_between(tmp_path, monkeypatch):
    three_blocks(tmp_path)
    sums = []
    crc32 = zlib.crc32

    def note(data: bytes, start: int = 0) -> int:
        if len(data) > HEADER_BYTES:
            sums.append(len(data))
        return crc32(data, start)

    monkeypatch.setattr(zlib, "crc32", note)
    store = open_store(tmp_path)
    half = BLOCK_BYTES // 2
    for _ in range(3):
        for start in (0, half // 2, half - 500, half + 7, 2 * half - 500, 2 * half + 100):
            store.read(start, start + 1000)
        store.close()
    assert len(sums) == 3 and sorted(sums)[1:] == [BLOCK_BYTES] * 2


def test_ids_beyond_the_vocabulary_are_refused_on_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "_refuse", lambda *_: None)  # a writer that forgot to check
    write_store(tmp_path, [[[3, 4], [64]]])
    assert "00000.shard: block at bytes 4096..4" in (message := refusal(tmp_path))
    assert "has id 64, the vocabulary 64" in message


@pytest.mark.parametrize("change", [-1, -200, 1])
def test_a_shard_of_another_size_is_refused_at_open(tmp_path, change):
    write_store(tmp_path, SHARDS)
    path = tmp_path / "00003.shard"
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(DataError, match=f"00003.shard: file has {size + change} bytes.*{size}"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "field, options", [("tokenizer_digest", {"tokenizer": "tokenizer-b"}), ("vocab_size", {})]
)
def test_a_shard_of_another_tokenizer_is_refused_at_open(tmp_path, field, options):
    write_store(tmp_path / "a", SHARDS, vocab_size=64)
    write_store(tmp_path / "b", SHARDS, vocab_size=64 if options else 65, **options)
    shutil.copy(tmp_path / "b/00003.shard", tmp_path / "a/00003.shard")
    with pytest.raises(DataError, match=f"00003.shard: file has {field}"):
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


def test_a_shard_that_cannot_be_read_is_refused_at_open(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "RETRY_AFTER", (0, 0, 0))
    write_store(tmp_path, SHARDS)
    path = tmp_path / "00002.shard"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # opens, but its first bytes are an Input/output error
    with pytest.raises(StorageError, match="00002.shard: Input/output error"):
        open_store(tmp_path)


def test_a_shard_of_another_version_is_refused_with_both(tmp_path, monkeypatch):
    write_store(tmp_path, SHARDS)
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "VERSION", blocks.VERSION + 1)
        write_store(other, SHARDS)
    shutil.copy(other / "00003.shard", tmp_path)
    said = f"00003.shard: file has version {blocks.VERSION + 1}, this program reads"
    with pytest.raises(DataError, match=f"{said} {blocks.VERSION}"):
        open_store(tmp_path)


@pytest.mark.parametrize("failures, number", [(3, errno.ESTALE), (4, errno.EIO), (1, errno.ENOENT)])
def test_a_shard_that_cannot_be_opened_for_a_while_is_tried_again(
    tmp_path, monkeypatch, failures, number
):
    write_store(tmp_path, SHARDS)
    store, stream = open_store(tmp_path), stream_of(SHARDS)
    waited, left, os_open = [], [failures], os.open
    monkeypatch.setattr(blocks, "RETRY_AFTER", (0.001, 0.002, 0.003))
    monkeypatch.setattr(blocks.time, "sleep", waited.append)

    def away(path, *args):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return os_open(path, *args)

    monkeypatch.setattr(os, "open", away)
    if failures == 3:
        assert store.read(0, 3).tolist() == stream[:3]
        assert waited == [0.001, 0.002, 0.003]  # longer each time
    else:
        with pytest.raises(StorageError, match=f"00000.shard: {os.strerror(number)}"):
            store.read(0, 3)
        assert len(waited) == failures - 1  # what is not there will not come back


def test_a_shard_truncated_while_open_is_an_error_and_not_a_crash(tmp_path):
    three_blocks(tmp_path)
    store = open_store(tmp_path)
    store.read(0, 10)
    os.truncate(tmp_path / "00000.shard", HEADER_BYTES + BLOCK_BYTES + 5)
    with pytest.raises(DataError, match="00000.shard: bytes .* has become shorter"):
        store.read(BLOCK_BYTES // 2 + 10, BLOCK_BYTES // 2 + 20)


def test_a_read_error_is_retried_and_then_named(tmp_path, monkeypatch):
    write_store(tmp_path, SHARDS)
    monkeypatch.setattr(blocks, "RETRY_AFTER", (0, 0, 0))
    failures = [3]
    preadv = os.preadv

    def flaky(*args):
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", flaky)
    assert open_store(tmp_path).read(0, 3).tolist() == stream_of(SHARDS)[:3]
    failures[0] = 4
    with pytest.raises(StorageError, match="00000.shard: bytes .*Input/output error"):
        open_store(tmp_path).read(0, 3)


def test_a_read_that_returns_less_than_asked_for_goes_on(tmp_path, monkeypatch):
    write_store(tmp_path, SHARDS)
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, b, at: preadv(fd, [memoryview(b[0]).cast("B")[:3]], at)
    )
    store = open_store(tmp_path)
    assert store.read(0, store.stream_len + 1).tolist() == stream_of(SHARDS)


def test_the_checksums_are_standard_crc_32(tmp_path):
    """So that a store can be checked without this package."""
    three_blocks(tmp_path)
    data = (tmp_path / "00000.shard").read_bytes()
    table = np.frombuffer(data[-24:-12], "<u4")
    assert zlib.crc32(data[HEADER_BYTES : HEADER_BYTES + BLOCK_BYTES]) == table[0]
    assert zlib.crc32(data[HEADER_BYTES + 2 * BLOCK_BYTES : -24]) == table[2]


def test_a_huge_document_may_come_in_parts(tmp_path):
    parts = [np.array([3, 4]), np.array([], np.int32), np.array([5])]
    whole = write_shard(tmp_path / "a", [encoded([7]), encoded([3, 4, 5])], **COMMON)
    digest = encoded([3, 4, 5]).digest
    given = [encoded([7]), Encoded(iter(parts), 1, "a", digest)]
    cut = write_shard(tmp_path / "b", given, **COMMON)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert cut | {"name": "a"} == whole


def test_digests_are_halves_of_sha_256(tmp_path):
    write_shard(tmp_path / "x", [Encoded(np.array([3]), 3, "a", document_digest(b"abc"))], **COMMON)
    found = read_digests(shard_file.open_shard(tmp_path / "x", {}))
    assert found.shape == (1, 2)
    assert found.tobytes().hex() == "ba7816bf8f01cfea414140de5dae2223"  # FIPS 180-2, "abc"


def test_a_copy_keeps_the_chosen_documents_as_they_were(tmp_path):
    documents = [encoded(ids, 5 + ids[0], f"file {ids[0]}") for ids in ([3, 4], [5], [6, 7, 8])]
    write_shard(tmp_path / "x", documents, **COMMON)
    source = shard_file.open_shard(tmp_path / "x", {})
    copied = copy_shard(source, tmp_path / "y", np.array([True, False, True]))
    right = write_shard(tmp_path / "z", [documents[0], documents[2]], **COMMON)
    assert (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes()
    assert copied == right | {"name": "y"}


def test_starts_of_a_shard_with_very_many_documents_are_read_where_needed(tmp_path, monkeypatch):
    documents = random_documents(np.random.default_rng(0).integers(1, 9, 3000).tolist())
    write_store(tmp_path, [documents])
    loaded, right = open_store(tmp_path), [i == E for i in stream_of([documents])]
    loaded.shard(0)
    monkeypatch.setattr(shard_file, "LOADED_STARTS", 100)
    stored = open_store(tmp_path)
    for start in range(0, stored.stream_len - 200, 997):
        got = stored.opens(start, start + 200)
        assert got.tolist() == np.flatnonzero(right[start : start + 200]).tolist()
        assert stored.document_at(start) == loaded.document_at(start)
    assert type(stored.shard(0).starts) is not type(loaded.shard(0).starts)
