"""The orders of rows: one to one at every size, equal to big-integer arithmetic, evenly random."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data import order

SMALL = [*range(1, 40), 63, 64, 65, 127, 128, 129, 251, 255, 256, 257, 1021, 4095, 4096, 4097]
LARGE = [2**31 + 11, 2**32 - 1, 2**32 + 1, 2**33 + 5, 2**40 - 87, 2**40 + 1, 2**53 + 1, 2**62]
GOLDEN = {
    10: [8, 7, 1, 2, 4, 3],
    2**33 + 5: [7165407599, 6231966523, 6389356018, 2795787274, 6647832156, 5047796163],
    2**40 + 1: [148549792965, 465777583482, 421381009177, 11352081116, 257787809589, 1014126917607],
}
SIZES = [1 << 18, 1_000_003, 120_000_000, 2**33 + 5]
KINDS = ["global", "stretches", "inside"]


STRETCHES = [  # (rows, rows of a stretch): short, single, full and missing last stretches
    (1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (7, 3), (8, 4), (9, 4), (64, 16), (65, 16), (63, 16),
    (100, 1), (100, 99), (100, 100), (100, 101), (200, 7), (210, 64),
]  # fmt: skip
FEW_STRETCHES = [  # (rows, rows of a stretch) that have at most 17 stretches
    (2**33 + 5, 2**30), (2**40 + 1, 2**37 + 1), (2**53 + 1, 2**50), (2**62, 2**58),
    (2**62, 2**58 + 1), (2**62 - 1, 2**61), (2**62, 2**62), (2**62, 2**62 - 1),
]  # fmt: skip
BLOCK_GOLDEN = {
    (10, 4): [9, 8, 1, 3, 2, 0],
    (1000, 64): [8, 35, 34, 36, 24, 58],
    (2**33 + 5, 2**15): [
        3255686723, 3255687945, 3255695018, 3255668510, 3255674526, 3255693630
    ],
    (2**40 + 1, 2**12): [
        696983270167, 696983272434, 696983271011, 696983271850, 696983271733, 696983270755
    ],
    (2**62, 2**25): [
        616148947178696316, 616148947167320450, 616148947175088146,
        616148947185511856, 616148947171905684, 616148947179371476,
    ],
}  # fmt: skip


def slow_keys(text: str) -> list[int]:
    data = hashlib.sha512(text.encode("ascii")).digest()
    return [int.from_bytes(data[8 * k : 8 * k + 8], "little") for k in range(8)]


def slow_mix(x: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = ((x ^ (x // 2**33)) * factor) % 2**64
    return x ^ (x // 2**33)


def slow_walk(keys: list[int], n: int, index: int) -> int:
    """The permutation of `order.permute` from its definition, in Python's unbounded integers."""
    half = 1
    while 4**half < n:
        half += 1
    value = index
    while True:
        left, right = divmod(value, 2**half)
        for key in keys:
            left, right = right, left ^ (slow_mix(right ^ key) % 2**half)
        value = left * 2**half + right
        if value < n:
            return value


def slow_permute(seed: int, digest: str, epoch: int, n: int, index: int) -> int:
    return slow_walk(slow_keys(f"jaxgpt order 1|{seed}|{digest}|{epoch}"), n, index)


def slow_block(seed: int, digest: str, epoch: int, n: int, stretch: int, index: int) -> int:
    """Block order by passing over whole stretches one by one, in Python's unbounded integers."""
    outer = slow_keys(f"jaxgpt order 1|{seed}|{digest}|{epoch}|stretches")
    inner = slow_keys(f"jaxgpt order 1|{seed}|{digest}|{epoch}|rows")
    firsts = range(0, n, stretch)  # first row of each stretch
    turn = 0
    while True:
        which = slow_walk(outer, len(firsts), turn)
        length = min(stretch, n - firsts[which])
        if index < length:
            keys = [slow_mix(key ^ which) for key in inner]
            return firsts[which] + slow_walk(keys, length, index)
        index -= length
        turn += 1


def rows_of(n: int, count: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    counter = np.arange(count, dtype=np.int64) + epoch * n
    return order.visit(seed, "digest", n, counter)[1]


@pytest.mark.parametrize("n", SMALL)
def test_every_epoch_visits_every_row_once(n):
    for epoch in range(3):
        assert sorted(rows_of(n, n, epoch=epoch)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1021, 2**18, 1_000_003, *LARGE])
def test_rows_equal_big_integer_arithmetic(n):
    picks = sorted({0, n - 1, n // 2, n // 3, *(n * k // 17 for k in range(17))})
    for seed, epoch in ((0, 0), (-5, 3), (2**70, 10**6)):
        keys = order.epoch_keys(seed, "abc", epoch)
        right = [slow_permute(seed, "abc", epoch, n, index) for index in picks]
        assert order.permute(keys, n, np.array(picks)).tolist() == right


def test_golden_rows_stay_frozen():
    """From `slow_permute`; they guard its text and the module's against a common change."""
    for n, right in GOLDEN.items():
        assert rows_of(n, 6, seed=1234).tolist() == right


@pytest.mark.parametrize("n", [1, 2, 3, 257, *LARGE])
def test_the_inverse_undoes_the_permutation(n):
    index = np.unique(np.linspace(0, n - 1, 1000).astype(np.uint64))
    index = index[index < n]
    keys = order.epoch_keys(7, "abc", 0)
    rows = order.permute(keys, n, index)
    assert rows.max() < n
    assert len(np.unique(rows)) == len(index)
    np.testing.assert_array_equal(order.invert(keys, n, rows), index)


def test_a_batch_over_several_epochs_equals_its_positions_one_by_one():
    counters = np.arange(40, dtype=np.int64)
    epochs, rows = order.visit(0, "digest", 7, counters)
    assert epochs.tolist() == [c // 7 for c in range(40)]
    single = [int(order.visit(0, "digest", 7, counters[c : c + 1])[1][0]) for c in range(40)]
    assert rows.tolist() == single


def test_counters_past_2_to_the_33_epochs_and_rows_are_exact():
    n, counter = 5, 2**40 + 3
    epochs, rows = order.visit(0, "digest", n, np.array([counter]))
    assert epochs.tolist() == [counter // n]
    assert rows.tolist() == [slow_permute(0, "digest", counter // n, n, counter % n)]


def whole_epoch(kind: str, n: int, stretch: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    counter = np.arange(n, dtype=np.int64) + epoch * n
    return order.visit(seed, "digest", n, counter, order=kind, stretch=stretch)[1]


@settings(deadline=None)
@given(
    kind=st.sampled_from(["global", "block", "sequential"]),
    n=st.integers(1, 700),
    stretch=st.integers(1, 800),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**40),
)
def test_every_order_visits_every_row_once_and_is_undone(kind, n, stretch, seed, epoch):
    rows = whole_epoch(kind, n, stretch, epoch, seed)
    assert sorted(rows.tolist()) == list(range(n))
    index = order.ordinal(seed, "digest", n, epoch, rows, order=kind, stretch=stretch)
    assert index.dtype == rows.dtype == np.int64
    np.testing.assert_array_equal(index, np.arange(n))


@pytest.mark.parametrize("kind", ["global", "block", "sequential"])
@pytest.mark.parametrize("n", [1, 2, 3, 257, *LARGE])
def test_every_order_is_undone_at_any_size(kind, n):
    index = np.unique(np.linspace(0, n - 1, 300).astype(np.uint64)).astype(np.int64)
    index = index[index < n]
    for stretch in (1, 1000, 2**20, 2**33 + 1, n):
        options = {"order": kind, "stretch": stretch}
        _, rows = order.visit(3, "abc", n, index, **options)
        assert 0 <= rows.min() <= rows.max() < n
        assert len(np.unique(rows)) == len(index)
        found = order.ordinal(3, "abc", n, 0, rows, **options)
        np.testing.assert_array_equal(found, index)


@pytest.mark.parametrize("kind", ["global", "block", "sequential"])
def test_the_inverse_takes_an_epoch_per_row(kind):
    counter = np.arange(500, dtype=np.int64)
    options = {"order": kind, "stretch": 4}
    epoch, rows = order.visit(0, "digest", 23, counter, **options)
    index = order.ordinal(0, "digest", 23, epoch, rows, **options)
    np.testing.assert_array_equal(epoch * 23 + index, counter)


def test_sequential_order_is_the_order_on_disk_in_every_epoch():
    epoch, rows = order.visit(5, "digest", 7, np.arange(30), order="sequential")
    assert rows.tolist() == [c % 7 for c in range(30)]
    assert epoch.tolist() == [c // 7 for c in range(30)]


@pytest.mark.parametrize("n, stretch", STRETCHES)
def test_block_order_equals_big_integer_arithmetic(n, stretch):
    for epoch in range(2):
        right = [slow_block(0, "digest", epoch, n, min(stretch, n), index) for index in range(n)]
        assert whole_epoch("block", n, stretch, epoch).tolist() == right


@pytest.mark.parametrize("n, stretch", FEW_STRETCHES)
def test_large_block_orders_equal_big_integer_arithmetic(n, stretch):
    index = sorted({0, n - 1, *(n * k // 37 for k in range(37)), *range(0, n, stretch)})
    for seed, epoch in ((0, 0), (-5, 1)):
        right = [slow_block(seed, "abc", epoch, n, stretch, i) for i in index]
        counter = np.array(index) if epoch == 0 else np.array(index[: len(index) // 2]) + n
        _, rows = order.visit(seed, "abc", n, counter, order="block", stretch=stretch)
        assert rows.tolist() == right[: len(counter)]


def test_golden_rows_of_block_order_stay_frozen():
    """From `slow_block`; they guard its text and the module's against a common change."""
    for (n, stretch), right in BLOCK_GOLDEN.items():
        _, rows = order.visit(1234, "digest", n, np.arange(6), order="block", stretch=stretch)
        assert rows.tolist() == right


@pytest.mark.parametrize("n, stretch", STRETCHES)
def test_the_rows_of_a_stretch_come_one_after_the_other_in_block_order(n, stretch):
    for epoch in range(4):
        which = whole_epoch("block", n, stretch, epoch) // stretch
        assert np.count_nonzero(np.diff(which)) == -(-n // stretch) - 1


def test_the_short_stretch_comes_at_any_turn():
    n, stretch = 34, 10  # stretches of 10, 10, 10 and 4 rows
    turns = [int(np.argmax(whole_epoch("block", n, stretch, e) >= 30)) for e in range(200)]
    assert set(turns) == {0, 10, 20, 30}


def test_a_batch_over_several_epochs_of_block_order_equals_its_positions_one_by_one():
    counters = np.arange(60, dtype=np.int64)
    options = {"order": "block", "stretch": 3}
    rows = order.visit(0, "digest", 7, counters, **options)[1].tolist()
    alone = [order.visit(0, "digest", 7, counters[c : c + 1], **options)[1] for c in range(60)]
    assert rows == [int(row[0]) for row in alone]


@pytest.mark.parametrize("options", [{}, {"order": "block"}, {"order": "block", "stretch": 1000}])
def test_epochs_seeds_and_sources_have_unrelated_orders(options):
    n = 1000
    orders = [
        order.visit(seed, digest, n, np.arange(n) + epoch * n, **options)[1]
        for seed, digest, epoch in [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0), (1, "a", 1)]
    ]
    orders.append(np.arange(n))
    for i, first in enumerate(orders):
        for second in orders[:i]:
            # Two random orders agree in 1 place on average; P(10 or more) is 1e-7.
            assert np.count_nonzero(first == second) < 10


def test_stretches_have_unrelated_orders_inside():
    rows = whole_epoch("block", 20_000, 1000).reshape(20, 1000) % 1000
    for i, first in enumerate(rows):
        for second in rows[:i]:
            assert np.count_nonzero(first == second) < 10


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'random' is not"):
        order.visit(0, "digest", 7, np.arange(3), order="random")
    with pytest.raises(ValueError, match="'random' is not"):
        order.ordinal(0, "digest", 7, 0, np.arange(3), order="random")


def test_no_visits_have_no_rows():
    for kind in ("global", "block", "sequential"):
        epoch, rows = order.visit(0, "digest", 7, np.arange(0), order=kind, stretch=2)
        assert epoch.tolist() == rows.tolist() == []


def shuffled(kind: str, n: int, seed: int) -> np.ndarray:
    """200,000 outputs in 0..n-1 of each permutation that an order is made of."""
    counter = np.arange(200_000, dtype=np.int64)
    if kind == "global":
        return rows_of(n, 200_000, seed)
    if kind == "stretches":
        return order.visit(seed, "digest", n, counter, order="block", stretch=1)[1]
    # The first stretch of two.
    return order.visit(seed, "digest", 2 * n, counter, order="block", stretch=n)[1] % n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_are_uncorrelated_at_lags_1_to_64(kind, n, seed):
    rows = shuffled(kind, n, seed).astype(np.float64)
    rows = (rows - rows.mean()) / rows.std()
    correlations = [abs(rows[lag:] @ rows[:-lag]) / len(rows) for lag in range(1, 65)]
    assert max(correlations) <= 0.02  # 0.004 would be ideal; weak ciphers reach 0.2 to 0.9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_the_lowest_bits_are_not_predicted_by_any_input_bit(kind, n):
    rows = shuffled(kind, n, 0)
    index = np.arange(200_000)
    for out_bit in range(3):
        out = 1 - 2.0 * (rows >> out_bit & 1)
        for in_bit in range(17):
            assert abs(np.mean(out * (1 - 2.0 * (index >> in_bit & 1)))) <= 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_rows_fall_evenly_into_buckets(kind, n):
    counts = np.bincount(shuffled(kind, n, 0) * 100 // n, minlength=100)
    # 2000 expected per bucket, standard deviation at most 44.5; 5 of them happen once in 20k runs.
    assert abs(counts - 2000).max() < 5 * 44.5
