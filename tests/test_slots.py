"""One block of a mixture: shortest exact length, largest remainder, even spread."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.slots import MAX_BLOCK, count, spread

MIXES = [
    (1.0,),
    (0.999, 0.001),
    (0.7, 0.3),
    (3, 3, 3),
    (1, 2, 4, 8, 16, 1000),
    (0.5, *[0.005] * 100),
    tuple(1 + i * i for i in range(30)),
    # Serving the largest deficit first would miss a share here by 1.56.
    (400, *[30] * 10, *[1] * 50),
]


def exact(weights: tuple[float, ...]) -> list[Fraction]:
    return [Fraction(repr(float(weight))) for weight in weights]


@pytest.mark.parametrize(
    "weights, block",
    [
        ((0.7, 0.3), 10),
        ((0.1, 0.2), 3),
        ((2, 6), 4),
        ((1 / 3, 2 / 3), 3),
        ((0.999, 0.001), 1000),
        ((0.2,), 1),
        ((0.500001, 0.499999), MAX_BLOCK),
    ],
)
def test_the_block_is_the_shortest_with_the_exact_shares(weights, block):
    assert sum(count(exact(weights))) == block


def test_shares_that_fit_no_block_are_rounded_by_largest_remainder():
    weights = (math.pi, math.e, math.sqrt(2))
    counts = count(exact(weights))
    shares = np.array(weights) / sum(weights) * MAX_BLOCK
    assert sum(counts) == MAX_BLOCK
    floors, parts = np.floor(shares), shares % 1
    up = np.argsort(-parts)[: MAX_BLOCK - int(floors.sum())]
    floors[up] += 1
    np.testing.assert_array_equal(counts, floors)


@pytest.mark.parametrize("weights", MIXES)
def test_every_prefix_is_within_one_of_each_share(weights):
    counts = np.array(count(exact(weights)))
    block = counts.sum()
    drawn = np.cumsum(spread(counts, block)[:, None] == np.arange(len(counts)), axis=0)
    shares = np.arange(1, block + 1)[:, None] * counts / block
    assert np.abs(drawn - shares).max() < 1
    np.testing.assert_array_equal(drawn[-1], counts)


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any),
    share=st.floats(0.01, 1),
)
def test_the_slots_serve_the_released_draw_of_the_earliest_deadline(counts, share):
    """Draw k of a source is released at floor(k M / count) and due by ceil((k + 1) M / count)."""
    block = sum(counts)
    length = max(1, int(share * block))
    jobs = sorted(
        (math.floor(Fraction(k * block, c)), math.ceil(Fraction((k + 1) * block, c)), source)
        for source, c in enumerate(counts)
        for k in range(c)
    )
    ready: list[tuple[int, int]] = []
    right = []
    for slot in range(length):
        while jobs and jobs[0][0] <= slot:
            _, deadline, source = jobs.pop(0)
            heapq.heappush(ready, (deadline, source))
        deadline, source = heapq.heappop(ready)
        assert slot < deadline
        right.append(source)
    assert spread(np.array(counts), length).tolist() == right
