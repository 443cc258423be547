"""The order of rows: one to one at every size, equal to big-integer arithmetic, evenly random."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from jaxgpt.data import order

SMALL = [*range(1, 40), 63, 64, 65, 127, 128, 129, 251, 255, 256, 257, 1021, 4095, 4096, 4097]
LARGE = [2**31 + 11, 2**32 - 1, 2**32 + 1, 2**33 + 5, 2**40 - 87, 2**40 + 1, 2**53 + 1, 2**62]
GOLDEN = {
    10: [8, 7, 1, 2, 4, 3],
    2**33 + 5: [7165407599, 6231966523, 6389356018, 2795787274, 6647832156, 5047796163],
    2**40 + 1: [
        148549792965, 465777583482, 421381009177, 11352081116, 257787809589, 1014126917607
    ],
}
SIZES = [1 << 18, 1_000_003, 120_000_000, 2**33 + 5]


def slow_permute(seed: int, digest: str, epoch: int, n: int, index: int) -> int:
    """The same permutation from its definition, in Python's unbounded integers."""
    text = f"jaxgpt order 1|{seed}|{digest}|{epoch}"
    key_bytes = hashlib.sha512(text.encode("ascii")).digest()
    half = 1
    while 4**half < n:
        half += 1
    value = index
    while True:
        left, right = divmod(value, 2**half)
        for number in range(8):
            key = int.from_bytes(key_bytes[8 * number : 8 * number + 8], "little")
            x = right ^ key
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                x = ((x ^ (x // 2**33)) * factor) % 2**64
            left, right = right, left ^ ((x ^ (x // 2**33)) % 2**half)
        value = left * 2**half + right
        if value < n:
            return value


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


def test_epochs_seeds_and_sources_have_unrelated_orders():
    n = 1000
    orders = [
        order.visit(seed, digest, n, np.arange(n) + epoch * n)[1]
        for seed, digest, epoch in [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0), (1, "a", 1)]
    ]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            # Two random orders agree in 1 place on average; P(10 or more) is 1e-7.
            assert np.count_nonzero(first == second) < 10


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_are_uncorrelated_at_lags_1_to_64(n, seed):
    rows = rows_of(n, 200_000, seed).astype(np.float64)
    rows = (rows - rows.mean()) / rows.std()
    correlations = [abs(np.mean(rows[lag:] * rows[:-lag])) for lag in range(1, 65)]
    assert max(correlations) <= 0.02  # 0.004 would be ideal; weak ciphers reach 0.2 to 0.9


@pytest.mark.parametrize("n", SIZES)
def test_the_lowest_bits_are_not_predicted_by_any_input_bit(n):
    rows = rows_of(n, 200_000)
    index = np.arange(200_000)
    for out_bit in range(3):
        out = 1 - 2.0 * (rows >> out_bit & 1)
        for in_bit in range(17):
            assert abs(np.mean(out * (1 - 2.0 * (index >> in_bit & 1)))) <= 0.02


@pytest.mark.parametrize("n", SIZES)
def test_rows_fall_evenly_into_buckets(n):
    counts = np.bincount(rows_of(n, 200_000) * 100 // n, minlength=100)
    # 2000 expected per bucket, standard deviation at most 44.5; 5 of them happen once in 20k runs.
    assert abs(counts - 2000).max() < 5 * 44.5
