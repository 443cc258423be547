"""Best-fit packing: no pair lost, twice, or torn without need; and the index that keeps it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import random_documents, write_store

from jaxgpt.data import best_fit
from jaxgpt.data.best_fit import (
    MissingIndex,
    Packed,
    build_index,
    index_path,
    open_index,
    pack,
)
from jaxgpt.data.store import Store, open_store
from jaxgpt.errors import ConfigError, DataError, StorageError

EDGES = (1, 2, 3, 10, 16, 17)
PROBLEMS = st.tuples(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 20), st.booleans())


def around(T: int) -> list[int]:
    """Every length up to 4T + 1, in an order that is neither rising nor falling."""
    return np.random.default_rng(T).permutation(np.arange(1, 4 * T + 2)).tolist()


def rows_of(packed: Packed) -> list[list[tuple[int, int]]]:
    """Return the pieces of each row."""
    pieces = [tuple(piece) for piece in packed.pieces.tolist()]
    return [pieces[first:last] for first, last in pairwise(packed.row_starts.tolist())]


def covered(pieces) -> list[int]:
    """Return the stream positions in pieces, sorted."""
    return sorted(p for start, length in pieces for p in range(start, start + length))


# The packing of one window.


@pytest.mark.parametrize("T", EDGES)
def test_every_pair_is_in_exactly_one_row_for_all_lengths_around_multiples(T):
    lengths = around(T)
    packed = pack(np.array(lengths), T, whole=False)
    assert covered(packed.pieces.tolist()) == list(range(sum(lengths)))
    assert packed.truncated == (0, 0)


@pytest.mark.parametrize("T", EDGES)
def test_only_documents_longer_than_a_row_are_cut_and_only_at_multiples_of_it(T):
    lengths = around(T)
    packed = pack(np.array(lengths), T, whole=False)
    expected, start = [], 0
    for length in lengths:
        expected += [(start + at, min(T, length - at)) for at in range(0, length, T)]
        start += length
    assert sorted(map(tuple, packed.pieces.tolist())) == expected


@settings(max_examples=200, deadline=None)
@given(PROBLEMS)
def test_rows_hold_at_most_their_length_and_lie_in_the_order_of_the_stream(problem):
    lengths, T, whole = problem
    packed = pack(np.array(lengths, np.int64), T, whole=whole)
    rows = rows_of(packed)
    assert all(rows), "no row is empty"
    assert rows == sorted(sorted(row) for row in rows)
    assert packed.fills.tolist() == [sum(length for _, length in row) for row in rows]
    assert packed.fills.max(initial=1) <= T
    assert packed.fills.sum() + packed.truncated.tokens == sum(lengths)


@settings(max_examples=200, deadline=None)
@given(PROBLEMS)
def test_whole_keeps_the_beginning_of_each_document_in_one_piece(problem):
    lengths, T, _ = problem
    packed = pack(np.array(lengths, np.int64), T, whole=True)
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    kept = [(start, min(length, T)) for start, length in zip(starts, lengths, strict=True)]
    assert sorted(map(tuple, packed.pieces.tolist())) == kept
    longer = [length - T for length in lengths if length > T]
    assert packed.truncated == (sum(longer), len(longer))


def test_four_documents_of_five_two_three_and_one_pairs_fill_three_rows_of_four():
    packed = pack(np.array([5, 2, 3, 1]), 4, whole=False)
    assert len(packed.fills) == 3  # 11 pairs need 3
    assert covered(packed.pieces.tolist()) == list(range(11))
    # 4 | 3, then the first of the pieces of 1 beside it | 2 and the other 1.
    assert rows_of(packed) == [[(0, 4)], [(4, 1), (7, 3)], [(5, 2), (10, 1)]]


def test_whole_documents_lose_one_pair_and_no_row_begins_inside_one():
    packed = pack(np.array([5, 2, 3, 1]), 4, whole=True)
    assert rows_of(packed) == [[(0, 4)], [(5, 2)], [(7, 3), (10, 1)]]
    assert packed.truncated == (1, 1)


def test_four_documents_of_five_two_three_and_one_ids_close_with_an_end_each():
    lengths = np.array([5, 2, 3, 1]) + 1
    packed = pack(lengths, 4, whole=False)
    assert covered(packed.pieces.tolist()) == list(range(15))
    assert len(packed.fills) == 4  # 15 pairs need 4
    assert pack(lengths, 4, whole=True).truncated == (2, 1)


@pytest.mark.parametrize(("pairs", "last"), [(23, 3), (24, 4)])
def test_a_document_longer_than_two_rows_is_cut_in_order(pairs, last):
    packed = pack(np.array([pairs]), 10, whole=False)
    assert rows_of(packed) == [[(0, 10)], [(10, 10)], [(20, last)]]


@pytest.mark.parametrize(("T", "most"), [(2048, 0.0005), (8192, 0.001)])
def test_padding_on_web_like_lengths_stays_within_its_bound(T, most):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.2, 1.1, 12 * 8192).astype(np.int64) + 2
    assert abs(lengths.mean() / 904 - 1) < 0.02
    packed = [pack(part, T, whole=False) for part in np.split(lengths, 12)]
    rows = sum(len(window.fills) for window in packed)
    assert 0 <= 1 - lengths.sum() / (rows * T) <= most


def test_a_million_documents_of_one_token_are_packed_densely():
    packed = pack(np.full(1_000_000, 2), 2047, whole=False)
    # Rows of 1023 documents and one free input: those of 2 pairs cannot use it.
    assert packed.fills.tolist() == [2046] * 977 + [2 * (1_000_000 - 977 * 1023)]
    assert (packed.pieces == np.arange(1_000_000)[:, None] * [2, 0] + [0, 2]).all()


def test_no_documents_give_no_rows():
    packed = pack(np.empty(0, np.int64), 8, whole=False)
    assert (packed.row_starts.tolist(), packed.pieces.shape, len(packed.fills)) == ([0], (0, 2), 0)


@pytest.mark.parametrize("T", [0, -1, 2**31])
def test_row_lengths_that_cannot_be_are_refused(T):
    with pytest.raises(ConfigError, match=f"model.seq_len: {T} "):
        pack(np.array([3]), T, whole=False)


# The index of a store.


T = 8
LENGTHS = [[1, 7, 8, 25, 3], [], [], [1], [9, 9, 2, 30, 6, 1, 1], []]  # content ids, by shard


def make(directory: Path, lengths=LENGTHS, seed: int = 0) -> Store:
    write_store(directory, [random_documents(part, seed=seed) for part in lengths])
    return open_store(directory)


def built(store: Store, seq_len: int = T, whole: bool = False) -> best_fit.PackingIndex:
    build_index(store, seq_len, whole=whole)
    return open_index(store, seq_len, whole=whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seq_len", [1, 8, 1000])
def test_rows_of_the_index_are_those_of_each_shard_moved_to_its_place(tmp_path, seq_len, whole):
    index = built(make(tmp_path), seq_len, whole)
    expected, base = [], 0
    for part in LENGTHS:
        packed = pack(np.array(part, np.int64) + 1, seq_len, whole=whole)
        expected += [[(base + start, n) for start, n in row] for row in rows_of(packed)]
        base += sum(part) + len(part)
    found = [
        [tuple(piece) for piece in row.tolist()] for row in map(index.row, range(len(expected)))
    ]
    assert (index.num_rows, found) == (len(expected), expected)


def test_every_input_of_the_store_is_in_the_index_once(tmp_path):
    store = make(tmp_path)
    index = built(store)
    pieces = np.concatenate(index.rows(np.arange(index.num_rows)))
    assert covered(pieces.tolist()) == list(range(store.stream_len))


def test_rows_in_any_order_and_repeated_are_the_single_rows(tmp_path):
    index = built(make(tmp_path))
    numbers = np.random.default_rng(0).integers(0, index.num_rows, 50)
    for number, pieces in zip(numbers, index.rows(numbers), strict=True):
        assert pieces.tolist() == index.row(number).tolist()
    assert index.rows(np.array([], np.int64)) == []


def test_fill_is_the_sum_of_the_pieces(tmp_path):
    index = built(make(tmp_path))
    numbers = np.random.default_rng(0).integers(0, index.num_rows, 50)
    fills = index.fill(numbers)
    assert fills.dtype == np.int64
    assert fills.tolist() == [index.row(number)[:, 1].sum() for number in numbers]
    assert index.fill(np.array([], np.int64)).shape == (0,)


def test_fill_reads_no_pieces(tmp_path, monkeypatch):
    index = built(make(tmp_path, [[1] * 300]))
    size = []
    read = best_fit.blocks.read
    monkeypatch.setattr(
        best_fit.blocks, "read", lambda file, a, b: size.append(b - a) or read(file, a, b)
    )
    index.fill(np.arange(index.num_rows))
    assert size == [8 * index.num_rows]


@pytest.mark.parametrize("whole", [False, True])
def test_the_row_of_a_position_is_where_the_rows_have_it(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(best_fit, "CHUNK", 3)
    store = make(tmp_path)
    index = built(store, whole=whole)
    where = dict.fromkeys(range(store.stream_len))
    for number in range(index.num_rows):
        row = [p for start, n in index.row(number).tolist() for p in range(start, start + n)]
        where |= {position: (number, offset) for offset, position in enumerate(row)}
    assert {p: index.row_of(p) for p in range(store.stream_len)} == where
    assert list(where.values()).count(None) == index.truncated.tokens == (whole and 1 + 18 + 27)


def test_rows_and_positions_that_are_not_there_are_refused(tmp_path):
    store = make(tmp_path)
    index = built(store)
    for call in (index.row, lambda n: index.rows(np.array([0, n])), lambda n: index.fill([n])):
        for number in (-1, index.num_rows):
            with pytest.raises(IndexError, match=str(number)):
                call(number)
    for position in (-1, store.stream_len):
        with pytest.raises(IndexError, match=str(position)):
            index.row_of(position)


def test_padding_and_truncation_are_counted(tmp_path):
    store = make(tmp_path, [[9, 2], [4]])  # 10 + 3 and 5 pairs
    index = built(store)
    assert index.num_rows == 3  # 8 | 3 + 2 | 5
    assert index.padding == pytest.approx(1 - 18 / 24)
    assert index.truncated == (0, 0)
    index = built(store, whole=True)
    assert index.padding == pytest.approx(1 - 16 / 24)  # 8 | 3 | 5
    assert index.truncated == (2, 1)


def test_a_store_without_documents_has_no_rows_and_no_padding(tmp_path):
    index = built(make(tmp_path, [[], []]))
    assert (index.num_rows, index.padding, index.inputs) == (0, 0.0, 0)


def test_building_again_gives_the_same_bytes(tmp_path):
    store = make(tmp_path)
    data = build_index(store, T, whole=False).read_bytes()
    assert build_index(store, T, whole=False).read_bytes() == data


def test_indices_of_several_kinds_share_a_folder(tmp_path):
    store = make(tmp_path)
    kinds = [(8, False), (8, True), (9, False)]
    paths = {build_index(store, n, whole=whole) for n, whole in kinds}
    assert paths == {index_path(store, n, whole=whole) for n, whole in kinds}
    assert len(paths) == len({open_index(store, n, whole=whole).digest for n, whole in kinds}) == 3


def test_equal_stores_have_equal_indices_whatever_their_empty_shards(tmp_path):
    shards = [random_documents(part, seed=1) for part in LENGTHS]
    write_store(tmp_path / "a", shards)
    write_store(tmp_path / "b", [shard for shard in shards if shard])
    store, other = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    assert store.digest == other.digest and store.num_shards != other.num_shards
    path = build_index(store, T, whole=False)
    shutil.copy(path, other.directory)
    index = open_index(other, T, whole=False)
    assert index.row(index.num_rows - 1).tolist() == built(store).row(index.num_rows - 1).tolist()
    assert build_index(other, T, whole=False).read_bytes() == path.read_bytes()


def test_progress_counts_the_shards_with_documents(tmp_path):
    calls = []
    build_index(make(tmp_path), T, whole=False, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_missing_index_says_who_builds_it(tmp_path):
    with pytest.raises(MissingIndex, match="prepare"):
        open_index(make(tmp_path), T, whole=False)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": 1}, "store"),
        ({"seq_len": 9}, "seq_len 9, expected 8"),
        ({"whole": True}, "whole True, expected False"),
        ({"version": 2}, "algorithm 2, expected 1"),
    ],
)
def test_an_index_of_something_else_is_refused_with_both_values(
    tmp_path, monkeypatch, change, names
):
    store, other = make(tmp_path / "a"), make(tmp_path / "b", seed=change.get("seed", 0))
    with monkeypatch.context() as patch:
        patch.setattr(best_fit, "VERSION", change.get("version", best_fit.VERSION))
        path = build_index(other, change.get("seq_len", T), whole=change.get("whole", False))
    shutil.copy(path, index_path(store, T, whole=False))
    with pytest.raises(DataError, match=names) as caught:
        open_index(store, T, whole=False)
    if "seed" in change:
        assert f"store {other.digest}, expected {store.digest}" in str(caught.value)


def test_any_changed_byte_is_noticed(tmp_path):
    store = make(tmp_path)
    path = build_index(store, T, whole=False)
    data = path.read_bytes()
    for at in [*range(0, 4096, 16), *range(4096, len(data))]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(DataError, match=path.name) as caught:
            index = open_index(store, T, whole=False)
            index.rows(np.arange(index.num_rows))
        assert "\n" not in str(caught.value) and "builds it again" in str(caught.value)


@pytest.mark.parametrize("size", [0, 100, 4096, -1, 1])
def test_an_index_cut_short_or_made_longer_is_refused(tmp_path, size):
    store = make(tmp_path)
    path = build_index(store, T, whole=False)
    data = path.read_bytes()
    path.write_bytes(data + b"\0" if size == 1 else data[:size])
    with pytest.raises(DataError, match=path.name):
        open_index(store, T, whole=False)


def test_an_index_that_does_not_fit_its_store_is_refused(tmp_path):
    store = make(tmp_path)
    build_index(store, T, whole=False)
    store.shard_positions = store.shard_positions + np.array([0, 0, 0, 0, 0, 1, 1])
    with pytest.raises(DataError, match="does not add up"):
        open_index(store, T, whole=False)


def test_a_shard_whose_positions_exceed_32_bits_is_refused_before_anything_is_written(tmp_path):
    store = SimpleNamespace(
        directory=tmp_path, digest="0" * 64, shard_positions=np.array([0, 5, 5 + 2**32])
    )
    with pytest.raises(DataError, match=f"shard 1 has {2**32} .* above the {2**32 - 1} "):
        build_index(store, T, whole=False)
    assert not list(tmp_path.iterdir())


def test_a_start_near_the_limit_of_32_bits_survives(tmp_path):
    lengths = np.array([2**31, 2**31 - 9, 8])  # 2^32 - 1 positions
    store = SimpleNamespace(
        directory=tmp_path,
        digest="0" * 64,
        shard_positions=np.array([0, 2**32 - 1, 2**32 + 3]),
        doc_starts=lambda shard: np.cumsum([0, *lengths]) if shard == 0 else np.array([0, 4]),
    )
    index = built(store, 2**30)
    # Rows 0 to 2 are full; the 8 pairs go beside the 2^30 - 9 of row 3.
    assert index.row(3).tolist() == [[3 * 2**30, 2**30 - 9], [2**32 - 9, 8]]
    assert index.row(4).tolist() == [[2**32 - 1, 4]]
    assert index.row_of(2**32 - 2) == (3, 2**30 - 2)


def test_a_folder_that_cannot_be_written_is_named_and_nothing_stays(tmp_path):
    store = make(tmp_path)
    path = index_path(store, T, whole=False)
    path.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError, match=f"{path.name}.*make the folder writable"):
        build_index(store, T, whole=False)
    assert sorted(tmp_path.iterdir()) == before


def test_a_shard_that_cannot_be_read_is_named_itself_and_nothing_stays(tmp_path, monkeypatch):
    store, error = make(tmp_path), StorageError("00003.shard: Input/output error")

    def doc_starts(shard: int) -> np.ndarray:
        if shard == 3:
            raise error
        return Store.doc_starts(store, shard)

    monkeypatch.setattr(store, "doc_starts", doc_starts)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError) as caught:
        build_index(store, T, whole=False)
    assert caught.value is error
    assert sorted(tmp_path.iterdir()) == before


BUILD = """
import sys
from jaxgpt.data.best_fit import build_index
from jaxgpt.data.store import open_store
for _ in range(30):
    build_index(open_store(sys.argv[1]), 8, whole=False)
assert "jax" not in sys.modules and "tensorflow" not in sys.modules
"""


def test_two_processes_may_build_at_once_and_need_no_jax(tmp_path):
    store = make(tmp_path)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    index = open_index(store, T, whole=False)
    assert covered(np.concatenate(index.rows(np.arange(index.num_rows))).tolist()) == list(
        range(store.stream_len)
    )
    assert [name for name in os.listdir(tmp_path) if "packing" in name] == [index.file.path.name]


def test_threads_read_the_same_rows(tmp_path):
    index = built(make(tmp_path, [[3] * 20_000, [1, 9] * 8_000]))  # more than one 256 KiB block
    numbers = np.random.default_rng(0).permutation(index.num_rows)[:2000]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: index.row(n).tolist(), numbers.tolist()))
        fills = np.concatenate(list(pool.map(index.fill, np.split(numbers, 8))))
    fresh = open_index(open_store(tmp_path), T, whole=False)
    assert found == [fresh.row(n).tolist() for n in numbers]
    assert fills.tolist() == [sum(length for _, length in row) for row in found]
